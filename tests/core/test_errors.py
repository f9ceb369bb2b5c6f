"""Errors: fields, messages and pickling."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from retinue import errors
from retinue.errors import LimitReached, LogUnreadable, OwnershipLost, StoreError, ToolError, UnknownAgent, UnknownRun

ARGS: dict[str, tuple[Any, ...]] = {
    "UnknownAgent": ("bob", ("ann",)),
    "ServerError": ("http://x", 404, "not_found", "there is none", "run_1"),
    "IllegalMove": ("call 'x'", "new", "failed"),
    "WriteConflict": ("k", "call_1", "call_2"),
    "HookFailed": ("hook 'h'", "run_start", "why"),
    "LimitReached": ("bob", "depth", "why"),
    "LogUnreadable": ("file.db", "run_1", 3, "why"),
}
ONE_FIELD = (
    "UnknownRun RuntimeClosed ConsumerTooSlow UnknownKey PluginAlreadyInstalled PluginNotInstalled MissingValue".split()
)


def made(name: str) -> Exception:
    make: Any = getattr(errors, name)
    if name in ARGS:
        return make(*ARGS[name])
    kind: type[Exception] = make
    one = name in ONE_FIELD or not hasattr(kind, "template") or issubclass(kind, ToolError | errors.ModelError)
    return make("a") if one else make("a", "b")


@pytest.mark.parametrize(
    "name", [name for name in errors.__all__ if name not in ("ChildAgentError", "RunNotCompleted")]
)
def test_an_error_survives_pickling_with_its_fields(name: str) -> None:
    error = made(name)
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert str(error)


def test_fields_are_given_by_place_or_by_name() -> None:
    assert str(UnknownAgent("bob", known=("ann",))) == "unknown agent 'bob'; known: ann"
    assert UnknownAgent(name="bob").known == ()
    assert StoreError("db", "is full", transient=True).transient
    with pytest.raises(TypeError, match="run_id"):
        UnknownRun()  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="many"):
        UnknownRun("a", "b")  # pyright: ignore[reportCallIssue]


def test_errors_with_a_longer_message_keep_their_fields() -> None:
    assert str(LimitReached("bob", "depth", "too deep")) == "[limit:depth] too deep"
    lost, unreadable = OwnershipLost("db", "run_1"), LogUnreadable("db", "run_1", 3, "a row is missing")
    assert (lost.log_id, str(lost)) == ("run_1", "db: run 'run_1' is another process's now")
    assert (unreadable.seq, unreadable.reason) == (3, "a row is missing")


def test_a_subclass_may_have_a_kind_or_fields_of_its_own() -> None:
    class QuotaUsed(ToolError):
        kind = "quota"

    class Refused(ToolError):
        code: int

        def __init__(self, code: int) -> None:
            super().__init__(f"code {code}")
            self.code = code

    assert str(QuotaUsed("come back tomorrow")) == "quota: come back tomorrow"
    assert (Refused(3).code, str(Refused(3))) == (3, "execution_failed: code 3")
