"""Plugins extend an agent with hooks, state keys and tools; some come with Retinue.

A plugin is a subclass of `Plugin` that registers hooks, keys and tools:

    class Guard(Plugin):
        def register(self, r: Registrar) -> None:
            r.hook("before_tool", self.check)

        def check(self, ctx: BeforeToolContext) -> Block | None:
            return Block("not on Sundays") if ctx.call.name == "pay" else None

A hook is a function of one context, sync or async. It is called in one of eight phases:

    run_start, step_start          HookContext
    before_inference               InferenceContext: `ctx.request`
    after_inference                InferenceContext: the answer is `ctx.messages[-1]`
    before_tool                    BeforeToolContext: `ctx.call`; may return Block, Suspend or SetResult
    after_tool                     AfterToolContext: `ctx.call` and `ctx.result`
    step_end, run_end              HookContext

It returns None, or a `StateCommand` that updates state keys, emits events and schedules actions:
`StateCommand().update(key, value).schedule(AddSystemText("Be brief."))`. A hook that raises fails the run, unless it
was registered with `optional=True`.

The loop carries out the actions that are exported here. For one of your own, subclass `Action` and register a handler:
`r.action(MyAction, handler)` runs it at the end of the phase, `r.effect(MyEffect, handler)` after the commit.

A stop policy is a subclass of `StopPolicy` with a method `reason(ctx)`, which returns why the run should end, or None.
"""

# fmt: off
from ..core.hooks import AfterToolContext, BeforeToolContext, HookContext, HookFunction, InferenceContext, Registrar
from ..core.plugins import (
    Action, AddContextMessage, AddMessage, AddSystemText, Block, ExcludeTools, IncludeTools, OverrideSettings,
    PHASES, Phase, Plugin, SetResult, StopRun, Suspend, TransferTo, UseSummary,
)
from .compaction import Compaction
from .decorator import hook
from .permissions import Permissions
from .results import ResultFiles
from .todo import TODOS, Todo, TodoItem
from .stopping import StopAfterSeconds, StopAfterSteps, StopAfterTokens, StopOnRepeat, StopOnTool, StopPolicy

__all__ = [
    "Action", "AddContextMessage", "AddMessage", "AddSystemText", "AfterToolContext", "BeforeToolContext", "Block",
    "Compaction", "ExcludeTools", "HookContext", "HookFunction", "IncludeTools", "InferenceContext",
    "OverrideSettings", "PHASES", "Permissions", "Phase", "Plugin", "Registrar", "ResultFiles", "SetResult",
    "StopAfterSeconds", "StopAfterSteps", "StopAfterTokens", "StopOnRepeat", "StopOnTool", "StopPolicy", "StopRun",
    "Suspend", "TODOS", "Todo", "TodoItem", "TransferTo", "UseSummary", "hook",
]
