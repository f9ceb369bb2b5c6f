"""The life of tasks with several nodes over one repository, whatever happens to the nodes and to their clocks."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from retinue.tasks import MemoryTaskRepository, TaskRecord, TaskScope, TaskSettings, TaskStatus
from retinue.tasks.sweeper import Sweeper
from retinue.tasks.task import at, await_human, beat, begin, finish, request_cancel
from retinue.testing.tasks import NOW, task_record

from ..effort import share

T = TypeVar("T")

SETTINGS = TaskSettings(heartbeat=30, orphan_after=600, sweep_every=300)
SCOPE = TaskScope("boss", "s1")
NODES = ("n0", "n1", "n2")
nodes = st.sampled_from(NODES)


class Node:
    """A process: what it executes, its clock, and its sweeper. One that has crashed comes back with nothing."""

    def __init__(self, name: str, repository: MemoryTaskRepository, world: World) -> None:
        self.name, self.world = name, world
        self.skew = 0.0
        self.asleep = False
        self.executes: set[str] = set()
        self.last_beat: dict[str, float] = {}
        self.next_sweep = world.time
        self.sweeper = Sweeper(repository, clock=self.clock, steady=lambda: world.time)

    def clock(self) -> float:
        return NOW + self.world.time + self.skew


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.repository = MemoryTaskRepository(SETTINGS)
        self.nodes = {name: Node(name, self.repository, self) for name in NODES}
        self.count = 0
        self.ended: dict[str, TaskRecord] = {}
        self.ran_on: dict[str, set[str]] = {}

    def teardown(self) -> None:
        self.end_of_the_story()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of work that never waits for anything."""
        try:
            work.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("it waits")

    def records(self) -> dict[str, TaskRecord]:
        return {record.task_id: record for record in self.wait(self.repository.list(SCOPE))}

    def update(self, task_id: str, change: Any) -> TaskRecord:
        after = self.wait(self.repository.update(SCOPE, task_id, change))
        assert after is not None
        return after

    @initialize()
    def first_task(self) -> None:
        self.a_task_is_added("n0", begins=True)

    @rule(name=nodes, begins=st.booleans())
    def a_task_is_added(self, name: str, begins: bool) -> None:
        """Without a beginning: its process crashed in between."""
        node = self.nodes[name]
        if node.asleep:
            return
        task_id = f"t{self.count}"
        self.count += 1
        moment = at(node.clock())
        self.wait(self.repository.add(task_record(task_id, created_at=moment, last_updated_at=moment)))
        if begins:
            after = self.update(task_id, lambda record: begin(record, node.clock(), node.name))
            assert after.status is TaskStatus.RUNNING
            self.ran_on.setdefault(task_id, set()).add(name)
            node.executes.add(task_id)
            node.last_beat[task_id] = self.time

    @rule(name=nodes, data=st.data())
    def a_node_begins_a_task_that_is_not_its_own(self, name: str, data: st.DataObject) -> None:
        """A bug or a race: only one that nobody has begun may be taken."""
        task_id = data.draw(st.sampled_from(sorted(self.records())))
        node = self.nodes[name]
        before = self.records()[task_id]
        after = self.update(task_id, lambda record: begin(record, node.clock(), node.name))
        if after.version != before.version:
            assert before.status is TaskStatus.PENDING
            self.ran_on.setdefault(task_id, set()).add(name)
            node.executes.add(task_id)
            node.last_beat[task_id] = self.time

    @rule(seconds=st.sampled_from([1, 31, 300, 601, 3000]))
    def time_passes(self, seconds: float) -> None:
        """Whoever is awake beats, looks and sweeps in the meantime, as the service does."""
        end = self.time + seconds
        while self.time < end:
            self.time = min(self.time + SETTINGS.heartbeat, end)
            for node in self.nodes.values():
                if not node.asleep:
                    self.look_after_own(node)
            for node in self.nodes.values():
                if not node.asleep and self.time >= node.next_sweep:
                    node.next_sweep = self.time + SETTINGS.sweep_every
                    self.sweep(node)

    def look_after_own(self, node: Node) -> None:
        known = self.records()
        for task_id in sorted(node.executes):
            record = known[task_id]
            if record.status.is_terminal:
                node.executes.discard(task_id)  # somebody has given up on it: it stops
            elif record.cancel_requested:
                self.finish(node, task_id, TaskStatus.CANCELLED)
            elif self.time - node.last_beat[task_id] >= SETTINGS.heartbeat:
                self.update(task_id, lambda record: beat(record, node.clock(), node.name))
                node.last_beat[task_id] = self.time

    def finish(self, node: Node, task_id: str, status: TaskStatus) -> None:
        node.executes.discard(task_id)
        self.update(task_id, lambda record: finish(record, status, node.clock(), result=f"by {node.name}"))

    @precondition(lambda self: any(node.executes and not node.asleep for node in self.nodes.values()))
    @rule(data=st.data(), status=st.sampled_from([TaskStatus.COMPLETED, TaskStatus.FAILED]))
    def work_ends(self, data: st.DataObject, status: TaskStatus) -> None:
        owned = [(n.name, task) for n in self.nodes.values() if not n.asleep for task in sorted(n.executes)]
        name, task_id = data.draw(st.sampled_from(owned))
        self.finish(self.nodes[name], task_id, status)

    @precondition(lambda self: any(node.executes and not node.asleep for node in self.nodes.values()))
    @rule(data=st.data(), question=st.sampled_from(["really?", None]))
    def a_human_is_asked_or_has_answered(self, data: st.DataObject, question: str | None) -> None:
        owned = [(n.name, task) for n in self.nodes.values() if not n.asleep for task in sorted(n.executes)]
        name, task_id = data.draw(st.sampled_from(owned))
        self.update(task_id, lambda record: await_human(record, self.nodes[name].clock(), question))

    @rule(name=nodes, data=st.data())
    def somebody_cancels(self, name: str, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.records())))
        self.update(task_id, lambda record: request_cancel(record, self.nodes[name].clock()))

    @rule(name=nodes)
    def a_node_crashes(self, name: str) -> None:
        self.nodes[name] = Node(name, self.repository, self)

    @rule(name=nodes)
    def a_node_stalls_or_wakes(self, name: str) -> None:
        self.nodes[name].asleep = not self.nodes[name].asleep
        if not self.nodes[name].asleep:
            self.look_after_own(self.nodes[name])  # the first thing it does is to show that it lives

    @rule(name=nodes, seconds=st.sampled_from([300, 601, 3000]), finishes=st.booleans())
    def a_node_stalls_and_goes_on_before_it_looks(self, name: str, seconds: float, finishes: bool) -> None:
        node = self.nodes[name]
        node.asleep = True
        self.time_passes(seconds)
        self.a_terminal_record_never_changes()
        node.asleep = False
        for task_id in sorted(node.executes):
            self.update(task_id, lambda record: beat(record, node.clock(), node.name))
            node.last_beat[task_id] = self.time
            if finishes:
                self.finish(node, task_id, TaskStatus.COMPLETED)

    @rule(name=nodes, seconds=st.sampled_from([-86_400.0, -700.0, -5.0, 5.0, 700.0, 86_400.0, 3e7]))
    def a_clock_jumps(self, name: str, seconds: float) -> None:
        self.nodes[name].skew += seconds

    @rule(name=nodes)
    def a_node_sweeps(self, name: str) -> None:
        if not self.nodes[name].asleep:
            self.sweep(self.nodes[name])

    def sweep(self, node: Node) -> None:
        alive = {task for other in self.nodes.values() if not other.asleep for task in other.executes}
        before = self.records()
        swept = self.wait(node.sweeper.sweep(node.executes))
        for record in swept:
            assert before[record.task_id].status in (TaskStatus.PENDING, TaskStatus.RUNNING)
            assert record.task_id not in alive, "a task was given up on whose executor shows life"

    @invariant()
    def a_terminal_record_never_changes(self) -> None:
        for task_id, record in self.records().items():
            if record.status.is_terminal:
                assert self.ended.setdefault(task_id, record) == record
            else:
                assert task_id not in self.ended

    @invariant()
    def no_task_was_run_by_two_nodes(self) -> None:
        assert all(len(names) <= 1 for names in self.ran_on.values())

    def end_of_the_story(self) -> None:
        """Every executor is gone; one sweeper is left, whose clock is years behind."""
        if not self.records():
            return
        left = Node("left", self.repository, self)
        left.skew = -1e8
        for _ in range(4):
            self.wait(left.sweeper.sweep())
            self.time += SETTINGS.sweep_every
        for record in self.records().values():
            waits = record.awaiting is not None and not record.cancel_requested
            assert record.status.is_terminal or waits, f"{record.task_id} stays {record.status} for ever"
        self.a_terminal_record_never_changes()


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=share(100), stateful_step_count=30, deadline=None)
