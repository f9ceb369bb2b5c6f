"""Declarations in Markdown: `subagents/<id>.md`, and the agents of other tools in `.claude/agents/`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from heapq import nsmallest
from typing import Any

from msgspec import Struct

from ..core.agents import NAME_RULE, agent_name
from ..core.errors import ConfigurationError, FileMissing, FilesystemError, PathError
from ..core.filesystem import Filesystem, Stamp
from ..core.runs import Limits
from .declarations import BUILTIN_TOOLS, DEFAULT_STEPS, Problem, SubagentDeclaration, WorkspaceMode
from .frontmatter import BadFile, FrontMatter, as_number, shown

_FIELDS = frozenset(
    "description workspace model maxIters max_steps steps tools builtin_tools disallowed_tools timeout limits".split()
)
_REMOTE = frozenset({"url", "headers"})

_CLAUDE_TOOLS = {
    "Read": "read_file",
    "Write": "write_file",
    "Edit": "edit_file",
    "MultiEdit": "edit_file",
    "LS": "list_files",
    "Glob": "glob_files",
    "Grep": "grep_files",
    "Bash": "shell",
}
_CLAUDE_ONLY = frozenset(
    "AskUserQuestion BashOutput EnterPlanMode ExitPlanMode KillBash KillShell ListMcpResourcesTool NotebookEdit "
    "NotebookRead ReadMcpResourceTool Skill SlashCommand TaskOutput TodoRead TodoWrite ToolSearch WebFetch WebSearch".split()
)
_CLAUDE_FIELDS = frozenset({"name", "description", "tools", "disallowedTools", "model", "maxTurns"})
_CLAUDE_FAMILIES = frozenset({"sonnet", "opus", "haiku", "fable"})


class Loaded(Struct, frozen=True):
    """The declaration of a file, if it has a usable one, and its problems."""

    declaration: SubagentDeclaration | None
    problems: tuple[Problem, ...] = ()


def read_markdown(name: str, data: bytes, where: str) -> Loaded:
    """Read a file of `subagents/`. Its `name`, without `.md`, is the id."""
    try:
        front = FrontMatter(data, where)
    except BadFile as exc:
        return Loaded(None, (Problem(where, exc.message, exc.line),))
    agent_id = agent_name(name)
    if agent_id is None:
        return Loaded(None, (Problem(where, f"its file name is no agent_id: use {NAME_RULE}"),))
    for field in front.fields:
        if field in _REMOTE:
            front.warn(field, "is not read from files; declare remote sub-agents in code")
        elif field == "name":
            front.warn(field, f"is not read: the file name makes this {agent_id!r}")
        elif field not in _FIELDS:
            front.warn(field, f"is not known and has no effect; known: {', '.join(sorted(_FIELDS))}")
    mode, path = _workspace(front)
    body: str | None = front.body or None
    if path is not None and body is not None:
        front.warn("workspace.path", "is given, and its AGENTS.md counts: the text below the front matter is ignored")
        body = None
    given = {
        "workspace": path,
        "inline": body,
        "mode": mode,
        "model": front.text("model", warning=True),
        "max_steps": _steps(front),
        "tools": front.names("tools"),
        "builtin_tools": _builtin_tools(front),
        "disallowed_tools": front.names("disallowed_tools") or (),
        "timeout": front.number("timeout"),
        "limits": _limits(front),
    }
    return _declare(front, agent_id, given)


def read_claude_markdown(name: str, data: bytes, where: str) -> Loaded:
    """Read a file of `.claude/agents/`; one without a name in its front matter is a document, not an agent."""
    try:
        front = FrontMatter(data, where, lenient=True)
    except BadFile as exc:
        return Loaded(None, (Problem(where, exc.message, exc.line),))
    given_name = front.text("name")
    if given_name is None:
        return Loaded(None, tuple(front.problems))
    if agent_name(given_name) is None:
        front.fault("name", f"must be {NAME_RULE}")
        return Loaded(None, tuple(front.problems))
    for field in front.fields:
        if field not in _CLAUDE_FIELDS:
            front.warn(field, "has no counterpart here and has no effect")
    inherited, built_in = _claude_tools(front, "tools")
    denied, denied_built_in = _claude_tools(front, "disallowedTools")
    given = {
        "inline": front.body or None,
        "mode": WorkspaceMode.SHARED,
        "model": _claude_model(front),
        "max_steps": front.whole_number("maxTurns") or DEFAULT_STEPS,
        "tools": inherited,
        "builtin_tools": built_in,
        "disallowed_tools": (*(denied or ()), *(denied_built_in or ())),
    }
    return _declare(front, given_name, given, escaped=True)


def _declare(front: FrontMatter, name: str, given: dict[str, Any], *, escaped: bool = False) -> Loaded:
    description = front.text("description")
    if escaped and description is not None:
        description = description.replace("\\n", "\n")  # Claude Code writes a line break as \n
    if description is None and not any(problem.field == "description" for problem in front.problems):
        front.fault("description", "is missing: say when to use this sub-agent and what it gives back")
    made: SubagentDeclaration | None = None
    if description is not None and all(problem.is_warning for problem in front.problems):
        try:
            made = SubagentDeclaration(name, description, source=front.where, lines=front.lines, **given)
        except ConfigurationError as exc:
            front.problems.append(Problem(front.where, str(exc)))
    return Loaded(made, tuple(front.problems))


def _workspace(front: FrontMatter) -> tuple[WorkspaceMode, str | None]:
    said = front.fields.get("workspace")
    example = said if isinstance(said, str) and said in list(WorkspaceMode) else "isolated"
    shape = f"{{mode: {example}}} (mode is isolated or shared; path is a folder)"
    given = front.mapping("workspace", shape, warning=True) or {}
    for field in given:
        if field not in ("mode", "path"):
            front.warn(f"workspace.{field}", "is not known and has no effect; known: mode, path")
    mode, path = given.get("mode"), given.get("path")
    if path is not None and not isinstance(path, str):
        front.fault("workspace.path", "must be text")
        path = None
    path = (path or "").strip() or None
    if mode is None:
        return WorkspaceMode.ISOLATED, path
    if isinstance(mode, str) and mode.lower() in list(WorkspaceMode):
        return WorkspaceMode(mode.lower()), path
    front.warn("workspace.mode", f"must be isolated or shared, not {shown(mode)}; isolated is used")
    return WorkspaceMode.ISOLATED, path


def _builtin_tools(front: FrontMatter) -> list[str] | None:
    names = front.names("builtin_tools")
    for name in names or ():
        if name not in BUILTIN_TOOLS:
            front.fault("builtin_tools", f"there is no built-in tool {name!r}; there are {', '.join(BUILTIN_TOOLS)}")
    return names


def _steps(front: FrontMatter) -> int:
    given = [name for name in ("max_steps", "steps", "maxIters") if name in front.fields]
    for name in given[1:]:
        front.warn(name, f"says the same as {given[0]}, which counts")
    return (front.whole_number(given[0]) if given else None) or DEFAULT_STEPS


def _limits(front: FrontMatter) -> Limits | None:
    """Read the limits. Bad ones are a fault, not a warning: without limits the sub-agent could spend anything."""
    given = front.mapping("limits", "{steps: 20} (any of " + ", ".join(Limits.__struct_fields__) + ")")
    if given is None:
        return None
    found: dict[str, Any] = {}
    for name, value in given.items():
        number = as_number(value)
        if name not in Limits.__struct_fields__:
            front.fault(f"limits.{name}", f"there is no such limit; there are {', '.join(Limits.__struct_fields__)}")
        elif number is None or number < 0 or (name not in ("cost", "seconds") and number != int(number)):
            front.fault(f"limits.{name}", f"must be a number of 0 or more, not {shown(value)}")
        else:
            found[name] = number if name in ("cost", "seconds") else int(number)
    try:
        return Limits(**found)
    except ValueError as exc:
        front.fault("limits", str(exc))
        return None


def _claude_tools(front: FrontMatter, field: str) -> tuple[list[str] | None, list[str] | None]:
    """Return the inherited and the built-in tools here that tools of Claude Code stand for."""
    names = front.names(field)
    if names is None:
        return None, None
    inherited: list[str] = []
    built_in: list[str] = []
    for name in names:
        plain, bracket, _ = name.partition("(")
        plain = plain.strip()
        if bracket and field == "tools":
            front.warn(field, f"{name!r} allows some calls only, which has no counterpart here: it gets none")
        elif plain in _CLAUDE_TOOLS or plain in BUILTIN_TOOLS:
            built_in.append(_CLAUDE_TOOLS.get(plain, plain))
        elif plain in ("Agent", "Task"):
            front.warn(field, f"{plain} has no effect: a declared sub-agent starts none itself")
        elif plain in _CLAUDE_ONLY or plain.startswith("mcp__"):
            front.warn(field, f"{plain} has no counterpart here and has no effect")
        else:
            inherited.append(plain)
    return inherited, list(dict.fromkeys(built_in))


def _claude_model(front: FrontMatter) -> str | None:
    model = front.text("model", warning=True)
    if model in (None, "inherit"):
        return None
    if model in _CLAUDE_FAMILIES:
        front.warn("model", f"{model!r} names a family, not a model: the parent's is used; write provider:model")
        return None
    return model if ":" in model else f"anthropic:{model}"


MANY, PATIENCE = 200, 1.0
"""More files than `MANY` are checked one by one only every `PATIENCE` seconds. Added or removed ones are noticed at once."""
MOST_FILES = 1000
"""The number of declarations that are read: all of them go to a model."""
DEEPEST = 4
"""The levels of folders that are searched."""

Reader = Callable[[str, bytes, str], Loaded]


class DeclarationFolder:
    """The `.md` files of a folder and, if `nested`, of the folders below it. Blocking."""

    def __init__(self, filesystem: Filesystem, folder: str, read: Reader, *, nested: bool = False) -> None:
        self._filesystem, self._folder, self._reader, self._nested = filesystem, folder, read, nested
        self._stamps: dict[str, Stamp] | None = None
        self._folder_stamp: Stamp | None = None
        self._checked_at = 0.0
        self._files: dict[str, Loaded] = {}
        self.problems: tuple[Problem, ...] = ()

    def is_still_missing(self) -> bool:
        """Return whether there was no such folder and is none now; microseconds, where anything else may take long."""
        try:
            return self._stamps == {} and self._folder_stamp is None is self._filesystem.folder_stamp(self._folder)
        except FilesystemError:
            return False

    @property
    def declarations(self) -> list[SubagentDeclaration]:
        """The usable declarations, in the order of their files' names."""
        return [loaded.declaration for loaded in self._files.values() if loaded.declaration is not None]

    def refresh(self) -> bool:
        """Read the files that have changed; return whether any had."""
        try:
            folder_stamp = self._filesystem.folder_stamp(self._folder)
            has_many = self._stamps is not None and len(self._stamps) > MANY
            is_recent = has_many and time.monotonic() - self._checked_at < PATIENCE
            if folder_stamp == self._folder_stamp and is_recent:
                return False
            stamps = self._find_stamps("", DEEPEST if self._nested else 0)
        except FilesystemError as exc:
            changed = self._stamps is not None or not self.problems
            self._files, self._stamps, self.problems = {}, None, (Problem(self._folder, _why(exc)),)
            return changed
        self._folder_stamp, self._checked_at = folder_stamp, time.monotonic()
        if stamps == self._stamps:
            return False
        before = self._stamps or {}
        is_kept = {name: name in self._files and before.get(name) == stamp for name, stamp in stamps.items()}
        names = nsmallest(MOST_FILES, stamps)
        self._files = {name: self._files[name] if is_kept[name] else self._read(name) for name in names}
        self._stamps = stamps
        problems = [problem for loaded in self._files.values() for problem in loaded.problems]
        if len(stamps) > MOST_FILES:
            too_many = (
                f"it has {len(stamps):,} declarations: those after {names[-1]!r}, the {MOST_FILES:,}th, are ignored"
            )
            problems.append(Problem(self._folder, too_many))
        self.problems = tuple(problems)
        return True

    def _find_stamps(self, below: str, depth: int) -> dict[str, Stamp]:
        """Return the stamps of the files, by their paths in this folder."""
        folder = f"{self._folder}/{below}".rstrip("/")
        stamps = {below + name: stamp for name, stamp in self._filesystem.stamps(folder, ".md").items()}
        if depth > 0:
            with suppress(FileMissing):
                for entry in self._filesystem.list(folder):
                    if entry.is_dir:
                        stamps |= self._find_stamps(f"{below}{entry.path.rpartition('/')[2]}/", depth - 1)
        return stamps

    def _read(self, name: str) -> Loaded:
        path = f"{self._folder}/{name}"
        where = path.encode(errors="backslashreplace").decode()  # any name must be printable
        try:
            data = self._filesystem.read(path)
        except FilesystemError as exc:
            return Loaded(None, (Problem(where, _why(exc)),))
        return self._reader(name.rpartition("/")[2].removesuffix(".md"), data, where)


def _why(error: FilesystemError) -> str:
    """Return the problem without the path, which is shown beside it."""
    return error.problem if isinstance(error, PathError) else str(error)
