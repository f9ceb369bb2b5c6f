"""The store that keeps everything in this process."""

from __future__ import annotations

from ..core.stores import RunRecord, ThreadRecord


class MemoryStore:
    """Threads and runs in dictionaries. The oldest finished runs are forgotten past `max_runs`."""

    def __init__(self, max_runs: int = 1_000) -> None:
        self._threads: dict[str, ThreadRecord] = {}
        self._runs: dict[str, RunRecord] = {}
        self._uses: dict[str, int] = {}
        """How many of the runs are on each thread."""
        self._max_runs = max_runs

    async def load_thread(self, thread_id: str) -> ThreadRecord | None:
        return self._threads.get(thread_id)

    async def save_thread(self, record: ThreadRecord) -> None:
        self._threads[record.thread_id] = record

    async def load_run(self, run_id: str) -> RunRecord | None:
        return self._runs.get(run_id)

    async def save_run(self, record: RunRecord) -> None:
        identity = record.identity
        if identity.run_id not in self._runs:
            self._uses[identity.thread_id] = self._uses.get(identity.thread_id, 0) + 1
        self._runs[identity.run_id] = record
        while len(self._runs) > self._max_runs:
            oldest = next((key for key, run in self._runs.items() if run.result is not None), None)
            if oldest is None:
                return
            self._forget(self._runs.pop(oldest))

    def _forget(self, record: RunRecord) -> None:
        """Forget the conversation of a run that was given no thread, unless another run has continued it."""
        thread_id, run_id = record.identity.thread_id, record.identity.run_id
        self._uses[thread_id] -= 1
        if not self._uses[thread_id]:
            del self._uses[thread_id]
            if thread_id.removeprefix("thread_") == run_id.removeprefix("run_"):
                self._threads.pop(thread_id, None)

    async def list_runs(
        self,
        thread_id: str | None = None,
        *,
        user_id: str | None = None,
        status: str | None = None,
        limit: int | None = None,
    ) -> list[RunRecord]:
        found = [
            run
            for run in self._runs.values()
            if run.log_id in ("", run.identity.run_id)
            and thread_id in (None, run.identity.thread_id)
            and user_id in (None, run.identity.user_id)
            and status in (None, run.status)
        ]
        return found[::-1][:limit]
