"""Retinue: a runtime for agents that delegate to sub-agents.

These are the names for every day. The rest is in modules by topic: `retinue.backends`, `errors`, `events`, `messages`,
`models`, `plugins`, `runs`, `state`, `stores`, `subagents`, `tasks`, `telemetry`, `testing`, `tools`, `workspace`.
"""

# fmt: off
# Agents and their runs
from .core.agents import Agent
from .runs import Budget, Decision, Limits, MAX_SPAWN_DEPTH, Run, RunIdentity, RunResult, RunState, RunStatus, Runtime, Usage
# Tools
from .tools import (
    CancellationToken, ProgressStatus, ResumeMode, SuspendTicket, Tool, ToolContext, ToolDescriptor, ToolOutput,
    ToolResult, ToolStatus, file_tools, tool,
)
from .runs import ToolCallStatus
# Messages and models
from .messages import DataPart, FilePart, ImagePart, Message, ReceiptPart, ToolCall
from .models import CallChunk, Model, ModelRequest, PartChunk, Rate, TextChunk, TurnEnd
# State
from .state import MutationBatch, PersistedState, StateCommand, StateKey, StateStore, UnknownKeyPolicy
# Plugins
from .plugins import Block, Compaction, HookContext, Permissions, Plugin, Registrar, SetResult, Suspend, Todo
# Events
from .events import Event, NullSink, Sink
from .telemetry import Telemetry
# Sub-agents
from .subagents import (
    A2AAgent, Child, ChildErrorForwarding, HarnessAgent, ParentContext, StreamedChild, StreamingPassthroughSink,
    SubagentDeclaration, run_child_agent, run_child_agent_checked, run_streaming_subagent,
)
from .backends import Backend, BackendProfile
from .workspace import LocalFilesystem, SandboxFilesystem
from .stores import StoreFilesystem
# Errors
from .errors import (
    ChildAgentError, ConfigurationError, DecisionRefused, Denied, ExecutionBackendError, ExecutionFailed,
    InternalError, InvalidArguments, ModelError, NotFound, RetinueError, RunNotCompleted, ThreadBusy, ToolCancelled,
    ToolError, ToolTimeout, UnknownAgent, UnknownRun,
)

__version__ = "0.1.0"

__all__ = [
    "A2AAgent", "Agent", "Backend", "BackendProfile", "Block", "Budget", "CallChunk", "CancellationToken", "Child", "ChildAgentError",
    "ChildErrorForwarding", "Compaction", "ConfigurationError", "DataPart", "Decision", "DecisionRefused", "Denied",
    "Event", "ExecutionBackendError", "ExecutionFailed", "FilePart", "HarnessAgent", "HookContext", "ImagePart",
    "InternalError", "InvalidArguments", "Limits", "LocalFilesystem", "MAX_SPAWN_DEPTH", "Message", "Model",
    "ModelError", "ModelRequest", "MutationBatch", "NotFound", "NullSink", "ParentContext", "PartChunk",
    "Permissions", "PersistedState", "Plugin", "ProgressStatus", "Rate", "ReceiptPart", "Registrar", "ResumeMode", "RetinueError", "Run",
    "RunIdentity", "RunNotCompleted", "RunResult", "RunState", "RunStatus", "Runtime", "SandboxFilesystem", "SetResult", "Sink",
    "StateCommand", "StateKey", "StateStore", "StoreFilesystem", "StreamedChild", "StreamingPassthroughSink",
    "SubagentDeclaration", "Suspend", "SuspendTicket", "Telemetry", "TextChunk", "ThreadBusy", "Todo", "Tool", "ToolCall",
    "ToolCallStatus", "ToolCancelled", "ToolContext", "ToolDescriptor", "ToolError", "ToolOutput", "ToolResult",
    "ToolStatus", "ToolTimeout", "TurnEnd", "UnknownAgent", "UnknownKeyPolicy", "UnknownRun", "Usage",
    "__version__", "file_tools", "run_child_agent", "run_child_agent_checked", "run_streaming_subagent", "tool",
]
