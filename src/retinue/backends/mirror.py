"""Events of the log that a run has elsewhere, mirrored in the log here."""

from __future__ import annotations

from msgspec.structs import replace

from ..core.backend import RunRequest
from ..core.events import DELTAS, Event, RunFinished, RunStarted, Sink, TextDelta
from ..core.rows import Private
from ..loop.log import LiveLog
from ..loop.state import RunState


def append_event(log: LiveLog, run: RunState, event: Event, seen: int) -> None:
    """Append an event of the log that a run has elsewhere, after the one of number `seen`. The beginnings and ends of the
    run itself are only noted."""
    if event.__class__ in DELTAS and event.seq != seen + 1:
        log.append_private(Private(kind="remote", run_id=run.run_id, remote=event.seq - 1))
    if not event.ns and isinstance(event, RunStarted | RunFinished):
        log.append_private(Private(kind="remote", run_id=run.run_id, remote=event.seq))
    else:
        log.append_remote(run, event)


async def last_seen(log: LiveLog, run: RunState) -> int:
    """Return the number of the last event of a run's log elsewhere: the last one noted, and the deltas after it."""
    if not run.remote_seq:
        return 0
    events = [event for event in log.events if event.seq > run.remote_at]
    if log.earlier is not None and run.remote_at < log.first:
        events += [event async for event in log.earlier(run.remote_at, log.first, True)]
    return run.remote_seq + sum([event.__class__ in DELTAS and event.ns[: len(run.ns)] == run.ns for event in events])


async def streamed_text(log: LiveLog, run: RunState) -> str:
    """Return the text that a run elsewhere has streamed into its log; not needed where its events have numbers."""
    if run.remote_seq:
        return ""
    events = list(log.events)
    if log.earlier is not None and log.first > 0:
        events = [event async for event in log.earlier(0, log.first, True)] + events
    return "".join([event.delta for event in events if isinstance(event, TextDelta) and event.run_id == run.run_id])


class Heard:
    """Gives a sink the events of a run that has no log."""

    def __init__(self, request: RunRequest, sink: Sink) -> None:
        self._identity, self._sink, self._seq = request.identity, sink, 0
        self.has_text = False

    def emit(self, event: Event) -> None:
        if event.ns:  # of a run below it
            return
        self._seq += 1
        self.has_text = self.has_text or isinstance(event, TextDelta)
        self._sink(replace(event, seq=self._seq, run_id=self._identity.run_id, agent=self._identity.agent))
