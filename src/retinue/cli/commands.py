"""The commands of a conversation: what is typed after a slash."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ..core.errors import ConfigurationError, RetinueError
from ..core.runs import unique
from .agents import choose_model
from .columns import short_count
from .outline import event_line, tree_lines
from .rows import money, state_of, total_usage
from .text import moment, one_line

if TYPE_CHECKING:
    from .talk import Talk

COMMANDS = {
    "help": "keys and commands",
    "agents": "the agents at work, or that can be given work",
    "tasks": "background tasks; /tasks stop ID stops one",
    "send": "NAME TEXT: a message to an agent at work",
    "later": "TEXT: for after the turn",
    "stop": "[NAME]: stop one agent, or the turn",
    "retry": "ask the last message again",
    "model": "[NAME]: show the model, or choose another",
    "cost": "what was used, by agent",
    "compact": "shorten the context before the next turn",
    "clear": "a new conversation",
    "resume": "[ID]: the conversations, or go on with one",
    "fork": "[TURN]: say a turn again, differently, in a new conversation",
    "history": "[N]: print earlier turns",
    "allow": "[RULE]: what is not asked about",
    "receipt": "what the agents of the last turn did",
    "events": "the log of the last turn",
    "exit": "leave (also Ctrl-D)",
}
_KEYS = """\
Keys
  Enter           send; while agents work: to the agent at work
  Ctrl-J          new line (also \\ and Enter, Alt+Enter)
  @name  @file    send to one agent; name a file
  Tab             complete; on an empty line: to the question, to the tree
  ↑ ↓  Ctrl-R     history; search it
  Ctrl-G          write in $EDITOR
  Alt+A R E L N   approve, reject, edit, always, next question
  Ctrl-C          stop the turn; twice: leave
  Ctrl-D          leave (on an empty line)   Ctrl-Z  to the shell

In the tree
  ↑ ↓             choose   → ←  open, close   Enter  read all
  m  x  /         message, stop, find   Esc  back to the line

Commands
"""
_WHILE_WORKING = ("help", "agents", "tasks", "send", "later", "stop", "cost", "allow", "events", "receipt", "exit")


class Commands:
    """Carries out what is typed after a slash."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk

    async def carry_out(self, text: str) -> None:
        """Carry out a command. One that is unknown is not sent to the model."""
        name, _, rest = text[1:].partition(" ")
        talk = self._talk
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, 1)
            meant = f"; did you mean /{near[0]}?" if near else "."
            talk.screen.note(f"/{one_line(name, 40)} is no command{meant} Start with a space to send it.")
            return
        if talk.run_now is not None and name not in _WHILE_WORKING:
            talk.screen.note(f"/{name} waits until the turn has ended: stop it first with /stop or Ctrl-C")
            return
        act: Callable[[str], Awaitable[None]] = getattr(self, f"do_{name}")
        try:
            await act(rest.strip())
        except RetinueError as exc:
            talk.screen.note(str(exc))

    async def do_help(self, rest: str) -> None:
        self._talk.lines(_KEYS + "\n".join(f"  /{name:<15}{about}" for name, about in COMMANDS.items()))

    async def do_agents(self, rest: str) -> None:
        board = self._talk.screen.board
        working = [run for run in board.tree.runs.values() if run.ended is None]
        lines = [
            f"  {one_line(run.label, 30):<16}{state_of(run, board.look)}: {one_line(run.task, 60)}" for run in working
        ]
        self._talk.lines("\n".join(lines) or f"  {', '.join(self._talk.session.agents)}")

    async def do_tasks(self, rest: str) -> None:
        talk, tasks = self._talk, self._talk.screen.board.tasks
        word, _, wanted = rest.partition(" ")
        if word == "stop" and wanted:
            found = [task for task in tasks if task.endswith(wanted.strip())]
            if len(found) != 1 or not talk.turns:
                talk.screen.note(f"{len(found)} tasks that work end in {wanted.strip()!r}: /tasks lists them")
                return
            run = talk.task_runs.get(found[0], talk.turns[-1].run_id)
            await talk.session.runtime.cancel_task(run, found[0])
            return
        talk.lines("\n".join(f"  {task}  {one_line(agent, 40)}" for task, agent in tasks.items()) or "  no task works")

    async def do_send(self, rest: str) -> None:
        name, _, words = rest.partition(" ")
        if not words:
            self._talk.screen.note("write /send NAME TEXT")
        else:
            await self._talk.send(f"@{name.removeprefix('@')} {words}")

    async def do_later(self, rest: str) -> None:
        if rest:
            self._talk.later.append(rest)
            self._talk.screen.stale(now=True)
        else:
            self._talk.lines("\n".join(f"  {text}" for text in self._talk.later) or "  nothing is waiting")

    async def do_stop(self, rest: str) -> None:
        talk = self._talk
        node = talk.screen.board.find(rest.removeprefix("@")) if rest else None
        if rest and node is None:
            talk.screen.note(f"no agent at work is called {one_line(rest, 40)}")
        elif talk.run_now is None:
            talk.screen.note("nothing works now")
        else:
            talk.stop_run(None if node is None or not node.ns else node.run_id)

    async def do_retry(self, rest: str) -> None:
        if not self._talk.asked:
            self._talk.screen.note("nothing was asked yet")
        else:
            await self._talk.turn(self._talk.asked[-1])

    async def do_model(self, rest: str) -> None:
        session = self._talk.session
        if session.consent is None:
            self._talk.screen.note("the agents of a server have their own models")
        elif not rest:
            self._talk.lines(f"  {session.model_label}")
        else:
            try:
                session.model, session.model_label = choose_model(rest), rest
            except ConfigurationError as exc:
                self._talk.screen.note(str(exc))
                return
            self._talk.screen.stale(now=True)

    async def do_cost(self, rest: str) -> None:
        talk, lines = self._talk, list[str]()
        for run in talk.screen.board.tree.runs.values():
            used = run.own_usage
            lines.append(
                f"  {one_line(run.label, 30):<20}{short_count(used.tokens):>8} tok  {money(used):>8}  {run.model}"
            )
        root = talk.screen.board.root
        if root is not None:
            used = total_usage(root)
            lines.append(f"  {'this turn':<20}{short_count(used.tokens):>8} tok  {money(used):>8}")
        lines.append(f"  all turns: {talk.usage_words() or 'nothing yet'}")
        talk.lines("\n".join(lines))

    async def do_compact(self, rest: str) -> None:
        self._talk.screen.note("the context is shortened by itself when it is nearly full; /clear begins anew")

    async def do_clear(self, rest: str) -> None:
        talk = self._talk
        talk.thread_id, talk.forks = f"thread_{unique()}", None
        talk.turns.clear()
        talk.asked.clear()
        talk.screen.note("a new conversation")

    async def do_resume(self, rest: str) -> None:
        talk = self._talk
        if not talk.session.is_stored:
            talk.screen.note("conversations are kept with --db URL only")
            return
        known = await talk.session.threads()
        if not rest:
            lines = [f"  {one.thread_id}  {moment(one.used_at)}  {one_line(one.title, 50)}" for one in known[:20]]
            talk.lines("\n".join(lines) or "  there is none")
            return
        found = [one for one in known if one.thread_id.endswith(rest)]
        if len(found) != 1:
            talk.screen.note(f"{len(found)} conversations end in {one_line(rest, 40)!r}: /resume lists them")
            return
        talk.thread_id, talk.forks = found[0].thread_id, None
        talk.turns.clear()
        talk.asked.clear()
        await talk.repaint()

    async def do_fork(self, rest: str) -> None:
        """Put the message of a turn into the editor; what is sent next replaces it, in a new conversation."""
        talk = self._talk
        if not talk.turns:
            talk.screen.note("no turn of this conversation was made here")
            return
        number = len(talk.turns) if not rest else int(rest) if rest.isdigit() else 0
        if not 1 <= number <= len(talk.turns):
            talk.screen.note(f"there are turns 1 to {len(talk.turns)}")
            return
        text = talk.asked[number - 1]
        if number == 1:
            await self.do_clear("")
        else:
            before = talk.turns[number - 2]
            talk.forks = (before.run_id, talk.lasts[before.run_id])
        del talk.turns[number - 1 :], talk.asked[number - 1 :]
        talk.screen.buffer.text = text
        talk.screen.buffer.cursor_position = len(text)
        talk.screen.say("Enter sends it in a new conversation")

    async def do_history(self, rest: str) -> None:
        talk = self._talk
        messages = await talk.session.runtime.messages(talk.thread_id)
        starts = [at for at, message in enumerate(messages) if message.role == "user"]
        most = int(rest) if rest.isdigit() else 10
        talk.print_messages(messages[starts[-most] if 0 < most <= len(starts) else 0 :])

    async def do_allow(self, rest: str) -> None:
        consent = self._talk.session.consent
        if consent is None:
            self._talk.screen.note("the server decides what is asked about")
        elif rest:
            consent.allow(rest)
            self._talk.screen.note(f"not asked about any more: {rest}")
        else:
            self._talk.lines(
                "\n".join(f"  {rule}" for rule in consent.rules_given)
                or "  everything that changes something is asked about"
            )

    async def do_receipt(self, rest: str) -> None:
        root = self._talk.screen.board.root
        self._talk.lines("  nothing has run yet" if root is None else "\n".join(tree_lines(root, "  ")))

    async def do_events(self, rest: str) -> None:
        talk = self._talk
        if not talk.turns:
            talk.screen.note("nothing has run yet")
            return
        run, lines = talk.turns[-1], list[str]()
        async for event in run:
            if not event.kind.endswith("_delta"):
                lines.append(event_line(event))
        talk.lines("\n".join(lines[-200:]))

    async def do_exit(self, rest: str) -> None:
        self._talk.leave()
