"""What a workspace says about itself, in the prompt: AGENTS.md and other files, within a budget."""

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

NEAR_FILES = 16
"""So many files are looked at without leaving the event loop."""


class WorkspaceContext(Plugin):
    """Gives the model AGENTS.md and `files` with every request. They are looked at when a run begins, and read again
    where they have changed; what does not fit in `max_tokens` (estimated) is cut where it shows."""

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
            r.hook("run_start", self._look, priority=70)
            r.hook("step_start", self._tell, priority=70)

    async def _look(self, ctx: HookContext) -> StateCommand | None:
        await self._refreshed()
        if not self.problems:
            return None
        return StateCommand().event({"type": "workspace_context", "problems": list(self.problems)})

    async def _tell(self, ctx: HookContext) -> StateCommand | None:
        if self._stamps is None:  # a run that goes on in another process than it began in
            await self._refreshed()
        return StateCommand().schedule(AddSystemText(self.text)) if self.text else None

    async def _refreshed(self) -> None:
        """Look, beside the event loop where it may take long."""
        if self._filesystem.is_near and len(self._paths) <= NEAR_FILES and self._stamps is not None:
            self.refresh()
        else:
            await in_thread(self.refresh, {})

    def refresh(self) -> None:
        """Look whether the files have changed, and read them if so. Blocking."""
        stamps = tuple([self._stamp(path) for path in self._paths])
        if stamps == self._stamps:
            return
        problems: list[str] = []
        shown: list[str] = []
        left = self._most
        for path, stamp in zip(self._paths, stamps, strict=True):
            if stamp is None:
                if path != AGENTS_FILE:
                    problems.append(f"{path}: there is no such file to show to the model")
                continue
            text = self._read(path, problems)
            if len(text) > left:
                cut = f"\n[{len(text) - left:,} more characters do not fit: read {path} with read_file]"
                text, left = text[:left] + cut, 0
            else:
                left -= len(text)
            if text:
                shown.append(f'<file path="{path}">\n{text}\n</file>')
        self.text = "\n\n".join(["What the workspace says about itself:", *shown]) if shown else ""
        self.problems, self._stamps = tuple(problems), stamps

    def _stamp(self, path: str) -> Stamp | None:
        try:
            return self._filesystem.stamp(path)
        except FilesystemError:
            return ()  # something is there that cannot be used: reading it says why

    def _read(self, path: str, problems: list[str]) -> str:
        try:
            return self._filesystem.read(path).decode("utf-8-sig").strip()
        except FilesystemError as exc:
            problems.append(str(exc))
        except UnicodeDecodeError:
            problems.append(f"{path}: it is not UTF-8 text: save it as UTF-8")
        return ""


def _plain(path: str) -> str:
    """The one way to write a path, so that no file is shown twice; a bad one as it is, to be reported by whoever reads."""
    try:
        return normal_path(path)
    except FilesystemError:
        return path
