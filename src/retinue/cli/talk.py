"""A conversation on a terminal: what is typed becomes a turn, a message to agents at work, an answer or a command."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from ..core.concurrency import cancel_all, helpers, wait_for_first
from ..core.decisions import Decision
from ..core.errors import RetinueError, RunEnded
from ..core.messages import Message, Role
from ..core.runs import RunResult, Usage
from ..models.profiles import profile
from ..runtime import Run
from .board import Block, said_rows
from .columns import short_count, wrapped
from .commands import COMMANDS, Commands
from .interrupt import Interrupt, converse
from .rows import Row, money, total_usage
from .screen import Screen
from .session import Session
from .text import clean, one_line

_TWICE = 2.0
"""Seconds in which a second Ctrl-C leaves."""
_TO = re.compile(r"@([\w.#-]+)\s+(.+)", re.DOTALL)


class Talk:
    """One `retinue chat` on a terminal. It owns the conversation, the screen has what is seen of it."""

    def __init__(self, session: Session, args: argparse.Namespace, interrupt: Interrupt, thread_id: str) -> None:
        self.session, self.args, self.interrupt, self.thread_id = session, args, interrupt, thread_id
        self.run_now: Run | None = None
        """The run of the turn in progress."""
        self.turns: list[Run] = []
        self.lasts: dict[str, int] = {}
        """The number of the last event of each turn, by run id."""
        self.asked: list[str] = []
        self.results: list[RunResult] = []
        self.task_runs: dict[str, str] = {}
        """The run that started each background task."""
        self.forks: tuple[str, int] | None = None
        """The run, and the event in it, that the next turn continues instead of the conversation."""
        self.later: list[str] = []
        self._typed: asyncio.Queue[str] = asyncio.Queue()
        self._left = asyncio.Event()
        self._stopper = Interrupt()
        self._stopped_at = -_TWICE
        self._jobs: set[asyncio.Task[Any]] = set()
        self.screen = Screen(
            sys.stdout,
            stop=self.ctrl_c,
            submit=self.submit,
            history=_history(),
            completer=_Words(session),
            ascii_only=args.ascii,
        )
        self.screen.status = self._status
        self.screen.stop_run = self.stop_run
        self.commands = Commands(self)

    async def run(self) -> str:
        """Talk until the person leaves, and return the id of the conversation."""
        async with self.screen:
            if self.session.consent is not None:
                self.session.consent.view = self.screen
            self.screen.put(Block(rows=tuple(self._head())))
            if self.args.thread is not None or self.args.goes_on:
                await self.repaint()
            self.spawn(self._tick())
            try:
                while await self._next():
                    pass
            finally:
                await cancel_all(self._jobs)
        return self.thread_id

    async def _next(self) -> bool:
        """Carry out what is typed next; return False when the person has left."""
        text = self.later.pop(0) if self.later else await self._wait_for_text()
        if text is None:
            return False
        if text.lstrip().startswith("/") and not text.startswith(" "):
            await self.commands.carry_out(text.strip())
        else:
            await self.turn(text.strip())
        return not self._left.is_set() and not self.interrupt.happened

    async def _wait_for_text(self) -> str | None:
        typing = asyncio.create_task(self._typed.get())
        try:
            await wait_for_first(asyncio.shield(typing), self._left.wait(), self.interrupt.wait())
            return typing.result() if typing.done() else None
        finally:
            typing.cancel()

    def leave(self) -> None:
        self._left.set()
        if self.run_now is not None:
            self._stopper.press()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work that ends with the conversation; what goes wrong in it is shown."""
        job = asyncio.create_task(self._shown(work))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def _shown(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except RetinueError as exc:
            self.screen.note(str(exc))

    # --- turns

    async def turn(self, text: str) -> None:
        """Have the agent answer a text."""
        self.screen.remark, self._stopped_at = "", -_TWICE
        try:
            run = await self._start(text)
            self.run_now = run
            self.turns.append(run)
            self.asked.append(text)
            self._stopper = Interrupt()
            async with helpers(self._stop_on_signal()):
                result = await converse(
                    run, self._continue, self.screen, self._stopper, self.session.consent, waits_for_tasks=False
                )
            self.results.append(result)
            self.lasts[run.run_id] = self.screen.board.last_seq
            for task_id in self.screen.board.tasks:
                self.task_runs.setdefault(task_id, run.run_id)
            self.spawn(self._follow_tasks(self.run_now, self.screen.board.last_seq))
        except RetinueError as exc:
            self.screen.note(str(exc))
        finally:
            self.run_now, self.screen.remark = None, ""

    async def _stop_on_signal(self) -> None:
        await self.interrupt.wait()
        self._stopper.press()

    async def _start(self, text: str) -> Run:
        if self.forks is None:
            return self.session.ask(text, self.thread_id)
        (run_id, at), self.forks = self.forks, None
        run = await self.session.fork(run_id, at, text)
        self.thread_id = run.thread_id
        return run

    def _continue(self, run_id: str, decisions: dict[str, Decision]) -> Run:
        self.run_now = self.session.answer(run_id, decisions)
        return self.run_now

    async def _follow_tasks(self, run: Run, after: int) -> None:
        """Show what background tasks do after their turn."""
        if self.screen.board.tasks:
            async for event in run.follow(after):
                self.screen.show_task(event)

    # --- what is typed

    def submit(self, text: str) -> None:
        """Take a text that was sent: a turn, or while one is in progress a command or a message to it."""
        if text.strip() == "/exit":
            self.leave()
        elif self.run_now is None:
            self._typed.put_nowait(text)
        elif text.startswith("/"):
            self.spawn(self.commands.carry_out(text.strip()))
        else:
            self.spawn(self.send(text.strip()))

    async def send(self, text: str) -> None:
        """Give a message to the agent at work that `@name` names, or to the root. If its run has ended, it is the next turn."""
        named, board, run = _TO.fullmatch(text), self.screen.board, self.run_now
        target = board.root if named is None else board.find(named[1])
        if named is not None and target is None:
            self.screen.note(f"No agent at work is called {one_line(named[1], 40)}. Your words are in the line.")
            self.screen.buffer.insert_text(text)
            return
        words = text if named is None else named[2]
        if run is None or target is None:
            self._typed.put_nowait(words)
            return
        try:
            await self.session.runtime.send(run.run_id, words, ns=target.ns)
        except RunEnded:  # meanwhile: it is the next turn
            self._typed.put_nowait(words)
            return
        board.sent(target.run_id, target.label, words)
        self.screen.stale(now=True)

    # --- stopping

    def ctrl_c(self) -> None:
        """Stop the turn; leave at the second Ctrl-C within two seconds, or when nothing works."""
        now = time.monotonic()
        if now - self._stopped_at < _TWICE:
            self.leave()
        elif self.run_now is not None:
            self.screen.say("stopping the turn; Ctrl-C again leaves")
            self._stopper.press()
        else:
            self.screen.say("Ctrl-C again, or Ctrl-D, leaves")
        self._stopped_at = now

    def stop_run(self, run_id: str | None) -> None:
        """Stop the turn, or one run of it."""
        if run_id is None or self.run_now is None:
            self._stopper.press()
            return
        node = self.screen.board.tree.runs.get(run_id)
        if node is not None:
            self.spawn(self.session.stop(self.run_now, node.ns))

    # --- what is shown

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            self.screen.tick()

    def _head(self) -> list[Row]:
        from .. import __version__

        session = self.session
        who = session.name if not session.model_label else f"{session.name} · {session.model_label}"
        others = [name for name in session.agents if name != session.name]
        look, columns = self.screen.look, self.screen.columns
        place = look.cut(clean(session.place), columns - 20)
        rows: list[Row] = [[("bold", f"retinue {__version__}"), ("dim", f"  {place}")]]
        rows.append([("", look.cut(f"{who}{' · ' + ', '.join(others[:6]) if others else ''}", columns))])
        asks = session.consent is not None and session.consent.rules.default == "ask"
        hint = f"{'Asks before it writes, edits or runs a command. ' * asks}/help shows keys and commands."
        return [*rows, *[[("dim", line)] for line in wrapped(hint, columns)]]

    async def repaint(self) -> None:
        """Print the last turn of the conversation, and how many there were before."""
        messages = await self.session.runtime.messages(self.thread_id)
        starts = [at for at, message in enumerate(messages) if message.role is Role.USER]
        if not starts:
            return
        if len(starts) > 1:
            self.screen.note(f"{len(starts) - 1} earlier turns: /history prints them")
        self.print_messages(messages[starts[-1] :])

    def print_messages(self, messages: Iterable[Message]) -> None:
        """Print messages of users and agents as they were printed when they were said."""
        for message in messages:
            if message.role is Role.USER:
                self.screen.put(Block(rows=said_rows(message.text, self.screen.look)))
            elif message.role is Role.ASSISTANT and message.text.strip():
                self.screen.put(Block(rows=([("bold", self.session.name)],), gap=False), Block(words=message.text))

    def usage_words(self) -> str:
        """Return tokens and cost of the conversation since it was opened."""
        used = sum((result.usage for result in self.results), start=Usage())
        root = self.screen.board.root
        if root is not None and self.screen.board.works:
            used += total_usage(root)
        return f"{short_count(used.tokens)} tok · {money(used)}" if used.tokens else ""

    def _context_words(self) -> str:
        """Return how full the model's window is, if it is known."""
        window, used = profile(self.session.model_label).context_window, self.screen.board.context
        return f"context {100 * used // window}%" if window and used else ""

    def _status(self) -> str:
        works = sum(run.ended is None and bool(run.ns) for run in self.screen.board.tree.runs.values())
        label = self.session.model_label.rpartition(":")[2] or self.session.name
        asked = len(self.screen.asked)
        tasks = len(self.screen.board.tasks)
        words = [
            f"{asked} question{'s' * (asked != 1)}" if asked else label,
            f"{works} work" if works > 1 else "",
            self._context_words(),
            self.usage_words(),
            f"{tasks} in the background" if tasks and not self.screen.board.works else "",
            f"{len(self.later)} for later" if self.later else "",
        ]
        return (", " if self.screen.look.ascii else " · ").join(word for word in words if word)

    def lines(self, text: str) -> None:
        """Print plain lines."""
        rows = [[("", line)] for part in clean(text).split("\n") for line in wrapped(part, self.screen.look.columns)]
        self.screen.put(Block(rows=tuple(rows)))


def _history() -> History:
    """Return the history of the editor, in the user's own state folder."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    place = Path(base, "retinue", "history")
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        place.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(place))


class _Words(Completer):
    """Completes `@agent`, `@file` and `/command`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        before = document.text_before_cursor
        word = re.split(r"\s", before)[-1]
        if before.startswith("/") and word == before:
            yield from _matching(word, [f"/{name}" for name in COMMANDS])
        elif word.startswith("@"):
            yield from _matching(word, [f"@{name}" for name in self._session.agents])
            yield from _matching(word, [f"@{path}" for path in self._files(word[1:])])

    def _files(self, begun: str) -> list[str]:
        """Return the files and folders that a path may go on to."""
        folder, _, name = begun.rpartition("/")
        if not os.path.isdir(self._session.place) or ".." in folder.split("/"):
            return []
        try:
            entries = sorted(os.scandir(os.path.join(self._session.place, folder)), key=lambda entry: entry.name)
        except OSError:
            return []
        lead = f"{folder}/" if folder else ""
        found = [f"{lead}{entry.name}{'/' * entry.is_dir()}" for entry in entries if entry.name.startswith(name)]
        return [path for path in found if not path.rpartition("/")[2].startswith(".") or name.startswith(".")][:200]


def _matching(word: str, names: Iterable[str]) -> Iterable[Completion]:
    for name in names:
        if name.startswith(word):
            yield Completion(name, start_position=-len(word))
