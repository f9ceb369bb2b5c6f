"""What is hardly HTTP: the server answers or closes, keeps its manners, and serves the next one."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from retinue import Runtime
from retinue.server import create_app, process

from .. import inside
from ..waiting import until
from .agents import Gate, speaker
from .serving import TOKEN, asking

AUTH = f"host: x\r\nx-api-key: {TOKEN}\r\n".encode()
RUNS = b"/api/v1/runs"
BODY = b'{"agent": "speaker", "input": "x"}'


class Raw:
    """A connection to the server, and what the server is."""

    def __init__(self, port: int, service: Any) -> None:
        self.port, self.service, self.url = port, service, f"http://127.0.0.1:{port}"

    async def send(self, *pieces: bytes, ends: bool = True) -> tuple[int, dict[str, Any]]:
        """Send bytes; return the status and the body of the answer, (0, {}) if there is none."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = b""
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if ends:
                writer.write_eof()
            while b"\r\n\r\n" not in answer and (piece := await reader.read(65_536)):
                answer += piece
            head, _, body = answer.partition(b"\r\n\r\n")
            length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
            while len(body) < length and (piece := await reader.read(65_536)):
                body += piece
        except ConnectionError:
            return 0, {}
        finally:
            writer.close()
        return (int(answer[9:12]), json.loads(body)) if answer else (0, {})


@asynccontextmanager
async def raw(*agents: Any, **options: Any) -> AsyncIterator[Raw]:
    """Serve as `retinue serve` does, in this event loop."""
    stop, ready = asyncio.Event(), asyncio.Event()
    async with Runtime(agents or [speaker("hi")]) as runtime:
        app = create_app(runtime, auth=TOKEN, **options)
        listener = process.bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        serving = asyncio.create_task(process.serve(app, listener, stop.wait(), ready.set, grace=1.0))
        await ready.wait()
        try:
            yield Raw(port, app.state.service)
            async with asking(f"http://127.0.0.1:{port}", TOKEN) as site:
                assert (await site.get("/healthz")).status == 200
        finally:
            stop.set()
            await serving


def post(body: bytes, *headers: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\n%b%b\r\n%b" % (RUNS, AUTH, b"".join(line + b"\r\n" for line in headers), body)


def get(path: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\n%bconnection: close\r\n\r\n" % (path, AUTH)


def length(count: int) -> bytes:
    return b"content-length: %d" % count


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "not_http"),
        (b"hello\r\n\r\n", 400, "not_http"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "not_http"),
        (b"GET /\x00 HTTP/1.1\r\n" + AUTH + b"\r\n", 400, "not_http"),
        (b"OPTIONS * HTTP/1.1\r\n" + AUTH + b"\r\n", 404, "no_route"),
        (b"CONNECT x:1 HTTP/1.1\r\n" + AUTH + b"\r\n", 400, "not_http"),
        (post(BODY, b"content-length: -1"), 400, "not_http"),
        (post(BODY, b"content-length: x"), 400, "not_http"),
        (post(BODY, length(len(BODY)), length(3)), 400, "not_http"),
        (post(BODY, length(len(BODY)), b"transfer-encoding: chunked"), 400, "not_http"),
        (post(b"zz\r\nabc\r\n0\r\n\r\n", b"transfer-encoding: chunked"), 400, "not_http"),
        (post(b"5\r\n{}\r\n0\r\n\r\n", b"transfer-encoding: chunked"), 400, "not_http"),
        (post(BODY[:-3], length(len(BODY))), 0, None),
        (post(BODY, length(len(BODY) - 3)), 400, "not_http"),
        (post(b"\xff\xfe{}", length(4)), 400, "not_json"),
        (post(b'{"agent": "sp\\ud800eaker", "input": "x"}', length(40)), 400, "not_json"),
        (post(b'{"agent": "\\u0000", "input": "x"}', length(33)), 404, "unknown_agent"),
        (post(b'{"agent": "speaker", "input": "x", "thread_id": "\\u0000"}', length(57)), 422, "invalid_body"),
        (get(RUNS + b"/%00"), 404, "not_found"),
        (get(RUNS + b"/%ff%fe"), 404, "not_found"),
        (get(RUNS + b"/\xff\xfe"), 400, "not_http"),
        (get(RUNS + b"/" + b"a" * 20_000), 404, "not_found"),
        (get(RUNS + b"/a%2fb"), 404, "no_route"),
        (get(RUNS + b"?cursor=%00"), 422, "invalid_query"),
        (get(RUNS + b"?cursor=%ff"), 422, "unknown_cursor"),
        (get(RUNS + b"?limit=1&limit=x"), 422, "invalid_query"),
        (get(b"/api/v1/threads/%00/events"), 404, "not_found"),
    ],
)
async def test_a_malformed_request(request_bytes: bytes, status: int, code: str | None) -> None:
    async with raw() as server:
        answer = await server.send(request_bytes)
        assert (answer[0], answer[1].get("code")) == (status, code)
        assert server.service.metrics.requests == 0
        assert await server.service.runtime.store.list_runs() == []


async def test_headers_without_end_are_refused() -> None:
    async with raw() as server:
        for head in (b"GET / HTTP/1.1\r\nx: " + b"a" * 2_000_000, b"GET /" + b"a" * 2_000_000):
            status, body = await server.send(head)
            assert (status, body.get("code")) in ((431, "headers_too_large"), (0, None))
        many = b"GET / HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % number for number in range(200_000))
        assert (await server.send(many))[0] in (431, 0)


async def test_a_client_that_does_not_send_its_headers_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[process.HttpProtocol] = []
    monkeypatch.setattr(process, "HEAD_SECONDS", 3600.0)
    made = process.HttpProtocol.connection_made

    def note(self: process.HttpProtocol, transport: asyncio.Transport) -> None:
        made(self, transport)
        waiting.append(self)

    monkeypatch.setattr(process.HttpProtocol, "connection_made", note)
    async with raw() as server:
        for head in (b"", b"GET /healthz HTTP/1.1\r\nx-a"):
            answer = asyncio.create_task(server.send(head, ends=False))
            late = await until(lambda: waiting and waiting.pop())
            timer = inside.head_timer(late)
            assert timer is not None
            late.give_up()
            assert await answer == (408, {"detail": "the headers did not come within 3600 seconds", "code": "too_slow"})
        assert (await server.send(get(b"/healthz")))[0] == 200
        assert inside.head_timer(waiting.pop()) is None


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async with raw() as server:
        server.service.body_seconds = 0.0
        status, body = await server.send(post(b"{", length(50)), ends=False)
        assert (status, body["code"]) == (408, "too_slow")


async def test_large_bodies_are_refused_and_their_clients_told_why() -> None:
    async with raw() as server:
        for size in (4_000_001, 10_000_000):
            status, body = await server.send(post(b"x" * size, length(size)), ends=False)
            assert (status, body["code"]) == (413, "too_large")
        chunk = b"%x\r\n%b\r\n" % (100_000, b"x" * 100_000)
        status, body = await server.send(post(b"", b"transfer-encoding: chunked"), *[chunk] * 100, b"0\r\n\r\n")
        assert (status, body["code"]) == (413, "too_large")
        endless = await server.send(post(b"", length(10**12)), *[b"x" * 1_000_000] * 40, ends=False)
        assert endless[0] in (413, 0)


async def test_requests_in_one_packet_are_answered_in_order() -> None:
    async with raw() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"".join(b"GET %b HTTP/1.1\r\n%b\r\n" % (path, AUTH) for path in (b"/ok", RUNS, b"/nowhere")))
        writer.write(get(b"/healthz"))
        answers = await reader.read()
        writer.close()
        assert [answers[place + 9 : place + 12] for place in _places(answers, b"HTTP/1.1 ")] == [
            b"200", b"200", b"404", b"200",
        ]  # fmt: skip


def _places(data: bytes, part: bytes) -> list[int]:
    return [place for place in range(len(data)) if data.startswith(part, place)]


@pytest.mark.parametrize("frame", ["garbage", "unmasked", "huge", "text", "control"])
async def test_a_web_socket_full_of_garbage(frame: str) -> None:
    frames = {
        "garbage": os.urandom(2_000),
        "unmasked": b"\x81\x02{}",
        "huge": b"\x81\xff" + (10**12).to_bytes(8, "big") + b"\0\0\0\0",
        "text": b"\x81\x82\0\0\0\0\xff\xfe",
        "control": b"\x89\xfe\xff\xff\0\0\0\0" + b"x" * 65_535,
    }
    async with raw() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"GET /api/v1/events HTTP/1.1\r\n" + AUTH + b"connection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: x3JJHMbDL1EzLkh9GBhXDw==\r\n\r\n"
        )
        assert b"101" in await reader.readuntil(b"\r\n\r\n")
        writer.write(frames[frame])
        assert b"HTTP" not in await reader.read()
        writer.close()


async def test_messages_that_are_no_requests_leave_the_socket_open() -> None:
    async with raw() as server, asking(server.url, TOKEN) as site, site.session.ws_connect("/api/v1/events") as socket:
        for text in ("", "{", "[]", "3", '{"subscribe": 3}', '{"fly": 1}', '{"subscribe": "x", "run_id": "\\u0000"}',
                     '{"subscribe": "x"}', '{"subscribe": "x", "run_id": "a", "thread_id": "b"}', "[" * 100_000,
                     '{"subscribe": "x", "run_id": "a", "merge": -1}', '{"subscribe": "x", "run_id": "a"}'):  # fmt: skip
            await socket.send_str(text)
            answer = await socket.receive_json()
            assert set(answer["error"]) >= {"detail", "code"}, text
        await socket.send_bytes(b"\xff\xfe")
        assert (await socket.receive_json())["error"]["code"] == "invalid"


async def test_a_reader_that_stops_reading_affects_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retinue.loop.turn.MAX_ANSWER", 100_000_000)  # more than the buffers on the way hold
    gate = Gate()
    async with raw(gate.agent()) as server, asking(server.url, TOKEN) as site:
        run_id = (await site.start("gated"))["run_id"]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(get(b"%b/%b/events" % (RUNS, run_id.encode())))
        await until(lambda: server.service.metrics.streams == 1)
        words = [f"{number}:" + "x" * 20_000 for number in range(500)]
        gate.say(*words, None)
        quick = await site.all_events(f"/api/v1/runs/{run_id}/events?kinds=text_delta")
        assert [event.data["delta"] for event in quick] == words
        # The slow one has what fitted into the buffers; it leaves, and continues from there.
        assert server.service.metrics.streams == 1
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        got = b""
        while got.count(b"\n\n") < 20:
            got += await reader.read(65_536)
        writer.close()
        last = int(got[: got.rindex(b"\n\n")].rpartition(b"id: ")[2].split(b"\n")[0])
        path = f"/api/v1/runs/{run_id}/events?kinds=text_delta"
        rest = await site.all_events(path, **{"Last-Event-ID": str(last)})
        assert quick[len(quick) - len(rest) :] == rest
        assert rest[0].data["seq"] == last + 1
        await until(lambda: server.service.metrics.streams == 0)
