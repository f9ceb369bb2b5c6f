"""`@hook`: a plugin made from one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

from ..core.hooks import (
    AfterToolHook,
    BeforeToolHook,
    CommandReturn,
    HookContext,
    HookOptions,
    InferenceHook,
    Registrar,
)
from ..core.plugins import Phase, Plugin


class HookPlugin(Plugin):
    """A plugin with one hook. Calling it calls the function, as a test does."""

    def __init__(
        self, phase: Phase, function: Callable[[Any], Any], priority: int, optional: bool, inherited: bool | None
    ):
        self.name = getattr(function, "__name__", "hook")
        self.inherited = inherited
        self.inherited = self.inherits(phase)
        self._registered: tuple[Any, ...] = (phase, function, priority, optional)

    def register(self, r: Registrar) -> None:
        phase, function, priority, optional = self._registered
        r.hook(phase, function, priority=priority, optional=optional)

    def __call__(self, ctx: HookContext) -> Any:
        return self._registered[1](ctx)


class PluginOptions(HookOptions, total=False):
    """The options of `@hook`, which describes them."""

    inherited: bool | None


@overload
def hook(phase: Literal["before_tool"], **options: Unpack[PluginOptions]) -> Callable[[BeforeToolHook], HookPlugin]: ...
@overload
def hook(phase: Literal["after_tool"], **options: Unpack[PluginOptions]) -> Callable[[AfterToolHook], HookPlugin]: ...
@overload
def hook(
    phase: Literal["before_inference", "after_inference"], **options: Unpack[PluginOptions]
) -> Callable[[InferenceHook], HookPlugin]: ...
@overload
def hook(
    phase: Phase, **options: Unpack[PluginOptions]
) -> Callable[[Callable[[HookContext], CommandReturn]], HookPlugin]: ...
def hook(phase: Phase, *, priority: int = 100, optional: bool = False, inherited: bool | None = None) -> Any:
    """Make a plugin from one function, for `Agent(plugins=[…])`; the plugin has the function's name.

    With `inherited=True` the hook also holds for every run below the agent, with `inherited=False` for the agent alone. If
    not given, a `before_tool` hook is inherited and others are not."""

    def decorate(function: Callable[[Any], Any]) -> HookPlugin:
        return HookPlugin(phase, function, priority, optional, inherited)

    return decorate
