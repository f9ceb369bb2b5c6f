"""Runs: their handles, results, limits and states, and the decisions that humans take."""

# fmt: off
from .core.budgets import Budget, BudgetLine
from .core.decisions import Decision
from .core.receipts import Approval, Failure, Receipt
from .core.results import ToolCallStatus
from .core.runs import MAX_SPAWN_DEPTH, Limits, RunIdentity, RunResult, RunStatus, Usage
from .log.state import CallState, LogState, RunState
from .runtime import Run, Runtime
from .runtime.run import ChildRun, RunHandle, TextStream
from .runtime.runtime import RunOptions

__all__ = [
    "Approval", "Budget", "BudgetLine", "CallState", "ChildRun", "Decision", "Failure", "Limits", "LogState", "MAX_SPAWN_DEPTH", "Receipt", "Run", "RunHandle", "RunIdentity",
    "RunOptions", "RunResult", "RunState", "RunStatus", "Runtime", "TextStream", "ToolCallStatus", "Usage",
]
