"""The files an agent works on: a folder it cannot leave, or a sandbox, the tools that read and change it, and its own words."""

from .context import AGENTS_FILE, WorkspaceContext
from .local import LocalFilesystem
from .sandbox import SandboxFilesystem
from .shell import shell_tool
from .tools import file_tools

__all__ = ["AGENTS_FILE", "LocalFilesystem", "SandboxFilesystem", "WorkspaceContext", "file_tools", "shell_tool"]
