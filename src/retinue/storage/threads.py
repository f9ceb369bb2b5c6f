"""Threads as the rows of a list have them."""

from __future__ import annotations

import re
from typing import Any

from ..core.runs import Usage
from ..core.stores import IDLE, STATUSES, ThreadSummary


def literally(text: str) -> str:
    """Return a text as a pattern of LIKE that is met by nothing else."""
    return re.sub(r"([!%_])", r"!\1", text)


def thread_summary(
    used_at: float,
    thread_id: str,
    user_id: str | None,
    changed_at: float,
    title: str | None,
    rank: int | None,
    questions: int,
    children: int,
    *usage: Any,
) -> ThreadSummary:
    return ThreadSummary(
        thread_id=thread_id,
        user_id=user_id,
        used_at=used_at,
        changed_at=changed_at,
        title=title or "",
        status=IDLE if rank is None else STATUSES[rank],
        questions=questions,
        children=children,
        usage=Usage(**dict(zip(Usage.__struct_fields__, usage, strict=True))),
    )
