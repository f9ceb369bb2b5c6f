"""The shell tool: runs a command on the files of an agent, as confined as their filesystem says."""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

from ..core.context import ToolContext
from ..core.errors import ConfigurationError, ExecutionFailed, FilesystemError, InvalidArguments
from ..core.filesystem import Command, Filesystem, RunsCommands, files_of
from ..core.functions import FunctionTool, in_thread
from ..core.runs import RunIdentity
from ..core.tools import Tool
from .limits import folder_size

LONGEST = 600
"""Seconds a command may be given."""
PATIENCE = 5.0
"""Seconds to wait for processes to end after a signal. A supervisor needs a part of them itself."""
MOST_OUTPUT = 1_000_000
"""Characters of output that are kept; the rest is counted."""
MEASURED_EVERY = 0.25
"""Seconds between two looks at the size of a folder, or more where a look takes long."""
LONGEST_SETUP = 30.0
"""Seconds that a sandboxed command may take to be ready."""


def shell_tool(filesystem: Filesystem) -> Tool:
    """Return the tool `shell(command)` for a filesystem that runs commands; refuse others."""
    if not isinstance(filesystem, RunsCommands):
        advice = "leave disable_shell on, or use a LocalFilesystem or a SandboxFilesystem"
        raise ConfigurationError(f"no command can be run on the files of {filesystem!r}: {advice}")
    return FunctionTool(_Shell(filesystem).shell, category="shell")


Started = tuple[asyncio.SubprocessTransport, Command]


class _Shell:
    def __init__(self, filesystem: Filesystem) -> None:
        self._filesystem = filesystem

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
        transport, started = await self._started(command, ctx.run, output)
        ended = asyncio.create_task(output.exited.wait())
        filled = asyncio.create_task(_wait_until_full(started))
        try:
            await asyncio.wait({ended, filled}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reason = None if ended.done() else filled.result() if filled.done() else f"stopped after {seconds} s"
            filled.cancel()
            ended.cancel()
            await _stop(transport, output, started)
        if reason is not None:
            raise ExecutionFailed(f"{reason}; output so far:\n{output.text}")
        return f"exit code: {transport.get_returncode()}\n{output.text}"

    async def _started(self, line: str, run: RunIdentity, output: _Output) -> Started:
        """Start a command. If cancelled meanwhile, wait for its start, then end it with all its processes."""
        starting = asyncio.create_task(self._start(line, run, output))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with suppress(ExecutionFailed):
                transport, command = await starting
                await _stop(transport, output, command)
            raise

    async def _start(self, line: str, run: RunIdentity, output: _Output) -> Started:
        try:
            command = await in_thread(self._command, {"line": line, "run": run})
            if not command.waits:
                return await _begin(command, output, asyncio.subprocess.DEVNULL), command
            with ExitStack() as ends:
                ours, theirs = [ends.enter_context(end) for end in socket.socketpair()]
                transport = await _begin(command, output, theirs.fileno())
                theirs.close()
                await _release(ours)
                return transport, command
        except (OSError, ValueError, FilesystemError) as exc:
            raise ExecutionFailed(f"the shell could not be started: {exc}") from exc

    def _command(self, line: str, run: RunIdentity) -> Command:
        files = files_of(self._filesystem, run)
        if not isinstance(files, RunsCommands):
            raise ConfigurationError(f"no command can be run on the files of {files!r}")
        return files.command(line)


async def _begin(command: Command, output: _Output, stdin: int) -> asyncio.SubprocessTransport:
    transport, _ = await asyncio.get_running_loop().subprocess_exec(
        lambda: output,
        *command.argv,
        cwd=command.folder,
        env=command.environment,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    return transport


async def _release(end: socket.socket) -> None:
    """Wait until a command is ready, then let it begin. One that fails before has an error in its output."""
    end.setblocking(False)
    loop = asyncio.get_running_loop()
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(LONGEST_SETUP):
            if await loop.sock_recv(end, 1):
                await loop.sock_sendall(end, b"\n")


class _Output(asyncio.SubprocessProtocol):
    """The output of a command, streamed. The command ends with its shell, even if a process still holds the output."""

    def __init__(self, ctx: ToolContext) -> None:
        self._ctx, self._kept, self._length, self._dropped = ctx, list[str](), 0, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.exited, self.closed = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._append(self._decoder.decode(data))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._append(self._decoder.decode(b"", final=True))
        self.closed.set()

    def process_exited(self) -> None:
        self.exited.set()

    def _append(self, text: str) -> None:
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


async def _wait_until_full(command: Command) -> str:
    """Return once a command has filled its folder beyond the limit; never if there is none."""
    if command.disk is None:
        return await asyncio.get_running_loop().create_future()
    folder, most = command.disk
    # A folder that is too large already may be made smaller, but not larger.
    most = max(most, await in_thread(folder_size, {"root": folder, "most": sys.maxsize}))
    while True:
        began = time.monotonic()
        if await in_thread(folder_size, {"root": folder, "most": most}) > most:
            return f"stopped because its folder has more than {most:,} bytes"
        await asyncio.sleep(max(MEASURED_EVERY, 10 * (time.monotonic() - began)))


async def _stop(transport: asyncio.SubprocessTransport, output: _Output, command: Command) -> None:
    """End a command and its processes, first with SIGTERM, then with SIGKILL, and read its last output."""
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
    if command.cleanup:
        await in_thread(_clean_up, {"command": command})


def _clean_up(command: Command) -> None:
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            command.cleanup, env=dict(command.environment), capture_output=True, timeout=LONGEST_SETUP, check=False
        )


def _reaches(group: int, number: int) -> bool:
    """Send a signal to a process group; return whether it exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
