"""Every error that Retinue raises; `RetinueError` is the base of all. `help(retinue.core.errors)` draws the tree."""

# fmt: off
from .core.errors import (
    ChildAgentError, ConfigurationError, ConsumerTooSlow, ContextOverflow, DecisionRefused, Denied,
    EngineError, Escape, ExecutionBackendError, ExecutionFailed, FileMissing, FilesystemDown, FilesystemError, HookFailed,
    IllegalMove, InternalError, InvalidArguments, KeyAlreadyRegistered, KeyDecodeError, KeyEncodeError, LimitReached,
    LogUnreadable, MissingValue, ModelAccessDenied, ModelError, ModelNotFound, ModelRateLimited, ModelRefused,
    ModelRequestInvalid, ModelResponseInvalid, ModelStreamBroken, ModelTimeout, ModelUnavailable, NoForkPlace, NotFound,
    OutputTruncated, OwnershipLost, PathDenied, PathError, PluginAlreadyInstalled, PluginNotInstalled,
    RecordUnreadable, RecordUnwritable, ReducerFailed, RetinueError, RevisionConflict, RunElsewhere, RunEnded, RunNotCompleted,
    RunawayActions, RuntimeClosed, ServerError, StateError, StoreError, TaskStoreError, ThreadBusy, ToolCancelled,
    ToolError, ToolTimeout, UnknownAction,
    UnknownAgent, UnknownKey, UnknownRun, WriteConflict,
)

__all__ = [
    "ChildAgentError", "ConfigurationError", "ConsumerTooSlow", "ContextOverflow", "DecisionRefused",
    "Denied", "EngineError", "Escape", "ExecutionBackendError", "ExecutionFailed", "FileMissing", "FilesystemDown",
    "FilesystemError", "HookFailed", "IllegalMove", "InternalError", "InvalidArguments", "KeyAlreadyRegistered",
    "KeyDecodeError", "KeyEncodeError", "LimitReached", "LogUnreadable", "MissingValue", "ModelAccessDenied",
    "ModelError", "ModelNotFound", "ModelRateLimited", "ModelRefused", "ModelRequestInvalid", "ModelResponseInvalid",
    "ModelStreamBroken", "ModelTimeout", "ModelUnavailable", "NoForkPlace", "NotFound", "OutputTruncated", "OwnershipLost",
    "PathDenied", "PathError", "PluginAlreadyInstalled", "PluginNotInstalled", "RecordUnreadable", "RecordUnwritable",
    "ReducerFailed", "RetinueError", "RevisionConflict", "RunElsewhere", "RunEnded", "RunNotCompleted", "RunawayActions",
    "RuntimeClosed", "ServerError", "StateError", "StoreError",
    "TaskStoreError", "ThreadBusy", "ToolCancelled", "ToolError", "ToolTimeout", "UnknownAction", "UnknownAgent",
    "UnknownKey", "UnknownRun", "WriteConflict",
]
