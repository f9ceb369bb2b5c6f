"""Background tasks: records of children that outlive the run that started them, and their repositories."""

# fmt: off
from .files import WorkspaceTaskRepository
from .repository import MemoryTaskRepository, TaskLiveness, TaskRepository, TaskSettings
from .task import TaskRecord, TaskScope, TaskStatus

__all__ = [
    "MemoryTaskRepository", "TaskLiveness", "TaskRecord", "TaskRepository", "TaskScope", "TaskSettings", "TaskStatus",
    "WorkspaceTaskRepository",
]
