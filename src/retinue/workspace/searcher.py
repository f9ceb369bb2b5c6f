"""Runs a regular expression where it can be stopped: in a process that is killed when it takes too long."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ..core.context import CancellationToken
from ..core.errors import ExecutionFailed, InvalidArguments
from . import matcher

SECONDS = 20.0
"""How long one search may take."""

Search: TypeAlias = Callable[[bytes, int, int], list[tuple[int, str]]]
"""Give a block of lines, the number of its first and the most matches wanted; get their numbers and texts."""

_SPECIAL = frozenset(r".^$*+?{}[]\|()")


@contextmanager
def searching(pattern: str, cancellation: CancellationToken) -> Generator[Search, None, None]:
    """A search for a pattern. Plain text is searched for right here, as that cannot take long."""
    if not _SPECIAL & set(pattern):
        yield _text_search(pattern)
        return
    process = _start()
    if process is None:
        yield partial(matcher.find_lines, _compiled(pattern))
        return
    try:
        search = _ProcessSearch(process, cancellation)
        search.send_pattern(pattern)
        yield search
    finally:
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        process.wait()


def _text_search(text: str) -> Search:
    pattern, data = re.compile(re.escape(text)), text.encode("utf-8", "replace")
    return lambda block, first, most: matcher.find_lines(pattern, block, first, most) if data in block else []


def _start() -> subprocess.Popen[bytes] | None:
    """The matcher in its own process; None where no interpreter can be started, as in a frozen program."""
    is_python = Path(sys.executable or "").name.lower().startswith(("python", "pypy"))
    if getattr(sys, "frozen", False) or not is_python:
        return None
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", matcher.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None


def _compiled(pattern: str) -> re.Pattern[str]:
    compiled = matcher.compile_pattern(pattern)
    if isinstance(compiled, str):
        raise InvalidArguments(f"invalid regular expression: {compiled}")
    return compiled


class _ProcessSearch:
    def __init__(self, process: subprocess.Popen[bytes], cancellation: CancellationToken) -> None:
        self._process, self._cancellation = process, cancellation
        self._expired = False
        threading.Thread(target=self._watch, name="grep-watch", daemon=True).start()

    def send_pattern(self, pattern: str) -> None:
        problem = self._ask(json.dumps(pattern).encode() + b"\n")
        if problem is not None:
            raise InvalidArguments(f"invalid regular expression: {problem}")

    def __call__(self, block: bytes, first: int, most: int) -> list[tuple[int, str]]:
        return self._ask(b"[%d,%d,%d]\n%b" % (len(block), first, most, block))

    def _ask(self, message: bytes) -> Any:
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        answer = b""
        with suppress(OSError):
            requests.write(message)
            requests.flush()
            answer = answers.readline()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        if self._expired:
            raise ExecutionFailed(
                f"the search was stopped after {SECONDS:g} s: make the pattern simpler (repeats within repeats, "
                "such as (a+)+, can take for ever) or search in a smaller folder"
            )
        self._cancellation.raise_if_set()
        raise ExecutionFailed("the process that searches was ended from outside; search again")

    def _watch(self) -> None:
        end = time.monotonic() + SECONDS
        while self._process.poll() is None:
            self._expired = time.monotonic() > end
            if self._expired or self._cancellation.is_set():
                return self._process.kill()
            time.sleep(0.05)
