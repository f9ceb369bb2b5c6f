"""The conformance suite of the `TaskRepository` port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.errors import TaskStoreError
from ..tasks.repository import TaskRepository
from ..tasks.task import TaskRecord, TaskScope, TaskStatus, at, beat, begin, finish, request_cancel
from .suite import Suite

NOW = 1_800_000_000.0
S1 = TaskScope("boss", "s1")


def task_record(task_id: str, scope: TaskScope = S1, **fields: Any) -> TaskRecord:
    """Return the record of a new task."""
    given: dict[str, Any] = {"sub_agent_id": "worker", "created_at": at(NOW), "last_updated_at": at(NOW), **fields}
    return TaskRecord(
        task_id=task_id,
        parent_agent_id=scope.agent,
        parent_session_id=scope.session_id,
        user_id=scope.user_id,
        **given,
    )


class TaskRepositorySuite(Suite[TaskRepository]):
    """The contract of TaskRepository."""

    async def check_what_was_added_is_read(self, repository: TaskRepository) -> None:
        record = task_record(
            "t1", input="do it\n\u017elu\u0165 \u2028 \U0001f600", agent_key="agent:worker:1", run_id="run_1"
        )
        await repository.add(record)
        for reader in self._readers(repository):
            assert await reader.get(S1, "t1") == record
            assert list(await reader.list(S1)) == [record]

    async def check_nothing_is_there_at_first(self, repository: TaskRepository) -> None:
        assert await repository.get(S1, "t1") is None
        assert list(await repository.list(S1)) == []
        assert list(await repository.open_scopes()) == []
        assert await repository.update(S1, "t1", lambda record: record) is None

    async def check_a_task_is_added_once(self, repository: TaskRepository) -> None:
        await repository.add(task_record("t1", input="first"))
        for writer in self._readers(repository):
            try:
                await writer.add(task_record("t1", input="second"))
            except TaskStoreError as error:
                assert "t1" in str(error), f"the error names no task: {error}"
            else:
                raise AssertionError("a second task of the same id was taken")
        assert await repository.get(S1, "t1") == task_record("t1", input="first")

    async def check_the_oldest_comes_first(self, repository: TaskRepository) -> None:
        names = ["t3", "t1", "t2", "t10"]
        for name in names:
            await repository.add(task_record(name))
        await repository.update(S1, "t3", lambda record: begin(record, NOW, "n1"))
        for reader in self._readers(repository):
            assert [record.task_id for record in await reader.list(S1)] == names

    async def check_sessions_and_users_see_their_own(self, repository: TaskRepository) -> None:
        scopes = [S1, TaskScope("boss", "s2"), TaskScope("boss", "s1", "ann"), TaskScope("boss", "s1", "bob")]
        for number, scope in enumerate(scopes):
            await repository.add(task_record(f"t{number}", scope))
        for reader in self._readers(repository):
            for number, scope in enumerate(scopes):
                assert [record.task_id for record in await reader.list(scope)] == [f"t{number}"]
                for other in range(len(scopes)):
                    found = await reader.get(scope, f"t{other}")
                    changed = await reader.update(scope, f"t{other}", lambda record: None)
                    assert (found is not None) == (changed is not None) == (other == number)

    async def check_an_update_gives_what_is_there_afterwards(self, repository: TaskRepository) -> None:
        await repository.add(task_record("t1"))
        running = await repository.update(S1, "t1", lambda record: begin(record, NOW + 1, "n1"))
        assert running is not None
        assert (running.status, running.node, running.version) == (TaskStatus.RUNNING, "n1", 2)
        unchanged = await repository.update(S1, "t1", lambda record: None)
        assert unchanged == running
        for reader in self._readers(repository):
            assert await reader.get(S1, "t1") == running

    async def check_a_reader_sees_what_was_written_since(self, repository: TaskRepository) -> None:
        readers = self._readers(repository)
        await repository.add(task_record("t1", node="n1", status=TaskStatus.RUNNING))
        for number in range(1, 30):
            for reader in readers:
                found = await reader.get(S1, "t1")
                assert found is not None
                assert found.version == number, f"version {found.version} was read where {number} had been written"
            await repository.update(S1, "t1", lambda record: beat(record, NOW, "n1"))

    async def check_a_terminal_record_stays(self, repository: TaskRepository) -> None:
        for number, end in enumerate((TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED)):
            await repository.add(task_record(f"t{number}", node="n1", status=TaskStatus.RUNNING))
            ended = await repository.update(S1, f"t{number}", _finishing(end))
            for writer in self._readers(repository):
                for change in (_finishing(TaskStatus.FAILED), _beating, _cancelling):
                    assert await writer.update(S1, f"t{number}", change) == ended
                assert await writer.get(S1, f"t{number}") == ended

    async def check_an_error_in_a_change_spoils_nothing_else(self, repository: TaskRepository) -> None:
        await repository.add(task_record("t1", node="n1", status=TaskStatus.RUNNING))
        await repository.add(task_record("t2", node="n1", status=TaskStatus.RUNNING))

        def spoil(record: TaskRecord) -> TaskRecord:
            raise ValueError("no")

        results = await asyncio.gather(
            repository.update(S1, "t1", spoil),
            repository.update(S1, "t2", _finishing(TaskStatus.COMPLETED)),
            return_exceptions=True,
        )
        assert isinstance(results[0], ValueError), f"the error was swallowed: {results[0]!r}"
        for reader in self._readers(repository):
            assert [record.status for record in await reader.list(S1)] == [TaskStatus.RUNNING, TaskStatus.COMPLETED]

    async def check_updates_at_once_are_all_kept(self, repository: TaskRepository) -> None:
        count = 40
        for number in range(4):
            await repository.add(task_record(f"t{number}", node="n1", status=TaskStatus.RUNNING))
        writers = self._readers(repository)
        await asyncio.gather(
            *[
                writer.update(S1, f"t{number}", _beating)
                for _ in range(count)
                for number in range(4)
                for writer in writers
            ]
        )
        for reader in self._readers(repository):
            versions = [record.version for record in await reader.list(S1)]
            assert versions == [1 + count * len(writers)] * 4, f"updates were lost: {versions}"

    async def check_one_of_many_ends_is_taken(self, repository: TaskRepository) -> None:
        await repository.add(task_record("t1", node="n1", status=TaskStatus.RUNNING))
        ends = [TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED] * 5
        writers = self._readers(repository)
        results = await asyncio.gather(
            *[writer.update(S1, "t1", _finishing(end)) for end in ends for writer in writers]
        )
        first = results[0]
        assert first is not None
        assert first.version == 2
        assert results == [first] * len(results), "two ends were taken"

    async def check_several_updates_at_once(self, repository: TaskRepository) -> None:
        other = TaskScope("boss", "s2", "ann")
        for task_id, scope in (("t1", S1), ("t2", S1), ("t3", other)):
            await repository.add(task_record(task_id, scope, node="n1", status=TaskStatus.RUNNING))
        tasks = ((S1, "t1"), (S1, "t2"), (other, "t3"), (S1, "gone"))
        await asyncio.gather(*[repository.update(scope, task_id, _beating) for scope, task_id in tasks])
        for reader in self._readers(repository):
            assert [record.version for record in [*await reader.list(S1), *await reader.list(other)]] == [2, 2, 2]

    async def check_results_come_back_whole(self, repository: TaskRepository) -> None:
        for number, text in enumerate(("", "short", "\u017elu\u0165\r\n\u2028" * 3000, "x" * 200_000)):
            await repository.add(task_record(f"t{number}", node="n1", status=TaskStatus.RUNNING))
            before = await repository.get(S1, f"t{number}")
            assert before is not None
            kept = await repository.keep_result(before, text)
            ended = await repository.update(S1, f"t{number}", _finishing(TaskStatus.COMPLETED, text, kept))
            for reader in self._readers(repository):
                found = await reader.get(S1, f"t{number}")
                assert found == ended
                assert found is not None
                assert await reader.read_result(found) == text

    async def check_open_scopes_are_those_with_work_left(self, repository: TaskRepository) -> None:
        scopes = [TaskScope("boss", "s1"), TaskScope("boss", "s1", "ann"), TaskScope("boss", "s2", "bob")]
        for number, scope in enumerate(scopes):
            await repository.add(task_record(f"t{number}", scope, node="n1", status=TaskStatus.RUNNING))
        for reader in self._readers(repository):
            assert set(await reader.open_scopes()) == set(scopes)
        for number, scope in enumerate(scopes):
            await repository.update(scope, f"t{number}", _finishing(TaskStatus.COMPLETED))
            for reader in self._readers(repository):
                assert set(scopes[number + 1 :]) <= set(await reader.open_scopes())

    async def check_a_task_without_a_log_lives_by_its_heartbeats(self, repository: TaskRepository) -> None:
        other = TaskScope("boss", "s1", "ann")
        await repository.add(task_record("t1", node="n1", status=TaskStatus.RUNNING))
        await repository.add(task_record("t2", node="n1", status=TaskStatus.RUNNING, log_id="elsewhere"))
        await repository.add(task_record("t3", other, status=TaskStatus.COMPLETED))
        for reader in self._readers(repository):
            assert [dict(await reader.liveness(scope)) for scope in (S1, other, TaskScope("boss", "s9"))] == [{}] * 3


def _finishing(
    end: TaskStatus, result: str | None = None, kept: str | None = None
) -> Callable[[TaskRecord], TaskRecord | None]:
    shown = None if kept is not None else result

    def change(record: TaskRecord) -> TaskRecord | None:
        return finish(record, end, NOW + 1, result=shown, result_file=kept)

    return change


_beating = partial(beat, now=NOW + 1, node="n1")
_cancelling = partial(request_cancel, now=NOW + 1)
