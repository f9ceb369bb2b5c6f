"""Tools: what a model may call, what a call is given, and what it returns."""

# fmt: off
from .core.concurrency import CancellationToken
from .core.context import ProgressStatus, ToolContext
from .core.functions import FunctionTool, tool
from .core.results import ResumeMode, SuspendTicket, ToolOutput, ToolResult, ToolStatus
from .core.tools import FrontEndTool, Tool, ToolDescriptor, ToolOptions
from .workspace import file_tools, shell_tool

__all__ = [
    "CancellationToken", "FrontEndTool", "FunctionTool", "ProgressStatus", "ResumeMode", "SuspendTicket", "Tool",
    "ToolContext", "ToolDescriptor", "ToolOptions", "ToolOutput", "ToolResult", "ToolStatus", "file_tools", "shell_tool", "tool",
]
