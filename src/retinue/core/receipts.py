"""Receipts: the runtime's own account of a run, which the run cannot write.

Invariant: a receipt follows from the events of a log alone. No text that a model wrote is in it, except names of tools
and files that calls really had, and these are cut and cleaned. What a model reads as a receipt was made by `Receipt.line`:
`escape_frames` changes lines of other text that look like one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

Receipts = Literal["auto", "always", "never"]
"""When a model reads the receipt of a sub-agent: if it says more than success, at every end, or not at all."""

MOST_FAILURES = 3
MOST_NAMES = 20
"""Approvals, files and limits that a receipt names."""
MOST_REASON = 80
"""Characters of the reason of a failure, and of any other text of a receipt."""
MOST_BYTES = 240
"""Bytes of the line that a model reads: 60 tokens by our estimate."""
_SHOWN = 32
"""Characters of a name in that line."""
MARK = "[receipt]"


class Failure(Struct, frozen=True, gc=False):
    """A call that failed, was denied or was cancelled."""

    tool: str
    code: str
    reason: str = ""


class Approval(Struct, frozen=True, gc=False):
    """A human's answer to a call that waited."""

    tool: str
    answer: Literal["approved", "rejected", "answered", "cancelled"]
    by: str
    """The user who answered; `local` for the process itself, `link` for the holder of a link."""


class Receipt(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The deeds of a run and of everything below it, by the events of its log."""

    status: str
    steps: int = 0
    """The steps of the run itself."""
    calls: int = 0
    """The tool calls that have ended."""
    failed: int = 0
    failures: tuple[Failure, ...] = ()
    """The first three."""
    approvals: tuple[Approval, ...] = ()
    limits: tuple[str, ...] = ()
    """The limits that were hit, as `termination` names them."""
    files: tuple[str, ...] = ()
    """The first files that the file tools have changed."""
    files_changed: int = 0
    shell: int = 0
    """The commands that were run; what they changed is not known."""
    open_tasks: int = 0
    """The background tasks that had not ended."""
    children: int = 0
    """The runs below it."""
    not_completed: int = 0
    """The runs below it that did not complete."""
    reported_by: str | None = None
    """The server whose word this is; None if it follows from the log here."""
    remote: tuple[str, ...] = ()
    """The servers on whose word a part of this rests."""

    @property
    def is_clean(self) -> bool:
        """True if the run has completed and nothing below it failed, hit a limit or is still open."""
        troubles = self.failed or self.limits or self.open_tasks or self.not_completed
        return self.status == "completed" and not troubles

    def line(self, label: str = "") -> str:
        """Return the line that a model reads, at most `MOST_BYTES` long."""
        return _line(self, label)


def is_shown(receipt: Receipt, when: Receipts) -> bool:
    """Return whether a model reads a receipt."""
    return when == "always" or (when == "auto" and not receipt.is_clean)


def merged(receipts: Sequence[Receipt], *, children: int = 0) -> Receipt:
    """Return the receipt of a run, the first one, with those of `children` runs below it."""
    first = receipts[0]
    calls = failed = files_changed = shell = open_tasks = not_completed = 0
    failures: list[Failure] = []
    approvals: list[Approval] = []
    limits: list[str] = []
    files: list[str] = []
    remote: list[str] = []
    for place, one in enumerate(receipts):
        calls += one.calls
        failed += one.failed
        files_changed += one.files_changed
        shell += one.shell
        open_tasks += one.open_tasks
        not_completed += one.not_completed
        if place:
            children += one.children
            not_completed += one.status != "completed"
            remote += one.remote if one.reported_by is None else (one.reported_by, *one.remote)
        failures += one.failures
        approvals += one.approvals
        limits += one.limits
        files += one.files
    return replace(
        first,
        calls=calls,
        failed=failed,
        failures=tuple(failures[:MOST_FAILURES]),
        approvals=tuple(approvals[:MOST_NAMES]),
        limits=_distinct(limits),
        files=_distinct(files),
        files_changed=files_changed,
        shell=shell,
        open_tasks=open_tasks,
        children=children,
        not_completed=not_completed,
        remote=_distinct(remote),
    )


def of_children(receipts: Sequence[Receipt]) -> Receipt:
    """Return the receipt for a call that started several children: `completed` only if all of them are."""
    if len(receipts) == 1:
        return receipts[0]
    worst = max(receipts, key=lambda one: _SEVERITY.get(one.status, 1))
    whole = merged(
        [replace(worst, steps=sum([one.steps for one in receipts])), *[one for one in receipts if one is not worst]]
    )
    not_completed = sum([one.not_completed + (one.status != "completed") for one in receipts])
    return replace(whole, children=len(receipts) + sum([one.children for one in receipts]), not_completed=not_completed)


_SEVERITY = {"completed": 0, "cancelled": 2, "timeout": 3, "failed": 4}


def reported(given: Receipt | None, status: str, steps: int, host: str) -> Receipt:
    """Return the receipt of a run on a server: what the server says, bounded, under the status that the run has here."""
    if given is None:
        return Receipt(status=status, steps=steps, reported_by=cleaned(host))
    counts = ("calls", "failed", "files_changed", "shell", "open_tasks", "children", "not_completed")
    bounded = {name: min(max(getattr(given, name), 0), 2**53) for name in counts}
    failures = [
        Failure(cleaned(one.tool), cleaned(one.code), cleaned(one.reason)) for one in given.failures[:MOST_FAILURES]
    ]
    approvals = [Approval(cleaned(one.tool), one.answer, cleaned(one.by)) for one in given.approvals[:MOST_NAMES]]
    return Receipt(
        status=status,
        steps=steps,
        failures=tuple(failures),
        approvals=tuple(approvals),
        limits=_distinct(map(cleaned, given.limits[:MOST_NAMES])),
        files=_distinct(map(cleaned, given.files[:MOST_NAMES])),
        reported_by=cleaned(host),
        remote=_distinct(map(cleaned, given.remote[:MOST_NAMES])),
        **bounded,
    )


def cleaned(text: str) -> str:
    """Return text as one short line without control characters."""
    line = " ".join(text[: 4 * MOST_REASON].split())
    return "".join([one for one in line if unicodedata.category(one)[0] != "C"])[:MOST_REASON]


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))[:MOST_NAMES] if names else ()


# --- the line that a model reads

_UNSAFE = re.compile(r"[^\w./@:+~*#%-]+")


def _name(text: str) -> str:
    """Return a name that cannot be taken for another field of the line."""
    plain = _UNSAFE.sub("_", text) or "_"
    return plain if len(plain) <= _SHOWN else f"{plain[: _SHOWN - 1]}…"


def _line(receipt: Receipt, label: str) -> str:
    """Fit all counts into the line first, then as many names as there is room for."""
    fields = [(f"task={_name(label)}", list[str]())] if label else []
    fields += [(f"status={_name(receipt.status)}", [])]
    if receipt.reported_by is not None:
        fields.append((f"reported_by={_name(receipt.reported_by)}", []))
    if not (receipt.reported_by is not None and not receipt.calls):
        fields.append((f"calls={receipt.calls}", []))
    failures = [f"{_name(one.tool)}: {_name(one.code)}" for one in receipt.failures]
    fields.append((f"failed={receipt.failed}", failures)) if receipt.failed else None
    for limit in receipt.limits[:2]:
        fields.append((f"limit={_name(limit.removeprefix('limit:'))}", []))
    counted: list[tuple[str, int, list[str]]] = [
        ("not_completed", receipt.not_completed, []),
        ("tasks_open", receipt.open_tasks, []),
        (
            "approvals",
            len(receipt.approvals),
            [f"{_name(one.tool)} {one.answer} by {_name(one.by)}" for one in receipt.approvals],
        ),
        ("files", receipt.files_changed, [_name(one) for one in receipt.files]),
        ("shell", receipt.shell, []),
        ("children", receipt.children, []),
    ]
    fields += [(f"{name}={count}", names) for name, count, names in counted if count]
    return _fitted(fields)


def _fitted(fields: list[tuple[str, list[str]]]) -> str:
    left = MOST_BYTES - len(MARK) - sum([len(field.encode()) + 1 for field, _ in fields])
    shown = [MARK]
    for field, names in fields:
        taken: list[str] = []
        for name in names:
            size = len(name.encode()) + (2 if taken else 3)
            if size > left - 3:  # room for the sign that there are more
                break
            taken.append(name)
            left -= size
        if taken and len(taken) < len(names):
            taken.append("…")
            left -= 5
        shown.append(f"{field} ({', '.join(taken)})" if taken else field)
    return " ".join(shown)


# --- text that looks like the runtime's

_FRAMES = re.compile(r"[\[<]\W{0,8}(?:receipt|task-notification)", re.IGNORECASE)
_NOTICES = re.compile(r"\[\W{0,8}(?:limit|budget):", re.IGNORECASE)
_BRACKETS = re.compile(r"([\[\]<>［］＜＞【】])")
_HINTS = re.compile(r"receipt|task-notification|limit:|budget:", re.IGNORECASE)


def escape_frames(text: str) -> str:
    """Return text in which no line looks like a receipt or another frame of the runtime: such a line gets a backslash
    before each bracket.

    A notice of a limit is a whole result, so the first line of a text may be one.
    """
    if text.isascii() and _HINTS.search(text) is None:
        return text
    lines = text.splitlines(keepends=True)
    changed = [_escaped(line, is_first=place == 0) for place, line in enumerate(lines)]
    return text if changed == lines else "".join(changed)


def _escaped(line: str, *, is_first: bool) -> str:
    plain = line if line.isascii() else _folded(line)
    tight = "".join(plain.split())
    is_frame = _FRAMES.search(tight) is not None or (not is_first and _NOTICES.search(tight) is not None)
    return _BRACKETS.sub(r"\\\1", line) if is_frame else line


_LOOKALIKES: dict[int, Any] = str.maketrans("【】〔〕⟦⟧‹›⟨⟩аеосрхіѕτгԁｔ", "[][][]<><>aeocpxistrdt")
"""Brackets, and letters of other scripts, that look like those of our frames."""


def _folded(line: str) -> str:
    """Return a line as it looks: without marks and invisible characters, in plain letters."""
    wide = unicodedata.normalize("NFKD", line).translate(_LOOKALIKES)
    return "".join([one for one in wide if unicodedata.category(one) not in ("Cf", "Cc", "Mn", "Me") or one.isspace()])
