"""python -m benchmarks.stream_server: a server that streams a long chat completion, in a process of its own.

`/burst/…` writes everything at once, `/paced/…` an event at a time, as a model does. Prints its port.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

TEXTS, ARGUMENTS = 2_000, 500
_SHARED = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def _chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {**_SHARED, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def _argument(piece: str) -> dict[str, Any]:
    return _chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})


def events() -> list[bytes]:
    """The events as HTTP chunks, each in one of its own."""
    begun = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "note", "arguments": ""}}
    usage = {"prompt_tokens": 10, "completion_tokens": 2_500, "total_tokens": 2_510}
    chunks = [
        *[_chunk({"content": f"word{number} "}) for number in range(TEXTS)],
        _chunk({"tool_calls": [begun]}),
        _argument('{"text": "'),
        *[_argument("a") for _ in range(ARGUMENTS - 3)],
        _argument('"}'),
        _chunk({}, "tool_calls"),
        {**_SHARED, "choices": [], "usage": usage},
    ]
    lines = [f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode() for chunk in chunks]
    return [b"%x\r\n%s\r\n" % (len(line), line) for line in (*lines, b"data: [DONE]\n\n")]


EVENTS = TEXTS + ARGUMENTS


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made = events()
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            if b"/paced/" in head.split(b"\r\n")[0]:
                for event in made:
                    writer.write(event)
                    await asyncio.sleep(0.0002)
            else:
                writer.write(b"".join(made))
            writer.write(b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
