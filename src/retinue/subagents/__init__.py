"""Sub-agents: how they are declared, how a tool starts one, and what comes back."""

# fmt: off
from ..core.runs import Child, ChildErrorForwarding, ParentContext
from .child import (
    StreamedChild,
    StreamingPassthroughSink,
    run_child_agent,
    run_child_agent_checked,
    run_streaming_subagent,
)
from .declarations import A2AAgent, RemoteSubagentStub, SubagentDeclaration, WorkspaceMode
from .harness import HarnessAgent

__all__ = [
    "A2AAgent", "Child", "ChildErrorForwarding", "HarnessAgent", "ParentContext", "RemoteSubagentStub", "StreamedChild",
    "StreamingPassthroughSink", "SubagentDeclaration", "WorkspaceMode", "run_child_agent", "run_child_agent_checked",
    "run_streaming_subagent",
]
