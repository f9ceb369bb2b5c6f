"""Workspaces: the files an agent works on, in a folder or a sandbox, and the tools that read and change them."""

# fmt: off
from ..core.filesystem import FileEntry, Filesystem
from .context import AGENTS_FILE, WorkspaceContext
from .limits import SandboxLimits
from .local import LocalFilesystem
from .sandbox import SandboxFilesystem
from .shell import shell_tool
from .tools import file_tools

__all__ = [
    "AGENTS_FILE", "FileEntry", "Filesystem", "LocalFilesystem", "SandboxFilesystem", "SandboxLimits",
    "WorkspaceContext", "file_tools", "shell_tool",
]
