"""The declared sub-agents of a folder, as the command line lists, checks and runs them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import msgspec

from ..core.agents import Agent
from ..core.errors import ConfigurationError, FilesystemError
from ..core.runs import Limits
from ..models.registry import resolve_model
from ..subagents.catalog import Catalog, Entry
from ..subagents.declarations import Problem, SubagentDeclaration
from ..subagents.folder import DeclarationFolder
from ..subagents.harness import HarnessAgent
from ..subagents.markdown import read_markdown
from ..workspace import LocalFilesystem
from .assistant import check_workspace


def looked_at(harness: HarnessAgent) -> Catalog:
    """The sub-agents of a harness, with its files read as they are now."""
    assert harness.catalog is not None
    harness.catalog.refresh()
    return harness.catalog


def problems_of(catalog: Catalog) -> list[Problem]:
    """What is wrong with the declarations, and models no provider here has: elsewhere there may be one."""
    problems = list(catalog.problems)
    for entry in catalog.entries.values():
        declared = entry.declaration
        if declared is not None and declared.model is not None:
            try:
                resolve_model(declared.model, entry.id)
            except ConfigurationError as exc:
                problems.append(Problem(declared.source, str(exc), declared.lines.get("model"), "model", True))
    return problems


class Declared(NamedTuple):
    """A sub-agent to run by itself, and what its declaration allows it."""

    agent: Agent
    limits: Limits | None


async def make_declared(harness: HarnessAgent, name: str, max_steps: int | None = None) -> Declared:
    """One of the sub-agents of a harness, as the harness would spawn it."""
    catalog = looked_at(harness)
    entry = catalog.entries.get(name)
    if entry is None:
        known = ", ".join(sorted(catalog.entries))
        raise ConfigurationError(f"there is no sub-agent {name!r} here; there are: {known}")
    if entry.declaration is None:
        return Declared(harness.mirror(entry.id), None)
    declaration = entry.declaration if max_steps is None else replace(entry.declaration, max_steps=max_steps)
    try:
        return Declared(await catalog.child(declaration), _limits(declaration))
    except FilesystemError as exc:
        raise ConfigurationError(f"the sub-agent {name!r} cannot work: {exc}") from exc


def _limits(declaration: SubagentDeclaration) -> Limits | None:
    """The limits of a declaration; its timeout is the time there is, as nobody waits for a root."""
    limits, timeout = declaration.limits, declaration.timeout
    if timeout is None:
        return limits
    limits = limits or Limits()
    seconds = timeout if limits.seconds is None else min(timeout, limits.seconds)
    return msgspec.structs.replace(limits, seconds=seconds)


def example_of(harness: HarnessAgent, entry: Entry) -> Agent:
    """An agent with the tools, model and steps of a sub-agent, to look at: nothing is read or made on disk."""
    if entry.declaration is None:
        return harness.mirror(entry.id)
    return harness.child(entry.declaration, "", harness.files, tells_agents_file=False)


def read_declarations(folder: str, workspace: str) -> tuple[list[SubagentDeclaration], list[Problem]]:
    """The sub-agents in `subagents/` of another folder than the workspace, which brings its own."""
    check_workspace(workspace)
    check_workspace(folder, "with --subagents")
    if os.path.samefile(folder, workspace):
        return [], []
    files = DeclarationFolder(LocalFilesystem(folder), "subagents", read_markdown)
    files.refresh()
    problems = [msgspec.structs.replace(problem, where=in_folder(folder, problem.where)) for problem in files.problems]
    found = [replace(one, source=in_folder(folder, one.source)) for one in files.declarations]
    if not found and not problems:
        raise ConfigurationError(f"{in_folder(folder, 'subagents')!r} has no Markdown files: give another --subagents")
    return found, problems


def in_folder(folder: str, path: str) -> str:
    """A path in a folder as it is typed where the command runs."""
    return os.path.normpath(os.path.join(folder, path))
