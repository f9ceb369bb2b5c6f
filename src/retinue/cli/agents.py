"""The agents of the command line: the assistant of a folder, its sub-agents, agents of a module; and `retinue agents`."""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from importlib import import_module
from textwrap import fill
from typing import Any, cast

import msgspec

from ..core.agents import Agent
from ..core.errors import ConfigurationError, FilesystemError, PathError
from ..core.model import Model
from ..core.probation import MAX_TAKEOVERS
from ..core.runs import Limits, limits_of_run
from ..core.stores import Store
from ..core.tools import Tool
from ..log.ownership import LEASE
from ..models.registry import resolve_model
from ..plugins.compaction import Compaction
from ..plugins.permissions import Permissions
from ..runtime import Runtime
from ..storage.sql import SqlStore
from ..storage.stores import open_store
from ..storage.tasks import SqlTaskRepository
from ..subagents.catalog import Catalog, Entry
from ..subagents.declarations import Problem, SubagentDeclaration, names_provider
from ..subagents.harness import HarnessAgent
from ..subagents.markdown import DeclarationFolder, read_markdown
from ..workspace import AGENTS_FILE, LocalFilesystem
from .parsers import COMPLETED, FAILED
from .text import clean, complain, count, one_line, print_json, table

NAME = "assistant"
DEFAULT_MODEL = "offline:rules"
MODEL_VARIABLE = "RETINUE_MODEL"
MAX_STEPS = 16

_INSTRUCTIONS = (
    "You are an assistant that works on the files of one folder, the workspace, with the tools you have. "
    "Look before you answer, say where you found what you say as path:line, and say so when you found nothing. "
    "Change files only when you are asked to."
)
_WIDTH = 100
"""The width of text that is not for a terminal."""


def make_assistant(
    workspace: str,
    model: Model,
    max_steps: int | None = None,
    *,
    shell: bool = False,
    subagents: Iterable[SubagentDeclaration] = (),
    store: Store | None = None,
    consent: Permissions | None = None,
    context_window: int | None = None,
) -> HarnessAgent:
    """Make the agent "assistant" of a folder. Its tasks are in the database of its runs, where there is one.

    Raises ConfigurationError where it cannot work in the folder.
    """
    check_folder(workspace)
    filesystem = LocalFilesystem(workspace)
    try:
        if filesystem.exists(AGENTS_FILE):
            filesystem.read(AGENTS_FILE).decode()
    except (FilesystemError, OSError) as exc:
        problem = exc.problem.partition(";")[0] if isinstance(exc, PathError) else exc  # without advice for a model
        raise ConfigurationError(
            f"cannot read {AGENTS_FILE} of the workspace: {problem}: correct, shorten or remove it"
        ) from exc
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{AGENTS_FILE} of the workspace is not UTF-8 text: save it as UTF-8") from exc
    return HarnessAgent(
        NAME,
        model,
        _INSTRUCTIONS,
        plugins=() if consent is None else (consent,),
        max_steps=max_steps or MAX_STEPS,
        workspace=workspace,
        filesystem=filesystem,
        subagents=subagents,
        task_repository=SqlTaskRepository(store) if isinstance(store, SqlStore) else None,
        disable_shell=not shell,
        compaction=Compaction(window=context_window),
    )


def choose_model(given: str | None) -> Model:
    """Return the model of --model or $RETINUE_MODEL, else the built-in rules."""
    where, name = "--model" if given is not None else f"${MODEL_VARIABLE}", model_name(given)
    try:
        return resolve_model(name, where)
    except ConfigurationError as exc:
        message = str(exc).replace(" or pass api_key=…", "")
        raise ConfigurationError(message if ":" in name else f"{message}, as in {DEFAULT_MODEL}") from exc


def model_name(given: str | None) -> str:
    """Return the name of that model."""
    return (given if given is not None else os.environ.get(MODEL_VARIABLE)) or DEFAULT_MODEL


def warn_of(model: str | None, problems: Iterable[Problem], folder: str) -> None:
    """Say that the default model answers, and that declared sub-agents are missing because of errors."""
    if model is None and not os.environ.get(MODEL_VARIABLE):
        complain(
            f"{DEFAULT_MODEL} answers: rules, not a language model; "
            f"choose one with --model provider:model or ${MODEL_VARIABLE}"
        )
    warn_of_errors(problems, folder)


def warn_of_errors(problems: Iterable[Problem], folder: str) -> None:
    """Say how many errors there are; `retinue agents validate` prints them, and warnings too."""
    if errors := sum(not problem.is_warning for problem in problems):
        complain(f"{count(errors, 'error')} in declared sub-agents; see: retinue agents validate {folder}")


def check_folder(path: str, how: str = "with --workspace") -> None:
    """Raise ConfigurationError where a path is no folder that can be read."""
    try:
        os.scandir(path).close()
    except FileNotFoundError:
        raise ConfigurationError(f"there is no folder {path!r}: create it, or give another {how}") from None
    except NotADirectoryError:
        raise ConfigurationError(f"{path!r} is a file: give the folder it is in {how}") from None
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ConfigurationError(f"cannot work in {path!r}: {reason}: give another folder {how}") from exc


def read_catalog(harness: HarnessAgent) -> Catalog:
    """Return the sub-agents of a harness, with their files read now."""
    assert harness.catalog is not None
    harness.catalog.refresh()
    return harness.catalog


def find_problems(catalog: Catalog) -> list[Problem]:
    """Return the problems of the declarations; an unknown model is a warning, as another machine may know it."""
    problems = list(catalog.problems)
    for entry in catalog.entries.values():
        declared = entry.declaration
        if declared is not None and declared.model is not None and names_provider(declared.model):
            try:
                resolve_model(declared.model, entry.id)
            except ConfigurationError as exc:
                problems.append(Problem(declared.source, str(exc), declared.lines.get("model"), "model", True))
    return problems


async def make_declared(
    harness: HarnessAgent, name: str, max_steps: int | None = None, consent: Permissions | None = None
) -> Agent:
    """Make one of the sub-agents of a harness, as the harness would spawn it. It has no parent to inherit consent from."""
    catalog = read_catalog(harness)
    entry = catalog.entries.get(name)
    if entry is None:
        known = ", ".join(sorted(catalog.entries))
        raise ConfigurationError(f"there is no sub-agent {name!r} here; there are: {known}")
    if entry.declaration is None:
        return _alone(harness.mirror(entry.id), consent, None)
    declaration = entry.declaration if max_steps is None else replace(entry.declaration, max_steps=max_steps)
    try:
        return _alone(await catalog.child(declaration), consent, _limits(declaration))
    except FilesystemError as exc:
        raise ConfigurationError(f"the sub-agent {name!r} cannot work: {exc}") from exc


def _alone(agent: Agent, consent: Permissions | None, limits: Limits | None) -> Agent:
    """Return a sub-agent that runs by itself: with these permissions, and with these limits."""
    made = copy(agent)
    if consent is not None:
        others = [known for known in agent.plugins if known.name != consent.name]
        object.__setattr__(made, "plugins", (consent, *others))
    object.__setattr__(made, "limits", limits_of_run(agent.limits, limits, over_network=False) or agent.limits)
    return made


def _limits(declaration: SubagentDeclaration) -> Limits | None:
    """Return the limits of a declaration. A root has no parent that waits, so its timeout limits the run."""
    limits, timeout = declaration.limits, declaration.timeout
    return limits if timeout is None else Limits(seconds=timeout).narrowed(limits)


def read_declarations(folder: str, workspace: str) -> tuple[list[SubagentDeclaration], list[Problem]]:
    """Read `subagents/` of another folder than the workspace, which brings its own."""
    check_folder(workspace)
    check_folder(folder, "with --subagents")
    if os.path.samefile(folder, workspace):
        return [], []
    files = DeclarationFolder(LocalFilesystem(folder), "subagents", read_markdown)
    files.refresh()
    problems = [msgspec.structs.replace(problem, where=join_path(folder, problem.where)) for problem in files.problems]
    found = [replace(one, source=join_path(folder, one.source)) for one in files.declarations]
    if not found and not problems:
        raise ConfigurationError(f"{join_path(folder, 'subagents')!r} has no Markdown files: give another --subagents")
    return found, problems


def join_path(folder: str, path: str) -> str:
    """Return a path in a folder, relative to where the command runs."""
    return os.path.normpath(os.path.join(folder, path))


def load_runtime(
    target: str,
    url: str,
    *,
    how: str = "--target",
    serves: bool = False,
    is_chosen: bool = False,
    engine: str | None = None,
    lease: float = LEASE,
    max_takeovers: int = MAX_TAKEOVERS,
) -> Runtime:
    """Return the runtime that `module:attribute` names, on a database.

    `is_chosen`: the database was named by the user, so a Runtime with another one is refused. `how` the target was given
    is part of the errors.
    """
    found = _import_target(target, how)
    if isinstance(found, Runtime) and is_chosen:
        raise ConfigurationError(
            f"{how} {target}: this Runtime has its own store: leave --db out, or name a function that takes the URL"
        )
    if isinstance(found, Tool) or inspect.iscoroutinefunction(found):
        kind = "a tool" if isinstance(found, Tool) else "an async function"
        raise ConfigurationError(
            f"{how} {target}: it is {kind}: name an agent, a list of agents, a Runtime, or a plain function that returns one"
        )
    if not isinstance(cast("object", found), Agent | Runtime) and callable(found):
        try:
            found = found(url) if inspect.signature(found).parameters else found()
        except Exception as exc:
            raise ConfigurationError(f"{how} {target}: it failed with {type(exc).__name__}: {exc}") from exc
    if isinstance(found, Runtime) and engine is not None:
        raise ConfigurationError(f"{how} {target}: it is a Runtime, and --engine needs its agents: name a list of them")
    if isinstance(found, Runtime):
        return found
    agents = _agents_in(found, f"{how} {target}")
    return runtime_on(agents, open_store(url), serves=serves, engine=engine, lease=lease, max_takeovers=max_takeovers)


def _agents_in(found: Any, where: str) -> list[Agent]:
    """Return what a target names, or gave, as a list of agents."""
    is_list = isinstance(found, Iterable) and not isinstance(found, str)
    agents: list[Any] = list(cast("Iterable[Any]", found)) if is_list else [found]
    if not agents:
        raise ConfigurationError(f"{where}: the list is empty: put an agent into it")
    odd = [one for one in agents if not isinstance(one, Agent)]
    if odd:
        place = "the list has" if is_list else "it gives"
        raise ConfigurationError(f"{where}: {place} {odd[0]!r:.80}, not an agent: name an agent or a list of agents")
    return agents


def runtime_on(
    agents: Iterable[Agent],
    store: Store,
    *,
    serves: bool,
    engine: str | None = None,
    lease: float = LEASE,
    max_takeovers: int = MAX_TAKEOVERS,
) -> Runtime:
    """Return a runtime. One that serves recovers interrupted runs, and leaves its own to the next process."""
    on_close = "leave" if serves and isinstance(store, SqlStore) else "cancel"
    return Runtime(
        agents,
        store=store,
        recover=serves,
        on_close=on_close,
        engine=engine,
        lease=lease,
        max_takeovers=max_takeovers,
    )


async def workspace_runtime(
    workspace: str, agent: str, model: str | None, url: str, consent: Permissions | None = None
) -> Runtime:
    """Return the runtime of a folder with the agent that `retinue run` made of it."""
    store = open_store(url)
    harness = make_assistant(workspace, choose_model(model), store=store, consent=consent)
    if agent != NAME and agent not in read_catalog(harness).entries:
        raise ConfigurationError(
            f"the agent {agent!r} is not declared in {workspace!r}: name it with --target MODULE:ATTR if it is in your "
            "code, or give --workspace DIR with the folder that declares it"
        )
    chosen = harness if agent == NAME else await make_declared(harness, agent, None, consent)
    return runtime_on([chosen], store, serves=False)


def _import_target(target: str, how: str) -> Any:
    module, colon, path = target.partition(":")
    if not module or not colon or not path:
        raise ConfigurationError(f"{how} {target!r}: write MODULE:ATTR, as in app.agents:assistant")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except Exception as exc:
        raise ConfigurationError(f"{how} {target}: {type(exc).__name__}: {exc}: correct it, or name another") from exc
    return found


async def list_agents(args: argparse.Namespace) -> int:
    """List every sub-agent of a folder."""
    folder, harness, catalog = _read_folder(args)
    rows = [_agent_json(entry, harness) for entry in catalog.entries.values()]
    if args.json:
        print_json(rows)
    else:
        _print_table(rows)
    if not _has_declarations(catalog):
        complain(_no_declarations(folder))
    elif problems := find_problems(catalog):
        complain(f"{count(len(problems), 'problem')}; see: retinue agents validate {folder}")
    return COMPLETED


async def validate_agents(args: argparse.Namespace) -> int:
    """Print the problems of the declarations of a folder."""
    folder, _, catalog = _read_folder(args)
    if not _has_declarations(catalog):
        raise ConfigurationError(_no_declarations(folder))
    problems = find_problems(catalog)
    errors = [problem for problem in problems if not problem.is_warning]
    warnings = [problem for problem in problems if problem.is_warning]
    if args.json:
        names = [entry.id for entry in catalog.entries.values() if entry.declaration is not None]
        print_json({"ok": not errors, "agents": names, "problems": [_problem_json(one) for one in problems]})
    else:
        for heading, found in (("Errors", errors), ("Warnings", warnings)):
            if found:
                print(clean("\n".join([f"{heading}:", *_lines(found, folder), ""])))
        print(clean(_verdict(catalog, len(errors), len(warnings))))
    return FAILED if errors else COMPLETED


def _read_folder(args: argparse.Namespace) -> tuple[str, HarnessAgent, Catalog]:
    if args.folder is not None and args.workspace is not None:
        raise ConfigurationError(f"two folders are given: leave out {args.folder!r} or --workspace {args.workspace!r}")
    folder = args.folder or args.workspace or "."
    check_folder(folder, "as DIR")
    harness = make_assistant(folder, choose_model(DEFAULT_MODEL))
    return folder, harness, read_catalog(harness)


def _no_declarations(folder: str) -> str:
    return f"{folder!r} declares no sub-agents: write one as subagents/<id>.md"


def _has_declarations(catalog: Catalog) -> bool:
    return bool(catalog.problems) or any(entry.declaration is not None for entry in catalog.entries.values())


def _agent_json(entry: Entry, harness: HarnessAgent) -> dict[str, Any]:
    """Return a sub-agent with the tools, model and steps it would have; without I/O."""
    declared = entry.declaration
    if declared is None:
        agent = harness.mirror(entry.id)
    else:
        agent = harness.child(declared, "", harness.files, tells_agents_file=False)
    return {
        "id": entry.id,
        "description": entry.description,
        "source": entry.source,
        "mode": "shared" if declared is None else str(declared.mode),
        "definition": None if declared is None or declared.workspace is None else str(declared.workspace),
        "model": agent.model,
        "max_steps": agent.max_steps,
        "tools": list(agent.toolbox),
        "has_all_tools": agent.toolbox.keys() == harness.toolbox.keys()
        and (declared is None or declared.tools is None),
        "timeout": None if declared is None else declared.timeout,
    }


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each agent, with its description and tools below."""
    cells = [("id", "source", "workspace", "model", "steps")]
    for row in rows:
        defined = f" ({row['definition']})" if row["definition"] else ""
        place = f"{row['mode']}{defined}"
        cells.append((row["id"], row["source"], place, row["model"] or "parent's", str(row["max_steps"])))
    heading, *lines = table(cells)
    width = max(shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH, 20)
    print(heading)
    for line, row in zip(lines, rows, strict=True):
        print(line)
        tools = "all" if row["has_all_tools"] else ", ".join(row["tools"]) or "none"
        for text in (row["description"], f"Tools: {tools}"):
            print(fill(" ".join(clean(text).split()), width, initial_indent="    ", subsequent_indent="    "))


def _problem_json(problem: Problem) -> dict[str, Any]:
    severity = "warning" if problem.is_warning else "error"
    place = {"file": problem.where, "line": problem.line, "field": problem.field}
    return {"severity": severity, **place, "message": problem.message}


def _lines(problems: Iterable[Problem], folder: str) -> list[str]:
    """Return problems by file and line, with paths that can be opened from here."""
    ordered = sorted(problems, key=lambda problem: (problem.where, problem.line or 0))
    placed = [msgspec.structs.replace(problem, where=join_path(folder, problem.where)) for problem in ordered]
    return [one_line(str(problem), 1_000) for problem in placed]


def _verdict(catalog: Catalog, errors: int, warnings: int) -> str:
    usable = sum(entry.declaration is not None for entry in catalog.entries.values())
    found = f"{count(usable, 'declared sub-agent')} can be used"
    if errors:
        return f"{count(errors, 'error')}, {count(warnings, 'warning')}; {found}"
    return f"{found}, with {count(warnings, 'warning')}" if warnings else f"{found}, no problems"
