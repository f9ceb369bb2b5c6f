"""`retinue agents`: which sub-agents a folder has, and what is wrong with their declarations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.agents import Agent
    from ..subagents.catalog import Catalog, Entry
    from ..subagents.declarations import Problem
    from ..subagents.harness import HarnessAgent

_WHERE = "Sub-agents are declared in DIR/subagents/*.md and DIR/.claude/agents/*.md; docs/harness.md says how."
_COLUMNS = ("id", "source", "workspace", "model", "steps")
_WIDTH = 100
"""Where text is wrapped that is not for a terminal."""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "agents",
        help="list or check the sub-agents that a folder declares",
        description=f"The sub-agents of a folder. {_WHERE}",
    )
    actions: Any = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = "list every sub-agent an agent on the folder has"
    checking = "print every problem as file:line: field: message; exit 1 if there are errors"
    for name, about, execute in (("list", listing, execute_list), ("validate", checking, execute_validate)):
        action: argparse.ArgumentParser = actions.add_parser(name, help=about, description=f"{about}. {_WHERE}")
        action.add_argument(
            "folder", metavar="DIR", nargs="?", default=".", help="the workspace (default: this folder)"
        )
        action.add_argument("--json", action="store_true", help="print JSON")
        action.add_argument("--verbose", action="store_true", help="log what happens, and show tracebacks")
        action.set_defaults(execute=execute)


def execute_list(args: argparse.Namespace) -> int:
    from .declared import example_of, problems_of
    from .exits import COMPLETED
    from .text import complain, count

    harness, catalog = _catalog(args.folder)
    rows = [_described(entry, example_of(harness, entry), harness) for entry in catalog.entries.values()]
    if args.json:
        _print_json(rows)
    else:
        _print_table(rows)
    if not _has_declarations(catalog):
        complain(f"{args.folder!r} declares no sub-agents: write one as subagents/<id>.md")
    elif problems := problems_of(catalog):
        complain(f"{count(len(problems), 'problem')}; see: retinue agents validate {args.folder}")
    return COMPLETED


def execute_validate(args: argparse.Namespace) -> int:
    from ..core.errors import ConfigurationError
    from .declared import problems_of
    from .exits import COMPLETED, FAILED
    from .text import clean

    _, catalog = _catalog(args.folder)
    if not _has_declarations(catalog):
        raise ConfigurationError(f"{args.folder!r} declares no sub-agents: write one as subagents/<id>.md")
    problems = problems_of(catalog)
    errors = [problem for problem in problems if not problem.is_warning]
    warnings = [problem for problem in problems if problem.is_warning]
    if args.json:
        names = [entry.id for entry in catalog.entries.values() if entry.declaration is not None]
        _print_json({"ok": not errors, "agents": names, "problems": [_as_json(problem) for problem in problems]})
    else:
        for heading, found in (("Errors", errors), ("Warnings", warnings)):
            if found:
                print(clean("\n".join([f"{heading}:", *_lines(found, args.folder), ""])))
        print(clean(_verdict(catalog, len(errors), len(warnings))))
    return FAILED if errors else COMPLETED


def _catalog(folder: str) -> tuple[HarnessAgent, Catalog]:
    from .assistant import DEFAULT_MODEL, check_workspace, choose_model, make_assistant
    from .declared import looked_at

    check_workspace(folder, "as DIR")
    harness = make_assistant(folder, choose_model(DEFAULT_MODEL))
    return harness, looked_at(harness)


def _has_declarations(catalog: Catalog) -> bool:
    return bool(catalog.problems) or any(entry.declaration is not None for entry in catalog.entries.values())


def _described(entry: Entry, agent: Agent, harness: HarnessAgent) -> dict[str, Any]:
    """A sub-agent as JSON."""
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


def _cells(row: dict[str, Any]) -> list[str]:
    defined = f" ({row['definition']})" if row["definition"] else ""
    return [row["id"], row["source"], f"{row['mode']}{defined}", row["model"] or "parent's", str(row["max_steps"])]


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    """A line for each in columns, with what it is for and what it can use below."""
    import shutil
    from textwrap import fill

    from .text import clean, one_line

    cells = [[one_line(cell, 200) for cell in line] for line in (_COLUMNS, *map(_cells, rows))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    print(lines[0])
    for line, row in zip(lines[1:], rows, strict=True):
        print(line)
        tools = "all" if row["has_all_tools"] else ", ".join(row["tools"]) or "none"
        for text in (row["description"], f"Tools: {tools}"):
            print(fill(" ".join(clean(text).split()), max(width, 20), initial_indent="    ", subsequent_indent="    "))


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))


def _as_json(problem: Problem) -> dict[str, Any]:
    return {
        "severity": "warning" if problem.is_warning else "error",
        "file": problem.where,
        "line": problem.line,
        "field": problem.field,
        "message": problem.message,
    }


def _lines(problems: Iterable[Problem], folder: str) -> list[str]:
    """Problems by file and line, with paths that can be opened from here."""
    import msgspec

    from .declared import in_folder
    from .text import one_line

    ordered = sorted(problems, key=lambda problem: (problem.where, problem.line or 0))
    placed = [msgspec.structs.replace(problem, where=in_folder(folder, problem.where)) for problem in ordered]
    return [one_line(str(problem), 1_000) for problem in placed]


def _verdict(catalog: Catalog, errors: int, warnings: int) -> str:
    from .text import count

    usable = sum(entry.declaration is not None for entry in catalog.entries.values())
    found = f"{count(usable, 'declared sub-agent')} can be used"
    if errors:
        return f"{count(errors, 'error')}, {count(warnings, 'warning')}; {found}"
    return f"{found}, with {count(warnings, 'warning')}" if warnings else f"{found}, no problems"
