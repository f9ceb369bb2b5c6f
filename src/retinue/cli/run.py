"""`retinue run`: one question, shown live."""

from __future__ import annotations

import argparse

from ..core.errors import ConfigurationError
from .interrupt import Interrupt, converse, make_view
from .replay import recording
from .session import open_session


async def run(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Ask a question and show the run until it ends."""
    if not args.question.strip():
        raise ConfigurationError('the question is empty: ask something, as in retinue run "Where is the key kept?"')
    async with open_session(args) as session:
        with recording(args.record) as record:
            async with make_view(args) as view:
                asked = session.ask(args.question, args.thread)
                result = await converse(asked, session.answer, view, interrupt, session.consent, record=record)
    return session.exit_code(result, interrupt)
