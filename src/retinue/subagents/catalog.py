"""The catalog: all sub-agents that an agent can spawn, merged from code, factories and files."""

from __future__ import annotations

import inspect
import logging
import os
import posixpath
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from ..core.agents import NAME_RULE, Agent, agent_name
from ..core.context import ToolContext
from ..core.errors import ConfigurationError, ExecutionBackendError, FilesystemError
from ..core.filesystem import Filesystem
from ..core.functions import in_thread
from ..workspace import AGENTS_FILE, LocalFilesystem
from .declarations import (
    BUILTIN_TOOLS,
    DEFAULT_STEPS,
    SUBAGENT_TOOLS,
    Problem,
    SubagentDeclaration,
    WorkspaceMode,
    names_provider,
    remote_stub,
)
from .markdown import DeclarationFolder, read_claude_markdown, read_markdown
from .prompt import with_context

if TYPE_CHECKING:
    from ..core.backend import Resolver
    from .harness import HarnessAgent

_log = logging.getLogger(__name__)

GENERAL_PURPOSE = "general-purpose"
GENERAL_PURPOSE_DESCRIPTION = (
    "Works as you do, with your tools and in your workspace, on a task of several steps whose details you need not "
    "see: a search over many files, a piece of work that stands on its own. Returns a short report."
)

Factory = Callable[[ToolContext], Agent | Awaitable[Agent]]
"""Makes a sub-agent for the call that wants it."""


class Entry(Struct, frozen=True):
    """A sub-agent that can be spawned."""

    id: str
    description: str
    source: str
    """`built in`, `code`, `factory`, or the path of a file."""
    make: Factory
    declaration: SubagentDeclaration | None = None
    check: Callable[[Agent, Resolver], None] | None = None
    """Raises ConfigurationError for an agent that may not be the child of this parent."""

    async def agent(self, ctx: ToolContext) -> Agent:
        """Return the agent to run now; raises ExecutionBackendError if there is none."""
        try:
            made: Any = self.make(ctx)
            if inspect.isawaitable(made):
                made = await made
        except ExecutionBackendError:
            raise
        except Exception as exc:
            _log.warning("sub-agent %r could not be made", self.id, exc_info=exc)
            raise ExecutionBackendError(self.id, f"{type(exc).__name__}: {exc}") from exc
        agent: Agent = made
        if not isinstance(agent, Agent):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ExecutionBackendError(self.id, f"its factory gave {made!r}, which is not an agent")
        try:
            if self.check is not None:
                self.check(agent, ctx.resolver)
        except ConfigurationError as exc:
            raise ExecutionBackendError(self.id, str(exc)) from exc
        return agent


class Catalog:
    """The sub-agents of one harness, none of which can do what the harness cannot.

    `refresh` reads the files; before that, only those in code are known."""

    def __init__(self, parent: HarnessAgent) -> None:
        self._parent = parent
        self._named: Mapping[str, Agent] = {}
        self._made: dict[str, tuple[SubagentDeclaration | None, str, Agent]] = {}
        self._without_folder: frozenset[str] = frozenset()
        """Folders that declarations name and that were not there."""
        self._folders: tuple[DeclarationFolder, ...] = ()
        if parent.reads_workspace:
            self._folders = (
                DeclarationFolder(parent.files, "subagents", read_markdown),
                DeclarationFolder(parent.files, ".claude/agents", read_claude_markdown, nested=True),
            )
        self._is_fresh, self._refreshing = False, Lock()
        self.entries: dict[str, Entry] = {}
        self.problems: tuple[Problem, ...] = ()
        self._merge()

    def check(self) -> None:
        """Refuse bad names, and two declarations in code with one name."""
        places: dict[str, str] = {}
        declared = [(name_of(given), "subagents") for given in self._parent.subagents]
        made = [(name, "subagent_factories") for name in self._parent.subagent_factories]
        for name, place in (*declared, *made):
            if agent_name(name) is None:
                raise ConfigurationError(f"sub-agent {name!r}: a name is {NAME_RULE}")
            if name in places:
                owner, first = f"agent {self._parent.name!r}", places[name]
                both = f"both in {place}" if first == place else f"one in {first} and one in {place}"
                raise ConfigurationError(f"{owner} has two sub-agents named {name!r}, {both}: rename one")
            places[name] = place

    def set_named_agents(self, agents: Mapping[str, Agent]) -> None:
        """Set the agents that `subagents` names as text."""
        self._named = agents
        self._merge()

    def refresh(self) -> None:
        """Read the files that have changed. Blocking."""
        with self._refreshing:  # runs that begin together wait for the one that reads
            changed = [folder.refresh() for folder in self._folders]
            given = [one for one in self._parent.subagents if isinstance(one, SubagentDeclaration)]
            found = [one for folder in self._folders for one in folder.declarations]
            changed.append(self._look_for_folders([*given, *found]))
            if not any(changed) and self._is_fresh:
                return
            before = set(self.problems) if self._is_fresh else set[Problem]()
            self._merge()
            self._is_fresh = True
            for problem in self.problems:
                if problem not in before:
                    _log.warning("%s", problem)

    async def refresh_without_blocking(self) -> None:
        """Refresh in a thread, as files may be many and large; not where there are none."""
        is_quick = self._is_fresh and self._parent.files.is_local
        if not is_quick or not all(folder.is_still_missing() for folder in self._folders):
            await in_thread(self.refresh, {})

    async def load_entries(self) -> dict[str, Entry]:
        """Return the entries; read the files if that never happened."""
        if not self._is_fresh:
            await self.refresh_without_blocking()
        return self.entries

    async def child(self, declaration: SubagentDeclaration) -> Agent:
        """Return the child of a declaration, with its instructions as they are now."""
        base = await self._base(declaration)
        return self._kept(declaration.name, declaration, base, lambda: self._build(declaration, base))

    def _merge(self) -> None:
        """Merge the sources: code before files, files in the order of their folders, `general-purpose` last."""
        problems: list[Problem] = [problem for folder in self._folders for problem in folder.problems]
        entries: dict[str, Entry] = {}
        if self._parent.general_purpose:

            def mirror(ctx: ToolContext) -> Agent:
                return self._kept(GENERAL_PURPOSE, None, "", lambda: self._parent.mirror(GENERAL_PURPOSE))

            entries[GENERAL_PURPOSE] = Entry(GENERAL_PURPOSE, GENERAL_PURPOSE_DESCRIPTION, "built in", mirror)
        in_code = [self._entry(given) for given in self._parent.subagents]
        made, check = self._parent.subagent_factories, self._parent.check_confined
        factories = [_factory_entry(name, given, check) for name, given in made.items()]
        taken = {entry.id: entry.source for entry in (*in_code, *factories)}
        from_files: list[Entry] = []
        for declaration in [found for folder in self._folders for found in folder.declarations]:
            if declaration.name in taken:
                message = f"{declaration.name!r} is declared in {taken[declaration.name]}, which counts"
                problems.append(Problem(declaration.source, message))
                continue
            taken[declaration.name] = declaration.source
            from_files.append(self._entry(declaration))
        for entry in (*in_code, *from_files, *factories):
            found = [] if entry.declaration is None else list(self._problems_of(entry.declaration))
            problems.extend(found)
            if all(problem.is_warning for problem in found):
                entries[entry.id] = entry
        self.entries, self.problems = entries, tuple(problems)

    def _entry(self, given: SubagentDeclaration | Agent | str) -> Entry:
        if isinstance(given, SubagentDeclaration):
            return Entry(given.name, given.description, given.source, self._maker(given), given)
        name = name_of(given)
        agent = self._named.get(name) if isinstance(given, str) else given
        description = (agent.description if agent is not None else "") or name

        def make_given(ctx: ToolContext) -> Agent:
            return ctx.resolver.agent(name) if isinstance(given, str) else given

        return Entry(name, description, "code", make_given)

    def _look_for_folders(self, declarations: Iterable[SubagentDeclaration]) -> bool:
        """Look for the folders that define sub-agents; return whether the set of missing ones has changed. Blocking."""
        before, missing = self._without_folder, set[str]()
        for declaration in declarations:
            if declaration.workspace is not None:
                with suppress(FilesystemError, ConfigurationError):  # which are problems of their own
                    if self._definition(declaration).folder_stamp() is None:
                        missing.add(os.fspath(declaration.workspace))
        self._without_folder = frozenset(missing)
        return self._without_folder != before

    def _maker(self, declaration: SubagentDeclaration) -> Factory:
        if declaration.is_remote:
            stub = remote_stub(declaration)
            return lambda ctx: stub

        async def make(ctx: ToolContext) -> Agent:
            try:
                return await self.child(declaration)
            except (FilesystemError, ConfigurationError) as exc:
                raise ExecutionBackendError(declaration.name, str(exc)) from exc

        return make

    def _problems_of(self, declaration: SubagentDeclaration) -> Iterator[Problem]:
        """Yield the problems of a declaration. One that is no warning makes it unusable."""
        if declaration.is_remote:
            for name, default in _DECIDED_BY_SERVER.items():
                if getattr(declaration, name) != default:
                    yield _problem(declaration, name, "has no effect on a remote sub-agent: its server decides")
            return
        if not names_provider(declaration.model):
            message = f"{declaration.model!r} names no provider: the parent's is used; write provider:model"
            yield _problem(declaration, "model", message)
        yield from self._tool_problems(declaration)
        try:
            if declaration.workspace is not None:
                self._definition(declaration)
                if (folder := os.fspath(declaration.workspace)) in self._without_folder:
                    message = f"there is no folder {folder!r}: {declaration.name} has no instructions"
                    yield _problem(declaration, _workspace_field(declaration), message)
        except (FilesystemError, ConfigurationError) as exc:
            yield _problem(declaration, _workspace_field(declaration), str(exc), warning=False)

    def _tool_problems(self, declaration: SubagentDeclaration) -> Iterator[Problem]:
        parent, inherited = self._parent, cache(self._parent.inherited_names)
        allowed, denied = declaration.tools or (), declaration.disallowed_tools
        named = [("tools", name) for name in allowed] + [("disallowed_tools", name) for name in denied]
        for field, name in named:
            if name in SUBAGENT_TOOLS:
                yield _problem(declaration, field, f"{name} has no effect: a declared sub-agent starts none itself")
            elif name not in BUILTIN_TOOLS and name not in parent.own_tool_names and name not in inherited():
                known = sorted({*inherited(), *parent.builtin_names})
                close = get_close_matches(name, known, 1)
                meant = f"; did you mean {close[0]}?" if close else ""
                message = f"its parent has no tool {name!r}; it has {', '.join(known) or 'none'}{meant}"
                # A misspelt name in a file must neither give nor take a tool unseen.
                yield _problem(declaration, field, message, warning=declaration.source == "code")
        wanted = [("tools", name) for name in allowed if name in BUILTIN_TOOLS]
        wanted += [("builtin_tools", name) for name in declaration.builtin_tools or ()]
        for field, name in wanted:
            if name not in parent.builtin_names:
                message = f"its parent has no {name}, so {declaration.name} gets none"
                yield _problem(declaration, field, message)

    def _kept(self, name: str, declaration: SubagentDeclaration | None, base: str, build: Callable[[], Agent]) -> Agent:
        """Return the child made before if nothing about it has changed."""
        made = self._made.get(name)
        if made is None or made[0] is not declaration or made[1] != base:
            made = self._made[name] = (declaration, base, build())
        return made[2]

    async def _base(self, declaration: SubagentDeclaration) -> str:
        """Return the instructions of the child as they are now. If it has a folder of its own, that is made."""
        if declaration.workspace is not None:
            return await in_thread(self._read_definition, {"declaration": declaration})
        if declaration.mode is WorkspaceMode.ISOLATED and self._parent.reads_workspace:
            files = self._runtime_files(declaration)
            if files.is_local:
                files.make_folder("")
            else:
                await in_thread(files.make_folder, {"path": ""})
        return declaration.inline or ""

    def _read_definition(self, declaration: SubagentDeclaration) -> str:
        files = self._definition(declaration)
        if files.stamp(AGENTS_FILE) is None:
            return ""
        try:
            return files.read(AGENTS_FILE).decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise ConfigurationError(f"{AGENTS_FILE} of {declaration.workspace} is not UTF-8 text") from None

    def _build(self, declaration: SubagentDeclaration, base: str) -> Agent:
        files = self._runtime_files(declaration)
        defined_here = declaration.workspace is not None and _same_place(self._definition(declaration), files)
        return self._parent.child(declaration, with_context(base), files, tells_agents_file=not defined_here)

    def _runtime_files(self, declaration: SubagentDeclaration) -> Filesystem:
        """Return the files that a child works on: rows two to five of the table of workspaces."""
        if declaration.mode is WorkspaceMode.SHARED:
            return self._parent.files
        if declaration.workspace is not None:
            return self._definition(declaration)
        return self._parent.files.below(f"agents/{declaration.name}/workspace")

    def _definition(self, declaration: SubagentDeclaration) -> Filesystem:
        """Return the folder that defines a child: in the main workspace, or in a root that its parent allows."""
        given = os.fspath(declaration.workspace or "")
        files = self._parent.files
        path = posixpath.normpath(given.replace(os.sep, "/"))
        if not os.path.isabs(given) and path != ".." and not path.startswith("../"):
            return files.below(path)
        if isinstance(files, LocalFilesystem):
            wanted = os.path.normpath(os.path.join(files.root, given))
            for allowed in (".", *self._parent.workspace_roots):
                root = os.path.normpath(os.path.join(files.root, allowed))
                if os.path.commonpath([root, wanted]) == root:
                    root_files = files if root == files.root else files.at(root)
                    return root_files.below(os.path.relpath(wanted, root).replace(os.sep, "/"))
        advice = "move it in, or allow a folder above it in code, with HarnessAgent(workspace_roots=…)"
        raise ConfigurationError(f"{given!r} is outside the main workspace: {advice}")


_DECIDED_BY_SERVER: Mapping[str, Any] = {
    **dict.fromkeys(("model", "tools", "builtin_tools")),
    "disallowed_tools": (),
    "max_steps": DEFAULT_STEPS,
    "mode": WorkspaceMode.ISOLATED,
}
"""Fields that a remote sub-agent does not use, with their defaults."""


def _workspace_field(declaration: SubagentDeclaration) -> str:
    return "workspace.path" if "workspace.path" in declaration.lines else "workspace"


def _problem(declaration: SubagentDeclaration, field: str, message: str, *, warning: bool = True) -> Problem:
    where = f"sub-agent {declaration.name!r} in code" if declaration.source == "code" else declaration.source
    return Problem(where, message, declaration.lines.get(field), field, warning)


def name_of(given: SubagentDeclaration | Agent | str) -> str:
    return (agent_name(given) or given) if isinstance(given, str) else given.name


def _same_place(one: Filesystem, other: Filesystem) -> bool:
    if isinstance(one, LocalFilesystem) and isinstance(other, LocalFilesystem):
        return one.root == other.root
    return one == other


def _factory_entry(name: str, given: Any, check: Callable[[Agent, Resolver], None]) -> Entry:
    pair = cast("tuple[Any, ...]", given if isinstance(given, tuple) else ("", given))
    if len(pair) != 2 or not isinstance(pair[0], str) or not callable(pair[1]):
        shape = "a function of a ToolContext, or (what it is for, function)"
        raise ConfigurationError(f"sub-agent {name!r}: a factory is {shape}, not {given!r}")
    description, factory = cast("tuple[str, Factory]", pair)
    return Entry(name, description or name, "factory", factory, check=check)
