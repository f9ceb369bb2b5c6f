"""Plugins: what an agent is extended with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import KeyAlreadyRegistered
from .state import StateKey

if TYPE_CHECKING:
    from .tools import Tool


class Plugin:
    """Subclass it, give it a `name`, and register keys and tools in `register`."""

    name: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__dict__.get("name"):
            cls.name = cls.__name__

    def register(self, r: Registrar) -> None:
        """Called once for each store the plugin is installed in."""


class Registrar:
    """Collects what a plugin registers, so that it can be installed whole."""

    __slots__ = ("keys", "plugin", "tools")

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        self.keys: list[StateKey[Any, Any]] = []
        self.tools: list[Tool] = []

    def key(self, key: StateKey[Any, Any]) -> None:
        """Make a state key known to the agent."""
        if any(key.name == known.name for known in self.keys):
            raise KeyAlreadyRegistered(key.name, self.plugin.name)
        self.keys.append(key)

    def tool(self, tool: Tool) -> None:
        """Give the agent a tool."""
        self.tools.append(tool)
