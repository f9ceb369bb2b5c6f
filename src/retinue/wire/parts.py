"""LangGraph-shaped stream parts, `{"type", "ns", "data"}`, as a function of events.

They differ from LangGraph's where its clients would misread them: `ns` holds `tools:<call id>` (not a random id), and
`langgraph_checkpoint_ns` leaves out the node's own segment, which clients would take for a sub-agent. Every sub-agent is
a call named `task` (`delegations.py`), however it was started.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Literal, TypedDict, cast, get_args

from ..core import events
from ..core.content import record_json, to_json_text
from ..core.events import Event, Namespace
from ..core.messages import Message, ReasoningPart, ReceiptPart, Role
from ..core.results import ToolCallStatus
from ..core.runs import RunStatus
from .delegations import TASK, Delegations, as_task, is_delegation

LangGraphMode = Literal["updates", "messages", "values", "custom", "tasks", "checkpoints", "debug"]
OwnMode = Literal["output", "progress", "activities"]
Mode = LangGraphMode | OwnMode

MODES: tuple[Mode, ...] = (*get_args(LangGraphMode), *get_args(OwnMode))
MODEL_NODE, TOOL_NODE, INTERRUPT = "model_request", "tools", "__interrupt__"
_NO_CALL: dict[str, Any] = {"name": "", "args": {}}
_PROGRESS = "tool-call-progress"

_TYPES = {Role.SYSTEM: "system", Role.USER: "human", Role.ASSISTANT: "ai", Role.TOOL: "tool"}


class StreamPart(TypedDict):
    """One part of a stream: its mode, the agent it belongs to, and data in the shape of that mode."""

    type: Mode
    ns: Namespace
    data: Any


class PartsProjection:
    """Call it with each event of a log, in order; it returns the parts of that event."""

    def __init__(self, modes: Mode | Iterable[Mode] = ("updates",)) -> None:
        wanted = (modes,) if isinstance(modes, str) else tuple(modes or ())
        unknown = [mode for mode in wanted if mode not in MODES]
        if unknown or not wanted:
            own, theirs = ", ".join(get_args(OwnMode)), ", ".join(get_args(LangGraphMode))
            got = ", ".join(map(str, unknown)) or "none"
            raise ValueError(f"our own modes are {own}; LangGraph's stream modes are {theirs}; got {got}")
        self._modes = frozenset(wanted)
        self._runs: dict[str, _RunView] = {}
        self._delegations = Delegations()
        self._interrupts: dict[tuple[Namespace, str], dict[str, Any]] = {}
        """The waiting calls, by the namespace of their agent and their call id."""

    def __call__(self, event: Event) -> list[StreamPart]:
        return [part for part in self._parts(event) if part["type"] in self._modes]

    def _parts(self, event: Event) -> Iterator[StreamPart]:
        view = self._runs.get(event.run_id)
        if view is None:
            view = self._runs[event.run_id] = _RunView()
        view.follow(event)
        if isinstance(event, events.ChildStarted | events.RunStarted):
            yield from self._begin_child(event)
        match event:
            case events.TextDelta() | events.ReasoningDelta() | events.ToolCallStarted() | events.ToolCallArgsDelta():
                # The arguments of a call that is shown as `task` come once they are complete, as those of a `task`.
                if not (isinstance(event, events.ToolCallArgsDelta) and event.call_id in view.described):
                    yield _part("messages", event, (view.chunk(event), view.metadata(event, MODEL_NODE)))
            case events.RunStarted(continues=False) | events.MessagesSnapshot():
                yield from self._snapshot(event, view, "input")
            case events.StepStarted() if not view.open_calls:  # otherwise the step resumes with its calls
                yield from _task(event, view, _model_task(event, view), "task", input=None, triggers=[])
            case events.InferenceFinished():
                yield from self._inference(event, view)
            case events.ToolCallReady() | events.ToolCallResumed():
                yield from self._begin_call(event, view)
            case events.ToolCallFinished():
                yield from self._end_call(event, view)
            case events.RunFinished() | events.TaskUpdated():
                yield from self._end_child(event)
            case events.StepFinished():
                yield from self._snapshot(event, view, "loop")
            case _:
                yield from _reports(event)

    def _inference(self, event: events.InferenceFinished, view: _RunView) -> Iterator[StreamPart]:
        message = message_to_dict(event.message)
        message["tool_calls"] = [as_task(call) for call in message["tool_calls"]]
        self._delegations.note_calls(event)
        for call in message["tool_calls"]:
            if call["id"] in view.described:
                view.described.discard(call["id"])
                chunk = view.call_chunk(call["id"], {"name": None, "args": to_json_text(call["args"]), "id": None})
                yield _part("messages", event, (chunk, view.metadata(event, MODEL_NODE)))
        view.add(message)
        update = {"messages": [message]}
        yield from _task(event, view, _model_task(event, view), "task_result", error=None, result=update, interrupts=[])
        yield _part("updates", event, {MODEL_NODE: update})

    def _begin_child(self, event: events.ChildStarted | events.RunStarted) -> Iterator[StreamPart]:
        """Announce a sub-agent as a call named `task`, unless the model's answer has done so.

        This repeats the answer, under its id, with those of its calls that have not ended: an ended one would begin anew.
        """
        child = self._delegations.begin_child(event)
        if child is None:
            return
        view = self._runs[child.parent.run_id]
        message = view.answer_to(child.call_id)
        call: dict[str, Any] = next((one for one in message["tool_calls"] if one["id"] == child.call_id), _NO_CALL)
        if child.number == 1 and call["name"] == TASK and call["args"].get("subagent_type") == child.agent:
            return
        args = {**call["args"], "subagent_type": child.agent, "description": child.description}
        shown = {"name": TASK, "args": args, "id": child.shown_id}
        if child.number == 1:
            view.rename(child.call_id, shown)
        open_ids = [one["id"] for one in message["tool_calls"] if one["id"] in view.open_calls]
        calls = [*(view.open_calls[one] for one in open_ids if one != child.shown_id), shown]
        yield _part("updates", child.parent, {MODEL_NODE: {"messages": [{**message, "tool_calls": calls}]}})

    def _end_child(self, event: events.RunFinished | events.TaskUpdated) -> Iterator[StreamPart]:
        """Show the end of a sub-agent whose call has ended before it, or has several."""
        if isinstance(event, events.RunFinished):
            child, content = self._delegations.end_child(event), event.response or event.error or ""
            is_success = event.status is RunStatus.COMPLETED
        else:
            child, content = self._delegations.note_task(event), f"the task is {event.status.lower()}"
            is_success = event.status.upper() == "COMPLETED"
        if child is None:
            return
        parent, view = child.parent, self._runs[child.parent.run_id]
        message = {
            "type": "tool",
            "content": content,
            "id": f"{event.run_id}-result",
            "name": TASK,
            "tool_call_id": child.shown_id,
            "status": "success" if is_success else "error",
        }
        if isinstance(event, events.RunFinished) and event.receipt is not None and not event.receipt.is_clean:
            message["receipt"] = record_json(event.receipt)
        yield _part("messages", parent, (message, view.metadata(parent, TOOL_NODE)))
        yield _part("updates", parent, {TOOL_NODE: {"messages": [message]}})

    def _begin_call(self, event: events.ToolCallReady | events.ToolCallResumed, view: _RunView) -> Iterator[StreamPart]:
        self._interrupts.pop((event.ns, event.call_id), None)
        known = view.open_calls.get(event.call_id)
        call = known or as_task({"name": event.tool_name, "args": event.args or {}, "id": event.call_id})
        if known is not None and event.args is not None:  # a decision may have changed them
            call = as_task({**known, "name": event.tool_name, "args": event.args})
            if known["name"] == TASK != call["name"]:  # another tool, whose child has started
                call = {**call, "name": TASK, "args": {**known["args"], **event.args}}
        yield from _task(event, view, (event.call_id, TOOL_NODE), "task", input=[call], triggers=[])

    def _end_call(self, event: events.ToolCallFinished, view: _RunView) -> Iterator[StreamPart]:
        task = event.call_id, TOOL_NODE
        if event.status is ToolCallStatus.SUSPENDED:
            waiting = self._interrupt(event)
            yield from _task(event, view, task, "task_result", error=None, result={}, interrupts=waiting)
            yield _part("updates", event, {INTERRUPT: waiting})
            return
        self._interrupts.pop((event.ns, event.call_id), None)
        if event.status is ToolCallStatus.CANCELLED and event.call_id not in view.open_calls:
            return  # the model never finished asking for it, so it is in no message
        ok = event.result.is_success()
        message = {**message_to_dict(event.message), "status": "success" if ok else "error"}
        if self._delegations.end_call(event):
            message["name"] = TASK
        view.add(message)
        update = {"messages": [message]}
        error = None if ok else event.message.text
        yield from _task(event, view, task, "task_result", error=error, result=update, interrupts=[])
        yield _part("messages", event, (message, view.metadata(event, TOOL_NODE)))
        yield _part("updates", event, {TOOL_NODE: update})

    def _interrupt(self, event: events.ToolCallFinished) -> list[dict[str, Any]]:
        """Return the questions that a call waits for: those of its children, otherwise its own."""
        if waiting := self._waiting(event.ns, event.call_id):
            return waiting
        ticket = event.result.suspension
        value = {
            "action": event.tool_name if ticket is None else ticket.action,
            "message": event.result.message if ticket is None else ticket.message,
            "parameters": None if ticket is None else ticket.parameters,
            "response_schema": None if ticket is None else ticket.response_schema,
            "tool_name": event.tool_name,
            "tool_call_id": event.call_id,
            "path": [*[name.removeprefix("tools:") for name in event.ns], event.call_id],
        }
        made = {"id": event.call_id if ticket is None else ticket.id, "value": value}
        self._interrupts[event.ns, event.call_id] = made
        return [made]

    def _waiting(self, ns: Namespace, call_id: str | None = None) -> list[dict[str, Any]]:
        """The questions of an agent and of all below it, or only those below one of its calls."""
        found = [(other[len(ns) :], made) for (other, _), made in self._interrupts.items() if other[: len(ns)] == ns]
        # The n-th child of a call has `~n` after the call's id.
        below = f"tools:{call_id}"
        return [made for rest, made in found if call_id is None or (rest and rest[0].partition("~")[0] == below)]

    def _values(self, event: Event, view: _RunView) -> dict[str, Any]:
        values = {"messages": list(view.messages), **view.state}
        waiting = self._waiting(event.ns)
        return {**values, INTERRUPT: waiting} if waiting else values

    def _snapshot(self, event: Event, view: _RunView, source: str) -> Iterator[StreamPart]:
        """The values, and a checkpoint. Its id is the event number that `runtime.state_at` takes."""
        if "values" in self._modes:
            yield _part("values", event, self._values(event, view))
        resumes = source == "input" and not view.input  # the state is that of the checkpoint before
        if resumes or not self._modes & {"checkpoints", "debug"}:
            return
        place = {"thread_id": view.thread_id, "checkpoint_ns": "|".join(event.ns), "checkpoint_id": str(event.seq)}
        before, view.checkpoint = view.checkpoint, {"configurable": place}
        upcoming = [(call_id, TOOL_NODE) for call_id in view.open_calls]
        if not upcoming and view.messages and view.messages[-1]["type"] != "ai":
            upcoming = [(f"{event.run_id}-s{view.step + 1}", MODEL_NODE)]
        tasks: list[dict[str, Any]] = []
        for task_id, node in upcoming:
            own = self._interrupts.get((event.ns, task_id))
            waiting = self._waiting(event.ns, task_id) if own is None else [own]
            tasks.append({"id": task_id, "name": node, "interrupts": waiting, "state": None})
        payload = {
            "config": view.checkpoint,
            "parent_config": before,
            "values": self._values(event, view),
            "metadata": {"source": source, "step": view.step, "run_id": event.run_id},
            "next": [node for _, node in upcoming],
            "tasks": tasks,
        }
        yield _part("checkpoints", event, payload)
        yield _debug(event, view, "checkpoint", payload)


class _RunView:
    """The state of one run that its parts show."""

    def __init__(self) -> None:
        self.thread_id = ""
        self.step = 0
        self.input: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}
        self.open_calls: dict[str, dict[str, Any]] = {}
        """The calls of the last message that have no result yet."""
        self.checkpoint: dict[str, Any] | None = None
        self.described: set[str] = set()
        """The calls that the model is asking for whose arguments are shown in another form, so only as a whole."""
        self._chunks: dict[str, tuple[str, int]] = {}
        """The message id and the index of each call that the model is asking for."""

    def follow(self, event: Event) -> None:
        match event:
            case events.RunStarted():
                self.thread_id = event.thread_id
                self.input = [message_to_dict(message) for message in event.messages]
                self.messages.extend(self.input)
            case events.MessagesSnapshot():  # the conversation that the run continues
                self.messages, self.open_calls = [], {}
                for message in [*map(_earlier, event.messages), *self.input]:
                    self.add(message)
            case events.StateSnapshot():
                self.state.update(event.state)
            case events.StateDelta():
                self.state.update(event.delta)
            case events.StepStarted():
                self.step = event.step
            case _:
                pass

    def add(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        if message["type"] == "ai":
            self.open_calls = {call["id"]: call for call in message["tool_calls"]}
            self._chunks, self.described = {}, set()
        elif message["type"] == "tool":
            self.open_calls.pop(message["tool_call_id"], None)

    def answer_to(self, call_id: str) -> dict[str, Any]:
        """Return the message that asks for a call."""
        for message in reversed(self.messages):
            if any(call["id"] == call_id for call in message.get("tool_calls", ())):
                return message
        return {"type": "ai", "content": "", "id": "", "tool_calls": []}

    def rename(self, call_id: str, shown: dict[str, Any]) -> None:
        """Show a call under another name from now on. Messages that readers have stay as they are."""
        before = self.answer_to(call_id)
        calls = [shown if call["id"] == call_id else call for call in before["tool_calls"]]
        self.messages = [{**one, "tool_calls": calls} if one is before else one for one in self.messages]
        if call_id in self.open_calls:
            self.open_calls[call_id] = shown

    def chunk(
        self, event: events.TextDelta | events.ReasoningDelta | events.ToolCallStarted | events.ToolCallArgsDelta
    ) -> dict[str, Any]:
        """A piece of the message that the model is writing."""
        if isinstance(event, events.TextDelta):
            return {"type": "AIMessageChunk", "content": event.delta, "id": event.message_id}
        if isinstance(event, events.ReasoningDelta):
            made = {"type": "AIMessageChunk", "content": "", "id": event.message_id}
            return {**made, "additional_kwargs": {"reasoning_content": event.delta}}
        if isinstance(event, events.ToolCallStarted):
            index = sum(message_id == event.message_id for message_id, _ in self._chunks.values())
            self._chunks[event.call_id] = event.message_id, index
            name = event.tool_name
            if is_delegation(name) and name != TASK:
                name = TASK
                self.described.add(event.call_id)
            return self.call_chunk(event.call_id, {"name": name, "args": "", "id": event.call_id})
        return self.call_chunk(event.call_id, {"name": None, "args": event.delta, "id": None})

    def call_chunk(self, call_id: str, piece: dict[str, Any]) -> dict[str, Any]:
        """A piece of a call that the model is asking for."""
        message_id, index = self._chunks.get(call_id, ("", 0))
        pieces = [{**piece, "index": index, "type": "tool_call_chunk"}]
        return {"type": "AIMessageChunk", "content": "", "id": message_id, "tool_call_chunks": pieces}

    def metadata(self, event: Event, node: str) -> dict[str, Any]:
        place = "|".join(event.ns)
        return {
            "langgraph_node": node,
            "langgraph_step": self.step,
            "langgraph_checkpoint_ns": place,
            "checkpoint_ns": place,
            "lc_agent_name": event.agent,
            "run_id": event.run_id,
            "thread_id": self.thread_id,
        }


def message_to_dict(message: Message) -> dict[str, Any]:
    """Return a message as the plain dict that parts carry."""
    made: dict[str, Any] = {"type": _TYPES[message.role], "content": message.text, "id": message.id}
    if message.role is Role.ASSISTANT:
        made["tool_calls"] = [{"name": call.name, "args": call.args, "id": call.id} for call in message.tool_calls]
        if reasoning := "".join([part.text for part in message.parts if isinstance(part, ReasoningPart)]):
            made["additional_kwargs"] = {"reasoning_content": reasoning}
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    receipts = [part for part in message.parts if isinstance(part, ReceiptPart)]
    if receipts:
        made["receipt"] = record_json(receipts[0].receipt)
    return made


def _earlier(message: Message) -> dict[str, Any]:
    """Return a message of the conversation that a run continues: its sub-agents have ended."""
    made = message_to_dict(message)
    if "tool_calls" in made:
        made["tool_calls"] = [as_task(call) for call in made["tool_calls"]]
    elif message.role is Role.TOOL and is_delegation(message.name or ""):
        made["name"] = TASK
    return made


def _reports(event: Event) -> Iterator[StreamPart]:
    """The parts of what a call shows while it works."""
    match event:
        case events.Custom():
            yield _part("custom", event, event.data)
        case events.ToolCallStreamDelta():
            data = {"tool_call_id": event.call_id, "name": event.tool_name, "delta": event.delta}
            yield _part("output", event, data)
        case events.ActivitySnapshot(activity_type=kind, content=dict() as content) if kind == _PROGRESS:  # pyright: ignore[reportUnknownVariableType]
            given = cast("dict[str, Any]", content)
            told = {name: given.get(name) for name in ("status", "message", "progress")}
            yield _part("progress", event, {"tool_call_id": event.call_id, "name": given.get("tool_name"), **told})
        case events.ActivitySnapshot():
            data = {"tool_call_id": event.call_id, "type": event.activity_type, "content": event.content}
            yield _part("activities", event, data)
        case events.ActivityDelta():
            data = {"tool_call_id": event.call_id, "type": event.activity_type, "patch": event.delta}
            yield _part("activities", event, data)
        case _:
            pass


async def parts_of(
    source: AsyncIterator[Event], modes: Mode | Iterable[Mode], after: int = 0
) -> AsyncIterator[StreamPart]:
    """Yield the parts of the events of a log, from its first on, that come after event number `after`."""
    project = PartsProjection(modes)
    async for event in source:
        parts = project(event)
        if event.seq > after:
            for part in parts:
                yield part


def _part(kind: Mode, event: Event, data: Any) -> StreamPart:
    return {"type": kind, "ns": event.ns, "data": data}


def _model_task(event: Event, view: _RunView) -> tuple[str, str]:
    return f"{event.run_id}-s{view.step}", MODEL_NODE


def _task(event: Event, view: _RunView, task: tuple[str, str], kind: str, **fields: Any) -> Iterator[StreamPart]:
    payload = {"id": task[0], "name": task[1], **fields}
    yield _part("tasks", event, payload)
    yield _debug(event, view, kind, payload)


def _debug(event: Event, view: _RunView, kind: str, payload: dict[str, Any]) -> StreamPart:
    timestamp = datetime.fromtimestamp(event.at, UTC).isoformat()
    return _part("debug", event, {"step": view.step, "timestamp": timestamp, "type": kind, "payload": payload})
