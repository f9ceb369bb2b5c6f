"""`retinue agents`: list the sub-agents of a folder, and check their declarations."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import Any

import msgspec

from ..core.agents import Agent
from ..core.errors import ConfigurationError
from ..subagents.catalog import Catalog, Entry
from ..subagents.declarations import Problem
from ..subagents.harness import HarnessAgent
from .assistant import (
    DEFAULT_MODEL,
    check_folder,
    choose_model,
    find_problems,
    join_path,
    make_assistant,
    make_example,
    read_catalog,
)
from .parsers import COMPLETED, FAILED
from .text import clean, complain, count, one_line, print_json, table

_WIDTH = 100
"""The width of text that is not for a terminal."""


async def list_agents(args: argparse.Namespace) -> int:
    """List every sub-agent of a folder."""
    folder, harness, catalog = _read_folder(args)
    rows = [_agent_json(entry, make_example(harness, entry), harness) for entry in catalog.entries.values()]
    if args.json:
        print_json(rows)
    else:
        _print_table(rows)
    if not _has_declarations(catalog):
        complain(_no_declarations(folder))
    elif problems := find_problems(catalog):
        complain(f"{count(len(problems), 'problem')}; see: retinue agents validate {folder}")
    return COMPLETED


async def validate_agents(args: argparse.Namespace) -> int:
    """Print the problems of the declarations of a folder."""
    folder, _, catalog = _read_folder(args)
    if not _has_declarations(catalog):
        raise ConfigurationError(_no_declarations(folder))
    problems = find_problems(catalog)
    errors = [problem for problem in problems if not problem.is_warning]
    warnings = [problem for problem in problems if problem.is_warning]
    if args.json:
        names = [entry.id for entry in catalog.entries.values() if entry.declaration is not None]
        print_json({"ok": not errors, "agents": names, "problems": [_problem_json(problem) for problem in problems]})
    else:
        for heading, found in (("Errors", errors), ("Warnings", warnings)):
            if found:
                print(clean("\n".join([f"{heading}:", *_lines(found, folder), ""])))
        print(clean(_verdict(catalog, len(errors), len(warnings))))
    return FAILED if errors else COMPLETED


def _read_folder(args: argparse.Namespace) -> tuple[str, HarnessAgent, Catalog]:
    if args.folder is not None and args.workspace is not None:
        raise ConfigurationError(f"two folders are given: leave out {args.folder!r} or --workspace {args.workspace!r}")
    folder = args.folder or args.workspace or "."
    check_folder(folder, "as DIR")
    harness = make_assistant(folder, choose_model(DEFAULT_MODEL))
    return folder, harness, read_catalog(harness)


def _no_declarations(folder: str) -> str:
    return f"{folder!r} declares no sub-agents: write one as subagents/<id>.md"


def _has_declarations(catalog: Catalog) -> bool:
    return bool(catalog.problems) or any(entry.declaration is not None for entry in catalog.entries.values())


def _agent_json(entry: Entry, agent: Agent, harness: HarnessAgent) -> dict[str, Any]:
    declared = entry.declaration
    return {
        "id": entry.id,
        "description": entry.description,
        "source": entry.source,
        "mode": "shared" if declared is None else str(declared.mode),
        "definition": None if declared is None or declared.workspace is None else str(declared.workspace),
        "model": agent.model,
        "max_steps": agent.max_steps,
        "tools": list(agent.toolbox),
        "has_all_tools": agent.toolbox.keys() == harness.toolbox.keys(),
        "timeout": None if declared is None else declared.timeout,
    }


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each agent, with its description and tools below."""
    cells = [("id", "source", "workspace", "model", "steps")]
    for row in rows:
        defined = f" ({row['definition']})" if row["definition"] else ""
        place = f"{row['mode']}{defined}"
        cells.append((row["id"], row["source"], place, row["model"] or "parent's", str(row["max_steps"])))
    heading, *lines = table(cells)
    width = max(shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH, 20)
    print(heading)
    for line, row in zip(lines, rows, strict=True):
        print(line)
        tools = "all" if row["has_all_tools"] else ", ".join(row["tools"]) or "none"
        for text in (row["description"], f"Tools: {tools}"):
            print(fill(" ".join(clean(text).split()), width, initial_indent="    ", subsequent_indent="    "))


def _problem_json(problem: Problem) -> dict[str, Any]:
    return {
        "severity": "warning" if problem.is_warning else "error",
        "file": problem.where,
        "line": problem.line,
        "field": problem.field,
        "message": problem.message,
    }


def _lines(problems: Iterable[Problem], folder: str) -> list[str]:
    """Return problems by file and line, with paths that can be opened from here."""
    ordered = sorted(problems, key=lambda problem: (problem.where, problem.line or 0))
    placed = [msgspec.structs.replace(problem, where=join_path(folder, problem.where)) for problem in ordered]
    return [one_line(str(problem), 1_000) for problem in placed]


def _verdict(catalog: Catalog, errors: int, warnings: int) -> str:
    usable = sum(entry.declaration is not None for entry in catalog.entries.values())
    found = f"{count(usable, 'declared sub-agent')} can be used"
    if errors:
        return f"{count(errors, 'error')}, {count(warnings, 'warning')}; {found}"
    return f"{found}, with {count(warnings, 'warning')}" if warnings else f"{found}, no problems"
