"""Notifications of a PostgreSQL server: one connection listens and wakes the watches of a topic."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class NotifiedWatch:
    """Wakes when its topic was notified, or may have been."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    def wake(self) -> None:
        """Report a change from another thread."""
        with suppress(RuntimeError):  # its event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._changed.set)


class Listener:
    """Listens in a thread that starts with the first watch.

    It reconnects when the connection breaks. Notifications sent meanwhile are lost, so it wakes every watch whenever
    it starts to listen.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], channel: str) -> None:
        self._connect, self._channel = connect, channel
        self._watches: dict[str, set[NotifiedWatch]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._connection: psycopg.Connection[Any] | None = None
        self._closed = threading.Event()

    @contextmanager
    def watch(self, topic: str) -> Generator[NotifiedWatch]:
        watch = NotifiedWatch()
        with self._lock:
            self._watches.setdefault(topic, set()).add(watch)
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._listen, name="retinue-listen", daemon=True)
                self._thread.start()
        try:
            yield watch
        finally:
            with self._lock:
                watches = self._watches[topic]
                watches.discard(watch)
                if not watches:
                    del self._watches[topic]

    def close(self) -> None:
        """Stop the thread and wait for its end."""
        with self._lock:
            self._closed.set()
            if self._connection is not None:
                # The thread, which waits for the other end, wakes up.
                with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
                    end.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()

    def _listen(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closed.is_set():
            with suppress(psycopg.Error, OSError), self._connect() as connection:
                connection.execute(f'LISTEN "{self._channel}"'.encode())
                pause = _FIRST_PAUSE
                with self._lock:
                    self._connection = connection
                self._wake(None)
                self._receive(connection)
            with self._lock:
                self._connection = None
            self._closed.wait(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _receive(self, connection: psycopg.Connection[Any]) -> None:
        """Wake watches until the connection breaks or this is closed."""
        with selectors.DefaultSelector() as ready:
            ready.register(connection, selectors.EVENT_READ)
            while not self._closed.is_set():
                for note in connection.notifies(timeout=0):
                    self._wake(note.payload)
                ready.select()

    def _wake(self, topic: str | None) -> None:
        """Wake the watches of a topic, or all."""
        with self._lock:
            chosen = self._watches.values() if topic is None else [self._watches.get(topic, set())]
            for watch in [watch for watches in chosen for watch in watches]:
                watch.wake()
