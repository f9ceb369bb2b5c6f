"""Plugins extend an agent with hooks, state keys and tools; some come with Retinue."""

# fmt: off
from ..core.hooks import AfterToolContext, BeforeToolContext, HookContext, HookFunction, InferenceContext, Registrar
from ..core.plugins import (
    Action, AddContextMessage, AddMessage, AddSystemText, Block, ExcludeTools, IncludeTools, OverrideSettings, PHASES,
    Phase, Plugin, SetResult, StopRun, Suspend, TransferTo, UseSummary,
)
from .compaction import Compaction
from .decorator import hook
from .permissions import Permissions
from .results import ResultFiles
from .stopping import StopAfterSeconds, StopAfterSteps, StopAfterTokens, StopOnRepeat, StopOnTool, StopPolicy

__all__ = [
    "Action", "AddContextMessage", "AddMessage", "AddSystemText", "AfterToolContext", "BeforeToolContext", "Block",
    "Compaction", "ExcludeTools", "HookContext", "HookFunction", "IncludeTools", "InferenceContext",
    "OverrideSettings", "PHASES", "Permissions", "Phase", "Plugin", "Registrar", "ResultFiles", "SetResult",
    "StopAfterSeconds", "StopAfterSteps", "StopAfterTokens", "StopOnRepeat", "StopOnTool", "StopPolicy", "StopRun",
    "Suspend", "TransferTo", "UseSummary", "hook",
]
