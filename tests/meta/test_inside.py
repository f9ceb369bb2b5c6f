"""Tests reach into private parts of Retinue through `tests/inside.py` only, so that it is the one file to change."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[2]
TESTS = PROJECT / "tests"
OF_OTHERS = {("connections.py", "_prepared"), ("databases.py", "_lock"), ("fuzz/campaign.py", "_run")}
"""Names of psycopg, of the PostgreSQL of the tests and of asyncio that Retinue happens to use, too."""
PATCHES = {"setattr", "delattr", "getattr", "hasattr", "setitem", "delitem", "object", "patch"}
"""Functions that are given the name of an attribute as text."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def names_of(tree: ast.AST) -> Iterator[str]:
    """Return the private names that a module defines, of itself, of its classes and of their objects."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(asname=str(name)):
                yield name
            case _:
                pass


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return where a test names a private part of something that is not its own object, with the name."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                pass
            case ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("retinue"):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.Call(func=ast.Attribute(attr=function) | ast.Name(id=function), args=args) if function in PATCHES:
                texts = [arg.value for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                yield from ((node.lineno, text.rpartition(".")[2]) for text in texts)
            case _:
                pass


def test_only_one_module_of_the_tests_names_private_parts() -> None:
    parsed = [ast.parse(file.read_bytes()) for file in (PROJECT / "src").rglob("*.py")]
    private = {name for tree in parsed for name in names_of(tree) if is_private(name)}
    found = [
        f"{file.relative_to(PROJECT)}:{line}: {name}"
        for file in sorted(TESTS.rglob("*.py"))
        if file != TESTS / "inside.py"
        for line, name in uses(ast.parse(file.read_bytes()))
        if name in private and (file.relative_to(TESTS).as_posix(), name) not in OF_OTHERS
    ]
    assert found == [], "put a function with a purpose into tests/inside.py"
