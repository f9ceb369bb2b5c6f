"""Limits on the commands of a sandbox: memory, processor time, processes and disk, and what holds them."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from secrets import token_hex

from msgspec import Struct

from ..core.errors import ConfigurationError

CGROUPS = "/sys/fs/cgroup"
_UNLIMITED = "unlimited"


class SandboxLimits(Struct, frozen=True, kw_only=True):
    """Limits of one command. None is no limit. `SandboxFilesystem.limits_in_force()` says what holds each."""

    memory: int | None = 4 * 2**30
    """Bytes: of the command with a cgroup, otherwise of each of its processes."""
    processes: int | None = 512
    cpu_seconds: int | None = 1200
    """Processor time of each process."""
    disk: int | None = 8 * 2**30
    """Bytes of the folder, and of each file in it. The folder is measured while a command runs, so a fast one may write
    more before it is stopped."""
    temporary: int | None = 2**30
    """Bytes of `/tmp`, and of `/dev/shm`."""
    cgroup: str | None = None
    """A cgroup (version 2) to make the cgroups of commands in, with its memory and pids controllers given to those
    below. None uses the cgroup of this process, where it can."""

    def __post_init__(self) -> None:
        for name in ("memory", "processes", "cpu_seconds", "disk", "temporary"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"SandboxLimits: {name} is a whole number above 0, or None, not {value!r}")

    def words(self) -> tuple[str, str, str, str]:
        """Return the operands of `ulimit` -t, -f, -d and -u."""
        blocks = None if self.disk is None else -(-self.disk // 512)
        kilobytes = None if self.memory is None else -(-self.memory // 1024)
        first, second, third, fourth = [
            _UNLIMITED if value is None else str(value)
            for value in (self.cpu_seconds, blocks, kilobytes, self.processes)
        ]
        return first, second, third, fourth


SET_LIMITS = 'ulimit -t "$2"; ulimit -f "$3"; ulimit -d "$4"; (ulimit -u "$5") && ulimit -u "$5" || ulimit -p "$5"; '
"""For a shell that has the operands as $2 to $5. A limit of the system that is lower stays; bash and dash differ in the last."""


class Cgroup(Struct, frozen=True):
    """A cgroup in which those of commands are made."""

    parent: str

    @classmethod
    def find(cls, limits: SandboxLimits) -> Cgroup | None:
        """Return the cgroup to use; None where this process can make none. One that was named must work."""
        parent = limits.cgroup or _own_cgroup()
        if parent is not None and _can_hold(parent):
            return cls(parent)
        if limits.cgroup is not None:
            raise ConfigurationError(
                f"no cgroup can be made in {limits.cgroup}: it must be of version 2, writable, and have memory and pids "
                "in its cgroup.subtree_control"
            )
        return None

    def enclosed(self, argv: tuple[str, ...], limits: SandboxLimits) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return a command in a cgroup of its own, and the command that removes the cgroup with all that is in it."""
        folder = os.path.join(self.parent, f"retinue-{token_hex(8)}")
        settings = {"memory.max": limits.memory, "memory.swap.max": limits.memory and 0, "pids.max": limits.processes}
        writes = [f'echo {value} > "$0/{name}"' for name, value in settings.items() if value is not None]
        optional = 'echo 1 > "$0/memory.oom.group" 2>/dev/null'
        enter = " && ".join(
            ['mkdir "$0"', *writes, f"{{ {optional}; :; }}", 'echo $$ > "$0/cgroup.procs"', 'exec "$@"']
        )
        leave = (
            'test -d "$0" || exit 0; test -w "$0/cgroup.kill" && echo 1 > "$0/cgroup.kill"; '
            'for i in 1 2 3 4 5 6 7 8 9 10; do rmdir "$0" 2>/dev/null && exit 0; sleep 0.1; done'
        )
        return ("/bin/sh", "-c", enter, folder, *argv), ("/bin/sh", "-c", leave, folder)


def _own_cgroup() -> str | None:
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as stream:
            own = next((line[3:].strip() for line in stream if line.startswith("0::")), None)
    except OSError:
        return None
    return None if own is None else os.path.join(CGROUPS, own.lstrip("/"))


def _can_hold(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "cgroup.subtree_control"), encoding="utf-8") as stream:
            return {"memory", "pids"} <= {*stream.read().split()} and os.access(folder, os.W_OK)
    except OSError:
        return False


# --- the network without the sockets of this machine

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 13
_NUMBERS = {"x86_64": (0xC000003E, 41, 53), "aarch64": (0xC00000B7, 198, 199)}
"""By machine: its seccomp architecture, and the numbers of socket and socketpair."""
_IO_URING, _X32 = 425, 0x40000000
_AF_UNIX, _STREAM, _SEQUENCED = 1, 1, 5


def socket_filter(machine: str) -> bytes:
    """Return a seccomp program that refuses Unix sockets, as those of the machine's programs can be reached by name.

    Connected pairs are allowed, but not of datagrams: these could be connected anew. io_uring, which opens sockets
    without system calls, and system calls of other architectures are refused too.
    """
    if machine not in _NUMBERS:
        known = " and ".join(_NUMBERS)
        raise ConfigurationError(f"network=True keeps commands from local sockets on {known} only, not on {machine}")
    architecture, socket, pair = _NUMBERS[machine]
    program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 0, 13, architecture),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 11, 0, _X32),
        (_EQUAL, 10, 0, _IO_URING),
        (_EQUAL, 2, 0, socket),
        (_EQUAL, 3, 0, pair),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 16),  # socket: the first argument, the family
        (_EQUAL, 5, 4, _AF_UNIX),
        (_LOAD, 0, 0, 24),  # socketpair: the second, the type without its flags
        (_AND, 0, 0, 0xF),
        (_EQUAL, 1, 0, _STREAM),
        (_EQUAL, 0, 1, _SEQUENCED),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join([struct.pack("=HBBI", *line) for line in program])


def folder_size(root: str, most: int) -> int:
    """Return the bytes that a folder takes on disk; counting stops above `most`."""
    total, waiting = 0, [root]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                if total > most:
                    return total
    return total
