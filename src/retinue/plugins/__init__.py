"""Plugins that come with Retinue: when to stop, what is allowed, and what the model reads of a long conversation."""

from .compaction import Compaction
from .permissions import Permissions
from .results import ResultFiles
from .stopping import StopAfterSeconds, StopAfterSteps, StopAfterTokens, StopOnRepeat, StopOnTool

__all__ = [
    "Compaction",
    "Permissions",
    "ResultFiles",
    "StopAfterSeconds",
    "StopAfterSteps",
    "StopAfterTokens",
    "StopOnRepeat",
    "StopOnTool",
]
