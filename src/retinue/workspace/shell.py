"""The shell tool: a command in the folder an agent works in. It is not confined to that folder."""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
from contextlib import suppress

from ..core.context import ToolContext
from ..core.errors import ExecutionFailed, InvalidArguments
from ..core.functions import FunctionTool
from ..core.tools import Tool

LONGEST = 600
"""Seconds a command may be given."""
PATIENCE = 1.0
"""Seconds that what is asked to end is given for it."""
MOST_OUTPUT = 1_000_000
"""Characters of output that are kept; the rest is counted."""
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "TERM")
"""The environment a command sees: keys and tokens of this process are not its business."""


def shell_tool(root: str) -> Tool:
    """The tool `shell(command)` for a folder of this machine."""
    return FunctionTool(_Shell(root).shell, category="shell")


class _Shell:
    def __init__(self, root: str) -> None:
        self._root = root

    async def shell(self, command: str, ctx: ToolContext, timeout_seconds: int = 120) -> str:
        """Run a command in a shell, in the workspace folder, and read its exit code and output.

        It has no input to type into. What it leaves running is stopped when it ends.

        Args:
            command: The command line, such as "python -m pytest -q".
            timeout_seconds: After how long it is stopped. At most 600.
        """
        if timeout_seconds < 1:
            raise InvalidArguments(f"timeout_seconds must be 1 or more, got {timeout_seconds}")
        seconds = min(timeout_seconds, LONGEST)
        output = _Output(ctx)
        transport = await self._started(command, output)
        timed_out = False
        try:
            async with asyncio.timeout(seconds):
                await output.exited.wait()
        except TimeoutError:
            timed_out = True
        finally:
            await _stop(transport, output)
        if timed_out:
            raise ExecutionFailed(f"stopped after {seconds} s; output so far:\n{output.text}")
        return f"exit code: {transport.get_returncode()}\n{output.text}"

    async def _started(self, command: str, output: _Output) -> asyncio.SubprocessTransport:
        """The running command. Cancelled half-way, it is let begin, to be ended with all that it has started."""
        starting = asyncio.create_task(self._start(command, output))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with suppress(ExecutionFailed):
                await _stop(await starting, output)
            raise

    async def _start(self, command: str, output: _Output) -> asyncio.SubprocessTransport:
        try:
            transport, _ = await asyncio.get_running_loop().subprocess_shell(
                lambda: output,
                command,
                cwd=self._root,
                env={name: os.environ[name] for name in PASSED_ON if name in os.environ},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as exc:
            raise ExecutionFailed(f"the shell could not be started in {self._root}: {exc}") from exc
        return transport


class _Output(asyncio.SubprocessProtocol):
    """What a command writes, shown as it comes. The command has ended when its shell has, also where something it
    started still holds its output."""

    def __init__(self, ctx: ToolContext) -> None:
        self._ctx, self._kept, self._length, self._dropped = ctx, list[str](), 0, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.exited, self.closed = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._take(self._decoder.decode(data))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._take(self._decoder.decode(b"", final=True))
        self.closed.set()

    def process_exited(self) -> None:
        self.exited.set()

    def _take(self, text: str) -> None:
        kept = text[: MOST_OUTPUT - self._length]
        self._dropped += len(text) - len(kept)
        self._length += len(kept)
        if kept:
            self._kept.append(kept)
            self._ctx.stream_output(kept)

    @property
    def text(self) -> str:
        more = f"\n[{self._dropped:,} more characters]" if self._dropped else ""
        return "".join(self._kept) + more


async def _stop(transport: asyncio.SubprocessTransport, output: _Output) -> None:
    """End a command and what it has started, politely, then not, and take in the last of what it wrote."""
    group, now = transport.get_pid(), asyncio.get_running_loop().time
    for how in (signal.SIGTERM, signal.SIGKILL):
        end = now() + PATIENCE
        there = _reaches(group, how)
        while there and now() < end:
            await asyncio.sleep(0.01)
            there = _reaches(group, 0)
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            await output.closed.wait()
    transport.close()


def _reaches(group: int, number: int) -> bool:
    """Send a signal to a group of processes; whether there was anybody."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
