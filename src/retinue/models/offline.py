"""offline:rules, the model that needs no network and no key. It is rules, not a language model.

It takes the telling words of a question, looks for them with the file tools and quotes what it finds; it checks links,
commands and headings of Markdown; where it has sub-agents, those a question names or a review fits get their part of it.
It understands nothing. It keeps nothing either: each turn is decided from the messages alone (`rules/turns.py` says how).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import msgspec

from ..core.errors import ConfigurationError
from ..core.model import CallChunk, ModelChunk, ModelRequest, ReasoningChunk, TextChunk, TurnEnd
from ..core.runs import Usage
from .rules.turns import decide


def make_model(name: str) -> RulesModel:
    """The model behind "offline:<name>"."""
    if name != "rules":
        raise ConfigurationError(f"there is no model 'offline:{name}'; there is: offline:rules")
    return RulesModel()


class RulesModel:
    """Rules, not a language model: it finds and quotes words in files, to try things out without a provider."""

    name = "offline:rules"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        turn = decide(request)
        if turn.thought:
            yield ReasoningChunk(turn.thought)
        written = len(turn.thought) + len(turn.answer)
        for index, (name, args) in enumerate(turn.calls):
            arguments = msgspec.json.encode(args).decode()
            written += len(name) + len(arguments)
            yield CallChunk(index, None, name, arguments)
        for word in re.findall(r"\s*\S+|\s+$", turn.answer):
            yield TextChunk(word)
        # Rules have no tokens: four characters are counted as one, so that budgets have something to work with.
        read = sum(len(message.text) for message in request.messages)
        usage = Usage(requests=1, input_tokens=-(-read // 4), output_tokens=-(-written // 4))
        yield TurnEnd("tool_calls" if turn.calls else "stop", usage)
