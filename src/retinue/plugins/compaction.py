"""Compaction: the model reads a summary in place of the beginning of a long conversation."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence

from ..core.errors import ConfigurationError
from ..core.hooks import HookContext, Registrar
from ..core.messages import Message, Role
from ..core.model import estimate_tokens
from ..core.plugins import Plugin, UseSummary
from ..core.state import StateCommand

Summarise = Callable[[Sequence[Message]], str | Awaitable[str]]


class Compaction(Plugin):
    """Replaces all but the last `keep` messages by a summary when the request passes `max_tokens` (estimated).

    The stored conversation is never touched; a `custom` event lists the messages that were dropped and kept.
    `summarise` may be any function of the messages; without it, each is quoted by its first words.
    """

    name = "compaction"

    def __init__(self, max_tokens: int, keep: int = 6, summarise: Summarise | None = None) -> None:
        if max_tokens < 1 or keep < 1:
            raise ConfigurationError(f"compaction: max_tokens and keep must be at least 1, got {max_tokens} and {keep}")
        self.max_tokens, self.keep, self._summarise = max_tokens, keep, summarise or quote_beginnings

    def register(self, r: Registrar) -> None:
        r.hook("before_inference", self._compact, priority=50)

    async def _compact(self, ctx: HookContext) -> StateCommand | None:
        assert ctx.request is not None
        tokens = sum(map(estimate_tokens, ctx.request.messages))
        end = max(0, len(ctx.messages) - self.keep)
        while end > 0 and ctx.messages[end].role is Role.TOOL:  # never between a call and its result
            end -= 1
        if tokens <= self.max_tokens or end <= ctx.compacted:
            return None
        made = self._summarise(ctx.messages[:end])
        summary = await made if inspect.isawaitable(made) else made
        report = {
            "type": "compaction",
            "tokens_before": tokens,
            "dropped": [message.id for message in ctx.messages[:end]],
            "kept": [message.id for message in ctx.messages[end:]],
            "summary": summary,
        }
        return StateCommand().schedule(UseSummary(end, summary)).event(report)


def quote_beginnings(messages: Sequence[Message]) -> str:
    """Return a summary made without a model: each message by its first words."""
    lines: list[str] = []
    for message in messages:
        words = " ".join(message.text[:1000].split())
        calls = ", ".join(f"{call.name}({call.args})" for call in message.tool_calls)
        text = " ".join(part for part in (words[:200], f"[called {calls[:200]}]" if calls else "") if part)
        lines.append(f"- {message.role}: {text}")
    return "Earlier in this conversation (shortened):\n" + "\n".join(lines)
