"""What a model reads of a conversation that has outgrown its window.

Invariant: the stored conversation is never changed. `ContextWindow` says from which message on the model reads it, and
what it reads instead of the beginning. The fold of the log changes it, and the thread keeps it for the next run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from .content import to_json_bytes
from .filesystem import name_of_part
from .messages import DataPart, FilePart, ImagePart, Message, Part, Role, TextPart, Visibility
from .model import CHARACTERS_PER_TOKEN, rendered

CONTEXT_KEY = "retinue.context"
"""The name under which the state of a thread has the `ContextWindow`."""
HISTORY = "history"
"""The folder of the files with what was cut."""
WIDE_MESSAGE = 3
"""A message of a person may be this much larger than a result before its middle is cut."""


class CutFile(Struct, frozen=True, gc=False):
    """Messages of a conversation that were cut from what the model reads, as a file that it can read."""

    path: str
    start: int
    end: int


class Cut(Struct, frozen=True, gc=False, omit_defaults=True):
    """The private part of a compaction."""

    count: int
    """The messages that the model reads as a summary."""
    result_limit: int
    """The estimated tokens of a single result that the model reads."""
    learned: int = 0
    """The estimated tokens that the model refused, less a tenth; 0 if it has refused nothing."""


class ContextWindow(Struct, frozen=True, gc=False, omit_defaults=True):
    """The messages that were cut, and the tokens that the model is known to take."""

    summary: str = ""
    """What the model reads instead of the first `count` messages."""
    count: int = 0
    files: tuple[CutFile, ...] = ()
    result_limit: int = 0
    """The estimated tokens of a single result that the model reads; 0 is a quarter of the window. It changes only with a
    compaction, because it is part of the cached prefix."""
    learned: int = 0
    scale: float = 0.0
    """The tokens of the model for each estimated token, by its last usage; 0 if not known."""
    prefix: tuple[str, ...] = ()
    """The parts of the prefix of the last request (`PREFIX`), each as a digest."""

    def after(self, cut: Cut, path: str, summary: str) -> ContextWindow:
        """Return the window after a compaction."""
        learned = cut.learned or self.learned
        if cut.count <= self.count:  # only results were shortened
            return replace(self, result_limit=cut.result_limit, learned=learned)
        files = (*self.files, CutFile(path, self.count, cut.count)) if path else self.files
        return replace(
            self,
            summary=summary,
            count=cut.count,
            files=files,
            result_limit=cut.result_limit,
            learned=learned,
        )

    def counted(self, estimate: int, tokens: int) -> ContextWindow:
        """Return the window after a request whose tokens were estimated and then counted by the provider."""
        # A count far below the estimate is no count: servers and test models report any number.
        if not estimate or tokens * 2 < estimate:
            return self
        return replace(self, scale=round(tokens / estimate, 2))

    def for_model(self, name: str) -> ContextWindow:
        """Return the window without what is known of another model."""
        if not self.prefix or self.prefix[0] == name:
            return self
        return replace(self, scale=0.0, learned=0, result_limit=0)


PREFIX = ("model", "tools", "system", "compacted")
"""The parts of the prefix of a request, in the order in which providers read them."""
NO_WINDOW = ContextWindow()


def folder_of(thread_id: str) -> str:
    """Return the folder for the files of a thread: ids may have any characters."""
    return f"{HISTORY}/{name_of_part(thread_id)}"


def file_of(thread_id: str, message: Message) -> str:
    """Return the path of the file with one whole message."""
    return f"{folder_of(thread_id)}/{name_of_part(message.id or '')}.md"


def shortened(message: Message, tokens: int, path: str) -> Message:
    """Return a message without the middle of its text if it has more than about `tokens`; its beginning and end stay.

    The result depends on the message and the limit alone, so that it has the same bytes in each request.
    """
    if message.role is Role.ASSISTANT or message.role is Role.SYSTEM:
        return message
    limit = (tokens if message.role is Role.TOOL else tokens * WIDE_MESSAGE) * CHARACTERS_PER_TOKEN
    text = message.text
    if len(text) * 4 <= limit:  # no character has more bytes
        return message
    size = len(text) if text.isascii() else len(text.encode(errors="replace"))
    if size <= limit:
        return message
    shown = without_middle(text, max(len(text) * limit // size, 2), path)
    others = [part for part in message.parts if type(part) is not TextPart]
    return replace(message, parts=(TextPart(shown), *others))


def without_middle(text: str, most: int, path: str = "") -> str:
    """Return the beginning and the end of a text, with about `most` characters; a note says what is missing."""
    if len(text) <= most:
        return text
    head = most * 3 // 5
    tail = most - head
    whole = f'; the whole is in "{path}", read it with read_file(path, offset, limit)' if path else ""
    note = f"[{len(text) - most:,} characters are cut here to fit the model's window{whole}]"
    return f"{text[:head]}\n{note}\n{text[len(text) - tail :]}"


class History:
    """The messages that were cut from a conversation, as files. They are made when they are read: nothing is stored twice."""

    def __init__(self, thread_id: str, messages: Sequence[Message], window: ContextWindow) -> None:
        self._messages, self._window, self._folder = messages, window, folder_of(thread_id)

    def read(self, path: str) -> str | None:
        """Return the text of a file, None if there is none."""
        for file in self._window.files:
            if file.path == path:
                return transcript(self._messages[file.start : file.end], first=file.start + 1)
        folder, _, name = path.rpartition("/")
        if folder != self._folder or not name.endswith(".md"):
            return None
        for message in self._messages:
            if message.id is not None and f"{name_of_part(message.id)}.md" == name:
                return rendered(message).text
        return None

    def paths(self) -> Iterator[str]:
        """The files of cut conversation; those of single messages are named where they are cut."""
        return (file.path for file in self._window.files)


def transcript(messages: Sequence[Message], first: int = 1, most: int = 0) -> str:
    """Return messages as Markdown for a reader; each text has at most `most` characters if that is given."""
    return "\n\n".join([_entry(number, rendered(message), most) for number, message in enumerate(messages, first)])


def _entry(number: int, message: Message, most: int) -> str:
    who: str = message.role
    if message.role is Role.TOOL:
        who = f"result of {message.name or 'a tool'} ({message.tool_call_id})"
    elif message.role is Role.USER and message.visibility is Visibility.INTERNAL:
        who = "note for the model"
    lines = [f"## {number}. {who}"]
    if text := message.text:
        lines.append(without_middle(text, most) if most else text)
    lines += [shown for part in message.parts if (shown := _shown(part))]
    for call in message.tool_calls:
        given = to_json_bytes(call.args).decode() if call.malformed is None else call.malformed
        lines.append(f"[calls {call.name}({without_middle(given, most) if most else given}) as {call.id}]")
    return "\n\n".join(lines)


def _shown(part: Part) -> str:
    match part:
        case ImagePart():
            return f"[an image: {part.url or part.media_type}]"
        case FilePart():
            return f"[a file: {part.name or part.url or part.media_type}]"
        case DataPart():
            return f"[data: {to_json_bytes(part.data).decode()}]"
        case _:
            return ""
