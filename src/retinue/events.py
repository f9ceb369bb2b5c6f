"""Events: the flat records of everything that happens in a run.

Iterate a `Run` to get them. `AnyEvent` is the union of all classes: it narrows by `isinstance`, by `match` and by
`event.kind == "text_delta"`.
"""

# fmt: off
from .core.events import (
    ActivityDelta, ActivitySnapshot, AnyEvent, BudgetWarning, CachePrefixChanged, ChildFinished, ChildStarted, Compacted, Custom,
    ErrorRaised, Event, Handoff, InferenceFinished, InferenceWaiting, MessageAdded, MessageDropped, MessagesSnapshot, Namespace, ReasoningDelta,
    RunFinished, RunStarted, Sink, StateDelta,
    StateSnapshot, StepFinished, StepStarted, TaskUpdated, TextDelta, ToolCallArgsDelta, ToolCallFinished,
    ToolCallReady, ToolCallResumed, ToolCallStarted, ToolCallStreamDelta, UnknownEvent, event_from_json, event_to_json,
)
from .core.events import FanOut, NullSink

__all__ = [
    "ActivityDelta", "ActivitySnapshot", "AnyEvent", "BudgetWarning", "CachePrefixChanged", "ChildFinished", "ChildStarted",
    "Compacted", "Custom", "ErrorRaised", "Event", "FanOut", "Handoff", "InferenceFinished", "InferenceWaiting",
    "MessageAdded", "MessageDropped", "MessagesSnapshot", "Namespace", "NullSink", "ReasoningDelta",
    "RunFinished", "RunStarted", "Sink", "StateDelta", "StateSnapshot", "StepFinished", "StepStarted", "TaskUpdated",
    "TextDelta", "ToolCallArgsDelta", "ToolCallFinished", "ToolCallReady", "ToolCallResumed", "ToolCallStarted",
    "ToolCallStreamDelta", "UnknownEvent", "event_from_json", "event_to_json",
]
