"""`retinue run`: one question, answered on a folder, shown live."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from .numbers import count_from_1

if TYPE_CHECKING:
    from ..core.agents import Agent
    from ..core.model import Model
    from ..runtime import Runtime
    from ..subagents.declarations import Problem
    from ..subagents.harness import HarnessAgent
    from .interrupt import Interrupt

_ABOUT = """\
Ask one question about the files of a folder and watch it being worked on.

The sub-agents that the folder declares in subagents/*.md and .claude/agents/*.md can be given work;
see them with retinue agents list.

Without --model and $RETINUE_MODEL, the built-in offline:rules answers. It is rules, not a language model:
it looks for the words of the question in the files and quotes what it finds."""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="ask one question about the files of a folder",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("question", help="what to ask, in quotes")
    parser.add_argument("--workspace", metavar="DIR", default=".", help="the folder to work in (default: this one)")
    parser.add_argument("--agent", metavar="NAME", help="run this sub-agent of the folder itself, without its parent")
    parser.add_argument("--subagents", metavar="DIR", help="use the sub-agents in DIR/subagents as well")
    parser.add_argument("--shell", action="store_true", help="let the agents run any command, as you could yourself")
    parser.add_argument("--model", metavar="M", help="provider:model (default: $RETINUE_MODEL, else offline:rules)")
    parser.add_argument("--thread", metavar="ID", help="the id of the conversation (default: a new one)")
    parser.add_argument(
        "--db", metavar="URL", help="keep the run in a database, as in sqlite:///app.db: see retinue runs"
    )
    parser.add_argument("--max-steps", metavar="N", type=count_from_1, help="model calls before the run is given up")
    parser.add_argument("--json", action="store_true", help="print one event a line, as JSON")
    parser.add_argument("--verbose", action="store_true", help="log what happens, and show tracebacks")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    import asyncio

    from ..core.errors import ConfigurationError
    from .assistant import DEFAULT_MODEL, MODEL_VARIABLE, choose_model, is_default_model, make_assistant
    from .declared import read_declarations
    from .interrupt import Interrupt
    from .text import complain

    if not args.question.strip():
        raise ConfigurationError('the question is empty: ask something, as in retinue run "Where is the key kept?"')
    model = choose_model(args.model)
    others, problems = ([], []) if args.subagents is None else read_declarations(args.subagents, args.workspace)
    harness = make_assistant(args.workspace, model, args.max_steps, shell=args.shell, subagents=others)
    if is_default_model(args.model):
        complain(
            f"{DEFAULT_MODEL} answers: rules, not a language model; "
            f"choose one with --model provider:model or ${MODEL_VARIABLE}"
        )
    _tell_problems(harness, args, problems)
    with Interrupt() as interrupt:
        return asyncio.run(_run(harness, model, args, interrupt))


def _tell_problems(harness: HarnessAgent, args: argparse.Namespace, others: list[Problem]) -> None:
    """Say which declared sub-agents are not there; what is only a warning is told by `retinue agents validate`."""
    from .declared import looked_at
    from .text import complain, count

    for problems, folder in ((looked_at(harness).problems, args.workspace), (others, args.subagents)):
        if errors := sum(not problem.is_warning for problem in problems):
            complain(f"{count(errors, 'error')} in declared sub-agents; see: retinue agents validate {folder}")


async def _run(harness: HarnessAgent, model: Model, args: argparse.Namespace, interrupt: Interrupt) -> int:
    from ..core.lifecycle import RunStatus
    from ..models.resilience import close_model
    from ..storage.stores import without_secrets
    from .assistant import named_model
    from .declared import Declared, make_declared
    from .exits import COMPLETED, FAILED
    from .interrupt import watch
    from .outline import how_it_ended
    from .text import complain, count
    from .view import make_view

    # What a shell passes may not be text: bytes that are none come as halves of surrogate pairs.
    question = args.question.encode("utf-8", "replace").decode()
    chosen = Declared(harness, None) if args.agent is None else await make_declared(harness, args.agent, args.max_steps)
    agent = chosen.agent
    # A run that is kept names its model: whoever goes on with it makes another.
    asked: str | Model = model if args.db is None else named_model(args.model)
    own_model = asked if args.model is not None or agent.model is None else None
    with make_view(as_json=args.json) as view:
        async with _runtime(agent, args.db) as runtime:
            run = runtime.stream(agent, question, thread_id=args.thread, limits=chosen.limits, model=own_model)
            result = await watch(run, view, interrupt)
    await close_model(agent.model)
    if result.status is RunStatus.COMPLETED and interrupt.lost_tasks:
        complain(f"{count(interrupt.lost_tasks, 'background task')} did not complete; see: retinue tasks list")
        return interrupt.code if interrupt.happened else FAILED
    if result.status is RunStatus.COMPLETED:
        return COMPLETED
    if result.status is RunStatus.CANCELLED and interrupt.happened:
        return interrupt.code
    complain(f"the run did not complete: {how_it_ended(result)}")
    if result.status is RunStatus.SUSPENDED and args.db is not None:
        complain(f"it waits for an answer; see: retinue runs show {result.run_id} --db {without_secrets(args.db)}")
    return FAILED


@asynccontextmanager
async def _runtime(agent: Agent, url: str | None) -> AsyncGenerator[Runtime]:
    """A runtime with one agent. What others left in a database is not for it: it works in another folder."""
    from ..runtime import Runtime
    from .database import said_as_misuse

    runtime = Runtime([agent]) if url is None else Runtime.open(url, [agent], recover=False)
    with said_as_misuse():
        await runtime.__aenter__()
    try:
        yield runtime
    finally:
        await runtime.close()
