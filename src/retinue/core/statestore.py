"""The store that holds the state of one run: registered keys, atomic commits, numbered revisions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from reprlib import repr as short_repr
from threading import RLock
from typing import Any

from msgspec import Struct

from .errors import (
    ConfigurationError,
    KeyAlreadyRegistered,
    KeyEncodeError,
    PluginAlreadyInstalled,
    PluginNotInstalled,
    ReducerFailed,
    RevisionConflict,
    UnknownKey,
)
from .hooks import Registrar, registered
from .plugins import Plugin, check_plugin
from .schema import isolate
from .state import (
    MutationBatch,
    PersistedState,
    Scope,
    Seed,
    Snapshot,
    StateCommand,
    StateKey,
    UnknownKeyPolicy,
    as_batch,
    as_persisted,
)

_log = logging.getLogger(__name__)


class Commit(Struct, frozen=True, eq=False):
    """A commit, for hooks on it. Indexing it reads the new snapshot."""

    snapshot: Snapshot
    revision: int
    previous_revision: int
    changes: dict[str, Any]
    """The new values of the persistent keys that were written, as JSON."""
    writes: dict[str, Any] = {}
    """The new values of all keys that were written; as JSON where that was asked for."""

    def __getitem__(self, key: StateKey[Any, Any]) -> Any:
        return self.snapshot[key]

    def get(self, key: StateKey[Any, Any]) -> Any:
        return self.snapshot.get(key)


class StateStore:
    """Copy on write: a commit makes a new map, so snapshots taken before it stay as they were."""

    __slots__ = ("_hooks", "_keys", "_lock", "_owners", "_plugins", "_values", "revision")

    def __init__(self, plugins: tuple[Plugin, ...] = ()) -> None:
        self._keys: dict[str, StateKey[Any, Any]] = {}
        self._owners: dict[str, str] = {}
        self._plugins: dict[str, Plugin] = {}
        self._values: dict[str, Any] = {}
        self._hooks: list[Callable[[Commit], object]] = []
        self._lock = RLock()
        self.revision = 0
        for plugin in plugins:
            self.install(plugin)

    def empty_copy(self) -> StateStore:
        """Return a store with the same plugins and no values; this is cheap."""
        made = StateStore.__new__(StateStore)
        made._plugins, made._keys, made._owners = self._plugins, self._keys, self._owners
        made._values, made._hooks, made._lock, made.revision = {}, [], self._lock, 0
        return made

    def install(self, plugin: Plugin) -> Registrar:
        """Register a plugin's keys, all or none; return all that it registered."""
        check_plugin(plugin, "StateStore.install")
        registrar = registered(plugin)
        with self._lock:
            if plugin.name in self._plugins:
                raise PluginAlreadyInstalled(plugin.name)
            for key in registrar.keys:
                if key.name in self._keys:
                    raise KeyAlreadyRegistered(key.name, self._owners[key.name])
            # New maps, not updates: snapshots and stores made from this one share the old ones.
            self._plugins = {**self._plugins, plugin.name: plugin}
            self._keys = {**self._keys, **{key.name: key for key in registrar.keys}}
            self._owners = {**self._owners, **{key.name: plugin.name for key in registrar.keys}}
        return registrar

    def install_once(self, plugin: Plugin) -> Registrar:
        """Install a plugin that may be there already; return what it registers."""
        if plugin.name not in self._plugins:
            return self.install(plugin)
        return registered(plugin)

    def uninstall(self, name: str) -> int:
        """Remove a plugin with its keys and their values; returns the revision."""
        with self._lock:
            if name not in self._plugins:
                raise PluginNotInstalled(name)
            self._plugins = {key: plugin for key, plugin in self._plugins.items() if key != name}
            gone = {key for key, owner in self._owners.items() if owner == name}
            self._keys = {key: value for key, value in self._keys.items() if key not in gone}
            self._owners = {key: owner for key, owner in self._owners.items() if key not in gone}
            written = gone & self._values.keys()
            if not written:
                return self.revision
            previous = self.revision
            self._values = {key: value for key, value in self._values.items() if key not in gone}
            self.revision += 1
            commit = Commit(self.snapshot(), self.revision, previous, {})
        self._notify(commit)
        return commit.revision

    def key(self, name: str) -> StateKey[Any, Any] | None:
        """The registered key of that name."""
        return self._keys.get(name)

    def commit(self, batch: MutationBatch | StateCommand) -> int:
        """Apply a batch whole or not at all; returns the new revision."""
        return self.apply(batch).revision

    def apply(self, batch: MutationBatch | StateCommand, *, as_json: bool = False) -> Commit:
        """Commit a batch and return the changes. An empty batch changes nothing and calls no hook.

        With `as_json`, every value must have a JSON form that is read back as it is.
        """
        patch = as_batch(batch)
        with self._lock:
            previous = self.revision
            if patch.base_revision is not None and patch.base_revision != previous:
                raise RevisionConflict(patch.base_revision, previous)
            if not patch.updates:
                return Commit(self.snapshot(), previous, previous, {})
            values, changes = self._reduced(patch)
            writes = {key.name: values[key.name] for key, _ in patch.updates}
            if as_json:
                writes = self._as_json(writes, changes)
            self._values = values
            self.revision = revision = previous + 1
            commit = Commit(Snapshot(self._keys, values, revision), revision, previous, changes, writes)
        if self._hooks:
            self._notify(commit)
        return commit

    def _as_json(self, writes: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        return {
            name: changes[name] if name in changes else self._keys[name].encode_exactly(value)
            for name, value in writes.items()
        }

    def preview(self, batch: MutationBatch | StateCommand) -> Snapshot:
        """Return the snapshot there would be after a commit; raise what the commit would raise."""
        with self._lock:
            return Snapshot(self._keys, self._reduced(as_batch(batch))[0], self.revision)

    check = preview

    def values(self, *, as_json: bool) -> dict[str, Any]:
        """Return every written value, by key name."""
        return self._as_json(self._values, {}) if as_json else self._values

    def restore(self, values: Mapping[str, Any], revision: int, *, as_json: bool) -> None:
        """Replace everything with earlier `values`; UnknownKey names a key that is not registered."""
        snapshot = self.snapshot_of(values, revision, as_json=as_json)
        with self._lock:
            self._values, self.revision = dict(snapshot.values()), revision

    def snapshot_of(self, values: Mapping[str, Any], revision: int, *, as_json: bool) -> Snapshot:
        """Return a snapshot of earlier `values`."""
        for name in values:
            if name not in self._keys:
                raise UnknownKey(name)
        read = {name: self._keys[name].decode(value) for name, value in values.items()} if as_json else dict(values)
        return Snapshot(self._keys, read, revision)

    def _reduced(self, patch: MutationBatch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return all values after a batch, and the new values of persistent keys as JSON."""
        keys, values = self._keys, self._values.copy()
        changes: dict[str, Any] = {}
        for key, update in patch.updates:
            name = key.name
            known = keys.get(name)
            if known is None:
                raise UnknownKey(name)
            if update.__class__ is known.plain:  # as most are: nothing to copy, check or reduce
                values[name] = encoded = update
            else:
                values[name] = value = _reduce(known, values, update)
                # A value that leaves the run or stays with the thread needs a JSON form.
                is_kept = known.persistent or (known.scope == "thread" and not known.sure)
                encoded = known.encode(value) if is_kept else None
            if known.persistent:
                changes[name] = encoded
        return values, changes

    def snapshot(self) -> Snapshot:
        return Snapshot(self._keys, self._values, self.revision)

    def on_commit(self, hook: Callable[[Commit], object]) -> None:
        """Call `hook` after every commit, in order of registration, with the new snapshot."""
        self._hooks.append(hook)

    def export_persisted(self) -> PersistedState:
        """Return the persistent keys that were written, as JSON."""
        return self._export([name for name in self._values if self._keys[name].persistent] if self._values else ())

    def export_scope(self, scope: Scope) -> PersistedState:
        """Return every written key of one scope as JSON, persistent or not. A thread keeps these between runs."""
        return self._export([name for name in self._values if self._keys[name].scope == scope] if self._values else ())

    def _export(self, names: Iterable[str]) -> PersistedState:
        keys, values = self._keys, self._values
        exported = PersistedState(self.revision)
        for name in names:
            value = values[name]
            exported.extensions[name] = value if value.__class__ is keys[name].plain else keys[name].encode(value)
        return exported

    def restore_persisted(
        self, persisted: PersistedState, policy: UnknownKeyPolicy | str = UnknownKeyPolicy.ERROR
    ) -> None:
        """Replace everything with an exported state, revision included."""
        given: Any = persisted
        if not isinstance(given, PersistedState):
            raise ConfigurationError(f"restore_persisted takes a PersistedState, not {short_repr(given)}")
        with self._lock:
            self._values = self._decoded(persisted, policy)
            self.revision = persisted.revision

    def apply_seed(self, seed: Seed, policy: UnknownKeyPolicy | str = UnknownKeyPolicy.ERROR) -> None:
        """Merge values in before a run begins: atomic, moves no revision, calls no hook."""
        persisted = seed if isinstance(seed, PersistedState) else as_persisted(seed)
        with self._lock:
            self._values = {**self._values, **self._decoded(persisted, policy)}

    def _decoded(self, persisted: PersistedState, policy: UnknownKeyPolicy | str) -> dict[str, Any]:
        policy = UnknownKeyPolicy(policy)
        decoded: dict[str, Any] = {}
        for name, value in persisted.extensions.items():
            key = self._keys.get(name)
            if key is not None:
                decoded[name] = isolate(key.decode(value))
            elif policy is UnknownKeyPolicy.ERROR:
                raise UnknownKey(name)
        return decoded

    def _notify(self, commit: Commit) -> None:
        for hook in self._hooks:
            try:
                hook(commit)
            except Exception:
                _log.exception("a commit hook failed at revision %d; the commit stands", commit.revision)


def _reduce(key: StateKey[Any, Any], values: dict[str, Any], update: Any) -> Any:
    """Return the value of a key after an update, sharing nothing with the update."""
    try:
        update = isolate(update)
    except Exception as exc:
        raise KeyEncodeError(key.name, f"it cannot be copied: {exc}") from exc
    if key.reduce is None:
        value = update
    else:
        try:
            current = isolate(values[key.name]) if key.name in values else key.default()
            value = key.reduce(current, update)
        except Exception as exc:
            raise ReducerFailed(key.name, f"{type(exc).__name__}: {exc}") from exc
    if not key.accepts(value):
        raise KeyEncodeError(
            key.name, f"expected {getattr(key.type, '__name__', key.type)}, got {type(value).__name__}"
        )
    return value
