"""Messages for a run at work: its model reads them with the next request.

Invariant: a message that was accepted is in exactly one request of its run and in the conversation, in order of arrival,
after the results of the calls before it; unless the run is stopped first, and says so by `message_dropped`. A message is
accepted once its row is stored. The fold of any prefix of the log has the same messages at the same places.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..core.events import MessageAdded, MessageDropped
from ..core.messages import Message
from ..log.owned import LiveLog
from ..log.state import RunState
from .budget import is_limited, reached

MOST_UNREAD = 100
"""Messages that may wait for the next request of a run."""


def refusal(log: LiveLog, run: RunState, max_steps: int | None) -> str:
    """Return why a run takes no message; empty if its model will have another request."""
    x = log.executions.get(run.run_id)
    if run.is_over:
        return f"it is {run.status.value}"
    if run.ending is not None or run.blocked is not None or (x is not None and x.is_ending):
        return "it is about to end"
    if max_steps is not None and run.step >= max_steps:
        return f"it has no step left of max_steps={max_steps}"
    if run.limit is not None or (is_limited(log.tree, run) and reached(log.tree, run, log.clock()) is not None):
        return "it has reached a limit, and gives its last answer"
    return f"{MOST_UNREAD} messages for it are unread" if len(run.queued) >= MOST_UNREAD else ""


def add_messages(log: LiveLog, run: RunState, messages: Iterable[Message]) -> None:
    """Append the messages that the run does not have yet."""
    identity = run.identity
    for message in messages:
        if message.id in run.added:
            continue
        added = MessageAdded(
            message=message,
            run_id=run.run_id,
            parent_run_id=identity.parent_run_id,
            agent=identity.agent,
            ns=run.ns,
        )
        log.append_stamped(added)


def drop_messages(log: LiveLog, run: RunState, reason: str) -> None:
    """Report the messages that a run leaves unread at its end."""
    for message in run.queued:
        log.append(run, MessageDropped(message_id=message.id or "", reason=reason))
