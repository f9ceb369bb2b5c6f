"""`retinue run`: one question on a folder, shown live; and the runtime of a folder, which `retinue chat` uses too."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import NamedTuple

from ..core.agents import Agent
from ..core.errors import ConfigurationError
from ..core.model import Model
from ..core.runs import RunResult
from ..models.resilience import close_model
from ..runtime import Run, Runtime
from ..storage.stores import open_store, without_secrets
from .agents import (
    choose_model,
    make_assistant,
    make_declared,
    model_name,
    read_catalog,
    read_declarations,
    warn_of,
    warn_of_errors,
)
from .consent import Consent
from .database import as_misuse, optional_url
from .interrupt import Interrupt, exit_code, make_view, watch


async def run(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Ask a question and show the run until it ends."""
    if not args.question.strip():
        raise ConfigurationError('the question is empty: ask something, as in retinue run "Where is the key kept?"')
    async with open_folder(args) as folder:
        with make_view(as_json=args.json) as view:
            result = await watch(folder.ask(args.question, args.thread), view, interrupt, consent=folder.consent)
    return folder.exit_code(result, interrupt)


class Folder(NamedTuple):
    """A runtime with the agent of a folder, as the options of a command describe it."""

    runtime: Runtime
    agent: Agent
    model: str | Model | None
    """Instead of the agent's own."""
    consent: Consent
    database: str
    """The option --db of what to type next."""
    is_stored: bool

    def ask(self, question: str, thread_id: str | None) -> Run:
        """Start a run. A shell may pass bytes that are no text; they arrive as lone surrogates, and are replaced."""
        text = question.encode("utf-8", "replace").decode()
        return self.runtime.stream(self.agent, text, thread_id=thread_id, model=self.model)

    def exit_code(self, result: RunResult, interrupt: Interrupt) -> int:
        """Return the exit code of a run, and say what is wrong."""
        return exit_code(result, interrupt, self.database, is_stored=self.is_stored, consent=self.consent)


@asynccontextmanager
async def open_folder(args: argparse.Namespace) -> AsyncGenerator[Folder]:
    """Make the agent of a folder, say what may not be meant, and enter its runtime."""
    model, url = choose_model(args.model), optional_url(args)
    store = None if url is None else open_store(url)
    workspace = args.workspace or "."
    others, problems = ([], []) if args.subagents is None else read_declarations(args.subagents, workspace)
    consent = Consent(args)
    harness = make_assistant(
        workspace, model, args.max_steps, shell=args.shell, subagents=others, store=store, consent=consent
    )
    warn_of(args.model, read_catalog(harness).problems, workspace)
    warn_of_errors(problems, args.subagents or "")
    agent = harness if args.agent is None else await make_declared(harness, args.agent, args.max_steps, consent)
    # A stored run names its model, for the process that resumes it.
    named: str | Model = model if store is None else model_name(args.model)
    own_model = named if args.model is not None or agent.model is None else None
    # Interrupted runs in the database belong to other folders: they are not recovered here.
    runtime = Runtime([agent], store=store, recover=False, on_close="cancel")
    database = "" if args.db is None else f" --db {without_secrets(args.db)}"
    with as_misuse():
        await runtime.__aenter__()
    try:
        yield Folder(runtime, agent, own_model, consent, database, store is not None)
    finally:
        await runtime.close()
        await close_model(agent.model)
