"""Records: what a run learned and how it began, as JSON that another process can go on with.

Whatever is written here was read back first, so a record that cannot be used is refused while the run can still be
told. What it is read back into may be gone or changed by the time of a recovery: then reading says what is missing.
Values that no type describes (a result's data and metadata, the parameters of a ticket, events) come back as JSON has
them: a tuple as a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from ..core.backend import RunRequest
from ..core.codec import to_json_bytes, to_json_value
from ..core.errors import RecordUnreadable, RecordUnwritable
from ..core.lifecycle import ToolCallStatus
from ..core.messages import Message
from ..core.output import OutputFormat
from ..core.plugins import RunAction, StepAction
from ..core.results import ToolResult
from ..core.runs import Limits, RunIdentity, RunResult
from ..core.state import PersistedState
from ..core.statestore import StateStore
from .commands import PaperCommand, from_paper, on_paper, reason_of, shown
from .outcomes import CallOutcome
from .phases import HookTable
from .turn import Turn

T = TypeVar("T")

_BUILT_IN: tuple[type, ...] = (*get_args(StepAction), *get_args(RunAction))


class _Outcome(Struct):
    """A CallOutcome on paper. The fields are named as there, so one without a command is written as it is."""

    status: ToolCallStatus
    result: ToolResult
    command: PaperCommand | None = None


class StoredRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a run began: what was asked of it."""

    agent: str
    identity: RunIdentity
    messages: tuple[Message, ...] = ()
    seed: PersistedState = field(default_factory=PersistedState)
    limits: Limits
    context: dict[str, Any] = {}
    model: str | None = None
    timeout: float | None = None
    keeps_thread: bool = False
    detached: bool = False
    lost: str | None = None
    """What of the request could not be stored, in words: the run cannot be begun again from this."""


_json = msgspec.json.Decoder().decode
_turn = msgspec.json.Decoder(Turn).decode
_outcome = msgspec.json.Decoder(_Outcome).decode
_result = msgspec.json.Decoder(RunResult).decode
_request = msgspec.json.Decoder(StoredRequest).decode


def encode_turn(turn: Turn) -> bytes:
    """What the model answered; RecordUnwritable where it could not be read back."""
    return _written(turn, _turn, "a model's answer")


def decode_turn(data: bytes) -> Turn:
    return _read(data, _turn, "a model's answer")


def encode_outcome(outcome: CallOutcome) -> bytes:
    """How a call went, with the state it asks to change; RecordUnwritable names what of it could not be read back."""
    command, what = outcome.command, f"the result of tool {outcome.result.tool_name!r}"
    if command is None:
        return _written(outcome, _outcome, what)
    return _written(_Outcome(outcome.status, outcome.result, on_paper(command)), _outcome, what)


def decode_outcome(data: bytes, state: StateStore, hooks: HookTable) -> CallOutcome:
    """The outcome, for a run with these keys and handlers; RecordUnreadable names what it misses or does not fit."""
    read = _read(data, _outcome, "the outcome of a call")
    command = None if read.command is None else from_paper(read.command, state, hooks)
    return CallOutcome(read.status, read.result, command)


def encode_result(result: RunResult, output_format: OutputFormat | None) -> bytes:
    """How a run ended, its output by the format of the agent that gave it."""
    what = f"the result of run {result.run_id!r}"
    try:
        output = to_json_value(result.output) if output_format is None else output_format.encode(result.output)
        data = to_json_bytes(replace(result, output=output))
        decode_result(data, output_format)
    except Exception as exc:
        raise RecordUnwritable(what, reason_of(exc)) from exc
    return data


def decode_result(data: bytes, output_format: OutputFormat | None) -> RunResult:
    read = _read(data, _result, "the result of a run")
    if output_format is None or read.output is None:
        return read
    try:
        return replace(read, output=output_format.decode(read.output))
    except Exception as exc:
        raise RecordUnreadable(f"the output of run {read.run_id!r}", reason_of(exc)) from exc


def encode_request(request: RunRequest) -> bytes:
    """How a run begins. What cannot be stored is left out, and `lost` says so."""
    context, lost = _storable(request.context)
    model: Any = request.model
    if not (model is None or isinstance(model, str)):
        model = None
        lost.append("its model was given as an object")
    stored = StoredRequest(
        agent=request.agent.name,
        identity=request.identity,
        messages=request.messages,
        seed=request.seed,
        limits=request.limits,
        context=context,
        model=model,
        timeout=request.timeout,
        keeps_thread=request.keeps_thread,
        detached=request.detached,
        lost="; ".join(lost) or None,
    )
    try:
        return _written(stored, _request, "a request")
    except RecordUnwritable as exc:
        lost.append(f"its messages or its seed cannot be written as JSON ({exc.reason})")
        rest = replace(stored, messages=(), seed=PersistedState(), lost="; ".join(lost))
        return _written(rest, _request, f"the request of run {request.identity.run_id!r}")


def decode_request(data: bytes) -> StoredRequest:
    return _read(data, _request, "the request of a run")


def _written(value: Any, read: Callable[[bytes], Any], what: str) -> bytes:
    """JSON that can be read back: tools and models may have filled records with anything."""
    try:
        data = to_json_bytes(value)
        read(data)
    except Exception as exc:
        raise RecordUnwritable(what, reason_of(exc)) from exc
    return data


def _read(data: bytes, read: Callable[[bytes], T], what: str) -> T:
    try:
        return read(data)
    except (ValueError, TypeError, RecursionError) as exc:
        raise RecordUnreadable(what, reason_of(exc)) from exc


def _storable(context: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What of a context JSON gives back as it is, and what it does not, in words."""
    kept: dict[str, Any] = {}
    lost: list[str] = []
    for name, value in context.items():
        try:
            as_json = to_json_value({name: value})
            if as_json == {name: value}:
                kept.update(as_json)
            else:
                lost.append(f"its context {name!r} would be read back as something else than {shown(value)}")
        except Exception:
            lost.append(f"its context {name!r} has no JSON form")
    return kept, lost
