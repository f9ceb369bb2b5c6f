"""Sinks: callables that receive events."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator

from .errors import ConsumerTooSlow
from .events import Event, Sink

_log = logging.getLogger(__name__)


def deliver(event: Event, sinks: list[Sink]) -> None:
    """Send an event to sinks. A sink that fails is removed from the list; the others still get the event."""
    for sink in tuple(sinks):
        try:
            sink(event)
        except Exception:
            _log.exception("a sink failed at event %d and is not called again", event.seq)
            sinks.remove(sink)


class NullSink:
    """Receives events and does nothing."""

    def __call__(self, event: Event) -> None:
        return None


class Subscription:
    """One reader of a FanOut, with a queue of its own that cannot grow past its size."""

    def __init__(self, maxsize: int) -> None:
        self._queue: deque[Event] = deque()
        self._maxsize = maxsize
        self._overflowed = self._closed = False
        self._last_seq = 0
        self._wake = asyncio.Event()

    def put(self, event: Event) -> None:
        if self._overflowed or self._closed:
            return
        if len(self._queue) >= self._maxsize:
            self._overflowed = True
        else:
            self._queue.append(event)
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            while self._queue:
                event = self._queue.popleft()
                self._last_seq = event.seq
                yield event
            if self._overflowed:
                raise ConsumerTooSlow(self._last_seq)
            if self._closed:
                return
            self._wake.clear()
            await self._wake.wait()


class FanOut:
    """One sink to many: plain sinks at once, subscribers through bounded queues.

    A subscriber whose queue overflows gets the queued events and then ConsumerTooSlow, with the last `seq` it got.
    Other subscribers are not affected.
    """

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = list(sinks)
        self._subscriptions: list[Subscription] = []

    def __call__(self, event: Event) -> None:
        deliver(event, self._sinks)
        for subscription in self._subscriptions:
            subscription.put(event)

    def subscribe(self, maxsize: int = 1024) -> Subscription:
        subscription = Subscription(maxsize)
        self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.remove(subscription)
        subscription.close()

    def close(self) -> None:
        """End every subscription after its queued events."""
        for subscription in self._subscriptions:
            subscription.close()
        self._subscriptions.clear()
