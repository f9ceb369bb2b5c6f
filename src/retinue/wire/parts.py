"""LangGraph-shaped stream parts: {"type", "ns", "data"}, made from events one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from ..core.events import (
    Custom,
    Event,
    InferenceFinished,
    MessagesSnapshot,
    RunStarted,
    StateDelta,
    StateSnapshot,
    StepFinished,
    StepStarted,
    TextDelta,
    ToolCallFinished,
    ToolCallReady,
)
from ..core.lifecycle import ToolCallStatus
from ..core.messages import Message, Role

Mode = Literal["updates", "messages", "values", "custom", "tasks"]
StreamPart = dict[str, Any]

MODES: tuple[Mode, ...] = get_args(Mode)
MODEL_NODE, TOOL_NODE = "model_request", "tools"

_TYPES = {Role.SYSTEM: "system", Role.USER: "human", Role.ASSISTANT: "ai", Role.TOOL: "tool"}


class PartsProjection:
    """Call it with each event of a log, in order; it gives the parts that event makes."""

    def __init__(self, modes: Mode | Iterable[Mode] = ("updates",)) -> None:
        wanted = (modes,) if isinstance(modes, str) else tuple(modes)
        unknown = [mode for mode in wanted if mode not in MODES]
        if unknown or not wanted:
            raise ValueError(f"stream modes are {', '.join(MODES)}; got {', '.join(map(str, unknown)) or 'none'}")
        self._modes = frozenset(wanted)
        self._runs: dict[str, _RunView] = {}

    def __call__(self, event: Event) -> list[StreamPart]:
        match event:
            case TextDelta():
                return self._text(event)
            case RunStarted():
                self._view(event).start(event)
                return [] if event.continues else self._values(event)
            case MessagesSnapshot():
                view = self._view(event)
                view.messages = [*[message_to_dict(message) for message in event.messages], *view.input]
                return self._values(event)
            case StateSnapshot() | StateDelta():
                self._view(event).state.update(event.state if isinstance(event, StateSnapshot) else event.delta)
            case StepStarted():
                self._view(event).step = event.step
                return self._model_task(event)
            case InferenceFinished():
                return self._inference(event)
            case ToolCallReady():
                return self._tool_task(event)
            case ToolCallFinished():
                return self._tool(event)
            case StepFinished():
                return self._values(event)
            case Custom() if "custom" in self._modes:
                return [_part("custom", event, event.data)]
            case _:
                pass
        return []

    def _view(self, event: Event) -> _RunView:
        view = self._runs.get(event.run_id)
        if view is None:
            view = self._runs[event.run_id] = _RunView(event)
        return view

    def _text(self, event: TextDelta) -> list[StreamPart]:
        if "messages" not in self._modes:
            return []
        chunk = {"type": "AIMessageChunk", "content": event.delta, "id": event.message_id}
        return [_part("messages", event, (chunk, self._view(event).metadata(event, MODEL_NODE)))]

    def _values(self, event: Event) -> list[StreamPart]:
        if "values" not in self._modes:
            return []
        view = self._view(event)
        return [_part("values", event, {"messages": list(view.messages), **view.state})]

    def _model_task(self, event: StepStarted) -> list[StreamPart]:
        if "tasks" not in self._modes:
            return []
        return [_part("tasks", event, _begun(_model_task_id(event), MODEL_NODE, None))]

    def _inference(self, event: InferenceFinished) -> list[StreamPart]:
        message, view = message_to_dict(event.message), self._view(event)
        view.messages.append(message)
        view.asked.update([call.id for call in event.message.tool_calls])
        parts: list[StreamPart] = []
        if "tasks" in self._modes:
            ended = _ended(_model_task_id(event), MODEL_NODE, None, {"messages": [message]})
            parts.append(_part("tasks", event, ended))
        if "updates" in self._modes:
            parts.append(_part("updates", event, {MODEL_NODE: {"messages": [message]}}))
        return parts

    def _tool_task(self, event: ToolCallReady) -> list[StreamPart]:
        if "tasks" not in self._modes:
            return []
        call = {"name": event.tool_name, "args": event.args, "id": event.call_id}
        return [_part("tasks", event, _begun(event.call_id, TOOL_NODE, [call]))]

    def _was_dropped(self, event: ToolCallFinished) -> bool:
        """A call that the model never finished asking for is in no message, so its end is in none either."""
        return event.status is ToolCallStatus.CANCELLED and event.call_id not in self._view(event).asked

    def _tool(self, event: ToolCallFinished) -> list[StreamPart]:
        if event.status is ToolCallStatus.SUSPENDED or self._was_dropped(event):
            return []
        message = {**message_to_dict(event.message), "status": "success" if event.result.is_success() else "error"}
        view = self._view(event)
        view.messages.append(message)
        parts: list[StreamPart] = []
        if "tasks" in self._modes:
            error = None if event.result.is_success() else event.message.text
            parts.append(_part("tasks", event, _ended(event.call_id, TOOL_NODE, error, {"messages": [message]})))
        if "messages" in self._modes:
            parts.append(_part("messages", event, (message, view.metadata(event, TOOL_NODE))))
        if "updates" in self._modes:
            parts.append(_part("updates", event, {TOOL_NODE: {"messages": [message]}}))
        return parts


class _RunView:
    """What the projection remembers of one run."""

    def __init__(self, event: Event) -> None:
        self.thread_id = ""
        self.step = 0
        self.input: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}
        self.asked: set[str] = set()
        """The calls that the model's messages ask for."""

    def start(self, event: RunStarted) -> None:
        self.thread_id = event.thread_id
        self.input = [message_to_dict(message) for message in event.messages]
        self.messages.extend(self.input)

    def metadata(self, event: Event, node: str) -> dict[str, Any]:
        return {
            "langgraph_node": node,
            "langgraph_step": self.step,
            "checkpoint_ns": "|".join(event.ns),
            "lc_agent_name": event.agent,
            "run_id": event.run_id,
            "thread_id": self.thread_id,
        }


def message_to_dict(message: Message) -> dict[str, Any]:
    """A message as the plain dict that stream parts carry."""
    made: dict[str, Any] = {"type": _TYPES[message.role], "content": message.text, "id": message.id}
    if message.role is Role.ASSISTANT:
        made["tool_calls"] = [{"name": call.name, "args": call.args, "id": call.id} for call in message.tool_calls]
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    return made


def _part(kind: Mode, event: Event, data: Any) -> StreamPart:
    return {"type": kind, "ns": event.ns, "data": data}


def _model_task_id(event: StepStarted | InferenceFinished) -> str:
    return f"{event.run_id}-s{event.step}"


def _begun(task_id: str, node: str, given: Any) -> dict[str, Any]:
    return {"id": task_id, "name": node, "input": given, "triggers": []}


def _ended(task_id: str, node: str, error: str | None, result: Any) -> dict[str, Any]:
    return {"id": task_id, "name": node, "error": error, "result": result, "interrupts": []}
