"""Python programs of tests, started as forks of a process that has made their imports.

A new interpreter spends most of its time on imports. A program that a test starts with `PYTHON` is a process as any other:
a child of the test process, with its own pid, to be waited for and killed. Programs whose imports are what is tested
start with `sys.executable`. Where forking is not known to work, both are the same.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PYTHON = os.path.join(os.path.dirname(sys.executable), ".", os.path.basename(sys.executable))
"""The interpreter of this environment, under a name of its own."""
ROOT = Path(__file__).parents[1]
CLONE_CALLS = {"x86_64": 56, "aarch64": 220}
"""By machine: the number of the system call `clone`."""
_READ_AT_START = ("PYTHON", "LANG", "LC_", "MALLOC_", "LD_", "SSL_CERT_")
"""Variables with these beginnings matter only when an interpreter starts, or to imports."""

_PopenHere, _environment = subprocess.Popen, dict(os.environ)


CAN_FORK = sys.platform == "linux" and platform.machine() in CLONE_CALLS


def install() -> None:
    """Have `subprocess` and asyncio fork programs that start with `PYTHON`."""
    if CAN_FORK:
        subprocess.Popen = _Popen


class _Template:
    """The process that is forked, started with the first program."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ours: socket.socket | None = None

    def fork(self, request: Mapping[str, Any], files: Sequence[int]) -> int:
        """Return the pid of a new child of this process."""
        with self._lock:
            ours = self._ours or self._start()
            data = json.dumps(request).encode()
            ours.sendall(len(data).to_bytes(4, "little"))
            socket.send_fds(ours, [b"f"], files)
            ours.sendall(data)
            answer = ours.recv(4)
            if not answer:
                raise RuntimeError("tests/template.py has ended; its standard error says why")
            return int.from_bytes(answer, "little")

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            words = [sys.executable, "-m", "tests.template", str(number), str(CLONE_CALLS[platform.machine()])]
            # It ends with the socket, so nobody waits for it.
            _PopenHere(words, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[number]).returncode = 0
        self._ours = ours
        atexit.register(ours.close)
        return ours


_template = _Template()


class _Popen(subprocess.Popen[Any]):
    """A program that may be forked; all else of it is as usual."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        executable, preexec, _, pass_fds, cwd, env, _, _, shell, *pipes = others[:15]
        _, gid, gids, uid, umask, new_session, group = others[15:]
        is_plain = (preexec, shell, gid, gids, uid, umask, group) == (None, False, None, None, None, -1, -1)
        words = [] if isinstance(args, (str, bytes, os.PathLike)) else [os.fspath(word) for word in args]
        program = _program_of(words)
        if program is None or not is_plain or pass_fds or executable not in (None, PYTHON) or not _may_fork(env):
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        request = {
            **program,
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(env or os.environ),
            "session": new_session,
        }
        own = {0: 0, 3: 1, 5: 2}  # its place among the pipes, and the file without a pipe
        try:
            self.pid = _template.fork(request, [own[i] if pipes[i] == -1 else pipes[i] for i in own])
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _program_of(words: list[str]) -> dict[str, Any] | None:
    """Return what a command runs; None if it is not `PYTHON` with a program and at most `-W error`."""
    if not words or words[0] != PYTHON:
        return None
    strict = words[1:3] == ["-W", "error"]
    match words[3 if strict else 1 :]:
        case ["-c" | "-m" as kind, what, *rest]:
            return {"kind": kind, "what": what, "argv": rest, "strict": strict}
        case [str(what), *rest] if not what.startswith("-"):
            return {"kind": "file", "what": what, "argv": rest, "strict": strict}
        case _:
            return None


def _may_fork(env: Mapping[str, str] | None) -> bool:
    """Return whether nothing has changed in the environment that matters to the start of the interpreter."""
    wanted = os.environ if env is None else env
    names = [name for name in {*wanted, *_environment} if name.startswith(_READ_AT_START)]
    return all(wanted.get(name) == _environment.get(name) for name in names)
