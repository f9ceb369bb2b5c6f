"""The harness: an agent with a workspace, file tools and sub-agents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from ..core.agents import RESULT_LIMIT, Agent, agent_name, linked_agents
from ..core.errors import ConfigurationError, FilesystemError, TaskStoreError, UnknownAgent, as_tuple
from ..core.filesystem import Filesystem, GuardedFilesystem, RunsCommands, is_divided
from ..core.functions import as_tool
from ..core.hooks import HookContext, Registrar, registered
from ..core.messages import Role, ToolCall
from ..core.plugins import AddContextMessage, AddSystemText, Plugin
from ..core.runs import Out
from ..core.state import StateCommand
from ..core.tools import Tool
from ..plugins import Compaction, ResultFiles
from ..tasks.files import WorkspaceTaskRepository, holds_tasks
from ..tasks.repository import TaskRepository
from ..tasks.service import TaskService
from ..tasks.task import TaskRecord, TaskScope
from ..workspace import LocalFilesystem, SandboxFilesystem, WorkspaceContext, file_tools, shell_tool
from ..workspace.context import AGENTS_FILES
from .catalog import GENERAL_PURPOSE_DESCRIPTION, Catalog, Factory
from .declarations import BUILTIN_TOOLS, SUBAGENT_TOOLS, SubagentDeclaration, names_provider
from .prompt import subagent_section, with_context
from .spawned import SPAWNED
from .task_tools import ANNOUNCED, TaskTools, announce, task_summary, untold_ends
from .tools import AgentTools
from .work import OnTimeout, Workers

if TYPE_CHECKING:
    from ..backends.background import LocalBackground
    from ..core.backend import Resolver
    from ..core.context import ToolContext
    from ..core.runs import Out, RunIdentity

HOOK_PRIORITY = 80

_INHERITED = (
    *("conflicts", "settings", "compaction", "tool_result_limit", "max_context_tokens"),
    *("disable_filesystem", "disable_shell", "disable_workspace_context"),
)
"""The fields that a sub-agent has from its parent."""


@dataclass(frozen=True, eq=False, slots=True)
class HarnessAgent(Agent[Out]):
    """An agent that works in a folder and delegates. Creating one does no I/O.

    Sub-agents come from `subagents` (declarations, agents, names of agents), `subagent_factories`, Markdown files in
    `<workspace>/subagents` and `<workspace>/.claude/agents`, and the built-in `general-purpose`. They are there unless
    it is a leaf, they are disabled, or it has no model.
    """

    _: KW_ONLY
    subagents: Iterable[Any] = ()
    """SubagentDeclaration, Agent, or the name of an agent the runtime knows."""
    subagent_factories: Mapping[str, Factory | tuple[str, Factory]] = field(default_factory=dict[str, Any])
    """Functions of a ToolContext that make an agent, by its name; `(description, function)` describes it too."""
    workspace: str | os.PathLike[str] = "."
    filesystem: Filesystem | None = None
    """Instead of the folder `workspace` of this machine."""
    task_repository: TaskRepository | None = None
    """The records of background tasks, instead of `agents/<name>/tasks` in the workspace."""
    on_timeout: OnTimeout = "promote"
    """A sub-agent that works longer than its parent waits becomes a background task, or is stopped."""
    wake_on_task_end: bool = False
    """True if a background task that ends while its conversation has no run starts a run that reports it."""
    context_files: Iterable[str] = ()
    """Files of the workspace that the model reads with AGENTS.md, always."""
    max_context_tokens: int = 8000
    compaction: Compaction | Literal[False] | None = None
    """How its requests are kept within the window of its model; None is at 80 % of it, False is not at all."""
    tool_result_limit: int = RESULT_LIMIT
    """Characters of a tool result the model reads; the whole goes to a file of the workspace."""
    workspace_roots: Iterable[str | os.PathLike[str]] = ()
    """Folders outside the workspace that sub-agents may be defined in."""
    general_purpose: bool = True
    builtin_tools: Iterable[str] | None = None
    """The tools of the workspace that it has; None is all that are not disabled."""
    disable_subagents: bool = False
    disable_filesystem: bool = False
    disable_shell: bool = True
    disable_workspace_context: bool = False
    leaf: bool = False
    """A sub-agent that has none itself."""
    tells_agents_file: bool = True
    """True if AGENTS.md is shown to the model; False if it is already the instructions."""
    files: Filesystem = field(init=False, repr=False)
    own_tools: tuple[Tool, ...] = field(init=False, repr=False)
    """The tools it was given, which its children inherit; not those it brings itself."""
    own_plugins: tuple[Plugin, ...] = field(init=False, repr=False)
    own_tool_names: frozenset[str] = field(init=False, repr=False)
    builtin_names: frozenset[str] = field(init=False, repr=False)
    catalog: Catalog | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        owner = f"agent {self.name!r}"
        own_tools = tuple([as_tool(candidate) for candidate in as_tuple(self.tools, owner, "tools")])
        own_plugins = as_tuple(self.plugins, owner, "plugins")
        roots: tuple[str | os.PathLike[str], ...] = as_tuple(self.workspace_roots, owner, "workspace_roots")
        subagents = as_tuple(self.subagents, owner, "subagents")
        for one in subagents:
            if not isinstance(one, SubagentDeclaration | Agent | str):
                what = "a SubagentDeclaration, an Agent or a name"
                raise ConfigurationError(f"{owner}: a sub-agent is {what}, not {one!r}")
        factories: Any = self.subagent_factories
        if not isinstance(factories, Mapping):
            raise ConfigurationError(f"{owner}: subagent_factories is a dict {{name: function}}, not {factories!r:.80}")
        folder: Any = self.workspace
        if not isinstance(folder, str | os.PathLike):
            raise ConfigurationError(f"{owner}: workspace is the path of a folder, not {folder!r:.80}")
        filesystem = self.filesystem if self.filesystem is not None else LocalFilesystem(self.workspace)
        if isinstance(filesystem, str | os.PathLike):
            raise ConfigurationError(f"{owner}: filesystem is not a path: write workspace={os.fspath(filesystem)!r}")
        _require(
            filesystem, "is_local", f"{owner}: filesystem is a LocalFilesystem, StoreFilesystem or SandboxFilesystem"
        )
        if self.task_repository is not None:
            what = "task_repository is a WorkspaceTaskRepository or another TaskRepository"
            _require(self.task_repository, "settings", f"{owner}: {what}")
        built_in = _builtin_tools(self, filesystem, owner)
        compaction, own_plugins = _compaction_of(self, own_plugins, owner)
        for name, value in (
            ("files", filesystem),
            ("own_tools", own_tools),
            ("own_plugins", own_plugins),
            ("compaction", compaction),
            ("own_tool_names", frozenset([tool.name for tool in own_tools])),
            ("builtin_names", frozenset([tool.name for tool in built_in])),
            ("subagents", subagents),
            ("subagent_factories", {agent_name(name) or name: made for name, made in self.subagent_factories.items()}),
            ("context_files", as_tuple(self.context_files, owner, "context_files")),
            ("workspace_roots", tuple([os.fspath(root) for root in roots])),
            ("result_limit", self.tool_result_limit),
            ("tools", (*own_tools, *built_in)),
            ("catalog", None),
        ):
            object.__setattr__(self, name, value)
        if self.has_subagents:
            object.__setattr__(self, "catalog", Catalog(self))
            object.__setattr__(self, "is_woken", self.wake_on_task_end)
        object.__setattr__(self, "plugins", (*own_plugins, *self._brought_plugins()))
        Agent.__post_init__(self)

    def _brought_plugins(self) -> Iterable[Plugin]:
        if not self.disable_workspace_context:
            first = AGENTS_FILES if self.tells_agents_file else ()
            yield WorkspaceContext(self.files, (*first, *self.context_files), self.max_context_tokens)
        if self.catalog is not None:
            yield Subagents(self.name, self.catalog, self._tasks(), self.on_timeout)
        if self.compaction:
            yield self.compaction
        if not self.disable_filesystem:
            yield ResultFiles(self.files)

    def _tasks(self) -> TaskRepository:
        if self.on_timeout not in ("promote", "cancel"):
            problem = f"on_timeout is 'promote' or 'cancel', not {self.on_timeout!r}"
            raise ConfigurationError(f"agent {self.name!r}: {problem}")
        if self.task_repository is None:
            object.__setattr__(self, "task_repository", WorkspaceTaskRepository(self.files, self.name))
        assert self.task_repository is not None
        return self.task_repository

    @property
    def has_subagents(self) -> bool:
        return not self.leaf and not self.disable_subagents and self.model is not None

    @property
    def reads_workspace(self) -> bool:
        """True if any file of the workspace is read."""
        return not self.disable_filesystem or not self.disable_workspace_context

    def check_confined(self, agent: Agent, resolver: Resolver | None = None) -> None:
        """Refuse an agent that works, itself or through those it names, outside the sandbox of this one."""
        if not isinstance(self.files, SandboxFilesystem):
            return
        for one in _with_linked(agent, None if resolver is None else resolver.agent):
            if isinstance(one, HarnessAgent) and not self.files.confines(one.files):
                raise ConfigurationError(
                    f"agent {one.name!r} works in {one.files!r}, outside of the sandbox of {self.name!r}: give it "
                    "filesystem= that of this agent (in a factory ctx.agent.files.for_run(ctx.run)), or a folder below it"
                )

    def inherited_names(self) -> frozenset[str]:
        """Return the names of the tools that its children inherit: its own, and those of its plugins."""
        names = {tool.name for plugin in self.own_plugins for tool in registered(plugin).tools}
        return self.own_tool_names | names

    def child(
        self, declaration: SubagentDeclaration, instructions: str, files: Filesystem, *, tells_agents_file: bool
    ) -> HarnessAgent:
        """Return the sub-agent of a declaration: a leaf, with the tools of this agent that the declaration allows."""
        denied = frozenset(declaration.disallowed_tools)
        allowed = None if declaration.tools is None else frozenset(declaration.tools)
        kept = self.builtin_names if declaration.builtin_tools is None else frozenset(declaration.builtin_tools)
        if allowed is not None:
            named = allowed & frozenset(BUILTIN_TOOLS)
            # An unknown name may be a misspelt built-in one, so it narrows these as well.
            is_unsure = declaration.builtin_tools is None and not allowed - SUBAGENT_TOOLS <= self.inherited_names()
            if named or is_unsure:
                kept &= named

        def inherits(name: str) -> bool:
            return name not in denied and (allowed is None or name in allowed)

        return HarnessAgent(
            declaration.name,
            declaration.model if names_provider(declaration.model) else None,
            instructions,
            [tool for tool in self.own_tools if inherits(tool.name)],
            [StateOf(plugin, inherits) for plugin in self.own_plugins],
            description=declaration.description,
            max_steps=declaration.max_steps,
            filesystem=files,
            builtin_tools=(kept & self.builtin_names) - denied,
            tells_agents_file=tells_agents_file,
            **self._inherited(),
        )

    def mirror(self, name: str) -> HarnessAgent:
        """Return a sub-agent with the same abilities as this agent, except to start sub-agents."""
        return HarnessAgent(
            name,
            None,
            with_context(""),
            self.own_tools,
            [StateOf(plugin, keeps_results=True) if plugin.inherited else plugin for plugin in self.own_plugins],
            description=GENERAL_PURPOSE_DESCRIPTION,
            max_steps=self.max_steps,
            filesystem=self.files,
            context_files=self.context_files,
            builtin_tools=self.builtin_names,
            **self._inherited(),
        )

    def _inherited(self) -> dict[str, Any]:
        return {"leaf": True} | {name: getattr(self, name) for name in _INHERITED}

    def delegation_tools(self, resolver: Resolver) -> Iterable[Tool]:
        """Resolve the sub-agents given by name and start the task watch. The plugin brings the tools: return none."""
        self.check_confined(self, resolver)
        if self.catalog is not None:
            names = [given for given in self.subagents if isinstance(given, str)]
            self.catalog.set_named_agents({name: resolver.agent(name) for name in names})
            assert self.task_repository is not None
            background: LocalBackground = resolver.background
            service = background.service(self.task_repository)
            for plugin in self.plugins:
                if isinstance(plugin, Subagents):
                    plugin.use(service, resolver)
            service.watch()
        return ()

    def check_parts(self) -> None:
        if self.catalog is not None:
            self.catalog.check()
        if "shell" in self.builtin_names and isinstance(self.files, RunsCommands):
            self.files.check_commands()
        self.check_confined(self)

    async def resume_tasks(self, run: RunIdentity, context_for: Callable[[ToolCall], ToolContext]) -> None:
        for plugin in self.plugins:
            if isinstance(plugin, Subagents):
                await plugin.resume_tasks(run, context_for)

    async def ended_tasks(self, run: RunIdentity, told: Mapping[str, Any]) -> Sequence[str]:
        assert self.task_repository is not None, "it has sub-agents"
        records = await self.task_repository.list(TaskScope(self.name, run.thread_id, run.user_id))
        return untold_ends(records, told.get(ANNOUNCED.name, {}))


class Subagents(Plugin):
    """Gives the model the tools for sub-agents, and lists these and the background tasks in every request."""

    name = "subagents"

    def __init__(self, agent_name: str, catalog: Catalog, repository: TaskRepository, on_timeout: OnTimeout) -> None:
        self._catalog, self._repository, self._agent_name = catalog, repository, agent_name
        self._workers = workers = Workers(agent_name, catalog, repository, on_timeout)
        self._agents, self._tasks = AgentTools(catalog, workers), TaskTools(workers)
        self._section: tuple[object, str] = (None, "")
        self._service: TaskService | None = None

    def register(self, r: Registrar) -> None:
        self._catalog.check()
        r.key(SPAWNED)
        r.key(ANNOUNCED)
        for tool in (*self._agents.tools(), *self._tasks.tools()):
            r.tool(tool)
        r.hook("run_start", self._report_problems, priority=HOOK_PRIORITY)
        r.hook("step_start", self._add_section, priority=HOOK_PRIORITY)
        r.hook("run_end", self._forget, priority=HOOK_PRIORITY)

    async def _report_problems(self, ctx: HookContext) -> StateCommand | None:
        await self._catalog.refresh_without_blocking()
        problems = [str(problem) for problem in self._catalog.problems]
        return StateCommand().event({"type": "subagents", "problems": problems}) if problems else None

    async def _add_section(self, ctx: HookContext) -> StateCommand | None:
        entries = await self._catalog.load_entries()
        if self._section[0] is not entries:
            described = {name: entry.description for name, entry in entries.items()}
            self._section = (entries, subagent_section(described) if entries else "")
        text = self._section[1]
        scope = TaskScope(self._agent_name, ctx.run.thread_id, ctx.run.user_id)
        try:
            records = await self._repository.list(scope)
            if self._service is not None:
                await self._service.watch_unwatched(records)
                records = [self._service.as_shown(record) for record in records]
            command = await announce(ctx, records, self._repository)
            tasks = "" if command is not None or _are_told(ctx, records) else task_summary(records)
        except (TaskStoreError, FilesystemError) as exc:
            tasks = f"# Async tasks (current session)\n\nThey cannot be read just now: {exc}"
            command = StateCommand().event({"type": "tasks_unreadable", "problem": str(exc)})
        if text:
            command = (command or StateCommand()).schedule(AddSystemText(text))
        if tasks:  # after the conversation: it changes, and what is before it must keep its bytes for the cache
            command = (command or StateCommand()).schedule(AddContextMessage(tasks))
        return command

    async def resume_tasks(self, run: RunIdentity, context_for: Callable[[ToolCall], ToolContext]) -> None:
        """Continue the tasks that a run had started before its process ended."""
        for record in await self._repository.list(TaskScope(self._agent_name, run.thread_id, run.user_id)):
            if record.parent_run_id == run.run_id and record.parent_tool_call_id is not None:
                await self._workers.resume(record, context_for(ToolCall(record.parent_tool_call_id, "agent_spawn", {})))

    def use(self, service: TaskService, resolver: Resolver) -> None:
        """Let a service watch the remote tasks of this agent whose processes are gone."""
        self._service = service
        service.watchers[self._agent_name] = partial(self._workers.watch_remote_task, resolver=resolver)

    def _forget(self, ctx: HookContext) -> None:
        self._agents.forget_run(ctx.run.run_id)


def _are_told(ctx: HookContext, records: Sequence[TaskRecord]) -> bool:
    """Return whether each task has ended and was announced, or is in the results of the last step. A summary would only
    repeat that."""
    last = "".join([one.text for one in takewhile(lambda said: said.role is Role.TOOL, reversed(ctx.messages))])
    is_ended = all(record.status.is_terminal for record in records)
    if is_ended and not untold_ends(records, ctx.snapshot[ANNOUNCED]):
        return True
    return all(record.task_id in last for record in records)


class StateOf(Plugin):
    """The state keys, actions, effects and inherited tools of a plugin, without its hooks."""

    name = "state_of"

    def __init__(
        self, plugin: Plugin, inherits: Callable[[str], bool] = lambda name: True, *, keeps_results: bool = False
    ) -> None:
        self._plugin, self._inherits, self._keeps_results = plugin, inherits, keeps_results
        self.name = plugin.name

    def register(self, r: Registrar) -> None:
        inner = registered(self._plugin)
        for key in inner.keys:
            r.key(key)
        r.actions.update(inner.actions)
        r.effects.update(inner.effects)
        r.tools.extend([tool for tool in inner.tools if self._inherits(tool.name)])
        if self._keeps_results:
            r.keeper = inner.keeper


def _compaction_of(
    agent: HarnessAgent, plugins: tuple[Plugin, ...], owner: str
) -> tuple[Compaction | Literal[False], tuple[Plugin, ...]]:
    """Return how an agent compacts, and its other plugins. A Compaction among these is the one that is meant."""
    given: Any = agent.compaction
    if given is not None and given is not False and not isinstance(given, Compaction):
        raise ConfigurationError(f"{owner}: compaction is a Compaction, False or None, not {given!r:.80}")
    named = [plugin for plugin in plugins if isinstance(plugin, Compaction)]
    if given is not None or len(named) != 1:
        return Compaction() if given is None else given, plugins
    return named[0], tuple([plugin for plugin in plugins if plugin is not named[0]])


def _require(value: object, attribute: str, what: str) -> None:
    """Raise ConfigurationError for an object of the wrong kind, or a class instead of an object."""
    if isinstance(value, type) or not hasattr(value, attribute):
        raise ConfigurationError(f"{what}, not {value!r:.80}")


def _builtin_tools(agent: HarnessAgent, filesystem: Filesystem, owner: str) -> tuple[Tool, ...]:
    """Return the workspace tools of an agent."""
    # Only the runtime may write task records: it believes what they say.
    shown = filesystem.without(holds_tasks) if isinstance(filesystem, GuardedFilesystem) else filesystem
    tools: list[Tool] = [] if agent.disable_filesystem else list(file_tools(shown))
    if not agent.disable_shell:
        try:
            tools.append(shell_tool(shown))
        except ConfigurationError as exc:
            raise ConfigurationError(f"{owner}: {exc}") from exc
    if agent.builtin_tools is None:
        return tuple(tools)
    kept = frozenset(agent.builtin_tools)
    if isinstance(agent.builtin_tools, str) or not kept <= {*BUILTIN_TOOLS}:
        problem = f"builtin_tools is a list of some of {', '.join(BUILTIN_TOOLS)}"
        raise ConfigurationError(f"{owner}: {problem}, not {agent.builtin_tools!r}")
    return tuple([tool for tool in tools if tool.name in kept])


def find_undivided(agent: Agent, known: Mapping[str, Agent]) -> HarnessAgent | None:
    """Return the agent, or one it reaches, that works on files which all users would share; None if there is none."""
    for one in _with_linked(agent, known.__getitem__):
        if isinstance(one, HarnessAgent) and one.builtin_names and not is_divided(one.files):
            return one
    return None


def _with_linked(agent: Agent, find: Callable[[str], Agent] | None) -> Iterable[Agent]:
    """Return an agent and all agents it reaches, as objects or by names that can be found."""
    found = {id(agent): agent}
    waiting = [agent]
    while waiting:
        one = waiting.pop()
        others = list(linked_agents(one))
        for name in (*one.subagents, *one.handoffs):
            if isinstance(name, str) and find is not None:
                with suppress(UnknownAgent, KeyError):  # it cannot be reached
                    others.append(find(name))
        for other in others:
            if id(other) not in found:
                found[id(other)] = other
                waiting.append(other)
    return found.values()
