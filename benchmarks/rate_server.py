"""A model provider on loopback that enforces limits, for `scripts/bench --rates` and a test:

python -m benchmarks.rate_server '{"rate": 10, "tells": "headers"}'    prints its port

It speaks chat completions and Anthropic's messages. GET /stats returns what came in.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from typing import Any


class RateServer:
    """A token bucket in which refused requests count, tokens a minute, requests at once, and a time in which it is down."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.rate: float | None = given.get("rate")
        self.burst = float(given.get("burst", self.rate or 0))
        self.tokens: float | None = given.get("tokens")
        self.parallel: int | None = given.get("parallel")
        self.tells: str = given.get("tells", "nothing")
        self.status: int = given.get("status", 429)
        self.seconds: float = given.get("seconds", 0.3)
        self.down: float = given.get("down", 0.0)
        self.began: float | None = None
        self.level, self.token_level, self.at = self.burst, self.tokens or 0.0, time.monotonic()
        self.busy = self.most_busy = 0
        self.arrivals: list[tuple[float, str, bool]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                if "/stats" in head[0]:
                    stats = {"arrivals": self.arrivals, "most_busy": self.most_busy}
                    self._plain(writer, 200, json.dumps(stats).encode())
                else:
                    await self._answer(writer, "/messages" in head[0], json.loads(body))
                await writer.drain()
        writer.close()

    def _plain(self, writer: asyncio.StreamWriter, status: int, body: bytes, *lines: str) -> None:
        head = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}", *lines]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)

    async def _answer(self, writer: asyncio.StreamWriter, anthropic: bool, asked: dict[str, Any]) -> None:
        now = time.monotonic()
        self.began = self.began or now
        said = asked["messages"][-1]["content"]
        words = said if isinstance(said, str) else said[-1].get("text", "")
        is_down = now - self.began < self.down
        why = "the service is down" if is_down else self._refusal(now)
        self.arrivals.append((now - self.began, words[:20], why is None))
        lines = self._headers(anthropic)
        if why is not None:
            if self.tells != "nothing" and not is_down:
                lines.append("retry-after: 1")
            body = json.dumps({"error": {"message": why, "type": "rate_limit_error"}}).encode()
            self._plain(writer, 503 if is_down else self.status, body, *lines)
            return
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        try:
            kind = ["HTTP/1.1 200 OK", "content-type: text/event-stream", "transfer-encoding: chunked", *lines]
            writer.write("\r\n".join([*kind, "", ""]).encode())
            await writer.drain()
            await asyncio.sleep(self.seconds)
            data = _anthropic() if anthropic else _chat()
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
        finally:
            self.busy -= 1

    def _refusal(self, now: float) -> str | None:
        """Count a request; return why it is refused, None if it is not."""
        passed, self.at = now - self.at, now
        if self.rate is not None:
            self.level = min(self.burst, self.level + passed * self.rate)
            fits, self.level = self.level >= 1, max(self.level - 1, 0.0)
            if not fits:
                return "too many requests"
        if self.tokens is not None:
            self.token_level = min(self.tokens, self.token_level + passed * self.tokens / 60)
            if self.token_level < TOKENS:
                return "too many tokens"
            self.token_level -= TOKENS
        if self.parallel is not None and self.busy >= self.parallel:
            return "too many concurrent requests"
        return None

    def _headers(self, anthropic: bool) -> list[str]:
        if self.tells != "headers":
            return []
        known: list[tuple[str, float, float, float]] = []
        if self.rate is not None:
            known.append(("requests", self.burst, self.level, (self.burst - self.level) / self.rate))
        if self.tokens is not None:
            known.append(("tokens", self.tokens, self.token_level, (self.tokens - self.token_level) / self.tokens * 60))
        lines: list[str] = []
        for name, limit, remaining, reset in known:
            if anthropic:
                at = (
                    time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + reset))
                    + f".{int(reset * 1000) % 1000:03}Z"
                )
                values = (f"{limit:.0f}", f"{int(remaining)}", at)
                lines += [
                    f"anthropic-ratelimit-{name}-{field}: {value}"
                    for field, value in zip(("limit", "remaining", "reset"), values, strict=True)
                ]
            else:
                values = (f"{limit:.0f}", f"{int(remaining)}", f"{reset:.3f}s")
                lines += [
                    f"x-ratelimit-{field}-{name}: {value}"
                    for field, value in zip(("limit", "remaining", "reset"), values, strict=True)
                ]
        return lines


TOKENS = 1_000
"""The tokens that each request uses."""


def _chat() -> bytes:
    chunks: list[Any] = [
        {"choices": [{"index": 0, "delta": {"content": "fine"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": TOKENS - 10, "completion_tokens": 10}},
    ]
    return b"".join([b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks]) + b"data: [DONE]\n\n"


def _anthropic() -> bytes:
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"usage": {"input_tokens": TOKENS - 10, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "fine"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 10}},
        {"type": "message_stop"},
    ]
    return b"".join([b"event: %s\ndata: %s\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in events])


async def main() -> None:
    server = await asyncio.start_server(RateServer(json.loads(sys.argv[1])), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main())
