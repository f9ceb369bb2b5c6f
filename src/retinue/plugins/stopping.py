"""Stop policies: plugins that end a run. They end this run; `Limits` end a whole tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from ..core.errors import ConfigurationError
from ..core.hooks import HookContext, Registrar
from ..core.messages import Role
from ..core.plugins import Plugin, StopRun
from ..core.state import StateCommand

Number = TypeVar("Number", int, float)


class StopPolicy(Plugin, ABC):
    """Base of policies that end a run after an answer of the model, before the calls in it are made.

    Give it a `name`, which is in `termination` as `limit:<name>`, and write `reason`.
    """

    def register(self, r: Registrar) -> None:
        r.hook("after_inference", self._check)

    def _check(self, ctx: HookContext) -> StateCommand | None:
        # An answer without calls ends the run by itself, whatever was used for it.
        if not ctx.messages[-1].tool_calls:
            return None
        reason = self.reason(ctx)
        return None if reason is None else StateCommand().schedule(StopRun(self.name, reason))

    @abstractmethod
    def reason(self, ctx: HookContext) -> str | None:
        """Return why the run should end now, or None."""


class StopAfterSteps(StopPolicy):
    """Fails a run whose model still asks for calls in step `steps`; those calls are not made."""

    name = "stop_after_steps"

    def __init__(self, steps: int) -> None:
        self.steps = _positive(self.name, steps)

    def reason(self, ctx: HookContext) -> str | None:
        return f"the run was to answer within {self.steps} steps" if ctx.step >= self.steps else None


class StopAfterSeconds(StopPolicy):
    """Fails a run whose model still asks for calls after `seconds`."""

    name = "stop_after_seconds"

    def __init__(self, seconds: float) -> None:
        self.seconds = _positive(self.name, seconds)

    def reason(self, ctx: HookContext) -> str | None:
        return f"the run was to answer within {self.seconds:g} s" if ctx.elapsed() >= self.seconds else None


class StopAfterTokens(StopPolicy):
    """Fails a run whose model still asks for calls after it has used `tokens`."""

    name = "stop_after_tokens"

    def __init__(self, tokens: int) -> None:
        self.tokens = _positive(self.name, tokens)

    def reason(self, ctx: HookContext) -> str | None:
        used = ctx.usage.tokens
        return f"the run has used {used} of {self.tokens} tokens" if used >= self.tokens else None


class StopOnRepeat(StopPolicy):
    """Fails a run whose model says the same, with the same calls, `times` times in a row."""

    name = "stop_on_repeat"

    def __init__(self, times: int = 3) -> None:
        self.times = _positive(self.name, times)

    def reason(self, ctx: HookContext) -> str | None:
        said = [message for message in ctx.messages if message.role is Role.ASSISTANT][-self.times :]
        forms = {(m.text, tuple((c.name, str(c.args)) for c in m.tool_calls)) for m in said}
        same = len(said) == self.times and len(forms) == 1
        return f"the model said the same {self.times} times in a row" if same else None


class StopOnTool(Plugin):
    """Completes a run after a successful call of a tool, as of one that hands the work in."""

    name = "stop_on_tool"

    def __init__(self, tool_name: str) -> None:
        given: Any = tool_name
        if not isinstance(given, str):
            raise ConfigurationError(f"stop_on_tool: give the name of a tool, as text, not {given!r}")
        self.tool_name = tool_name

    def register(self, r: Registrar) -> None:
        r.hook("after_tool", self._check)

    def _check(self, ctx: HookContext) -> StateCommand | None:
        if ctx.call is None or ctx.call.name != self.tool_name or ctx.result is None or not ctx.result.is_success():
            return None
        return StateCommand().schedule(StopRun(self.name, f"{self.tool_name} was called", completed=True))


def _positive(policy: str, value: Number) -> Number:
    given: Any = value
    if not isinstance(given, int | float) or given <= 0:
        raise ConfigurationError(f"{policy}: must be a number of more than 0, not {given!r}")
    return value
