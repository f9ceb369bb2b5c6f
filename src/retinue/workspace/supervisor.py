"""A program that runs a command and ends every process that the command leaves behind. Linux only.

It is a subreaper: a process whose parent has ended becomes its child, in whatever session or group it is. It runs as a
file of its own, without this package, so that it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

PATIENCE = 1.0
"""Seconds that processes have after SIGTERM."""
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36


def main(argv: list[str]) -> int:
    """Run a command and return the exit status of its first process, negative for a signal."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    prctl(_SET_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)  # nothing outlives the program that wanted it either
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    pid = os.fork()
    if pid == 0:
        _become(argv, prctl)
    status = _wait_for(pid, asked)
    return _end_all(pid, status)


def _become(argv: list[str], prctl: Callable[..., int]) -> None:
    try:
        for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os.execv(argv[0], argv)
    finally:
        os._exit(127)


def _wait_for(pid: int, asked: list[int]) -> int | None:
    """Wait until the first process has ended, or a stop is requested; return its wait status if it has ended."""
    while not asked:
        # The signal must not come between the check and the wait, so this waits for signals, not for children.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGCHLD))
        try:
            if asked:
                break
            while True:
                found, status = os.waitpid(-1, os.WNOHANG)
                if found == pid:
                    return status
                if not found:
                    break
            if signal.sigwait((signal.SIGTERM, signal.SIGCHLD)) == signal.SIGTERM:
                return None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGCHLD))
    return None


def _end_all(pid: int, status: int | None) -> int:
    """End the remaining processes, first with SIGTERM, then with SIGKILL."""
    end = time.monotonic() + PATIENCE
    _signal_all(signal.SIGTERM)
    while True:
        try:
            found, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if found == pid:
            status = ended
        elif not found:
            time.sleep(0.005)
        if time.monotonic() > end:
            _signal_all(signal.SIGKILL)
    return 0 if status is None else os.waitstatus_to_exitcode(status)


def _signal_all(number: int) -> None:
    """Send a signal to every process below this one."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    parent = int(stream.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            parents.setdefault(parent, []).append(int(name))
    waiting = [os.getpid()]
    while waiting:
        for pid in parents.get(waiting.pop(), ()):
            waiting.append(pid)
            try:
                os.kill(pid, number)
            except OSError:
                continue


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code < 0:  # end as the command did
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
