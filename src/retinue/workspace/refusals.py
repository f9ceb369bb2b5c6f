"""What the operating system refuses, in our words."""

from __future__ import annotations

import errno

from ..core.errors import FileMissing, PathDenied, PathError

LINK = "it is a symbolic link, and links are not followed"

_PROBLEMS: dict[int, tuple[type[PathError], str]] = {
    errno.ENOENT: (FileMissing, "there is no such file or folder"),
    errno.ENOTDIR: (PathError, "it is not a folder"),
    errno.EISDIR: (PathError, "it is a folder, not a file"),
    errno.ENOTEMPTY: (PathError, "the folder is not empty"),
    errno.ELOOP: (PathDenied, LINK),
    errno.EMLINK: (PathDenied, LINK),
    errno.EACCES: (PathDenied, "permission denied"),
    errno.EPERM: (PathDenied, "permission denied"),
    errno.EROFS: (PathDenied, "the disk is read-only"),
    errno.ENAMETOOLONG: (PathDenied, "the name is too long"),
}


def refusal_of(error: OSError, path: str) -> PathError:
    """What the operating system said, in our words."""
    known = _PROBLEMS.get(error.errno or 0)
    if known is None:
        return PathError(path, (error.strerror or str(error)).lower())
    kind, problem = known
    return kind(path, problem)
