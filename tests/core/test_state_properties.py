"""The store against a model that is too simple to be wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from retinue import MutationBatch, PersistedState, Plugin, Registrar, StateKey, StateStore
from retinue.errors import StateError

from ..effort import share

total: StateKey[int, int] = StateKey("total", int, reduce=lambda a, b: a + b, persistent=True)
tags: StateKey[list[str], str] = StateKey("tags", list[str], update=str, reduce=lambda a, b: [*a, b], persistent=True)
name: StateKey[str, str] = StateKey("name", str, persistent=True)
hidden: StateKey[int, int] = StateKey("hidden", int)
picky: StateKey[int, int] = StateKey("picky", int, reduce=lambda a, b: a + 100 // b, persistent=True)
KEYS = (total, tags, name, hidden, picky)
DEFAULTS = {"total": 0, "tags": [], "name": "", "hidden": 0, "picky": 0}

updates = st.one_of(
    st.tuples(st.just(total), st.integers(-9, 9)),
    st.tuples(st.just(tags), st.text(max_size=3)),
    st.tuples(st.just(name), st.text(max_size=3)),
    st.tuples(st.just(hidden), st.integers(-9, 9)),
    st.tuples(st.just(picky), st.integers(-2, 2)),
)


class All(Plugin):
    name = "all"

    def register(self, r: Registrar) -> None:
        for key in KEYS:
            r.key(key)


def reduced(values: dict[str, Any], batch: list[tuple[StateKey[Any, Any], Any]]) -> dict[str, Any]:
    values = dict(values)
    for key, update in batch:
        old = values.get(key.name, DEFAULTS[key.name])
        match key.name:
            case "total":
                values["total"] = old + update
            case "tags":
                values["tags"] = [*old, update]
            case "picky":
                values["picky"] = old + 100 // update
            case other:
                values[other] = update
    return values


class StoreMachine(RuleBasedStateMachine):
    """Random batches, conflicts, seeds and restores; what was refused must have changed nothing."""

    @initialize()
    def begin(self) -> None:
        self.store = StateStore((All(),))
        self.values: dict[str, Any] = {}
        self.revision = 0
        self.told: list[int] = []
        self.snapshots: list[tuple[Any, dict[str, Any]]] = []
        self.exports: list[tuple[PersistedState, dict[str, Any], int]] = []
        self.store.on_commit(lambda c: self.told.append(c.revision))

    @rule(batch=st.lists(updates, max_size=4), base=st.sampled_from([None, "now", "old"]))
    def commit(self, batch: list[tuple[StateKey[Any, Any], Any]], base: str | None) -> None:
        revision = {None: None, "now": self.revision, "old": self.revision - 1}[base]
        made = MutationBatch(base_revision=revision)
        for key, update in batch:
            made.update(key, update)
        wrong = base == "old" or any(key is picky and update == 0 for key, update in batch)
        told = len(self.told)
        if wrong and (batch or base == "old"):
            with pytest.raises(StateError):
                self.store.commit(made)
            assert len(self.told) == told
            return
        got = self.store.commit(made)
        if batch:
            self.revision += 1
            self.values = reduced(self.values, batch)
            assert self.told[told:] == [self.revision]
        assert got == self.revision

    @rule(seed=st.dictionaries(st.sampled_from(["total", "hidden", "name", "nowhere"]), st.integers(), max_size=3))
    def seed(self, seed: dict[str, Any]) -> None:
        fits = all(key in ("total", "hidden") for key in seed)
        if fits:
            self.store.apply_seed(PersistedState(extensions=seed))
            self.values = {**self.values, **seed}
        else:
            with pytest.raises(StateError):
                self.store.apply_seed(PersistedState(extensions=seed))

    @rule()
    def export(self) -> None:
        kept = {key: value for key, value in self.values.items() if key != "hidden"}
        exported = self.store.export_persisted()
        assert exported.extensions == kept
        self.exports.append((exported, kept, self.revision))

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        if self.exports:
            exported, kept, revision = data.draw(st.sampled_from(self.exports))
            self.store.restore_persisted(exported)
            self.values, self.revision = dict(kept), revision

    @rule()
    def snapshot(self) -> None:
        self.snapshots.append((self.store.snapshot(), dict(self.values)))

    @invariant()
    def everything_agrees(self) -> None:
        assert self.store.revision == self.revision
        self.agrees(self.store.snapshot(), self.values)
        for snapshot, values in self.snapshots:
            self.agrees(snapshot, values)

    def agrees(self, snapshot: Any, values: dict[str, Any]) -> None:
        for key in KEYS:
            assert snapshot[key] == values.get(key.name, DEFAULTS[key.name])
            assert snapshot.get(key) == values.get(key.name)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=share(60), stateful_step_count=30, deadline=None)
