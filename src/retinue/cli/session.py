"""Where a command runs its agents: in this process, for a folder, or on a server. Both have the same methods."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ..client import Client
from ..core.agents import Agent
from ..core.decisions import Decision
from ..core.errors import ConfigurationError, RetinueError
from ..core.model import Model
from ..core.runs import RunResult
from ..core.stores import ThreadSummary
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
from .interrupt import Interrupt, exit_code

_FIRST_PATIENCE = 3.0
"""Seconds for the first connection to a server. One that is lost later is waited for longer."""
_LOCAL_ONLY = ("workspace", "subagents", "shell", "yes", "allow", "read_only", "max_steps", "context_window", "db")
"""Options that say how agents of a folder work: a server has its own."""


@dataclass
class Session:
    """An agent to talk to, and what runs it."""

    runtime: Runtime | Client
    agent: Agent | str
    model: str | Model | None
    """Instead of the agent's own."""
    model_label: str
    consent: Consent | None
    database: str
    """The option --db of what to type next."""
    is_stored: bool
    agents: Sequence[str] = ()
    """The names of the agents that can be talked to, or be given work."""
    place: str = ""

    @property
    def name(self) -> str:
        return self.agent if isinstance(self.agent, str) else self.agent.name

    def ask(self, question: str, thread_id: str | None) -> Run:
        """Start a run. A shell may pass bytes that are no text; they arrive as lone surrogates, and are replaced."""
        text = question.encode("utf-8", "replace").decode()
        model = self.model if isinstance(self.runtime, Runtime) else None
        return self.runtime.stream(self.agent, text, thread_id=thread_id, model=model)

    def answer(self, run_id: str, decisions: dict[str, Decision]) -> Run:
        """Continue a run that waits."""
        return self.runtime.stream_resume(run_id, decisions)

    async def threads(self) -> list[ThreadSummary]:
        """Return the conversations, the one used last first."""
        return list(await self.runtime.threads())

    async def fork(self, run_id: str, at: int, text: str) -> Run:
        """Start a run on a new conversation that continues another run as it stood after an event."""
        return await self.runtime.fork(run_id, at=at, input=text)

    async def stop(self, run: Run, ns: Sequence[str]) -> None:
        """Stop one run below a root; its parent reads a cancelled result and goes on."""
        await self.runtime.cancel(run.run_id, ns=ns, reason="stopped by you")

    def exit_code(self, result: RunResult, interrupt: Interrupt) -> int:
        """Return the exit code of a run, and say what is wrong."""
        return exit_code(result, interrupt, self.database, is_stored=self.is_stored, consent=self.consent)


@asynccontextmanager
async def open_session(args: argparse.Namespace) -> AsyncGenerator[Session]:
    """Enter the runtime of a folder, or a client of the server that --server names."""
    opened = _open_server if args.server is not None else _open_folder
    async with opened(args) as session:
        yield session


@asynccontextmanager
async def _open_server(args: argparse.Namespace) -> AsyncGenerator[Session]:
    for name in _LOCAL_ONLY:
        if getattr(args, name, None):
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{option} is about agents of this machine: leave it out, or leave --server out")
    if args.model is not None:
        raise ConfigurationError("--model: the agents of a server have their own models: leave it out")
    try:
        async with Client(args.server, token=args.token, patience=_FIRST_PATIENCE) as client:
            known = await client.agents()
    except RetinueError as exc:
        raise ConfigurationError(f"--server: {exc}") from exc
    async with Client(args.server, token=args.token) as client:
        if not known:
            raise ConfigurationError(f"--server {args.server}: it serves no agent")
        if args.agent is not None and args.agent not in known:
            raise ConfigurationError(f"--server {args.server} has no agent {args.agent!r}: it has {', '.join(known)}")
        agent = args.agent or next(iter(known))
        yield Session(client, agent, None, "", None, "", True, tuple(known), args.server)


@asynccontextmanager
async def _open_folder(args: argparse.Namespace) -> AsyncGenerator[Session]:
    """Make the agent of a folder, say what may not be meant, and enter its runtime."""
    if args.token is not None:
        raise ConfigurationError("--token is for a server: give --server URL too")
    model, url = choose_model(args.model), optional_url(args)
    store = None if url is None else open_store(url)
    workspace = args.workspace or "."
    others, problems = ([], []) if args.subagents is None else read_declarations(args.subagents, workspace)
    consent = Consent(args)
    harness = make_assistant(
        workspace,
        model,
        args.max_steps,
        shell=args.shell,
        subagents=others,
        store=store,
        consent=consent,
        context_window=args.context_window,
    )
    catalog = read_catalog(harness)
    warn_of(args.model, catalog.problems, workspace)
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
    label = model_name(args.model)
    try:
        names = (agent.name, *catalog.entries)
        yield Session(runtime, agent, own_model, label, consent, database, store is not None, names, workspace)
    finally:
        await runtime.close()
        await close_model(agent.model)
