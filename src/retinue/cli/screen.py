"""The screen of `run` and `chat`: what is finished is printed once and stays; below it the tree, the questions and the
line to write in are painted again and again.

Everything happens in the event loop, so nothing is drawn half-changed. The stream of events is paced, keys are not:
events mark the screen as stale and a timer paints it at most five times a second, a key paints it at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from prompt_toolkit.application import Application
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import Completer
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.layout import ConditionalContainer, FormattedTextControl, HSplit, Layout, Window
from prompt_toolkit.layout.controls import BufferControl
from prompt_toolkit.layout.dimension import Dimension
from prompt_toolkit.output import ColorDepth, Output
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.styles import Style
from prompt_toolkit.widgets import SearchToolbar

from ..core.concurrency import wait_for_first
from ..core.events import Event
from ..core.runs import RunResult
from ..wire.tree import RunNode
from .board import Block, Board
from .columns import wrapped
from .keys import make_keys
from .paint import Paint, fragments, is_colourful, pad
from .questions import GUARD, Answer, Question, answered_row, parse_edited, parse_value, question_rows
from .reader import read_on_screen
from .rows import Look, Row, visible_runs
from .text import clean
from .view import View

PACE = 0.2
"""Seconds between two paintings that events cause."""
_LEAST_ROWS = 10
"""Below this height only counts are drawn of the tree."""
_EDITOR_LINES = 6


class Screen(View):
    """Shows one run after another, asks the person, and has a line to write in if `submit` is given."""

    asks = True

    def __init__(
        self,
        stream: TextIO,
        *,
        stop: Callable[[], None],
        submit: Callable[[str], None] | None = None,
        history: History | None = None,
        completer: Completer | None = None,
        ascii_only: bool = False,
    ) -> None:
        """`stop` is told of Ctrl-C, `submit` of each text that is sent."""
        super().__init__(stream)
        self.paint = Paint(stream, colour=is_colourful())
        self.look = Look(ascii=ascii_only or not self.paint.unicode)
        self.board = Board(self.look)
        self.focus = "line"
        """What the keys belong to: line, tree, question; or what the editor is for: reason, edit, answer, find."""
        self.remark = ""
        self.status: Callable[[], str] = str
        self.stop, self.submit = stop, submit
        self.stop_run: Callable[[str | None], None] = lambda run_id: stop()
        """Stops one run of the tree, by id; None stops the turn."""
        self.asked: list[Question] = []
        self._known: dict[str, Question] = {}
        """The questions of suspended calls, by the path of the call."""
        self._decided: dict[tuple[str, str], Answer] = {}
        """Answers that were given before their calls were suspended, by run and call."""
        self._draft: Document | None = None
        self._later: list[Block] = []
        self._painted_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[Any] | None = None
        self.buffer = Buffer(
            multiline=True, history=history or InMemoryHistory(), completer=completer, complete_while_typing=False
        )
        self.app = self._make_app(stream)

    # --- the view: events and remarks

    def recall(self, event: Event) -> None:
        self.board.recall(event)

    def show(self, event: Event) -> None:
        self.look.now = max(self.look.now, event.at)
        self._later += self.board.apply(event)
        self._note_questions()
        self.stale()

    def show_task(self, event: Event) -> None:
        self.show(event)

    def note(self, text: str) -> None:
        self.put(Block(rows=tuple([[("waits", line)] for line in wrapped(clean(text), self.columns - 2, "  ")])))

    def warn(self, text: str) -> None:
        self.say(text)

    def put(self, *blocks: Block) -> None:
        """Print blocks above what is painted."""
        self._later += blocks
        self.stale(now=True)

    def stale(self, *, now: bool = False) -> None:
        """Paint soon; with `now` at once."""
        if now:
            self._paint_now()
        elif self._timer is None and self._running is not None:
            wait = max(self._painted_at + PACE - time.monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(wait, self._paint_now)

    def tick(self) -> None:
        """Let the seconds go on, once a second."""
        if time.monotonic() - self._painted_at >= 1.0 and (self.board.works or self.asked):
            self.stale()

    async def __aenter__(self) -> Screen:
        begun = asyncio.Event()
        work = self.app.run_async(begun.set, handle_sigint=False, set_exception_handler=False)
        self._running = asyncio.create_task(work)  # painted beside everything else, until the block is left
        await wait_for_first(begun.wait(), asyncio.shield(self._running))
        return self

    async def __aexit__(self, *exc: object) -> None:
        running, self._running = self._running, None
        if self._timer is not None:
            self._timer.cancel()
        if self.app.is_running:
            self._print_later()
            self.app.exit()
        if running is not None:
            with suppress(EOFError, KeyboardInterrupt):
                await running
        self._write_plain()

    def close(self) -> None:
        """Give the terminal back at once: the process is about to end."""
        with suppress(Exception):
            self.app.renderer.erase()
            self.app.output.show_cursor()
            self.app.output.flush()

    # --- painting

    @property
    def columns(self) -> int:
        return self.app.output.get_size().columns

    def _paint_now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._painted_at = time.monotonic()
        if self.board.works or self.asked:
            self.look.now = max(self.look.now, time.time())
        if self.app.is_running and not self.app._running_in_terminal:  # pyright: ignore[reportPrivateUsage]
            self._print_later()
            self.app.invalidate()

    def _print_later(self) -> None:
        if self._later:
            blocks, self._later = self._later, []
            self.look.width = self.columns
            output, text = self.app.output, self.paint.text(blocks, self.look)
            self.app.renderer.erase()
            output.write_raw(text.replace("\n", "\r\n"))
            output.flush()

    def _write_plain(self) -> None:
        """Print what is left after the last painting."""
        blocks, self._later = self._later, []
        if blocks:
            self._stream.write(self.paint.text(blocks, self.look))
            self._stream.flush()

    def _live(self) -> StyleAndTextTuples:
        size, board, look = self.app.output.get_size(), self.board, self.look
        look.width = size.columns
        look.asking = frozenset(question.run_id for question in self.asked if question.ticket is None)
        room = size.rows - self._editor_height() - 4
        question = self._question_rows(max(room - 6, 8)) if self.asked else []
        pending = board.message_rows()
        room -= len(question) + len(pending)
        look.most = max(min(12, size.rows // 2, room), 1)
        tree = self._tree() if size.rows >= _LEAST_ROWS else self._tree()[:1]
        words = board.open_rows()
        words = words[max(len(words) - max(room - len(tree), 0), 0) :]
        rows = [*words, *tree, *([[]] if tree else []), *question, *([[]] if question else []), *pending]
        return fragments(rows[: max(size.rows - self._editor_height() - 3, 1)])

    def _tree(self) -> list[Row]:
        look = self.look
        look.selected = look.selected if self.focus == "tree" else None
        return self.board.tree_rows()

    def _question_rows(self, most: int) -> list[Row]:
        question = self.asked[0]
        focused = self.focus == "question"
        remark = self.remark if self.focus != "tree" else ""
        return question_rows(question, self.look, 1, len(self.asked), focused=focused, most=most, remark=remark)

    def _editor_height(self) -> int:
        if not self._has_editor():
            return 0
        return min(max(self.buffer.document.line_count, 1), _EDITOR_LINES) + 1

    def _has_editor(self) -> bool:
        return self.submit is not None or self.focus in ("reason", "edit", "answer", "find")

    def _status(self) -> StyleAndTextTuples:
        columns = max(min(self.columns, self.look.columns) - 1, 10)
        if self.remark and self.focus != "question":
            return [("ansiyellow", self.look.cut(f"  {self.remark}", columns))]
        hints = {
            "tree": "← → open  Enter read  x stop  m message  Esc line",
            "question": "Esc line",
            "reason": "Enter sends the reason  Esc back",
            "edit": "Ctrl-S send  Ctrl-G editor  Esc back",
            "answer": "Enter sends  Esc back",
            "find": "Enter finds  Esc back",
        }
        right = hints.get(self.focus, self._hint())
        return [("dim", self.look.cut(pad(f"  {self.status()}", right, columns), columns))]

    def _hint(self) -> str:
        if self.asked:
            return "Tab to the question"
        if not self.board.works:
            return "/help" if self.submit is not None else ""
        return "Tab tree · Ctrl-C stops" if not self.look.ascii else "Tab tree, Ctrl-C stops"

    def _prompt(self, line: int, wraps: int) -> StyleAndTextTuples:
        if line or wraps:
            return [("", "  ")]
        words = {"reason": "Why? ", "edit": "Edit ", "answer": "Answer ", "find": "Find "}.get(self.focus, "")
        return [("bold", f"{words}> " if self.look.ascii else f"{words}› ")]

    def _make_app(self, stream: TextIO) -> Application[None]:
        output: Output = create_output(stdout=stream)
        output.enable_cpr = False  # pyright: ignore[reportAttributeAccessIssue]
        search = SearchToolbar()
        has_editor = Condition(self._has_editor)
        dash = "-" if self.look.ascii else "─"
        self.search = search
        rule = Window(
            FormattedTextControl(lambda: fragments([[("dim", dash * self.look.columns)]])),
            height=1,
            dont_extend_height=True,
        )
        editor = Window(
            BufferControl(self.buffer, search_buffer_control=search.control),
            wrap_lines=True,
            dont_extend_height=True,
            height=lambda: Dimension(min=1, max=_EDITOR_LINES),
            get_line_prefix=self._prompt,
        )
        body = HSplit(
            [
                Window(FormattedTextControl(self._live), dont_extend_height=True, wrap_lines=False),
                ConditionalContainer(HSplit([rule, editor, search]), has_editor),
                Window(FormattedTextControl(self._status, focusable=True), height=1, dont_extend_height=True),
            ]
        )
        app: Application[None] = Application(
            layout=Layout(body, focused_element=editor if self.submit is not None else None),
            key_bindings=make_keys(self),
            style=Style([]),
            include_default_pygments_style=False,
            color_depth=ColorDepth.DEPTH_4_BIT if self.paint.colour else ColorDepth.DEPTH_1_BIT,
            erase_when_done=True,
            output=output,
        )
        app.ttimeoutlen, app.timeoutlen = 0.05, 0.3
        self.editor = editor
        return app

    # --- questions

    async def ask(self, question: Question) -> Answer:
        """Put a question and wait for its answer."""
        question.path = self.board.path_of(question.run_id) or question.path
        self._add_question(question)
        try:
            return await question.answered
        finally:
            self._remove_question(question)

    def _add_question(self, question: Question) -> None:
        self.asked.append(question)
        if len(self.asked) == 1:
            question.shown_at = time.monotonic()
        self.stale()

    def _remove_question(self, question: Question) -> None:
        if question in self.asked:
            self.asked.remove(question)
            if self.asked:
                self.asked[0].shown_at = time.monotonic()
            if self.focus in ("question", "reason", "edit", "answer") and self._running is not None:
                self.set_focus("question" if self.asked and self.focus == "question" else "line")
            self.stale(now=True)

    def _note_questions(self) -> None:
        """Take up calls that are suspended, and drop those that were answered elsewhere."""
        if not self.board.works and not self._known and (root := self.board.root) is not None:
            if not root.status.is_waiting:
                return
        waiting = {question.target: question for question in self.board.questions()}
        for target, question in waiting.items():
            if target not in self._known:
                self._known[target] = question
                decided = self._decided.pop((question.run_id, target.rpartition("/")[2]), None)
                if decided is None:
                    self._add_question(question)
                else:
                    question.answered.set_result(decided)
        for target in [target for target in self._known if target not in waiting]:
            self._remove_question(self._known.pop(target))

    async def answers(self, result: RunResult) -> dict[str, Answer]:
        """Wait until a person has answered at least one question of a run that waits, and return what is answered."""
        waiting = {
            target: question
            for target, question in self._known.items()
            if any("/".join(ticket.path) == target or call == target for call, ticket in result.suspended.items())
        }
        if not waiting:
            return {}
        await asyncio.wait([question.answered for question in waiting.values()], return_when=asyncio.FIRST_COMPLETED)
        given = {target: question.answered.result() for target, question in waiting.items() if question.answered.done()}
        for target in given:
            self._known.pop(target)
        return given

    def waiting(self, target: str) -> Question | None:
        return self._known.get(target)

    def lose(self, lost: bool) -> None:
        self.look.lost = lost
        self.stale(now=True)

    def decide(self, run_id: str, call_id: str, answer: Answer) -> None:
        self._decided[run_id, call_id] = answer

    def give(self, answer: Answer) -> None:
        """Answer the question at the head of the queue, once."""
        question = self.asked[0] if self.asked else None
        if question is None or question.answered.done():
            return
        if (
            answer.approved
            and question.is_approval
            and question.is_long
            and not question.is_open
            and answer.args is None
        ):
            self.say("There is more than fits here: v shows all, then approve.")
            return
        question.answered.set_result(answer)
        if answer.args is not None:
            question.args = answer.args
        self.put(Block(rows=(answered_row(question, answer, self.look),)))
        self._remove_question(question)

    def is_too_early(self) -> bool:
        """Return whether a single key may have been meant for what was there before, and say so."""
        if self.asked and time.monotonic() - self.asked[0].shown_at < GUARD:
            self.say("That question has just come up. Press the key again.")
            return True
        return False

    def say(self, text: str) -> None:
        """Show a remark until the next key."""
        self.remark = text
        self.stale(now=True)

    # --- what the keys do

    def leave(self) -> None:
        if self.submit is not None:
            self.submit("/exit")

    def set_focus(self, focus: str) -> None:
        if self._draft is not None and focus not in ("reason", "edit", "answer", "find"):
            self.buffer.document, self._draft = self._draft, None
        if focus == "tree" and self.board.root is not None and self.look.selected is None:
            runs = self.runs()
            self.look.selected = runs[min(1, len(runs) - 1)].run_id if runs else None
        self.focus = focus
        if focus in ("reason", "edit", "answer", "find"):
            self.app.layout.focus(self.editor)
        self.app.invalidate()

    def borrow_line(self, focus: str, text: str = "") -> None:
        """Use the editor for something else; the draft comes back afterwards."""
        if self._draft is None:
            self._draft = self.buffer.document
        self.set_focus(focus)
        self.buffer.document = Document(text, len(text))

    def runs(self) -> list[RunNode]:
        root = self.board.root
        return [] if root is None else visible_runs(root, self.look)

    def chosen(self) -> RunNode | None:
        return next((run for run in self.runs() if run.run_id == self.look.selected), None)

    def enter(self) -> None:
        """Send what the editor holds to where it belongs."""
        text, focus = self.buffer.text, self.focus
        if focus == "line":
            if text.endswith("\\"):
                self.buffer.delete_before_cursor()
                self.buffer.insert_text("\n")
            elif text.strip() and self.submit is not None:
                self.buffer.append_to_history()
                self.buffer.reset()
                self.submit(text)
            return
        if focus == "edit":
            self.buffer.insert_text("\n")
            return
        self.set_focus("question" if focus != "find" else "tree")
        if focus == "reason":
            self.give(Answer(False, text.strip()))
        elif focus == "answer" and self.asked:
            self.give(Answer(True, value=parse_value(self.asked[0], text)))
        elif focus == "find":
            self._find(text.strip().lower())

    def send_edited(self) -> None:
        """Send the arguments that were edited."""
        if not self.asked:
            return
        question, text = self.asked[0], self.buffer.text
        try:
            args = parse_edited(question, text)
        except ValueError as exc:
            self.say(str(exc))
            return
        self.set_focus("question")
        self.give(Answer(True, args=args))

    def _find(self, wanted: str) -> None:
        root = self.board.root
        found = [run for run in self.board.tree.runs.values() if wanted and wanted in run.label.lower()]
        if root is None or not found:
            self.say(f"No agent here is named like {wanted!r}.")
            return
        self.look.selected = found[0].run_id
        self.look.expanded |= {found[0].run_id}

    async def read(self, title: str, lines: Callable[[], list[Row]]) -> None:
        """Show text on the whole screen until Esc; what was printed before comes back unchanged."""
        await read_on_screen(self, title, lines)
