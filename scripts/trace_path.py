"""Print the path of one delegation: every module of ours with a function that is called, in order of first call.

    scripts/trace-path [--cold] [--functions] [--most 25]

A parent on SQLite calls `task` once; its child answers. The window begins when `tool_call_ready` of the parent is
appended to the log and ends when `tool_call_finished` is. All threads count; the runtime's own housekeeping, which may
come in between, does not. Exit code 1 where there are too many.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

from retinue import Agent, CallChunk, ModelRequest, Runtime, TextChunk, TurnEnd
from retinue.core.events import ToolCallFinished, ToolCallReady
from retinue.log.owned import LiveLog
from retinue.models import ModelChunk

MOST = 25
_APPEND = LiveLog.append.__code__


class Parent:
    """Calls its child once, and answers."""

    name = "trace:parent"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        if request.messages[-1].role == "tool":
            yield TextChunk("done")
        else:
            yield CallChunk(0, "call_1", "task", '{"subagent_type": "child", "description": "do it"}')
        yield TurnEnd()


class Child:
    """Answers."""

    name = "trace:child"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield TextChunk("it is done")
        yield TurnEnd()


class Tracer:
    """Notes the functions of ours that are called while the window is open."""

    def __init__(self) -> None:
        self.is_armed = self._is_open = False
        self._task: asyncio.Task[Any] | None = None
        """The task of the parent, in which the child runs too."""
        self._event_loop = threading.get_ident()
        self._last: FrameType | None = None
        """The frame with which the window closes."""
        self.windows = 0
        self.called: dict[str, dict[str, None]] = {}
        """Functions by module, both in order of first call."""

    def __call__(self, frame: FrameType, what: str, arg: Any) -> None:
        if what == "return" and frame is self._last:
            self.is_armed, self._is_open, self._last = False, False, None
            self.windows += 1
        if what != "call" or not self.is_armed:
            return
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if code is _APPEND and not frame.f_locals["run"].ns:
            event = frame.f_locals["event"]
            if isinstance(event, ToolCallReady):
                self._is_open, self._task = True, asyncio.current_task()
            if isinstance(event, ToolCallFinished):
                self._last = frame
        if (
            self._is_open
            and _is_start(frame)
            and self._is_of_run()
            and (module == "retinue" or module.startswith("retinue."))
        ):
            self.called.setdefault(module, {}).setdefault(code.co_qualname)

    def _is_of_run(self) -> bool:
        """Whether this is the run's task, a callback, or another thread."""
        return threading.get_ident() != self._event_loop or asyncio.current_task() in (None, self._task)


def _is_start(frame: FrameType) -> bool:
    """Whether a function begins. A coroutine that was called before the window and goes on in it is not called there."""
    code = frame.f_code
    is_function = bool(code.co_flags & 0x2)  # CO_NEWLOCALS: class bodies and modules have it not
    return is_function and code.co_code[frame.f_lasti + 1] & 3 == 0  # RESUME 0; it is 1 to 3 after yield and await


async def trace(tracer: Tracer, *, cold: bool) -> None:
    """Run the parent, the first time or after it has run before."""
    child = Agent("child", Child(), "You do it.")
    parent = Agent("parent", Parent(), "You delegate.", subagents=[child])
    with tempfile.TemporaryDirectory() as folder:
        async with Runtime.open(f"sqlite:///{folder}/app.db", [parent], recover=False) as runtime:
            for number in range(1 if cold else 3):
                tracer.is_armed = cold or number == 2
                result = await runtime.run("parent", "go", thread_id="traced")
                assert result.response == "done", result


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/trace-path", description="Print the path of one delegation.")
    parser.add_argument("--cold", action="store_true", help="trace the first run, with what is made only once")
    parser.add_argument("--functions", action="store_true", help="name the functions of each module, too")
    parser.add_argument("--most", type=int, default=MOST, help=f"modules that are not too many (default {MOST})")
    args = parser.parse_args()
    tracer = Tracer()
    threading.setprofile(tracer)  # before there are threads: each takes it when it starts
    sys.setprofile(tracer)
    asyncio.run(trace(tracer, cold=args.cold))
    sys.setprofile(None)
    if not tracer.windows:
        print("the parent's call was not seen: has LiveLog.append changed?", file=sys.stderr)
        return 2
    for number, (module, functions) in enumerate(tracer.called.items(), 1):
        print(f"{number:3}  {module}")
        if args.functions:
            for name in functions:
                print(f"       {name}")
    print(f"{len(tracer.called)} modules (at most {args.most})")
    return 0 if len(tracer.called) <= args.most else 1


if __name__ == "__main__":
    sys.exit(main())
