"""Notifications of a PostgreSQL server: one connection listens, and wakes those who watch a topic."""

from __future__ import annotations

import asyncio
import selectors
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class NotedWatch:
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
        """Say from another thread that something has changed."""
        with suppress(RuntimeError):  # its event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._changed.set)


class Listener:
    """Listens in a thread that begins with the first watch.

    A connection that breaks is opened again. Notifications sent before it listens are lost, so it wakes everybody when
    it begins to listen.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], channel: str) -> None:
        self._connect, self._channel = connect, channel
        self._watches: dict[str, set[NotedWatch]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._end: socket.socket | None = None
        """Closed to wake the thread."""

    @contextmanager
    def watch(self, topic: str) -> Generator[NotedWatch]:
        watch = NotedWatch()
        with self._lock:
            self._watches.setdefault(topic, set()).add(watch)
            if self._thread is None and not self._closed.is_set():
                self._start()
        try:
            yield watch
        finally:
            with self._lock:
                watches = self._watches[topic]
                watches.discard(watch)
                if not watches:
                    del self._watches[topic]

    def close(self) -> None:
        """End, and wait for the end."""
        with self._lock:
            self._closed.set()
            if self._end is not None:
                self._end.close()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        ended, self._end = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, args=(ended,), name="retinue-listen", daemon=True)
        self._thread.start()

    def _listen(self, ended: socket.socket) -> None:
        pause = _FIRST_PAUSE
        with ended:
            while not self._closed.is_set():
                with suppress(psycopg.Error, OSError), self._connect() as connection:
                    connection.execute(f'LISTEN "{self._channel}"'.encode())
                    pause = _FIRST_PAUSE
                    self._wake(None)
                    self._hear(connection, ended)
                self._closed.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)

    def _hear(self, connection: psycopg.Connection[Any], ended: socket.socket) -> None:
        """Wake those who watch, until the connection breaks or this is closed."""
        with selectors.DefaultSelector() as ready:
            ready.register(connection, selectors.EVENT_READ)
            ready.register(ended, selectors.EVENT_READ)
            while not self._closed.is_set():
                for note in connection.notifies(timeout=0):
                    self._wake(note.payload)
                ready.select()

    def _wake(self, topic: str | None) -> None:
        """Wake those who watch a topic, or everybody."""
        with self._lock:
            chosen = self._watches.values() if topic is None else [self._watches.get(topic, set())]
            for watch in [watch for watches in chosen for watch in watches]:
                watch.wake()
