"""State: typed keys, the updates made to them, and the forms in which state travels."""

from __future__ import annotations

import builtins
from collections.abc import Callable, ItemsView, Iterator, Mapping
from enum import StrEnum
from reprlib import repr as short_repr
from types import UnionType
from typing import Any, Generic, Literal, TypedDict, Unpack, cast, get_origin, is_typeddict, overload

from msgspec import Struct, field
from typing_extensions import TypeVar

from .content import is_no_type, to_json_value
from .errors import ConfigurationError, KeyDecodeError, KeyEncodeError, MissingValue, StateError, UnknownKey
from .schema import JsonCodec, codec_for, default_of, isolate

V = TypeVar("V")
U = TypeVar("U", default=V)
W = TypeVar("W")

Scope = Literal["run", "thread"]
Merge = Literal["exclusive", "commutative"]

_UNSET: Any = object()
_PLAIN = (int, bool)


class UnknownKeyPolicy(StrEnum):
    """The treatment of stored keys that the store does not know."""

    ERROR = "error"
    SKIP = "skip"


class KeyOptions(TypedDict, total=False):
    """The plain options of a `StateKey`, which describes them."""

    merge: Merge
    scope: Scope
    persistent: bool
    sure: bool


class StateKey(Generic[V, U]):
    """A named, typed slot of state. Without `reduce`, an update replaces the value.

    `scope`: how long the value lives. `merge`: may parallel calls both write it? `persistent`: is it exported, in the
    result and sent to clients? `default`: a value, or a function that makes one; otherwise the type is called. `sure`:
    every value has a JSON form, so commits need not check it.
    """

    @overload
    def __init__(
        self: StateKey[W, W],
        name: str,
        type: type[W],
        *,
        reduce: Callable[[W, W], W] | None = None,
        default: W | Callable[[], W] = ...,
        **options: Unpack[KeyOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        type: type[V],
        *,
        update: type[U],
        reduce: Callable[[V, U], V],
        default: V | Callable[[], V] = ...,
        **options: Unpack[KeyOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: StateKey[Any, Any],
        name: str,
        type: UnionType,
        *,
        update: Any = None,
        reduce: Callable[[Any, Any], Any] | None = None,
        default: Any = ...,
        **options: Unpack[KeyOptions],
    ) -> None: ...
    def __init__(
        self,
        name: str,
        type: Any,
        *,
        update: Any = None,
        reduce: Callable[[V, U], V] | None = None,
        merge: Merge = "exclusive",
        scope: Scope = "run",
        persistent: bool = False,
        default: V | Callable[[], V] = _UNSET,
        sure: bool = False,
    ) -> None:
        given: Any = name
        if not isinstance(given, str) or not given:
            raise ConfigurationError(f"a StateKey needs a name, as text, not {given!r}")
        if is_no_type(type):
            raise ConfigurationError(f"StateKey {name!r}: give a type, such as int or list[str], not {type!r}")
        if merge not in ("exclusive", "commutative"):
            raise ConfigurationError(f"StateKey {name!r}: merge is 'exclusive' or 'commutative', not {merge!r}")
        if scope not in ("run", "thread"):
            raise ConfigurationError(f"StateKey {name!r}: scope is 'run' or 'thread', not {scope!r}")
        if not (reduce is None or callable(cast("Any", reduce))):
            advice = "write reduce=lambda value, update: …"
            raise ConfigurationError(f"StateKey {name!r}: reduce is a function, not {short_repr(reduce)}: {advice}")
        self.name, self.type = name, type
        self.reduce, self.merge, self.scope, self.persistent = reduce, merge, scope, persistent
        self._default, self.sure = default, sure
        self._codec = codec_for(type)
        self._update_codec = self._codec if update is None else codec_for(update)
        plain = get_origin(type) or type
        has_class = isinstance(plain, builtins.type) and plain not in (object, UnionType) and not is_typeddict(plain)
        self._class: Any = plain if has_class else None
        """The class of the values, such as `list` for `list[int]`, if the type has one."""
        self.plain: Any = type if reduce is None and type in _PLAIN else None
        """The type of updates that are the value as they are: nothing to copy, check or encode."""

    def __repr__(self) -> str:
        return f"StateKey({self.name!r})"

    def default(self) -> V:
        """Return a fresh default value."""
        given = self._default
        if given is not _UNSET:
            return cast("V", given() if callable(given) else isolate(given))
        try:
            return default_of(self.type)
        except (TypeError, ValueError):
            raise MissingValue(self.name) from None

    def accepts(self, value: Any) -> bool:
        """Return whether a value has the class of the key's type; of `list[int]`, whether it is a list."""
        kind = self._class
        return kind is None or isinstance(value, kind) or (kind is float and isinstance(value, int))

    def encode(self, value: V) -> Any:
        """The value as JSON; KeyEncodeError names this key."""
        try:
            return self._codec.encode(value)
        except (TypeError, ValueError) as exc:
            raise KeyEncodeError(self.name, str(exc)) from exc

    def encode_update(self, update: U) -> Any:
        """Return an update as JSON; KeyEncodeError names this key."""
        try:
            return self._update_codec.encode(update)
        except (TypeError, ValueError) as exc:
            raise KeyEncodeError(self.name, f"of an update: {exc}") from exc

    def decode_update(self, update: Any) -> U:
        """Return an update from JSON; KeyDecodeError names this key."""
        try:
            return self._update_codec.decode(update)
        except (TypeError, ValueError) as exc:
            raise KeyDecodeError(self.name, f"of an update: {exc}") from exc

    def encode_exactly(self, value: V) -> Any:
        """Return the value as JSON; KeyEncodeError if it would not be read back as it is."""
        encoded = self.encode(value)
        if isinstance(self._codec, JsonCodec) and encoded != value:
            raise KeyEncodeError(self.name, f"{value!r:.80} would be read back as {encoded!r:.80}")
        return encoded

    def decode(self, value: Any) -> V:
        """The value from JSON; KeyDecodeError names this key."""
        try:
            return self._codec.decode(value)
        except (TypeError, ValueError) as exc:
            raise KeyDecodeError(self.name, str(exc)) from exc


def as_key(key: Any) -> StateKey[Any, Any]:
    """Return a key as it is; its name alone is not enough."""
    if not isinstance(key, StateKey):
        raise _not_state(key)
    return cast("StateKey[Any, Any]", key)


def key_items(values: Any) -> ItemsView[Any, Any]:
    """Return the items of what a caller gave as `{key: value}`."""
    if not isinstance(values, Mapping):
        raise _not_state(values)
    return cast("Mapping[Any, Any]", values).items()


def _not_state(given: Any) -> ConfigurationError:
    return ConfigurationError(f"state is given as {{key: value}} with StateKey objects, not {short_repr(given)}")


def as_batch(batch: Any) -> MutationBatch:
    """Return the updates that a caller gave as a MutationBatch or a StateCommand."""
    patch = batch.patch if isinstance(batch, StateCommand) else batch
    if not isinstance(patch, MutationBatch):
        raise ConfigurationError(
            f"updates are a MutationBatch, not {short_repr(batch)}: MutationBatch().update(key, value)"
        )
    return patch


class MutationBatch(Struct, eq=False):
    """Updates that are committed together or not at all. Methods change it in place and return it."""

    base_revision: int | None = None
    updates: list[tuple[StateKey[Any, Any], Any]] = []

    def update(self, key: StateKey[Any, W], value: W) -> MutationBatch:
        self.updates.append((as_key(key), value))
        return self

    def extend(self, other: MutationBatch) -> MutationBatch:
        """Append another batch; StateError if both name a base revision and they differ."""
        other = as_batch(other)
        if other.base_revision is not None:
            if self.base_revision not in (None, other.base_revision):
                raise StateError(
                    f"a batch made at revision {self.base_revision} cannot take one made at {other.base_revision}"
                )
            self.base_revision = other.base_revision
        self.updates.extend(other.updates)
        return self

    def __bool__(self) -> bool:
        return bool(self.updates)

    def __repr__(self) -> str:
        return f"MutationBatch({', '.join(key.name for key, _ in self.updates)})"


class StateCommand(Struct, eq=False):
    """Changes that a tool or hook asks for: state, actions, effects and events, in one commit."""

    patch: MutationBatch = field(default_factory=MutationBatch)
    actions: list[Any] = []
    effects: list[Any] = []
    events: list[Any] = []

    def update(self, key: StateKey[Any, W], value: W) -> StateCommand:
        self.patch.updates.append((as_key(key), value))
        return self

    def extend(self, batch: MutationBatch | StateCommand) -> StateCommand:
        self.patch.extend(as_batch(batch))
        if isinstance(batch, StateCommand):
            self.actions.extend(batch.actions)
            self.effects.extend(batch.effects)
            self.events.extend(batch.events)
        return self

    def schedule(self, action: Any) -> StateCommand:
        self.actions.append(action)
        return self

    def emit(self, effect: Any) -> StateCommand:
        self.effects.append(effect)
        return self

    def event(self, data: Any) -> StateCommand:
        self.events.append(to_json_value(data))
        return self

    def __bool__(self) -> bool:
        return bool(self.patch.updates or self.actions or self.effects or self.events)

    def __repr__(self) -> str:
        return f"StateCommand({self.patch!r})"


class Snapshot(Struct, frozen=True, eq=False):
    """State at one revision. Later commits, and changes to the values it returns, do not change it."""

    _keys: Mapping[str, StateKey[Any, Any]]
    _values: Mapping[str, Any]
    revision: int
    _takes_any_key: bool = False

    def for_hooks_above(self) -> Snapshot:
        """Return the same for hooks of the runs above, whose keys may be unknown here: those have their defaults."""
        return Snapshot(self._keys, self._values, self.revision, True)

    def __getitem__(self, key: StateKey[V, Any]) -> V:
        """The value, or a fresh default where nothing was written."""
        registered = self._registered(key)
        value = self._values.get(registered.name, _UNSET)
        return registered.default() if value is _UNSET else isolate(value)

    def get(self, key: StateKey[V, Any]) -> V | None:
        """The value, or None where nothing was written."""
        return isolate(self._values.get(self._registered(key).name))

    def __contains__(self, key: StateKey[Any, Any]) -> bool:
        return key.name in self._values

    def values(self) -> Mapping[str, Any]:
        """The written values by key name. They are shared: do not change them."""
        return self._values

    def _registered(self, key: StateKey[V, Any]) -> StateKey[V, Any]:
        try:
            registered = self._keys.get(key.name)
        except AttributeError:
            as_key(key)
            raise
        if registered is None:
            if self._takes_any_key:
                return key
            raise UnknownKey(key.name)
        return registered

    def __repr__(self) -> str:
        return f"Snapshot(revision={self.revision}, {dict(self._values)!r})"


class PersistedState(Struct, gc=False):
    """State as JSON, by key name: exported from a run, or given to one."""

    revision: int = 0
    extensions: dict[str, Any] = {}

    @classmethod
    def of(cls, values: Mapping[StateKey[Any, Any], Any]) -> PersistedState:
        """Encode values by their keys, persistent or not."""
        return cls(extensions={as_key(key).name: key.encode(value) for key, value in key_items(values)})

    @overload
    def __getitem__(self, key: StateKey[V, Any]) -> V: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __getitem__(self, key: StateKey[V, Any] | str) -> Any:
        """The decoded value of a key, or its default if nothing wrote it; by a name the JSON, or KeyError.

        Raise KeyError for an absent key that is not persistent: its value, if it has one, never leaves its run."""
        if isinstance(key, str):
            return self.extensions[key]
        if as_key(key).name in self.extensions:
            return key.decode(self.extensions[key.name])
        if key.persistent:
            return key.default()
        why = "write StateKey(…, persistent=True) for a key that leaves its run"
        raise KeyError(f"{key.name}: not in this state; {why}")

    @overload
    def get(self, key: StateKey[V, Any]) -> V | None: ...
    @overload
    def get(self, key: StateKey[V, Any], default: V) -> V: ...
    @overload
    def get(self, key: str, default: Any = None) -> Any: ...
    def get(self, key: StateKey[V, Any] | str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def __contains__(self, key: StateKey[Any, Any] | str) -> bool:
        return (key if isinstance(key, str) else key.name) in self.extensions

    def __iter__(self) -> Iterator[str]:
        return iter(self.extensions)

    def __len__(self) -> int:
        return len(self.extensions)


Seed = PersistedState | Mapping[StateKey[Any, Any], Any]


def as_persisted(seed: Seed) -> PersistedState:
    """Return the state that a caller gave as PersistedState."""
    given: Any = seed
    if not isinstance(given, PersistedState):
        return PersistedState.of(given)
    try:
        checked = {name: to_json_value(value, exact=True) for name, value in given.extensions.items()}
        return PersistedState(given.revision, checked)
    except (TypeError, ValueError) as exc:
        raise ConfigurationError(f"the state cannot be used: {exc}") from None
