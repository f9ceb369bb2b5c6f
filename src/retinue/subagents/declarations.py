"""Declarations: the sub-agents of an agent, and how each is made; the stub of one that runs on a server."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import StrEnum
from importlib.util import find_spec
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

from msgspec import Struct

from ..core.agents import NAME_RULE, Agent, agent_name, check_model
from ..core.errors import ConfigurationError, as_tuple
from ..core.model import ModelChunk, ModelRequest, TextChunk, TurnEnd
from ..core.runs import Limits, check_limits

FILE_TOOLS = ("read_file", "write_file", "edit_file", "list_files", "glob_files", "grep_files")
BUILTIN_TOOLS = (*FILE_TOOLS, "shell")
"""The tools a harness brings itself, as far as it may."""
SUBAGENT_TOOLS = frozenset(
    {"agent_spawn", "agent_send", "agent_list", "agent_close", "task_output", "task_cancel", "task_list"}
)
"""The tools of an agent that has sub-agents. A declared sub-agent has none of them."""

DEFAULT_STEPS = 10
"""Fewer than an agent of its own has: a sub-agent does one thing."""

Protocol = Literal["tasks", "a2a", "langgraph"]
"""The protocol of a server: the task protocol, A2A, or the HTTP API of LangGraph."""

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class WorkspaceMode(StrEnum):
    """The folder of a sub-agent: its own, or its parent's."""

    ISOLATED = "isolated"
    SHARED = "shared"


class Problem(Struct, frozen=True):
    """Something wrong with a declaration. A warning leaves it usable; otherwise there is no such sub-agent."""

    where: str
    """The file, or `code`."""
    message: str
    line: int | None = None
    field: str | None = None
    is_warning: bool = False

    def __str__(self) -> str:
        place = self.where if self.line is None else f"{self.where}:{self.line}"
        return ": ".join([part for part in (place, self.field, self.message) if part])


@dataclass(frozen=True, slots=True)
class SubagentDeclaration:
    """A sub-agent: a folder that defines it (`workspace`), its instructions as text (`inline`), or a server (`url`)."""

    name: str
    description: str
    """For the parent's model: when to use it, what it gives back, what it must not be used for."""
    _: KW_ONLY
    workspace: str | os.PathLike[str] | None = None
    """The folder whose AGENTS.md instructs it, relative to the main workspace."""
    inline: str | None = None
    url: str | None = None
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    """Sent to `url` with every request; never written anywhere."""
    protocol: Protocol = "tasks"
    """The protocol of the server: `tasks` (another Retinue), `a2a` or `langgraph`."""
    agent: str | None = None
    """The name of the agent on the server; None is `name`."""
    mode: WorkspaceMode | str = WorkspaceMode.ISOLATED
    model: str | Any | None = None
    """Without one it runs on its parent's."""
    max_steps: int = DEFAULT_STEPS
    tools: Iterable[str] | None = None
    """The tools of its parent that it has; None is all. Built-in tools are narrowed only if some are named here."""
    builtin_tools: Iterable[str] | None = None
    """The built-in tools of its parent that it has; None is all."""
    disallowed_tools: Iterable[str] = ()
    """Tools it does not have, inherited or built in, whatever the others say."""
    timeout: float | None = None
    """Seconds after which a run of it is stopped."""
    limits: Limits | None = None
    source: str = "code"
    """The path of its file, or `code`."""
    lines: Mapping[str, int] = field(default_factory=dict[str, int], repr=False, compare=False)
    """On which line of the file each field is."""

    def __post_init__(self) -> None:
        owner, name = f"sub-agent {self.name!r}", agent_name(self.name)
        if name is None:
            raise ConfigurationError(f"{owner}: a name is {NAME_RULE}")
        object.__setattr__(self, "name", name)
        self._check_types(owner)
        if not self.description.strip():
            raise ConfigurationError(f"{owner} needs a description: the model decides by it when to use it")
        self._check_source(owner)
        try:
            object.__setattr__(self, "mode", WorkspaceMode(self.mode))
        except ValueError:
            raise ConfigurationError(f"{owner}: mode is 'isolated' or 'shared', not {self.mode!r}") from None
        for name in ("tools", "builtin_tools", "disallowed_tools"):
            object.__setattr__(self, name, _names(getattr(self, name), f"{owner}: {name}"))
        for name in self.builtin_tools or ():
            if name not in BUILTIN_TOOLS:
                known = ", ".join(BUILTIN_TOOLS)
                raise ConfigurationError(f"{owner}: there is no built-in tool {name!r}; there are {known}")

    def _check_types(self, owner: str) -> None:
        """Refuse values of the wrong type."""
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        if not isinstance(values["description"], str):
            raise ConfigurationError(f"{owner}: description is text, not {values['description']!r:.80}")
        if not isinstance(values["inline"], str | None):
            raise ConfigurationError(f"{owner}: inline is text, not {values['inline']!r:.80}")
        if values["workspace"] is not None and not isinstance(values["workspace"], str | os.PathLike):
            raise ConfigurationError(f"{owner}: workspace is the path of a folder, not {values['workspace']!r:.80}")
        if values["model"] is not None and not (isinstance(values["model"], str) and values["model"]):
            check_model(values["model"], owner)
        steps, seconds = values["max_steps"], values["timeout"]
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigurationError(f"{owner}: max_steps must be at least 1, got {steps!r}")
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and seconds > 0):
            raise ConfigurationError(f"{owner}: timeout must be above 0 seconds, got {seconds!r}")
        if values["limits"] is not None:
            check_limits(values["limits"], f"{owner}: ")

    def _check_source(self, owner: str) -> None:
        """Refuse more than one of url, workspace and inline, and bad urls and headers."""
        has_inline = bool(self.inline and self.inline.strip())
        given = {"url": self.url is not None, "workspace": self.workspace is not None, "inline": has_inline}
        given_names = [name for name, is_given in given.items() if is_given]
        if len(given_names) > 1:
            raise ConfigurationError(f"{owner}: {given_names[0]} and {given_names[1]} exclude each other")
        if self.headers and self.url is None:
            raise ConfigurationError(f"{owner}: headers are sent to a url, and there is none")
        if self.protocol != "tasks" and self.url is None:
            raise ConfigurationError(f"{owner}: a protocol is that of a url, and there is none")
        if self.agent is not None and self.url is None:
            raise ConfigurationError(f"{owner}: agent is the name of one on a url, and there is none")
        if self.url is not None:
            check_server(self.url, self.headers, self.protocol, owner)
            _check_remote_name(self.agent, self.protocol, owner)

    @property
    def is_remote(self) -> bool:
        return self.url is not None


def names_provider(model: Any) -> bool:
    """Return whether a model is given as `provider:model`, as an object, or not at all."""
    return not isinstance(model, str) or all(model.partition(":"))


def check_server(url: str, headers: Mapping[str, str] | None, protocol: str, owner: str) -> None:
    """Refuse a bad url, header or protocol, and a protocol whose packages are not installed."""
    check_url(url, owner)
    named: Any = headers or {}
    if not isinstance(named, Mapping):
        raise ConfigurationError(f"{owner}: headers is a dict {{name: value}}")
    for name, value in (headers or {}).items():
        given: tuple[Any, Any] = (name, value)
        if not all(isinstance(one, str) for one in given):
            raise ConfigurationError(f"{owner}: header {name!r} and its value must be text")
        if not _HEADER.fullmatch(name) or "\n" in value or "\r" in value:
            raise ConfigurationError(f"{owner}: {name!r} is not a header that can be sent")
    if protocol not in get_args(Protocol):
        raise ConfigurationError(f"{owner}: protocol is 'tasks', 'a2a' or 'langgraph', not {protocol!r}")
    if protocol == "a2a" and not all(find_spec(package) for package in ("a2a", "grpc", "httpx")):
        raise ConfigurationError(f'{owner} speaks A2A, which needs: pip install "retinue[a2a]"')


def _check_remote_name(agent: Any, protocol: str, owner: str) -> None:
    if agent is not None and (not isinstance(agent, str) or not agent.strip()):
        raise ConfigurationError(f"{owner}: agent is the name of the agent on its server, not {agent!r}")
    if agent is not None and protocol == "a2a":
        raise ConfigurationError(f"{owner}: agent has no effect with A2A, where the url leads to one agent")


def check_url(url: Any, owner: str) -> None:
    """Refuse what is not the address of a server."""
    if not isinstance(url, str) or any(character.isspace() or not character.isprintable() for character in url):
        raise ConfigurationError(f"{owner}: url is text without white space, not {url!r:.80}")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as exc:
        raise ConfigurationError(f"{owner}: url cannot be read: {exc}") from None
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigurationError(f"{owner}: url must begin with http:// or https:// and name a host")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigurationError(f"{owner}: url has a password, '?' or '#' in it: pass credentials in headers")


def _names(given: Any, owner: str) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, str):
        raise ConfigurationError(f"{owner} is a list of tool names, not the text {given!r}")
    if not isinstance(given, Iterable):
        raise ConfigurationError(f"{owner} is a list of tool names, not {given!r:.80}")
    names = tuple(cast("Iterable[Any]", given))
    if not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"{owner} is a list of tool names, not {names!r}")
    return names


class _Elsewhere:
    """The model of an agent that does not think here."""

    name = "remote"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield TextChunk("This sub-agent runs on a server: spawn it with agent_spawn, it cannot be run here.")
        yield TurnEnd()


_PUBLIC_KEY = "BEGIN PUBLIC KEY"


@dataclass(frozen=True, eq=False, slots=True)
class RemoteSubagentStub(Agent):
    """Holds the place of an agent on a server. A child run of it goes there; run here, it only says so."""

    url: str = ""
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    protocol: Protocol = "tasks"
    agent: str | None = None
    """Its name on the server; None is `name`."""
    origins: tuple[str, ...] = ()
    """Further addresses that its card may name; the headers are sent there too."""
    card_key: str | bytes | None = field(default=None, repr=False)
    """The public key, as PEM, that must have signed its card."""

    def __post_init__(self) -> None:
        owner = f"agent {self.name!r}"
        check_server(self.url, self.headers, self.protocol, owner)
        _check_remote_name(self.agent, self.protocol, owner)
        for origin in self.origins:
            check_url(origin, owner)
        key: Any = self.card_key
        if key is not None and (not isinstance(key, str | bytes) or _PUBLIC_KEY not in str(key)):
            raise ConfigurationError(f"{owner}: card_key is a public key as PEM, which begins with -----{_PUBLIC_KEY}")
        if self.model is None:
            object.__setattr__(self, "model", _Elsewhere())
        Agent.__post_init__(self)


class A2AAgent(RemoteSubagentStub):
    """An agent on a server that speaks A2A, for `Agent(subagents=[…])`, `as_tool()` and `ctx.run_child`.

        researcher = A2AAgent("researcher", "https://host/agent", description="Looks things up.")

    name: its name here; that on its card does not matter.
    url: the address under which its card is, or the address of the card.
    description: says to other agents what this one is for. Nothing of the card is shown to a model.
    headers: sent to the origin of `url` with every request, and nowhere else.
    origins: further addresses that its card may name, such as that of a gRPC port; the headers are sent there too.
    card_key: a public key as PEM (EC, RSA or Ed25519). The card must be signed by it, or nothing is sent.
    """

    __slots__ = ()

    def __init__(
        self,
        name: str,
        url: str,
        *,
        description: str = "",
        headers: Mapping[str, str] | None = None,
        origins: Iterable[str] = (),
        card_key: str | bytes | None = None,
    ) -> None:
        RemoteSubagentStub.__init__(
            self,
            name,
            description=description,
            url=url,
            headers=headers,
            protocol="a2a",
            origins=as_tuple(origins, f"agent {name!r}", "origins"),
            card_key=card_key,
        )


def remote_stub(declaration: SubagentDeclaration) -> RemoteSubagentStub:
    """Return the stub of a declaration with a url."""
    return RemoteSubagentStub(
        declaration.name,
        description=declaration.description,
        url=declaration.url or "",
        headers=declaration.headers,
        protocol=declaration.protocol,
        agent=declaration.agent,
    )
