"""The files that instruct an agent, in its prompt: AGENTS.md and others, within a budget."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.errors import ConfigurationError, FilesystemError
from ..core.filesystem import Filesystem, Stamp
from ..core.functions import in_thread
from ..core.hooks import HookContext, Registrar
from ..core.model import CHARACTERS_PER_TOKEN
from ..core.plugins import AddSystemText, Plugin
from ..core.state import StateCommand
from .paths import normal_path

AGENTS_FILE = "AGENTS.md"
AGENTS_FILES = (AGENTS_FILE, "CLAUDE.md")
"""Files that need not be there. CLAUDE.md is often a link to AGENTS.md, or a copy: then it is not shown."""

LOOP_FILES = 16
"""The number of files that are looked at on the event loop."""


class WorkspaceContext(Plugin):
    """Gives the model the content of `files` with every request.

    The files are checked when a run begins, and read if they have changed. Text over `max_tokens` (estimated) is cut.
    """

    name = "workspace_context"

    def __init__(self, filesystem: Filesystem, files: Iterable[str] = (), max_tokens: int = 8000) -> None:
        if max_tokens < 0:
            raise ConfigurationError(f"max_context_tokens must be 0 or more, got {max_tokens}")
        self._filesystem = filesystem
        self._paths = tuple(dict.fromkeys(map(_plain, files)))
        self._most = max_tokens * CHARACTERS_PER_TOKEN
        self._stamps: tuple[Stamp | None, ...] | None = None
        self.text = ""
        self.problems: tuple[str, ...] = ()

    def register(self, r: Registrar) -> None:
        if self._paths:
            r.hook("run_start", self._report_problems, priority=70)
            r.hook("step_start", self._add_text, priority=70)

    async def _report_problems(self, ctx: HookContext) -> StateCommand | None:
        await self._refresh_beside()
        if not self.problems:
            return None
        return StateCommand().event({"type": "workspace_context", "problems": list(self.problems)})

    async def _add_text(self, ctx: HookContext) -> StateCommand | None:
        if self._stamps is None:  # the run began in another process
            await self._refresh_beside()
        return StateCommand().schedule(AddSystemText(self.text)) if self.text else None

    async def _refresh_beside(self) -> None:
        """Refresh, in a thread unless nothing has changed."""
        is_quick = self._filesystem.is_local and len(self._paths) <= LOOP_FILES and self._stamps is not None
        if not is_quick or self._find_stamps() != self._stamps:
            await in_thread(self.refresh, {})

    def refresh(self) -> None:
        """Read the files if one has changed. Blocking."""
        stamps = self._find_stamps()
        if stamps == self._stamps:
            return
        problems: list[str] = []
        shown: list[str] = []
        seen: set[str] = set()
        left = self._most
        for path, stamp in zip(self._paths, stamps, strict=True):
            if stamp is None:
                if path not in AGENTS_FILES:
                    problems.append(f"{path}: there is no such file to show to the model")
                continue
            text = self._read(path, problems)
            if path in AGENTS_FILES and text in seen:
                continue
            seen.add(text)
            if len(text) > left:
                cut = f"\n[{len(text) - left:,} more characters do not fit: read {path} with read_file]"
                text, left = text[:left] + cut, 0
            else:
                left -= len(text)
            if text:
                shown.append(f'<file path="{path}">\n{text}\n</file>')
        self.text = "\n\n".join(["What the workspace says about itself:", *shown]) if shown else ""
        self.problems, self._stamps = tuple(problems), stamps

    def _find_stamps(self) -> tuple[Stamp | None, ...]:
        return tuple([self._stamp(path) for path in self._paths])

    def _stamp(self, path: str) -> Stamp | None:
        try:
            return self._filesystem.stamp(path)
        except FilesystemError:
            # Reading it reports the error. A CLAUDE.md that is a link is ignored.
            return None if path in AGENTS_FILES and path != AGENTS_FILE else ()

    def _read(self, path: str, problems: list[str]) -> str:
        try:
            return self._filesystem.read(path).decode("utf-8-sig").strip()
        except FilesystemError as exc:
            problems.append(str(exc))
        except UnicodeDecodeError:
            problems.append(f"{path}: it is not UTF-8 text: save it as UTF-8")
        return ""


def _plain(path: str) -> str:
    """Return the normal form of a path, so that no file is shown twice. A bad path is reported when it is read."""
    try:
        return normal_path(path)
    except FilesystemError:
        return path
