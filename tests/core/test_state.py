"""State keys, batches and the store."""

from __future__ import annotations

import json
import pickle
import threading
from dataclasses import dataclass, field
from typing import Any, TypedDict

import pytest
from pydantic import BaseModel

from retinue import (
    MutationBatch,
    PersistedState,
    Plugin,
    Registrar,
    StateCommand,
    StateKey,
    StateStore,
    UnknownKeyPolicy,
)
from retinue.errors import (
    KeyAlreadyRegistered,
    KeyDecodeError,
    KeyEncodeError,
    MissingValue,
    PluginAlreadyInstalled,
    PluginNotInstalled,
    ReducerFailed,
    RevisionConflict,
    StateError,
    UnknownKey,
)


@dataclass
class Findings:
    items: list[str] = field(default_factory=list[str])


@dataclass
class Config:
    topic: str
    max_sources: int


class Model(BaseModel):
    n: int = 0


class Profile(TypedDict, total=False):
    name: str


findings: StateKey[Findings, Findings] = StateKey("research.findings", Findings, persistent=True)
config: StateKey[Config, Config] = StateKey("research.config", Config, persistent=True)
secret: StateKey[str, str] = StateKey("research.secret", str)
seen: StateKey[set[str], str] = StateKey(
    "research.seen", set[str], update=str, reduce=lambda s, url: s | {url}, merge="commutative", scope="thread"
)
count: StateKey[int, int] = StateKey("count", int, reduce=lambda a, b: a + b, persistent=True)


class Keys(Plugin):
    def __init__(self, name: str, *keys: StateKey[Any, Any]) -> None:
        self.name = name
        self._keys = keys

    def register(self, r: Registrar) -> None:
        for key in self._keys:
            r.key(key)


def store() -> StateStore:
    return StateStore((Keys("research", findings, config, secret, seen, count),))


def test_an_untouched_key_has_its_default_and_get_gives_none() -> None:
    snapshot = store().snapshot()
    assert snapshot[findings] == Findings()
    assert snapshot.get(findings) is None
    assert snapshot[seen] == set()
    assert findings not in snapshot
    with pytest.raises(MissingValue, match=r"research.config.*default="):
        snapshot[config]


def test_an_unregistered_key_raises_everywhere() -> None:
    s, other = store(), StateKey("other", int)
    for use in (
        lambda: s.snapshot()[other],
        lambda: s.snapshot().get(other),
        lambda: s.commit(MutationBatch().update(other, 1)),
        lambda: s.apply_seed(PersistedState.of({other: 1})),
        lambda: s.restore_persisted(PersistedState.of({other: 1})),
    ):
        with pytest.raises(UnknownKey, match="'other' is not registered"):
            use()


def test_a_commit_is_one_revision_and_hooks_see_the_new_snapshot() -> None:
    s, told = store(), list[tuple[int, int, Any]]()
    s.on_commit(lambda c: told.append((c.previous_revision, c.revision, c.snapshot[count])))
    s.on_commit(lambda c: told.append((-1, c.revision, c[count])))
    assert s.commit(MutationBatch().update(count, 2).update(count, 3)) == 1
    assert s.commit(MutationBatch()) == 1
    assert told == [(0, 1, 5), (-1, 1, 5)]
    assert s.revision == 1


def test_a_hook_that_fails_does_not_undo_the_commit() -> None:
    s = store()
    s.on_commit(lambda c: 1 / 0)
    assert s.commit(StateCommand().update(count, 2)) == 1
    assert s.snapshot()[count] == 2


def test_nothing_is_applied_when_anything_is_wrong() -> None:
    broken: StateKey[int, int] = StateKey("broken", int, reduce=lambda a, b: a // b)
    s = StateStore((Keys("k", count, broken, findings, name := StateKey("name", str, persistent=True)),))
    s.commit(MutationBatch().update(count, 1))
    with pytest.raises(RevisionConflict, match="made at revision 0, the store is at 1"):
        s.commit(MutationBatch(base_revision=0).update(count, 1))
    with pytest.raises(UnknownKey):
        s.commit(MutationBatch().update(count, 1).update(seen, "x"))
    with pytest.raises(ReducerFailed, match="'broken' failed: ZeroDivisionError"):
        s.commit(MutationBatch().update(count, 1).update(broken, 0))
    with pytest.raises(KeyEncodeError, match=r"research\.findings"):
        s.commit(MutationBatch().update(count, 1).update(findings, "not findings"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(KeyEncodeError, match="'name'.*expected str, got int"):
        s.commit(MutationBatch().update(count, 1).update(name, 5))  # pyright: ignore[reportArgumentType]
    assert (s.revision, s.snapshot()[count]) == (1, 1)


def test_snapshots_do_not_change_and_cannot_be_changed() -> None:
    s = store()
    given = Findings(["a"])
    s.commit(MutationBatch().update(findings, given))
    before = s.snapshot()
    given.items.append("slipped in")
    before[findings].items.append("slipped in too")
    s.commit(MutationBatch().update(findings, Findings(["b"])))
    assert before[findings] == Findings(["a"])
    assert s.snapshot()[findings] == Findings(["b"])
    assert before.revision == 1


def test_a_reducer_that_changes_its_argument_does_not_reach_older_snapshots() -> None:
    def add(value: list[int], update: int) -> list[int]:
        value.append(update)
        return value

    key: StateKey[list[int], int] = StateKey("numbers", list[int], update=int, reduce=add)
    s = StateStore((Keys("k", key),))
    snapshots = [s.snapshot()]
    for n in range(3):
        s.commit(MutationBatch().update(key, n))
        snapshots.append(s.snapshot())
    assert [snapshot[key] for snapshot in snapshots] == [[], [0], [0, 1], [0, 1, 2]]


def test_export_holds_what_is_persistent_and_was_written() -> None:
    s = store()
    s.commit(MutationBatch().update(config, Config("rust", 5)).update(secret, "x").update(seen, "u"))
    exported = s.export_persisted()
    assert exported.extensions == {"research.config": {"topic": "rust", "max_sources": 5}}
    assert exported.revision == 1
    assert exported[config] == Config("rust", 5)
    assert exported.get(findings) is None
    assert exported[findings] == Findings()
    with pytest.raises(KeyError, match=r"^'research.findings'$"):
        exported["research.findings"]
    with pytest.raises(
        KeyError, match=r"'report' has no value yet and its type has no default: give StateKey\(default="
    ):
        exported[StateKey("report", Config, persistent=True)]
    assert s.export_scope("thread").extensions == {"research.seen": ["u"]}


def test_restore_replaces_and_seed_merges() -> None:
    s = store()
    s.commit(MutationBatch().update(count, 1).update(secret, "mine"))
    s.apply_seed({count: 7, seen: {"a"}})
    assert (s.revision, s.snapshot()[count], s.snapshot()[secret], s.snapshot()[seen]) == (1, 7, "mine", {"a"})
    s.restore_persisted(PersistedState(revision=9, extensions={"count": 3}))
    assert (s.revision, s.snapshot()[count], s.snapshot().get(secret)) == (9, 3, None)


def test_seed_and_restore_are_atomic_and_the_policy_may_be_a_word() -> None:
    s = store()
    s.commit(MutationBatch().update(count, 1))
    bad = PersistedState(extensions={"count": 5, "research.config": {"topic": "x"}})
    with pytest.raises(KeyDecodeError, match=r"research\.config.*max_sources"):
        s.apply_seed(bad)
    with pytest.raises(KeyDecodeError):
        s.restore_persisted(bad)
    assert s.snapshot()[count] == 1
    s.apply_seed(PersistedState(extensions={"count": 5, "unknown": 1}), "skip")
    assert s.snapshot()[count] == 5
    with pytest.raises(UnknownKey):
        s.apply_seed(PersistedState(extensions={"unknown": 1}), UnknownKeyPolicy.ERROR)
    with pytest.raises(ValueError, match="whatever"):
        s.apply_seed(PersistedState(), "whatever")


@pytest.mark.parametrize(
    ("kind", "value", "encoded"),
    [
        (int, 3, 3),
        (str, "x", "x"),
        (float, 1, 1),
        (bool, True, True),
        (list, [1, "a"], [1, "a"]),
        (dict, {"a": 1}, {"a": 1}),
        (list[int], [1], [1]),
        (set[str], {"a"}, ["a"]),
        (dict[int, str], {1: "a"}, {"1": "a"}),
        (tuple[int, str], (1, "a"), [1, "a"]),
        (int | None, None, None),
        (Config, Config("a", 1), {"topic": "a", "max_sources": 1}),
        (list[Config], [Config("a", 1)], [{"topic": "a", "max_sources": 1}]),
        (Model, Model(n=2), {"n": 2}),
        (dict[str, Model], {"a": Model(n=2)}, {"a": {"n": 2}}),
        (Profile, {"name": "Ann"}, {"name": "Ann"}),
    ],
)
def test_value_types_travel_as_json(kind: Any, value: Any, encoded: Any) -> None:
    key = StateKey("k", kind, persistent=True)
    s = StateStore((Keys("k", key),))
    s.commit(MutationBatch().update(key, value))
    assert s.export_persisted().extensions == {"k": encoded}
    other = StateStore((Keys("k", key),))
    other.restore_persisted(s.export_persisted())
    assert other.snapshot()[key] == value
    assert PersistedState.of({key: value})[key] == value


@dataclass
class Tagged:
    tags: set[int | str]
    by_name: dict[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])


class TaggedModel(BaseModel):
    tags: set[int | str]
    below: list[TaggedModel] = []


@dataclass
class Holder:
    model: TaggedModel


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (set[int], lambda order: set(order)),
        (list[set[int | str]], lambda order: [{*order, "a"}]),
        (Tagged, lambda order: Tagged(set(order), {"z": frozenset(order), "a": frozenset()})),
        (TaggedModel, lambda order: TaggedModel(tags=set(order), below=[TaggedModel(tags={*order, "a"})])),
        (Holder, lambda order: Holder(TaggedModel(tags=set(order)))),
    ],
)
def test_equal_sets_have_equal_json(kind: Any, make: Any) -> None:
    """Sets iterate in an order that depends on how they were made and, for text, on the process."""
    key: StateKey[Any, Any] = StateKey("k", kind)
    assert list({0, 8}) != list({8, 0})
    one, other = (PersistedState.of({key: make(order)}) for order in ([0, 8], [8, 0]))
    assert json.dumps(one.extensions) == json.dumps(other.extensions)
    assert one[key] == make([0, 8])


def test_sorting_sets_leaves_dicts_in_their_order() -> None:
    key: StateKey[Any, Any] = StateKey("k", dict[str, set[int]])
    assert list(PersistedState.of({key: {"z": {10, 9}, "a": set()}}).extensions["k"].items()) == [
        ("z", [9, 10]),
        ("a", []),
    ]


def test_defaults_are_fresh() -> None:
    key = StateKey("k", dict[str, list[int]], default={"a": [1]})
    made = StateKey("m", Config, default=lambda: Config("x", 1))
    snapshot = StateStore((Keys("k", key, made),)).snapshot()
    snapshot[key]["a"].append(2)
    snapshot[made].max_sources = 99
    assert snapshot[key] == {"a": [1]}
    assert snapshot[made] == Config("x", 1)


def test_plugins_install_whole_or_not_at_all() -> None:
    s = store()
    with pytest.raises(PluginAlreadyInstalled, match="'research'"):
        s.install(Keys("research"))
    other = StateKey("other", int)
    with pytest.raises(KeyAlreadyRegistered, match="'count' is already registered by plugin 'research'"):
        s.install(Keys("second", other, count))
    with pytest.raises(UnknownKey):
        s.snapshot()[other]
    with pytest.raises(KeyAlreadyRegistered):
        StateStore((Keys("twice", other, StateKey("other", str)),))


def test_uninstall_forgets_values_in_one_revision() -> None:
    s = store()
    s.install(Keys("more", more := StateKey("more", int)))
    s.commit(MutationBatch().update(more, 1).update(count, 1))
    before = s.snapshot()
    told: list[int] = []
    s.on_commit(lambda c: told.append(c.revision))
    assert s.uninstall("more") == 2
    assert (told, before[more]) == ([2], 1)
    with pytest.raises(UnknownKey):
        s.snapshot()[more]
    with pytest.raises(PluginNotInstalled):
        s.uninstall("more")
    s.install(Keys("more", more))
    assert s.snapshot()[more] == 0


def test_batches_chain_and_refuse_to_mix_revisions() -> None:
    batch = MutationBatch().update(count, 1).extend(MutationBatch(base_revision=3).update(count, 2))
    assert (batch.base_revision, [value for _, value in batch.updates]) == (3, [1, 2])
    with pytest.raises(StateError, match="made at revision 3 cannot take one made at 4"):
        batch.extend(MutationBatch(base_revision=4))
    command = StateCommand().update(count, 1).extend(batch).schedule("a").emit("e").event({"x": 1})
    assert (len(command.patch.updates), command.actions, command.effects, command.events) == (
        3,
        ["a"],
        ["e"],
        [{"x": 1}],
    )


def test_many_threads_commit_one_after_the_other() -> None:
    s = store()
    threads = [
        threading.Thread(target=lambda: [s.commit(MutationBatch().update(count, 1)) for _ in range(200)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (s.revision, s.snapshot()[count]) == (1600, 1600)


def test_wrong_declarations_raise_at_once() -> None:
    with pytest.raises(ValueError, match="merge is"):
        StateKey("k", int, merge="sometimes")  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(ValueError, match="scope is"):
        StateKey("k", int, scope="galaxy")  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(ValueError, match="needs a name"):
        StateKey("", int)


def test_errors_survive_pickling() -> None:
    for error in (RevisionConflict(1, 2), UnknownKey("k"), KeyDecodeError("k", "why"), ReducerFailed("k", "why")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
