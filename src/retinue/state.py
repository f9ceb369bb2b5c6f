"""Typed state: keys, snapshots, the commands that change them, and the store that commits them."""

# fmt: off
from .core.state import MutationBatch, PersistedState, Seed, Snapshot, StateCommand, StateKey, UnknownKeyPolicy
from .core.statestore import Commit, StateStore

__all__ = [
    "Commit", "MutationBatch", "PersistedState", "Seed", "Snapshot", "StateCommand", "StateKey", "StateStore",
    "UnknownKeyPolicy",
]
