"""The keys of the screen. A typed letter answers a question only while the question has the focus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prompt_toolkit.filters import Condition
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys

from .questions import Answer, Question

if TYPE_CHECKING:
    from .screen import Screen

_TEXT = ("reason", "answer", "edit", "find")


def make_keys(screen: Screen) -> KeyBindings:
    """Return the keys of a screen."""
    keys = KeyBindings()
    _add_line_keys(keys, screen)
    _add_question_keys(keys, screen)
    _add_tree_keys(keys, screen)
    return keys


def _add_line_keys(keys: KeyBindings, screen: Screen) -> None:
    in_text = Condition(lambda: screen.focus == "line" or screen.focus in _TEXT)
    on_line = Condition(lambda: screen.focus == "line" and screen.submit is not None)

    @keys.add("enter", filter=in_text & Condition(lambda: not screen.app.layout.is_searching))
    def _(event: KeyPressEvent) -> None:
        screen.remark = ""
        screen.enter()

    @keys.add("c-j", filter=in_text)
    @keys.add("escape", "enter", filter=in_text)
    def _(event: KeyPressEvent) -> None:
        screen.buffer.insert_text("\n")

    @keys.add("c-s", filter=Condition(lambda: screen.focus == "edit"))
    def _(event: KeyPressEvent) -> None:
        screen.send_edited()

    @keys.add("c-g", filter=in_text)
    @keys.add("c-o", filter=in_text)
    def _(event: KeyPressEvent) -> None:
        screen.buffer.open_in_editor()

    @keys.add("tab")
    def _(event: KeyPressEvent) -> None:
        screen.remark = ""
        if screen.focus == "line" and screen.buffer.text:
            _complete(screen)
        else:
            _next_focus(screen)

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        screen.remark = ""
        if screen.focus in _TEXT:
            screen.set_focus("line")
        elif screen.buffer.text and not screen.board.works:
            screen.buffer.reset()
        else:
            screen.stop()

    @keys.add("c-d", filter=on_line & Condition(lambda: not screen.buffer.text))
    def _(event: KeyPressEvent) -> None:
        assert screen.submit is not None
        screen.submit("/exit")

    @keys.add("c-l")
    def _(event: KeyPressEvent) -> None:
        event.app.renderer.clear()

    @keys.add("c-z")
    def _(event: KeyPressEvent) -> None:
        event.app.suspend_to_background()

    @keys.add("escape", eager=False)
    def _(event: KeyPressEvent) -> None:
        screen.remark = ""
        screen.set_focus("question" if screen.focus in _TEXT and screen.asked and screen.focus != "find" else "line")


def _next_focus(screen: Screen) -> None:
    """Go to the oldest question, then to the tree, then back."""
    order = ["line"]
    if screen.asked:
        order.append("question")
    if screen.runs():
        order.append("tree")
    at = order.index(screen.focus) if screen.focus in order else 0
    screen.set_focus(order[(at + 1) % len(order)])


def _complete(screen: Screen) -> None:
    """Complete the word; with several ways to go on, name them."""
    buffer, completer = screen.buffer, screen.buffer.completer
    from prompt_toolkit.completion import CompleteEvent, get_common_complete_suffix

    found = list(completer.get_completions(buffer.document, CompleteEvent(completion_requested=True)))
    if len(found) == 1:
        buffer.apply_completion(found[0])
    elif found:
        suffix = get_common_complete_suffix(buffer.document, found)
        if suffix:
            buffer.insert_text(suffix)
        else:
            screen.say("  ".join(one.display_text for one in found[:12]))


# --- questions


def approve(screen: Screen, *, always: bool = False) -> None:
    if screen.asked:
        question = screen.asked[0]
        if question.is_approval:
            screen.give(Answer(True, always=always))
        else:
            screen.borrow_line("answer")


def reject(screen: Screen) -> None:
    if screen.asked:
        screen.borrow_line("reason")


def edit(screen: Screen) -> None:
    """Write the arguments into the editor, as JSON."""
    import json

    if not screen.asked:
        return
    question = screen.asked[0]
    if not question.is_approval or (question.ticket is not None and not question.ticket.takes_arguments):
        screen.say("These arguments cannot be changed.")
        return
    screen.borrow_line("edit", json.dumps(dict(question.args), indent=2, ensure_ascii=False, default=str))


def _rotate(screen: Screen) -> None:
    if len(screen.asked) > 1:
        screen.asked.append(screen.asked.pop(0))
        screen.asked[0].shown_at = 0.0
        screen.stale(now=True)


def _show_all(screen: Screen) -> None:
    from .questions import detail_rows

    if not screen.asked:
        return
    question: Question = screen.asked[0]
    question.is_open = True
    screen.app.create_background_task(screen.read(question.subject, lambda: detail_rows(question, screen.look)))


def _add_question_keys(keys: KeyBindings, screen: Screen) -> None:
    focused = Condition(lambda: screen.focus == "question" and bool(screen.asked))
    asked = Condition(lambda: bool(screen.asked))
    does: dict[str, Any] = {
        "a": lambda: approve(screen),
        "r": lambda: reject(screen),
        "e": lambda: edit(screen),
        "l": lambda: approve(screen, always=True),
        "v": lambda: _show_all(screen),
        "n": lambda: _rotate(screen),
    }
    for key, act in does.items():

        def pressed(event: KeyPressEvent, act: Any = act) -> None:
            screen.remark = ""
            act()

        keys.add(key, filter=focused, eager=True)(pressed)
        keys.add("escape", key, filter=asked)(pressed)

    @keys.add("enter", filter=focused, eager=True)
    def _(event: KeyPressEvent) -> None:
        if screen.asked[0].is_approval:
            screen.say("Enter does nothing here. Nothing was answered.")
        else:
            approve(screen)

    @keys.add(Keys.Any, filter=focused, eager=True)
    def _(event: KeyPressEvent) -> None:
        screen.say(f"{event.data} does nothing here. Nothing was answered." if event.data.isprintable() else "")


# --- the tree


def _move(screen: Screen, by: int) -> None:
    runs = screen.runs()
    at = next((at for at, run in enumerate(runs) if run.run_id == screen.look.selected), 0)
    if runs:
        screen.look.selected = runs[max(0, min(at + by, len(runs) - 1))].run_id
        screen.app.invalidate()


def _add_tree_keys(keys: KeyBindings, screen: Screen) -> None:
    on_tree = Condition(lambda: screen.focus == "tree")

    @keys.add("up", filter=on_tree, eager=True)
    def _(event: KeyPressEvent) -> None:
        _move(screen, -1)

    @keys.add("down", filter=on_tree, eager=True)
    def _(event: KeyPressEvent) -> None:
        _move(screen, 1)

    @keys.add("right", filter=on_tree, eager=True)
    def _(event: KeyPressEvent) -> None:
        if screen.look.selected is not None:
            screen.look.expanded |= {screen.look.selected}

    @keys.add("left", filter=on_tree, eager=True)
    def _(event: KeyPressEvent) -> None:
        screen.look.expanded -= {screen.look.selected or ""}

    @keys.add("enter", filter=on_tree, eager=True)
    def _(event: KeyPressEvent) -> None:
        from .reader import transcript

        run = screen.chosen()
        if run is not None:
            screen.app.create_background_task(screen.read(run.label, lambda: transcript(run, screen.look)))

    @keys.add("x", filter=on_tree, eager=True)
    def _(event: KeyPressEvent) -> None:
        run = screen.chosen()
        if run is not None:
            screen.stop_run(run.run_id if run.ns else None)
            screen.say(f"stopping {run.label}" if run.ns else "stopping the turn")

    @keys.add("m", filter=on_tree, eager=True)
    def _(event: KeyPressEvent) -> None:
        run = screen.chosen()
        if run is not None and screen.submit is not None:
            screen.set_focus("line")
            screen.buffer.insert_text(f"@{run.label} ")

    @keys.add("/", filter=on_tree, eager=True)
    def _(event: KeyPressEvent) -> None:
        screen.borrow_line("find")

    @keys.add(Keys.Any, filter=on_tree, eager=True)
    def _(event: KeyPressEvent) -> None:
        if event.data.isprintable():
            screen.say(f"{event.data} does nothing here.")
