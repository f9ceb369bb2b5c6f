"""Compaction: the model reads a summary in place of the beginning of a long conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import ConfigurationError
from ..core.hooks import CompactionPolicy, Registrar, Summarise
from ..core.messages import Message
from ..core.plugins import Plugin


class Compaction(Plugin):
    """Keeps the requests of an agent within the window of its model.

    A request over 80 % of the window, or over `max_tokens` (estimated), loses the beginning of its conversation. The model
    reads a summary instead, which the same model writes. `summarise` may be any function of the messages that are cut; with
    `max_tokens` the default quotes each message by its first words. The last `keep` messages stay, or as many as fit well.
    The stored conversation is never changed. `window` is the window of the model in tokens, if it is not known.
    """

    name = "compaction"

    def __init__(
        self,
        max_tokens: int | None = None,
        keep: int | None = None,
        summarise: Summarise | None = None,
        *,
        window: int | None = None,
    ) -> None:
        for option, given in (("max_tokens", max_tokens), ("keep", keep), ("window", window)):
            value: Any = given
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigurationError(
                    f"compaction: {option} is a whole number and must be at least 1, not {value!r}"
                )
        if summarise is None and max_tokens is not None:
            summarise = quote_beginnings
        self.policy = CompactionPolicy(max_tokens, keep, summarise, window)

    def register(self, r: Registrar) -> None:
        r.compaction(self.policy)


def quote_beginnings(messages: Sequence[Message]) -> str:
    """Return a summary made without a model: each message by its first words."""
    lines: list[str] = []
    for message in messages:
        words = " ".join(message.text[:1000].split())
        calls = ", ".join(f"{call.name}({call.args})" for call in message.tool_calls)
        text = " ".join(part for part in (words[:200], f"[called {calls[:200]}]" if calls else "") if part)
        lines.append(f"- {message.role}: {text}")
    return "Earlier in this conversation (shortened):\n" + "\n".join(lines)
