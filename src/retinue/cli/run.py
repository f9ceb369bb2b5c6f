"""`retinue run`: one question, answered on a folder, shown live."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.agents import Agent
    from .interrupt import Interrupt

_ABOUT = """\
Ask one question about the files of a folder and watch it being worked on.

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
    parser.add_argument("--model", metavar="M", help="provider:model (default: $RETINUE_MODEL, else offline:rules)")
    parser.add_argument("--thread", metavar="ID", help="the id of the conversation (default: a new one)")
    parser.add_argument("--max-steps", metavar="N", type=_positive, help="model calls before the run is given up")
    parser.add_argument("--json", action="store_true", help="print one event a line, as JSON")
    parser.add_argument("--verbose", action="store_true", help="log what happens, and show tracebacks")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    import asyncio

    from ..core.errors import ConfigurationError
    from .assistant import DEFAULT_MODEL, MODEL_VARIABLE, choose_model, is_default_model, make_assistant
    from .interrupt import Interrupt
    from .text import complain

    if not args.question.strip():
        raise ConfigurationError('the question is empty: ask something, as in retinue run "Where is the key kept?"')
    agent = make_assistant(args.workspace, choose_model(args.model), args.max_steps)
    if is_default_model(args.model):
        complain(
            f"{DEFAULT_MODEL} answers: rules, not a language model; "
            f"choose one with --model provider:model or ${MODEL_VARIABLE}"
        )
    with Interrupt() as interrupt:
        return asyncio.run(_run(agent, args, interrupt))


async def _run(agent: Agent, args: argparse.Namespace, interrupt: Interrupt) -> int:
    from ..core.lifecycle import RunStatus
    from ..runtime import Runtime
    from .exits import COMPLETED, FAILED, INTERRUPTED
    from .interrupt import watch
    from .text import complain
    from .view import make_view

    # What a shell passes may not be text: bytes that are none come as halves of surrogate pairs.
    question = args.question.encode("utf-8", "replace").decode()
    with make_view(as_json=args.json) as view:
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, question, thread_id=args.thread)
            result = await watch(run, view, interrupt)
    if result.status is RunStatus.COMPLETED:
        return COMPLETED
    if result.status is RunStatus.CANCELLED and interrupt.happened:
        return INTERRUPTED
    complain(f"the run did not complete: {result.status.value}: {result.error or result.termination}")
    return FAILED


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
