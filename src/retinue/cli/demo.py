"""`retinue demo`: a team at work in half a minute, with a question three levels down and a `kill -9` in the middle.

The agents work in a process of their own. This one shows what is stored, answers, kills that process, and starts another.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TextIO

import msgspec

from ..client import Client
from ..core.concurrency import Jobs, helpers, join, until_stopped, wait_for_first
from ..core.events import Event, RunFinished, ToolCallFinished
from ..core.runs import RunStatus
from ..runtime import Runtime
from .board import Board
from .demo_team import QUESTION, SPEED, Order
from .interrupt import Interrupt, make_view
from .parsers import COMPLETED, FAILED
from .questions import Answer, Question
from .rows import Look, money, total_usage, what_it_did
from .text import complain, count, program
from .view import View

INTRODUCTION = """\
Scripted models: no key, no network, no language model.
The processes, the database, kill -9 and the recovery are real."""
PATIENCE = 3.0
"""Seconds in which a person may answer; then the demo does."""
TOKEN = secrets.token_urlsafe(12)
_STILL = 1.5
"""Seconds in which nobody works on the run."""


async def demo(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Show the team at work, or serve it with its page."""
    folder = Path(tempfile.mkdtemp(prefix="retinue-demo-"))
    try:
        if args.web:
            return await _serve(folder, interrupt)
        return await Demo(args, interrupt, folder).run()
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


class Demo:
    """One showing. It owns the processes; the run belongs to the one that works on it."""

    def __init__(self, args: argparse.Namespace, interrupt: Interrupt, folder: Path) -> None:
        self._args, self._interrupt, self._folder = args, interrupt, folder
        self._url = f"sqlite:///{folder}/demo.db"
        self._worker: asyncio.subprocess.Process | None = None
        self._board = Board(Look())
        self._is_killed = False

    async def run(self) -> int:
        out = sys.stderr if self._args.json else sys.stdout
        print(f"{INTRODUCTION}\n", file=out, flush=True)
        try:
            run_id = await self._start(QUESTION)
            async with make_view(self._args) as view:
                async with until_stopped(self._show(run_id, view), self._interrupt.wait()) as showing:
                    if showing.done():
                        showing.result()
                    else:
                        return self._interrupt.code
        finally:
            await self._end_worker()
        return self._close(out)

    async def _start(self, question: str | None) -> str:
        """Start a process that works; return the id of the run that it has started."""
        words = [sys.executable, "-m", "retinue.cli.demo_team", self._url, *([question] if question else [])]
        self._worker = await asyncio.create_subprocess_exec(
            *words, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.PIPE
        )
        assert self._worker.stdout is not None
        said = (await self._worker.stdout.readline()).decode().strip()
        if not said:
            raise RuntimeError("the process of the demonstration ended before it began")
        return said

    async def _end_worker(self) -> None:
        if self._worker is not None and self._worker.returncode is None:
            self._worker.kill()
            await self._worker.wait()

    async def _show(self, run_id: str, view: View) -> None:
        """Show the run to its end; what happens in it decides when it is answered and when its process is killed."""
        failed = asyncio.get_running_loop().create_future()
        jobs = Jobs(report=failed.set_exception)
        async with Runtime.open(self._url, recover=False) as runtime, helpers(_tick(view)):
            try:
                await wait_for_first(self._show_events(runtime, run_id, view, jobs), failed)
            finally:
                await jobs.close()
                failed.cancel()

    async def _show_events(self, runtime: Runtime, run_id: str, view: View, jobs: Jobs) -> None:
        asked = set[str]()
        async for event in runtime.events(run_id):
            self._board.apply(event)
            view.show(event)
            for question in self._board.questions():
                if question.target not in asked:
                    asked.add(question.target)
                    jobs.start(self._answer(run_id, question, view))
            if not self._is_killed and _is_held(event):
                self._is_killed = True
                jobs.start(self._kill(view))
            if type(event) is RunFinished and event.run_id == run_id and not event.status.is_waiting:
                break

    async def _answer(self, run_id: str, question: Question, view: View) -> None:
        """Answer a question: as the person does, or after a while by ourselves, and say which."""
        mine = view.waiting(question.target)
        answer = Answer(True)
        if mine is None or not await join([mine.answered], PATIENCE / SPEED):
            await asyncio.sleep(PATIENCE / SPEED if mine is None else 0)
            what = " ".join([question.subject, *map(str, question.args.values())])
            view.note(f"approved by the demo, nobody answered: {what}")
        else:
            answer = mine.answered.result()
        ticket = question.ticket
        assert ticket is not None
        assert self._worker is not None
        assert self._worker.stdin is not None
        order = Order(run_id, {question.target: answer.decision(ticket)})
        self._worker.stdin.write(msgspec.json.encode(order) + b"\n")
        await self._worker.stdin.drain()

    async def _kill(self, view: View) -> None:
        """Kill the process that works, leave the run alone for a moment, and start another process."""
        await asyncio.sleep(0.7 / SPEED)
        assert self._worker is not None
        view.note(f"$ kill -9 {self._worker.pid}   # one process, all its agents, for real")
        os.kill(self._worker.pid, signal.SIGKILL)
        await self._worker.wait()
        view.lose(True)
        await asyncio.sleep(_STILL / SPEED)
        await self._start(None)
        assert self._worker is not None
        view.lose(False)
        root = self._board.root
        ended = 0 if root is None else sum(call.ended is not None for call in root.walk_calls())
        view.note(f"process {self._worker.pid} took over; {count(ended, 'finished call')} not run again")

    def _close(self, out: TextIO) -> int:
        root = self._board.root
        if root is None or root.status is not RunStatus.COMPLETED:
            complain("the demonstration did not complete")
            return FAILED
        held = (self._folder / "held.txt").read_text().count("\n")
        runs = self._board.tree.runs.values()
        lines = [
            "The receipts, which no model wrote:",
            *[f"  {run.label:<8} {what_it_did(run)} · {money(total_usage(run))}" for run in runs if run.ns],
            f"The seat was held {'once' if held == 1 else f'{held} times'}; the process was killed once.",
            f"At list prices it would have cost {money(total_usage(root))}.",
            "",
            "See it on a page   scripts/demo --web",
            f"Start your own     {program()} chat --model anthropic:claude-sonnet-4-6",
        ]
        print("\n".join(lines), file=out, flush=True)
        return COMPLETED


def _is_held(event: Event) -> bool:
    return (
        type(event) is ToolCallFinished
        and event.tool_name == "task"
        and "held" in event.message.text
        and len(event.ns) == 2
    )


async def _tick(view: View) -> None:
    while True:
        await asyncio.sleep(0.25)
        view.tick()


async def _serve(folder: Path, interrupt: Interrupt) -> int:
    """Serve the team, start its run, and say where the page is, until Ctrl-C."""
    words = [
        sys.executable,
        "-m",
        "retinue",
        "serve",
        "retinue.cli.demo_team:agents",
        "--db",
        f"sqlite:///{folder}/demo.db",
    ]
    server = await asyncio.create_subprocess_exec(
        *words, "--port", "0", "--token", TOKEN, cwd=folder, stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    try:
        while (line := (await server.stdout.readline()).decode()) and "http" not in line:
            print(line, end="", flush=True)
        found = re.search(r"http://[\w.:]+", line)
        if found is None:
            complain(f"the server did not start: {line}")
            return FAILED
        async with Client(found[0], token=TOKEN) as client:
            run = client.stream("lead", QUESTION, thread_id="demo")
            await run.stored()
            print(
                f"{INTRODUCTION}\n\nopen {found[0]}/#token={TOKEN}   and approve what it asks; Ctrl-C ends it",
                flush=True,
            )
            await wait_for_first(interrupt.wait(), server.wait())
        return interrupt.code if interrupt.happened else FAILED
    finally:
        if server.returncode is None:
            server.terminate()
            await server.wait()
