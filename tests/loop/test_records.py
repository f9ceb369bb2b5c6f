"""What is recorded of a run is read back as it was, or is refused before it counts."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue import (
    Agent,
    CancellationToken,
    Limits,
    Message,
    PersistedState,
    Plugin,
    RecordUnreadable,
    RecordUnwritable,
    Registrar,
    RetinueError,
    Role,
    RunIdentity,
    RunRequest,
    RunResult,
    RunStatus,
    StateCommand,
    StateKey,
    ToolCallStatus,
    ToolResult,
    Usage,
)
from retinue.core.model import TurnEnd
from retinue.core.plugins import HandOff, OverrideSettings
from retinue.loop.outcomes import CallOutcome
from retinue.loop.records import (
    StoredRequest,
    decode_outcome,
    decode_request,
    decode_result,
    decode_turn,
    encode_outcome,
    encode_request,
    encode_result,
    encode_turn,
)
from retinue.loop.turn import Turn
from retinue.testing import ScriptedModel
from tests.loop.recorded import (
    HOOKS,
    KEYS,
    STORE,
    All,
    Entry,
    Hidden,
    Note,
    Opaque,
    Paper,
    Point,
    Point3,
    anything,
    bare,
    commands,
    count,
    hidden,
    ignore,
    installed,
    jsons,
    maybe,
    messages,
    names,
    notes,
    objects,
    paper,
    papers_made,
    point,
    points,
    ratio,
    results,
    said,
    seen,
    succeeded,
    texts,
    tickets,
    turns,
    typed,
    updates,
    usages,
)

HERE = Opaque.__module__


@given(turns)
def test_a_turn_is_read_back_equal(turn: Turn) -> None:
    back = decode_turn(encode_turn(turn))
    assert back == turn
    assert [type(part) for part in back.message.parts] == [type(part) for part in turn.message.parts]
    assert [typed(call.args) for call in back.message.tool_calls] == [typed(c.args) for c in turn.message.tool_calls]


@given(st.sampled_from(ToolCallStatus), results, st.none() | commands())
def test_an_outcome_is_read_back_equal(
    status: ToolCallStatus, result: ToolResult, command: StateCommand | None
) -> None:
    back = decode_outcome(encode_outcome(CallOutcome(status, result, command)), STORE, HOOKS)
    assert (back.status, back.result) == (status, result)
    assert (typed(back.result.data), typed(back.result.metadata)) == (typed(result.data), typed(result.metadata))
    assert said(back.command) == said(command)


@given(st.lists(updates, max_size=5))
def test_a_command_read_back_changes_a_store_as_the_first_did(batch: list[tuple[Any, Any]]) -> None:
    first, again = STORE.empty_copy(), STORE.empty_copy()
    command = StateCommand()
    command.patch.updates.extend(value for value in batch if value[0] not in (seen, point, paper))
    back = decode_outcome(encode_outcome(succeeded(command)), again, HOOKS).command
    assert back is not None
    first.apply(command)
    again.apply(back)
    for key in KEYS:
        assert typed(again.snapshot().get(key)) == typed(first.snapshot().get(key))


def outputs() -> Iterator[tuple[Any, st.SearchStrategy[Any]]]:
    yield None, jsons
    yield str, texts
    yield Point, points
    yield Paper, papers_made
    yield Entry, st.fixed_dictionaries({"name": texts, "size": st.integers()})
    yield list[Note], st.lists(notes, max_size=2)
    yield set[int], st.sets(st.integers(), max_size=3)


@pytest.mark.parametrize(
    ("kind", "values"), list(outputs()), ids=["none", "str", "dataclass", "pydantic", "typed_dict", "list", "set"]
)
def test_a_result_is_read_back_equal(kind: Any, values: st.SearchStrategy[Any]) -> None:
    output_format = Agent("writer", output=kind).output_format

    @settings(max_examples=25)
    @given(st.none() | values, st.data())
    def check(output: Any, data: st.DataObject) -> None:
        result = RunResult(
            status=data.draw(st.sampled_from(RunStatus)),
            run_id=data.draw(texts),
            thread_id=data.draw(texts),
            response=data.draw(maybe),
            output=output,
            steps=data.draw(st.integers(0, 9)),
            state=PersistedState(data.draw(st.integers(0, 9)), data.draw(objects)),
            usage=data.draw(usages),
            error=data.draw(maybe),
            termination=data.draw(texts),
            messages=tuple(data.draw(st.lists(messages, max_size=2))),
            suspended=data.draw(st.dictionaries(texts, tickets, max_size=2)),
        )
        back = decode_result(encode_result(result, output_format), output_format)
        assert back == result
        assert typed(back.output) == typed(output)

    check()


def request(**fields: Any) -> RunRequest:
    identity = RunIdentity("run_1", "thread_1", "writer", user_id="ü", depth=2)
    given = {"messages": (Message.user("hello"),), "limits": Limits(), **fields}
    return RunRequest(agent=Agent("writer"), identity=identity, cancellation=CancellationToken(), **given)


@given(
    st.lists(messages, max_size=2).map(tuple),
    objects,
    st.builds(Limits, depth=st.integers(0, 9), tokens=st.none() | st.integers(0, 2**70), cost=st.none() | st.just(0.5)),
    objects,
    st.none() | texts,
    st.none() | st.floats(0, 9),
    st.booleans(),
    st.booleans(),
)
def test_a_request_is_read_back_equal(
    said: Any,
    seed: Any,
    limits: Any,
    context: Any,
    model: Any,
    timeout: Any,
    keeps: Any,
    apart: Any,
) -> None:
    asked = request(
        messages=said,
        seed=PersistedState(3, seed),
        limits=limits,
        context=context,
        model=model,
        timeout=timeout,
        keeps_thread=keeps,
        detached=apart,
    )
    assert decode_request(encode_request(asked)) == StoredRequest(
        agent="writer",
        identity=asked.identity,
        messages=said,
        seed=PersistedState(3, seed),
        limits=limits,
        context=context,
        model=model,
        timeout=timeout,
        keeps_thread=keeps,
        detached=apart,
        lost=None,
    )


def test_a_command_that_says_nothing_is_still_one() -> None:
    back = decode_outcome(encode_outcome(succeeded(StateCommand())), STORE, HOOKS).command
    assert back is not None
    assert not back


def test_a_limit_that_is_infinite_is_none() -> None:
    endless = request(limits=Limits(seconds=math.inf), timeout=math.inf)
    stored = decode_request(encode_request(endless))
    assert (stored.limits, stored.timeout, stored.lost) == (Limits(), None, None)


def test_the_key_that_is_registered_reads_an_update() -> None:
    same_name: StateKey[int, int] = StateKey("count", int)
    back = decode_outcome(encode_outcome(succeeded(StateCommand().update(same_name, 3))), STORE, HOOKS).command
    assert back is not None
    assert back.patch.updates[0][0] is count


# --- what cannot be written ------------------------------------------------------------------------------------------

endless: list[Any] = []
endless.append(endless)


@pytest.mark.parametrize(
    ("key", "update", "reason"),
    [
        (count, "3", "expected int, got str"),
        (names, ["a"], "expected str, got list"),
        (ratio, math.inf, "expected float, got NoneType"),
        (ratio, math.nan, "expected float, got NoneType"),
        (anything, Opaque(), "a value of type Opaque has no JSON form"),
        (anything, Note("a"), "Note Note(text='a', at=None) would be read back as dict {'text': 'a', 'at': None}"),
        (bare, [(1, 2)], "list [(1, 2)] would be read back as list [[1, 2]]"),
        (bare, [{1: 2}], "list [{1: 2}] would be read back as list [{'1': 2}]"),
        (bare, endless, "RecursionError: "),
        (point, Point3(1, z=3), "would be read back as Point Point(x=1, y=2, tags=set())"),
        (hidden, Hidden(number=3), "unable to parse string as an integer"),
        (names, "\ud800", "surrogates not allowed"),
    ],
    ids=str,
)
def test_an_update_that_would_not_be_read_back(key: StateKey[Any, Any], update: Any, reason: str) -> None:
    with pytest.raises(RecordUnwritable) as caught:
        encode_outcome(succeeded(StateCommand().update(count, 1).update(key, update)))
    assert caught.value.what == f"an update of state key {key.name!r}"
    assert reason in caught.value.reason
    assert "\n" not in caught.value.reason


class Transfer(HandOff, frozen=True):
    pass


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (StateCommand().schedule(Opaque()), f"action '{HERE}:Opaque' cannot be recorded: "),
        (StateCommand().emit(Opaque()), f"effect '{HERE}:Opaque' cannot be recorded: "),
        (StateCommand().schedule({"a": (1,)}), "action 'builtins:dict' cannot be recorded: dict {'a': (1,)} would be"),
        (StateCommand().schedule(OverrideSettings({"stop": Opaque()})), "retinue.core.plugins:OverrideSettings"),
        (StateCommand().schedule(Transfer("x")), f"action '{__name__}:Transfer' cannot be recorded: it is a subclass"),
        (StateCommand().event({"a": Opaque()}), "an event of a command cannot be recorded: a value of type Opaque"),
    ],
)
def test_a_command_that_cannot_be_written(command: StateCommand, message: str) -> None:
    with pytest.raises(RecordUnwritable) as caught:
        encode_outcome(succeeded(command))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [{"metadata": {"db": Opaque()}}, {"metadata": None}, {"message": 3}, {"data": "\ud800"}],
    ids=str,
)
def test_a_tool_result_that_would_not_be_read_back(fields: Any) -> None:
    with pytest.raises(RecordUnwritable, match="the result of tool 'search' cannot be recorded"):
        encode_outcome(succeeded(None, ToolResult("search", **fields)))


def test_a_turn_that_would_not_be_read_back() -> None:
    for wrong in (Turn(Message.assistant("\ud800"), TurnEnd()), Turn(Message(role=Role.USER), TurnEnd(model=3))):  # type: ignore[arg-type]
        with pytest.raises(RecordUnwritable, match="a model's answer cannot be recorded"):
            encode_turn(wrong)
    with pytest.raises(RecordUnwritable, match=r"end\.usage\.cost"):
        encode_turn(Turn(Message.assistant("a"), TurnEnd(usage=Usage(cost=math.nan))))


@pytest.mark.parametrize(("kind", "output"), [(None, Opaque()), (Point, "x"), (Hidden, Hidden(number=2))], ids=str)
def test_a_result_that_would_not_be_read_back(kind: Any, output: Any) -> None:
    made = RunResult(status=RunStatus.COMPLETED, run_id="run_1", thread_id="t", state=PersistedState(), output=output)
    with pytest.raises(RecordUnwritable, match="the result of run 'run_1' cannot be recorded"):
        encode_result(made, Agent("writer", output=kind).output_format)


@pytest.mark.parametrize(
    ("fields", "lost"),
    [
        ({"context": {"db": Opaque(), "n": 1}}, "its context 'db' has no JSON form"),
        (
            {"context": {"n": 1, "at": (1, 2)}},
            "its context 'at' would be read back as something else than tuple (1, 2)",
        ),
        ({"context": {"n": 1}, "model": ScriptedModel([])}, "its model was given as an object"),
        (
            {"context": {"n": 1, "db": Opaque()}, "model": ScriptedModel([])},
            "its context 'db' has no JSON form; its model was given as an object",
        ),
    ],
)
def test_what_a_request_loses_it_says(fields: Any, lost: str) -> None:
    stored = decode_request(encode_request(request(**fields)))
    assert (stored.lost, stored.context, stored.model) == (lost, {"n": 1}, None)
    assert stored.messages == (Message.user("hello"),)


@pytest.mark.parametrize(
    "fields", [{"messages": (Message.user("\ud800"),)}, {"seed": PersistedState(0, {"a": Opaque()})}], ids=str
)
def test_a_request_of_which_the_heart_is_lost_still_says_whose_it_was(fields: Any) -> None:
    stored = decode_request(encode_request(request(**fields, context={"db": Opaque()})))
    assert stored.lost is not None
    assert stored.lost.startswith("its context 'db' has no JSON form; its messages or its seed")
    assert (stored.identity.run_id, stored.messages, stored.seed) == ("run_1", (), PersistedState())


# --- what cannot be read any more ------------------------------------------------------------------------------------


class Changed(Plugin):
    """The keys and types of `All` in a later version: some gone, some changed."""

    name = "changed"

    def register(self, r: Registrar) -> None:
        r.key(StateKey("names", list[str], update=list[str], reduce=lambda a, b: a + b))
        r.action(Renamed, ignore)


class Renamed(msgspec.Struct):
    body: str


Renamed.__module__, Renamed.__qualname__ = Note.__module__, Note.__qualname__


@pytest.mark.parametrize(
    ("command", "what", "reason"),
    [
        (
            StateCommand().update(count, 3),
            "an update of state key 'count'",
            "no plugin of this agent registers that key now",
        ),
        (StateCommand().update(names, "a"), "an update of state key 'names'", "Expected `array`, got `str`"),
        (
            StateCommand().schedule(Point(1)),
            f"action '{HERE}:Point'",
            "no plugin of this agent registers that action now",
        ),
        (
            StateCommand().emit(Note("a")),
            f"effect '{HERE}:Note'",
            "no plugin of this agent registers that effect now",
        ),
        (
            StateCommand().schedule(Note("a")),
            f"action '{HERE}:Note'",
            "Object missing required field `body`",
        ),
    ],
)
def test_a_command_that_no_longer_fits(command: StateCommand, what: str, reason: str) -> None:
    data = encode_outcome(succeeded(command))
    decode_outcome(data, STORE, HOOKS)
    with pytest.raises(RecordUnreadable) as caught:
        decode_outcome(data, *installed(Changed()))
    assert (caught.value.what, caught.value.reason) == (what, reason)


def test_a_name_that_two_types_have_is_no_name() -> None:
    class Twin(Plugin):
        def register(self, r: Registrar) -> None:
            r.action(Renamed, ignore)

    data = encode_outcome(succeeded(StateCommand().schedule(Note("a"))))
    with pytest.raises(RecordUnreadable, match="several types have that name"):
        decode_outcome(data, *installed(All(), Twin()))


def test_an_action_of_the_loop_is_read_where_a_plugin_also_handles_it() -> None:
    class Watches(Plugin):
        def register(self, r: Registrar) -> None:
            r.action(HandOff, ignore)

    data = encode_outcome(succeeded(StateCommand().schedule(HandOff("other", "because"))))
    for plugins in ((), (Watches(),)):
        back = decode_outcome(data, *installed(*plugins)).command
        assert back is not None
        assert back.actions == [HandOff("other", "because")]


def test_an_output_that_no_longer_fits() -> None:
    made = RunResult(status=RunStatus.COMPLETED, run_id="run_1", thread_id="t", state=PersistedState(), output=Point(1))
    data = encode_result(made, Agent("writer", output=Point).output_format)
    with pytest.raises(RecordUnreadable, match="the output of run 'run_1' was recorded and cannot be read any more"):
        decode_result(data, Agent("writer", output=Paper).output_format)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"status":"gone","result":{}}', b"\xff"])
def test_what_is_no_record(data: bytes) -> None:
    with pytest.raises(RecordUnreadable, match="a model's answer"):
        decode_turn(data)
    with pytest.raises(RecordUnreadable, match="the outcome of a call"):
        decode_outcome(data, STORE, HOOKS)
    with pytest.raises(RecordUnreadable, match="the result of a run"):
        decode_result(data, None)
    with pytest.raises(RecordUnreadable, match="the request of a run"):
        decode_request(data)


def test_the_errors_say_what_to_do_and_can_be_pickled() -> None:
    unread, unwritten = RecordUnreadable("a turn", "it is torn"), RecordUnwritable("key 'a'", "it is a socket")
    assert str(unread) == (
        "a turn was recorded and cannot be read any more: it is torn; "
        "recover the run with the code that recorded it, or start it anew"
    )
    assert str(unwritten) == (
        "key 'a' cannot be recorded: it is a socket; use values of a type that JSON can be read back into"
    )
    for error in (unread, unwritten):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
        assert isinstance(error, RetinueError)
