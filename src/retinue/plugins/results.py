"""Long results in the workspace: the model reads a part and a pointer to the rest."""

from __future__ import annotations

import re
from hashlib import sha256

from ..core.filesystem import Filesystem, files_of
from ..core.hooks import Registrar
from ..core.messages import ToolCall
from ..core.plugins import Plugin
from ..core.runs import RunIdentity


class ResultFiles(Plugin):
    """Keeps results past the agent's `result_limit` whole, in a folder the agent can read with its file tools."""

    name = "result_files"

    def __init__(self, filesystem: Filesystem, folder: str = "tool_results") -> None:
        self._filesystem, self._folder = filesystem, folder.strip("/")

    def register(self, r: Registrar) -> None:
        r.results(self._keep)

    def _keep(self, call: ToolCall, text: str, run: RunIdentity) -> str:
        files = files_of(self._filesystem, run)
        # The model chose the id: only what is plain in a file name is taken from it.
        data = text.encode(errors="replace")
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", call.id)[:80]
        path = f"{self._folder}/{plain}.txt"
        if files.exists(path) and files.read(path) != data:
            # Agents that share a folder may have calls of one id.
            path = f"{self._folder}/{plain}-{sha256(data).hexdigest()[:8]}.txt"
        files.write(path, data)
        return f'the whole is in "{path}", read it with read_file(path, offset, limit)'
