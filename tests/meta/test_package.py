"""What the package promises about itself."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import retinue
import retinue.testing

ROOT = Path(__file__).parents[2]


def test_public_names_are_sorted_and_there() -> None:
    for package in (retinue, retinue.testing):
        assert package.__all__ == sorted(package.__all__)
        for name in package.__all__:
            assert hasattr(package, name)


def test_every_public_name_says_what_it_is() -> None:
    made = {name: getattr(retinue, name) for name in retinue.__all__}
    bare = [name for name, it in made.items() if (inspect.isclass(it) or inspect.isfunction(it)) and not it.__doc__]
    assert bare == []


def test_what_is_imported_is_exported() -> None:
    tree = ast.parse((ROOT / "src/retinue/__init__.py").read_text())
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported | {"__version__"} == set(retinue.__all__)


def test_importing_loads_no_server_database_terminal_or_model_layer() -> None:
    heavy = ["pydantic", "rich", "argparse", "httpx", "starlette", "sqlite3", "psycopg", "retinue.cli", "http.client"]
    heavy += ["opentelemetry", "genai_prices", "httpx2"]
    heavy += ["aiohttp", "openai", "anthropic", "pydantic_ai", "urllib.request", "retinue.models.providers"]
    code = f"import sys, retinue, retinue.testing; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_version_is_in_the_changelog() -> None:
    assert f"## {retinue.__version__}" in (ROOT / "CHANGELOG.md").read_text()
