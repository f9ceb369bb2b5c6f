"""Stores of threads, runs, logs, tasks and files: the ports, their records, and the implementations."""

# fmt: off
from .core.rows import LogRow
from .core.stores import (
    Conversation, Durability, DurableStore, EventStore, LogBatch, LogSummary, OpenLog, Reply, Retention, RunRecord, Store,
    StoredLog, SummaryUpdate, ThreadRecord, ThreadSummary, ThreadUpdate, Watch, WhenBusy, Wish,
)
from .storage.files import StoreFilesystem
from .storage.stores import MemoryStore
from .storage.tasks import SqlTaskRepository

__all__ = [
    "Conversation", "Durability", "DurableStore", "EventStore", "LogBatch", "LogRow", "LogSummary", "MemoryStore",
    "OpenLog", "Reply", "Retention", "RunRecord", "SqlTaskRepository", "Store", "StoreFilesystem", "StoredLog",
    "SummaryUpdate", "ThreadRecord", "ThreadSummary", "ThreadUpdate", "Watch", "WhenBusy", "Wish",
]
