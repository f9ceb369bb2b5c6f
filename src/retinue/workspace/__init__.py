"""The files an agent works on: a local folder it cannot leave, the tools that read and change it, and its own words."""

from .context import AGENTS_FILE, WorkspaceContext
from .local import LocalFilesystem
from .shell import shell_tool
from .tools import file_tools

__all__ = ["AGENTS_FILE", "LocalFilesystem", "WorkspaceContext", "file_tools", "shell_tool"]
