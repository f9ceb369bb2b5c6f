"""The files an agent works on: a local folder it cannot leave, and the tools that read and change it."""

from .local import LocalFilesystem
from .tools import file_tools

__all__ = ["LocalFilesystem", "file_tools"]
