"""The shell tool: runs a command on the files of an agent, as confined as their filesystem says."""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ..core.concurrency import until_stopped
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
LONGEST_END = 30.0
"""Seconds to wait for the processes of a sandbox after they were killed: one that the kernel holds may take for ever."""
_CREDENTIALS = struct.Struct("3i")
"""The process, user and group that sent a message."""


def shell_tool(filesystem: Filesystem) -> Tool:
    """Return the tool `shell(command)` for a filesystem that runs commands; refuse others."""
    if not isinstance(filesystem, RunsCommands):
        advice = "leave disable_shell on, or use a LocalFilesystem or a SandboxFilesystem"
        raise ConfigurationError(f"no command can be run on the files of {filesystem!r}: {advice}")
    return FunctionTool(_Shell(filesystem).shell, category="shell")


class _Started(NamedTuple):
    """A command at work."""

    transport: asyncio.SubprocessTransport
    command: Command
    first: int | None = None
    """A pidfd of the first process of its pid namespace, which ends after all others in it."""


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
        started = await self._started(command, ctx.run, output)
        try:
            async with until_stopped(_wait_until_full(started.command), output.exited.wait(), seconds) as filled:
                has_exited = output.exited.is_set()
                reason = filled.result() if filled.done() and not has_exited else f"stopped after {seconds} s"
        finally:
            await _stop(started, output)
        if not has_exited:
            raise ExecutionFailed(f"{reason}; output so far:\n{output.text}")
        return f"exit code: {started.transport.get_returncode()}\n{output.text}"

    async def _started(self, line: str, run: RunIdentity, output: _Output) -> _Started:
        """Start a command. If cancelled meanwhile, wait for its start, then end it with all its processes."""
        starting = asyncio.create_task(self._start(line, run, output))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with suppress(ExecutionFailed):
                await _stop(await starting, output)
            raise

    async def _start(self, line: str, run: RunIdentity, output: _Output) -> _Started:
        try:
            command = await in_thread(self._command, {"line": line, "run": run})
            if not command.waits:
                given = asyncio.subprocess.PIPE if command.is_held else asyncio.subprocess.DEVNULL
                return _Started(await _begin(command, output, given), command)
            with ExitStack() as ends:
                ours, theirs = [ends.enter_context(end) for end in socket.socketpair()]
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                transport = await _begin(command, output, theirs.fileno())
                theirs.close()
                return _Started(transport, command, await _release(ours))
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


async def _release(end: socket.socket) -> int | None:
    """Wait until a command is ready, then let it begin. One that fails before has an error in its output.

    Return a pidfd of the first process of the command's pid namespace; None if it has none of its own.
    """
    end.setblocking(False)
    if not await _wait_until_readable(end.fileno(), LONGEST_SETUP):
        return None
    try:
        data, sent_with, _, _ = end.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
        if not data:
            return None
        first = _first_process(sent_with)  # before it begins: so the process is there
        with suppress(ConnectionError):
            end.send(b"\n")
        return first
    except ConnectionError:
        return None


def _first_process(sent_with: list[tuple[int, int, bytes]]) -> int | None:
    """Return a pidfd of the first process of the pid namespace in which the sender of a message is the second."""
    for level, kind, data in sent_with:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            with suppress(OSError, KeyError, ValueError):
                parent = int(_process_status(_CREDENTIALS.unpack(data)[0])["PPid"])
                if _process_status(parent)["NSpid"].split()[1:][-1:] == ["1"]:
                    return os.pidfd_open(parent)
    return None


def _process_status(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as stream:
        return {name: value for name, _, value in (line.partition(":") for line in stream)}


async def _wait_until_readable(fd: int, seconds: float) -> bool:
    """Return whether a file becomes readable in time, as a pidfd does when its process has ended."""
    loop, seen = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, seen.set)
    try:
        async with asyncio.timeout(seconds):
            return await seen.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)


class _Output(asyncio.SubprocessProtocol):
    """The output of a command, streamed. The command ends with its shell, even if a process still holds the output."""

    def __init__(self, ctx: ToolContext) -> None:
        self._ctx, self._kept, self._length, self._dropped = ctx, list[str](), 0, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.exited, self.closed = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._append(self._decoder.decode(data))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 0:
            return
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


async def _stop(started: _Started, output: _Output) -> None:
    """End a command and its processes, first with SIGTERM, then with SIGKILL, and read its last output.

    A sandbox is killed as a whole when its command ends. The kernel does that after the command has gone, so this waits
    until the sandbox is empty.
    """
    group, now, command = started.transport.get_pid(), asyncio.get_running_loop().time, started.command
    for how in (signal.SIGTERM, signal.SIGKILL):
        end = now() + PATIENCE
        there = _reaches(group, how)
        while there and now() < end:
            await asyncio.sleep(0.01)
            there = _reaches(group, 0)
    if started.first is not None:
        try:
            await _wait_until_readable(started.first, LONGEST_END)
        finally:
            os.close(started.first)
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            await output.closed.wait()
    started.transport.close()
    if command.cleanup:
        options = {"env": dict(command.environment), "capture_output": True, "timeout": LONGEST_SETUP}
        with suppress(OSError, subprocess.TimeoutExpired):
            await in_thread(subprocess.run, {"args": command.cleanup, **options})


def _reaches(group: int, number: int) -> bool:
    """Send a signal to a process group; return whether it exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
