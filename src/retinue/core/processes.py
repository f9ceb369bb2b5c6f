"""The identity of a process, and a check that a process of this machine has ended."""

from __future__ import annotations

import os
import socket
import time
from functools import partial

_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)
boot_seconds = time.monotonic if _CLOCK is None else partial(time.clock_gettime, _CLOCK)
"""Returns the seconds since the boot, which pass also while the machine sleeps."""


def process_identity() -> str:
    """Return boot id, pid namespace, pid and start time of this process: no other process ever has the same."""
    return f"{_boot()}/{_pid_namespace()}/{os.getpid()}/{_start_time(os.getpid())}"


def has_process_ended(identity: str) -> bool:
    """Return whether a process is known to have ended; False for another boot or pid namespace, where nothing is known."""
    parts = identity.split("/")
    if len(parts) != 4 or parts[0] != _boot() or parts[1] != _pid_namespace() or not parts[2].isdigit():
        return False
    return _start_time(int(parts[2])) != parts[3]


def is_pid_used(pid: int) -> bool:
    """Return whether a process has this id in the pid namespace of this one."""
    return _start_time(pid) != ""


def boot_id() -> str | None:
    """Return the id of this boot of the machine; None where it has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def _boot() -> str:
    return boot_id() or socket.gethostname()


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").partition("[")[2].rstrip("]")
    except OSError:
        return "0"


def _start_time(pid: int) -> str:
    """Return a number that no later process of the same id has; empty where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
            return "" if fields[0] in b"ZX" else fields[19].decode()  # a zombie has ended
    except (OSError, IndexError):
        pass
    try:  # without /proc, only the use of the id is known
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "0"
