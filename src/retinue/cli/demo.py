"""`retinue demo`: the real runtime, tools and view at work on a small folder, without network or key."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.events import Event
from ..core.results import ToolCallStatus
from ..core.runs import RunStatus
from ..runtime import Runtime
from .agents import DEFAULT_MODEL, choose_model, make_assistant
from .interrupt import Interrupt, make_view, watch
from .outline import ShownTree
from .parsers import COMPLETED, FAILED
from .text import complain, count, duration, program
from .view import is_interactive

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

INTRODUCTION = """\
A demonstration on the papers of a lighthouse, with offline:rules: rules, not a language model.
The second question names a file that does not exist, to show a call that fails."""
QUESTIONS = (
    "Which part makes the lens motor squeal, and in which tin is it?",
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


async def demo(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Ask the questions on a copy of the folder."""
    folder = Path(tempfile.mkdtemp(prefix="retinue-demo-"))
    try:
        _copy_files(files(__name__.rpartition(".")[0]).joinpath("demo_files"), folder)
        return await _demonstrate(folder, args, interrupt)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


async def _demonstrate(folder: Path, args: argparse.Namespace, interrupt: Interrupt) -> int:
    out = sys.stderr if args.json else sys.stdout
    pace = _pace if not args.json and is_interactive(sys.stdout) else None
    print(INTRODUCTION, file=out, flush=True)
    agent = make_assistant(str(folder), choose_model(DEFAULT_MODEL))
    trees: list[ShownTree] = []
    async with make_view(args) as view:
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


def _copy_files(source: Traversable, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for item in source.iterdir():
        if item.is_dir():
            _copy_files(item, folder / item.name)
        elif item.name.endswith(".md"):
            folder.joinpath(item.name).write_bytes(item.read_bytes())


def _pace(event: Event) -> float:
    """Return the seconds to wait before an event is shown; less for children, which work side by side."""
    seconds = _PACE.get(event.kind, 0.0)
    return seconds if not event.ns else 0.0 if event.kind == "text_delta" else seconds / 2


def _closing(trees: list[ShownTree], folder: Path, kept: bool) -> str:
    """Return a line on what was done, and one on what to type next."""
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
        f'Next: {program()} run "{ask}" --workspace {where}, or the example in the README.'
    )
