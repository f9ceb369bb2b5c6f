"""Print the path of one run: modules and functions of ours that it calls, and which modules call which.

    scripts/trace-path [--cold] [--functions] [--edges]

An agent `lead` on SQLite calls `task` once; its child answers. The window begins with `runtime.stream("lead", …)`, and
ends when all events were read and the result is stored. All threads count, and all callbacks of the event loop; of its
tasks, those that the run starts: the others are the runtime's housekeeping. What only some of ten runs do is left out,
because it depends on the time. A coroutine counts where it begins, not where it continues; a comprehension is part of
its function. An edge is a pair of modules: one with a function that is called, and the one that calls it, which is
`(outside)` if the event loop, a thread or the caller of the runtime does. Exit code 1 where there are too many.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

from retinue import Agent, CallChunk, ModelRequest, Runtime, TextChunk, TurnEnd
from retinue.models import ModelChunk

MODULES, FUNCTIONS, EDGES = 41, 333, 114
"""What is not too many."""
WARM_UP, RUNS = 2, 10
"""Runs that do what is done only once, and runs that are traced."""
OUTSIDE = "(outside)"
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
"""Functions of their own before Python 3.12."""
_is_in_run: ContextVar[bool] = ContextVar("is_in_run", default=False)


class Lead:
    """Calls its child once, and answers."""

    name = "trace:lead"

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
    """Notes the functions of ours that a run calls, with the modules that call them."""

    def __init__(self) -> None:
        self.called: dict[tuple[str, str], None] = {}
        """Pairs of a module and a function of it, in order of first call."""
        self.edges: dict[tuple[str, str], None] = {}
        """Pairs of the module that calls and the module that is called, in order of first call."""
        self._is_open = False
        self._event_loop = threading.get_ident()

    @contextmanager
    def window(self) -> Iterator[None]:
        """Trace one more run. What this run does not do, and those before it did, is forgotten."""
        called, edges = self.called, self.edges
        self.called, self.edges = {}, {}
        token, self._is_open = _is_in_run.set(True), True
        yield
        self._is_open = False
        _is_in_run.reset(token)
        if called:
            self.called = {call: None for call in called if call in self.called}
            self.edges = {edge: None for edge in edges if edge in self.edges}

    def __call__(self, frame: FrameType, what: str, arg: Any) -> None:
        if what != "call" or not self._is_open or not _is_ours(frame) or not _is_start(frame):
            return
        if not _is_in_run.get() and threading.get_ident() == self._event_loop and asyncio.current_task() is not None:
            return
        module = frame.f_globals["__name__"]
        self.called.setdefault((module, frame.f_code.co_qualname))
        caller = frame.f_back
        while caller is not None and not _is_ours(caller):
            caller = caller.f_back
        origin = OUTSIDE if caller is None else caller.f_globals["__name__"]
        if origin != module:
            self.edges.setdefault((origin, module))

    def modules(self) -> dict[str, list[str]]:
        """Return the functions by module, both in order of first call."""
        found: dict[str, list[str]] = {}
        for module, function in self.called:
            found.setdefault(module, []).append(function)
        return found


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] == "retinue"


def _is_start(frame: FrameType) -> bool:
    """Return True if a function begins: not if a coroutine continues, and not for a class body or a comprehension."""
    code = frame.f_code
    is_function = bool(code.co_flags & 0x2) and code.co_name not in COMPREHENSIONS  # CO_NEWLOCALS
    return is_function and code.co_code[frame.f_lasti + 1] & 3 == 0  # RESUME 0; it is 1 to 3 after yield and await


async def trace(tracer: Tracer, *, cold: bool) -> None:
    """Run the lead ten times after it has run before, or only the first time."""
    child = Agent("child", Child(), "You do it.")
    lead = Agent("lead", Lead(), "You delegate.", subagents=[child])
    with tempfile.TemporaryDirectory() as folder:
        async with Runtime.open(f"sqlite:///{folder}/app.db", [lead], recover=False) as runtime:
            for _ in range(0 if cold else WARM_UP):
                await runtime.run("lead", "go", thread_id="traced")
            for _ in range(1 if cold else RUNS):
                with tracer.window():
                    run = runtime.stream("lead", "go", thread_id="traced")
                    kinds = [event.kind async for event in run]
                    result = await run.result()
                assert (result.response, kinds.count("child_finished")) == ("done", 1), result


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/trace-path", description="Print the path of one run.")
    parser.add_argument("--cold", action="store_true", help="trace the first run, with what is made only once")
    parser.add_argument("--functions", action="store_true", help="name the functions of each module, too")
    parser.add_argument("--edges", action="store_true", help="name the modules that call each module, too")
    args = parser.parse_args()
    tracer = Tracer()
    threading.setprofile(tracer)  # before there are threads: each takes it when it starts
    sys.setprofile(tracer)
    asyncio.run(trace(tracer, cold=args.cold))
    sys.setprofile(None)
    modules = tracer.modules()
    for number, (module, functions) in enumerate(modules.items(), 1):
        print(f"{number:3}  {module}  {len(functions)}")
        if args.edges:
            print(
                f"       called by {', '.join(sorted(origin for origin, called in tracer.edges if called == module))}"
            )
        if args.functions:
            for name in functions:
                print(f"       {name}")
    found = {"modules": (len(modules), MODULES), "functions": (len(tracer.called), FUNCTIONS)}
    found["edges"] = (len(tracer.edges), EDGES)
    print(", ".join([f"{count} {name} (at most {most})" for name, (count, most) in found.items()]))
    return int(any(count > most for count, most in found.values()))


if __name__ == "__main__":
    sys.exit(main())
