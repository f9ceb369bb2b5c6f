"""Stores of threads, runs, logs, tasks and files: the ports, their records, and the implementations."""

# fmt: off
from .core.rows import LogRow
from .core.stores import (
    Durability, DurableStore, EventStore, LogBatch, OpenLog, Reply, Retention, RunRecord, Store, StoredLog,
    ThreadRecord, ThreadSummary, ThreadUpdate, Watch, WhenBusy, Wish,
)
from .storage.files import StoreFilesystem
from .storage.stores import MemoryStore
from .storage.tasks import SqlTaskRepository

__all__ = [
    "Durability", "DurableStore", "EventStore", "LogBatch", "LogRow", "MemoryStore", "OpenLog", "Reply", "Retention",
    "RunRecord", "SqlTaskRepository", "Store", "StoreFilesystem", "StoredLog", "ThreadRecord", "ThreadSummary",
    "ThreadUpdate", "Watch", "WhenBusy", "Wish",
]
