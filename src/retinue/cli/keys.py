"""The keys of the screen. A typed letter answers a question only while the question has the focus."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from prompt_toolkit.completion import CompleteEvent, get_common_complete_suffix
from prompt_toolkit.filters import Condition
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys

from .questions import Answer, Question, detail_rows
from .reader import transcript

if TYPE_CHECKING:
    from .screen import Screen

_TEXT = ("reason", "answer", "edit", "find")


Act = Callable[[KeyPressEvent], object]


def make_keys(screen: Screen) -> KeyBindings:
    """Return the keys of a screen."""
    keys = KeyBindings()
    _add_line_keys(keys, screen)
    _add_question_keys(keys, screen)
    _add_tree_keys(keys, screen)
    return keys


def _bind(keys: KeyBindings, acts: Mapping[str, Act], filter: Condition | bool = True, *, eager: bool = False) -> None:
    """Bind keys, each the names of what is pressed one after the other."""
    for names, act in acts.items():

        def pressed(event: KeyPressEvent, act: Act = act) -> None:
            act(event)

        keys.add(*names.split(), filter=filter, eager=eager)(pressed)


def _add_line_keys(keys: KeyBindings, screen: Screen) -> None:
    buffer, is_searching = screen.buffer, Condition(lambda: screen.app.layout.is_searching)
    in_text = Condition(lambda: screen.focus == "line" or screen.focus in _TEXT)
    is_empty = Condition(lambda: screen.focus == "line" and screen.submit is not None and not buffer.text)
    _bind(keys, {"enter": lambda event: _enter(screen)}, Condition(lambda: in_text() and not is_searching()))
    _bind(keys, dict.fromkeys(("c-j", "escape enter"), lambda event: buffer.insert_text("\n")), in_text)
    _bind(keys, dict.fromkeys(("c-g", "c-o"), lambda event: buffer.open_in_editor()), in_text)
    _bind(keys, {"c-s": lambda event: screen.send_edited()}, Condition(lambda: screen.focus == "edit"))
    _bind(keys, {"c-d": lambda event: screen.leave()}, is_empty)
    always: dict[str, Act] = {
        "tab": lambda event: _tab(screen),
        "c-c": lambda event: _interrupt(screen),
        "c-l": lambda event: event.app.renderer.clear(),
        "c-z": lambda event: event.app.suspend_to_background(),
        "escape": lambda event: _escape(screen),
    }
    _bind(keys, always)


def _enter(screen: Screen) -> None:
    screen.remark = ""
    screen.enter()


def _tab(screen: Screen) -> None:
    screen.remark = ""
    if screen.focus == "line" and screen.buffer.text:
        _complete(screen)
    else:
        _next_focus(screen)


def _interrupt(screen: Screen) -> None:
    screen.remark = ""
    if screen.focus in _TEXT:
        screen.set_focus("line")
    elif screen.buffer.text and not screen.board.works:
        screen.buffer.reset()
    else:
        screen.stop()


def _escape(screen: Screen) -> None:
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
            if not screen.is_too_early():
                screen.give(Answer(True, always=always))
        else:
            screen.borrow_line("answer")


def reject(screen: Screen) -> None:
    if screen.asked:
        screen.borrow_line("reason")


def edit(screen: Screen) -> None:
    """Write the arguments into the editor, as JSON."""
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
    if not screen.asked:
        return
    question: Question = screen.asked[0]
    question.is_open = True
    screen.app.create_background_task(screen.read(question.subject, lambda: detail_rows(question, screen.look)))


def _add_question_keys(keys: KeyBindings, screen: Screen) -> None:
    focused = Condition(lambda: screen.focus == "question" and bool(screen.asked))
    does: dict[str, Act] = {
        "a": lambda event: approve(screen),
        "r": lambda event: reject(screen),
        "e": lambda event: edit(screen),
        "l": lambda event: approve(screen, always=True),
        "v": lambda event: _show_all(screen),
        "n": lambda event: _rotate(screen),
    }
    for key in does:  # a remark is about the key before
        does[key] = partial(_without_remark, screen, does[key])
    _bind(keys, does, focused, eager=True)
    _bind(keys, {f"escape {key}": act for key, act in does.items()}, Condition(lambda: bool(screen.asked)))
    _bind(keys, {"enter": lambda event: _enter_on_question(screen)}, focused, eager=True)
    _bind(keys, {Keys.Any.value: lambda event: _refuse(screen, event, " Nothing was answered.")}, focused)


def _without_remark(screen: Screen, act: Act, event: KeyPressEvent) -> None:
    screen.remark = ""
    act(event)


def _enter_on_question(screen: Screen) -> None:
    if screen.asked[0].is_approval:
        screen.say("Enter does nothing here. Nothing was answered.")
    else:
        approve(screen)


def _refuse(screen: Screen, event: KeyPressEvent, more: str = "") -> None:
    if event.data.isprintable():
        screen.say(f"{event.data} does nothing here.{more}")


# --- the tree


def _move(screen: Screen, by: int) -> None:
    runs = screen.runs()
    at = next((at for at, run in enumerate(runs) if run.run_id == screen.look.selected), 0)
    if runs:
        screen.look.selected = runs[max(0, min(at + by, len(runs) - 1))].run_id
        screen.app.invalidate()


def _add_tree_keys(keys: KeyBindings, screen: Screen) -> None:
    on_tree = Condition(lambda: screen.focus == "tree")
    does: dict[str, Act] = {
        "up": lambda event: _move(screen, -1),
        "down": lambda event: _move(screen, 1),
        "right": lambda event: _open(screen, True),
        "left": lambda event: _open(screen, False),
        "enter": lambda event: _read(screen),
        "x": lambda event: _stop(screen),
        "m": lambda event: _message(screen),
        "/": lambda event: screen.borrow_line("find"),
    }
    _bind(keys, does, on_tree, eager=True)
    _bind(keys, {Keys.Any.value: lambda event: _refuse(screen, event)}, on_tree)


def _open(screen: Screen, is_open: bool) -> None:
    chosen = screen.look.selected
    if chosen is not None:
        screen.look.expanded = screen.look.expanded | {chosen} if is_open else screen.look.expanded - {chosen}


def _read(screen: Screen) -> None:
    run = screen.chosen()
    if run is not None:
        screen.app.create_background_task(screen.read(run.label, lambda: transcript(run, screen.look)))


def _stop(screen: Screen) -> None:
    run = screen.chosen()
    if run is not None:
        screen.stop_run(run.run_id if run.ns else None)
        screen.say(f"stopping {run.label}" if run.ns else "stopping the turn")


def _message(screen: Screen) -> None:
    run = screen.chosen()
    if run is not None and screen.submit is not None:
        screen.set_focus("line")
        screen.buffer.insert_text(f"@{run.label} ")
