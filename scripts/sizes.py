"""Fail on modules and functions that have grown too long.

    python scripts/sizes.py

Prints what is over its limit. Split it, or list it in EXCEPTIONS with the reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULE_LINES = {"src": 500, "tests": 800, "benchmarks": 800}
FUNCTION_LINES = {"src": 80}

# "src/retinue/module.py" or "src/retinue/module.py:Class.function" -> why it may be longer
EXCEPTIONS: dict[str, str] = {
    "src/retinue/storage/sql.py": "one class: a method for each of its port",
    "src/retinue/log/owned.py": "one object: the log that this process owns, with its readers and its writer",
    "src/retinue/runtime/live.py": "one state machine: the legs of a run, their ends, and how the run is left",
    "src/retinue/runtime/runtime.py": "the public class; most of it is signatures and what they mean",
    "src/retinue/runtime/runs.py": "one subject: the root runs of a runtime, started, asked and read",
    "src/retinue/testing/durable.py": "one contract: the checks of a durable store",
    "src/retinue/loop/execution.py": "one subject: a run that executes here, from its set-up to its end",
    "src/retinue/backends/local.py": "one subject: a child in this process, found again, started, run and ended",
    "src/retinue/log/fold.py": "one fold: a function for each kind of row",
    "src/retinue/backends/foreign.py": "one subject: a child on another backend, from its start to its end",
    "src/retinue/wire/tree.py": "one tree: its nodes, and a reader for each kind of event",
    "src/retinue/core/budgets.py": "one subject: a budget, its windows, and what a runtime knows of its budgets",
    "src/retinue/runtime/elsewhere.py": "one subject: the runs of other processes, and how to reach their owners",
    "src/retinue/core/events.py": "one list: the events, each a few lines",
    "src/retinue/core/errors.py": "one tree of errors, each a few lines",
}


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Every function below a node with its qualified name and its lines, decorators not counted."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, (child.end_lineno or child.lineno) - child.lineno + 1
            yield from functions(child, f"{name}.")
        else:
            yield from functions(child, prefix)


def oversized() -> Iterator[tuple[str, str]]:
    for folder, limit in MODULE_LINES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            text = path.read_text(encoding="utf-8")
            lines = len(text.splitlines())
            if lines > limit:
                yield name, f"{lines} lines, limit {limit}"
            if (longest := FUNCTION_LINES.get(folder)) is None:
                continue
            for function, length in functions(ast.parse(text, name)):
                if length > longest:
                    yield f"{name}:{function}", f"{length} lines, limit {longest}"


def main() -> int:
    found = dict(oversized())
    problems = [f"{name}: {why}" for name, why in found.items() if name not in EXCEPTIONS]
    problems += [f"{name}: no longer over its limit, drop the exception" for name in EXCEPTIONS if name not in found]
    print("\n".join(problems) or "all within their limits")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
