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
        process = await self._start(command)
        output = _Output(ctx)
        try:
            async with asyncio.timeout(seconds):
                await output.take_from(process)
                code = await process.wait()
        except TimeoutError:
            raise ExecutionFailed(f"stopped after {seconds} s; output so far:\n{output.text}") from None
        finally:
            await _stop(process)
        return f"exit code: {code}\n{output.text}"

    async def _start(self, command: str) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_shell(
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


class _Output:
    """What a command writes, shown as it comes."""

    def __init__(self, ctx: ToolContext) -> None:
        self._ctx, self._kept, self._length, self._dropped = ctx, list[str](), 0, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def take_from(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while data := await process.stdout.read(65_536):
            self._take(self._decoder.decode(data))
        self._take(self._decoder.decode(b"", final=True))

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


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a command and what it has started: politely, then not."""
    for how, wait in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, how)
        if process.returncode is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), wait)
        else:
            return
