"""`retinue demo`: the real runtime, tools and view at work on a small folder, without network or key."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable
    from pathlib import Path

    from ..core.events import Event
    from .interrupt import Interrupt
    from .tree import ShownTree

INTRODUCTION = "A demonstration on the papers of a lighthouse, with offline:rules: rules, not a language model."
QUESTIONS = (
    "Which part makes the lens motor squeal, and where is the spare?",
    "What does fuel-log.md say about the May delivery?",
    "Who signed for it?",
    "Ask stores, crew and tides: can the bearing of the lens motor be changed on 22 May?",
    "Ask tides in the background: when can a boat land on 24 May?",
)
_PACE = {
    "run_started": 0.5,
    "tool_call_ready": 0.08,
    "tool_call_finished": 0.16,
    "step_finished": 0.2,
    "text_delta": 0.007,
}
"""Seconds before an event is shown to a person."""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="see it work, without network or key",
        description="Five questions on one conversation about a small folder, the fourth with three sub-agents that the "
        "folder declares in Markdown, the last with one in the background. The model is the built-in "
        "offline:rules: rules, not a language model. Nothing is sent anywhere.",
    )
    parser.add_argument("--json", action="store_true", help="print one event a line, as JSON")
    parser.add_argument("--keep", action="store_true", help="keep the folder, and say where it is")
    parser.add_argument("--verbose", action="store_true", help="log what happens, and show tracebacks")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    import asyncio
    import shutil
    import tempfile
    from pathlib import Path

    from .interrupt import Interrupt

    folder = Path(tempfile.mkdtemp(prefix="retinue-demo-"))
    try:
        _copy_files(folder)
        with Interrupt() as interrupt:
            return asyncio.run(_demonstrate(folder, args, interrupt))
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


async def _demonstrate(folder: Path, args: argparse.Namespace, interrupt: Interrupt) -> int:
    from ..core.lifecycle import RunStatus
    from ..runtime import Runtime
    from .assistant import DEFAULT_MODEL, choose_model, make_assistant
    from .exits import COMPLETED, FAILED
    from .interrupt import watch
    from .text import complain
    from .tree import ShownTree
    from .view import is_interactive, make_view

    out = sys.stderr if args.json else sys.stdout
    pace = _pace if not args.json and is_interactive(sys.stdout) else None
    print(INTRODUCTION, file=out, flush=True)
    agent = make_assistant(str(folder), choose_model(DEFAULT_MODEL))
    trees: list[ShownTree] = []
    with make_view(as_json=args.json) as view:
        async with Runtime([agent]) as runtime:
            for question in QUESTIONS:
                print(file=out, flush=True)
                trees.append(ShownTree())
                run = runtime.stream(agent, question, thread_id="demo", sinks=[trees[-1]])
                result = await watch(run, view, interrupt, pace)
                if interrupt.happened:
                    return interrupt.code
                if result.status is not RunStatus.COMPLETED:
                    complain(f"the demonstration did not complete: {result.error or result.termination}")
                    return FAILED
    print(f"\n{_closing(trees, folder, args.keep)}", file=out, flush=True)
    return COMPLETED


def _copy_files(folder: Path) -> None:
    from importlib.resources import files

    _copy_below(files(__name__.rpartition(".")[0]).joinpath("demo_files"), folder)


def _copy_below(source: Traversable, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for item in source.iterdir():
        if item.is_dir():
            _copy_below(item, folder / item.name)
        elif item.name.endswith(".md"):
            folder.joinpath(item.name).write_bytes(item.read_bytes())


def _pace(event: Event) -> float:
    """Children work side by side, so each of their events is a smaller part of what happens."""
    seconds = _PACE.get(event.kind, 0.0)
    return seconds if not event.ns else 0.0 if event.kind == "text_delta" else seconds / 2


def _closing(trees: list[ShownTree], folder: Path, kept: bool) -> str:
    """What was done, in one line, and what to type next, in another."""
    from ..core.lifecycle import ToolCallStatus
    from .text import count, duration

    roots = [tree.root for tree in trees if tree.root is not None]
    runs = [run for tree in trees for run in tree.runs.values()]
    calls = [call for root in roots for call in root.walk_calls()]
    failed = sum(call.status is ToolCallStatus.FAILED for call in calls)
    read = {
        (call.args or {}).get("path")
        for call in calls
        if call.tool == "read_file" and call.status is ToolCallStatus.SUCCEEDED
    }
    took = sum((root.ended or root.started) - root.started for root in roots)
    steps = sum(len(run.steps) for run in runs)
    asked = f"{count(len(roots), 'question')}, {count(len(runs) - len(roots), 'sub-agent')}"
    done = f"{asked}, {count(steps, 'step')}, {count(len(calls), 'tool call')} ({failed} failed)"
    ask, where = ("When can a boat land on 22 May?", folder) if kept else ("list the files", ".")
    return (
        f"Done: {done}, {count(len(read), 'file')} read, {duration(took)} of work.\n"
        f'Next: retinue run "{ask}" --workspace {where}, or the example in the README.'
    )
