"""Paths below a root: their rules and their meaning. Nothing here reads the disk.

The rules are the same on every system, so that a workspace can move between them: `/` separates names, a backslash,
a drive letter or a control character is refused, and a listing leaves out names that are refused.
"""

from __future__ import annotations

import os
import re
from hashlib import sha256

from ..core.errors import PathDenied

LONGEST_PATH = 4096
LONGEST_NAME = 255
TEMPORARY = ".retinue-tmp-"
"""The prefix of the name of a file that is being written."""

_WINDOWS = os.name == "nt"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PLAIN = re.compile(r"[a-z0-9_][a-z0-9_.@=+-]{0,99}")
_DRIVE = re.compile(r"[A-Za-z]:")
_DEVICE = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d|conin\$|conout\$)(\..*)?")


def split_path(path: str) -> tuple[str, ...]:
    """Return the names of a path, with `.` and `..` resolved; none for the root itself.

    No link is ever followed, so `a/../b` is `b` whatever `a` is.
    """
    if len(path) > LONGEST_PATH:
        raise PathDenied(path, f"the path is longer than {LONGEST_PATH} characters")
    if path.startswith("/"):
        raise PathDenied(path, "it is absolute; give a path relative to the workspace, such as 'notes/plan.md'")
    names: list[str] = []
    for name in path.split("/"):
        if name == "..":
            if not names:
                raise PathDenied(path, "it leads out of the workspace")
            names.pop()
        elif name not in ("", "."):
            if problem := name_problem(name):
                raise PathDenied(path, problem)
            names.append(name)
    return tuple(names)


def join_path(names: tuple[str, ...]) -> str:
    return "/".join(names)


def normal_path(path: str) -> str:
    """Return the normal form of a path."""
    return join_path(split_path(path))


def name_problem(name: str, *, windows: bool = _WINDOWS) -> str | None:
    """Return the reason why a name cannot be used, or None."""
    if "\\" in name:
        return "it has a backslash; put '/' between folders"
    if _CONTROL.search(name):
        return "it has a control character"
    if _DRIVE.match(name):
        return "it has a drive letter; give a path relative to the workspace, such as 'notes/plan.md'"
    if name.startswith(TEMPORARY):
        return f"names that begin with {TEMPORARY} are kept for files being written"
    try:
        size = len(name.encode())
        os.fsencode(name)
    except UnicodeEncodeError:
        return "it has a character that no file name can have"
    if size > LONGEST_NAME:
        return f"a name in it is longer than {LONGEST_NAME} bytes"
    return _windows_problem(name) if windows else None


def name_of_part(key: str) -> str:
    """Return the name for the part of a user or session: the key itself if it can be one, otherwise its hash.

    Keys with capital letters are hashed too: some systems do not tell them from small ones.
    """
    return key if _PLAIN.fullmatch(key) else f"~{sha256(key.encode(errors='surrogatepass')).hexdigest()}"


def _windows_problem(name: str) -> str | None:
    if ":" in name:
        return "it has a colon"
    if name.endswith((".", " ")):
        return "a name in it ends in a dot or a space"
    return "it names a device" if _DEVICE.fullmatch(name) else None
