"""Whatever goes wrong between here and a model is said in words: what happened and what to do, and never the key."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import re
import socket
import subprocess
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from retinue import (
    Agent,
    ConfigurationError,
    FilePart,
    ImagePart,
    Message,
    ModelError,
    ModelRequest,
    RunStatus,
    Runtime,
)
from retinue.errors import (
    ContextOverflow,
    ModelAccessDenied,
    ModelNotFound,
    ModelRateLimited,
    ModelRefused,
    ModelRequestInvalid,
    ModelResponseInvalid,
    ModelStreamBroken,
    ModelTimeout,
    ModelUnavailable,
)
from retinue.models import RetryPolicy, bridge_model, open_model, registry
from retinue.models.resilience import close_model
from retinue.testing import KnownTurn, hear
from retinue.wire.sse import EventDecoder, EventTooLong
from tests.models.server import Answer, Reply, Server, break_after, hang_after, refuse, serving, stream
from tests.models.streams import RENDER, chat, chat_chunk, event
from tests.models.test_conformance import connect
from tests.prepared import PYTHON

KEY = "sk-test-key"
HI = KnownTurn(text=("Hi",))


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if re.search(r"_API_KEY$|_BASE_URL$|_proxy$|_PROXY$", name):
            monkeypatch.delenv(name)


@asynccontextmanager
async def failing(answer: Answer, wire: str = "chat", **options: Any) -> AsyncIterator[tuple[Server, ModelError]]:
    """The error of one try, checked for what holds for all."""
    async with serving(answer) as server:
        model = connect(wire, server.url, **options)
        with pytest.raises(ModelError) as caught:
            async with asyncio.timeout(90):
                await hear(model)
        await close_model(model)
        yield server, check_error(caught.value)


def check_error(error: ModelError) -> ModelError:
    """No key in it, not in what led to it, and it survives pickling."""
    shown: BaseException | None = error
    while shown is not None:
        assert KEY not in f"{shown} {shown!r} {shown.args}"
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.status) == (type(error), str(error), error.status)
    return error


def test_unknown_provider() -> None:
    with pytest.raises(
        ConfigurationError, match="unknown model provider 'nowhere' in 'nowhere:x'; known: anthropic, llam"
    ):
        open_model("nowhere:x")


@pytest.mark.parametrize("name", ["", "openai", "openai:", ":x"])
def test_not_a_model(name: str) -> None:
    with pytest.raises(ConfigurationError, match="not of the form|unknown model provider ''"):
        open_model(name)


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("openai:gpt-5", "OPENAI_API_KEY"),
        ("openai-chat:gpt-5", "OPENAI_API_KEY"),
        ("anthropic:claude", "ANTHROPIC_API_KEY"),
        ("openrouter:meta/llama", "OPENROUTER_API_KEY"),
    ],
)
async def test_a_missing_key_names_its_variable(name: str, variable: str) -> None:
    agent = Agent("a", name)
    with pytest.raises(ConfigurationError, match=f"agent 'a': {name} needs a key: set {variable} in the environment"):
        await Runtime([agent]).run("a", "hi")


@pytest.mark.parametrize("name", ["ollama:x", "vllm:x", "llamacpp:x"])
def test_a_server_of_ones_own_needs_no_key(name: str) -> None:
    assert open_model(name).name == name


def test_a_missing_key_of_a_bridged_provider() -> None:
    with pytest.raises(ConfigurationError, match="DEEPSEEK_API_KEY"):
        open_model("deepseek:deepseek-chat")


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r'For more: pip install "retinue\[providers\]"'):
        open_model("deepseek:deepseek-chat")
    with pytest.raises(ConfigurationError, match=r'pip install "retinue\[providers\]"'):
        bridge_model(object())


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x/y", "http://", "http://user:hunter22@host/v1", "http://h/v1?key=hunter22"]
)
def test_an_address_that_cannot_be_asked(url: str) -> None:
    with pytest.raises(ConfigurationError, match="base_url") as caught:
        open_model("vllm:x", base_url=url)
    assert "hunter22" not in str(caught.value)


def test_a_key_that_cannot_be_sent() -> None:
    with pytest.raises(ConfigurationError, match="authorization") as caught:
        open_model("vllm:x", api_key="abc\ndef")
    assert "abc" not in str(caught.value)


def test_nothing_secret_shows_when_printed() -> None:
    model = open_model("openai:gpt-5", api_key=KEY, headers={"x-auth-token": "other-secret"})
    assert "openai:gpt-5" in repr(model)
    assert KEY not in repr(model)
    assert "secret" not in repr(model)


Case = tuple[int, Any, type[ModelError], str]
SAYS = {"error": {"message": "the reason", "type": "some_error", "code": None}}
CASES: dict[str, Case] = {
    "401": (401, {"error": {"message": f"Incorrect API key provided: {KEY}."}}, ModelAccessDenied, "check the key"),
    "403": (403, SAYS, ModelAccessDenied, "check the key"),
    "404": (404, SAYS, ModelNotFound, "check the name of the model and base_url"),
    "400": (400, SAYS, ModelRequestInvalid, "does not take this request"),
    "402": (402, SAYS, ModelAccessDenied, "no credit left"),
    "429": (429, SAYS, ModelRateLimited, "send fewer at once"),
    "no quota": (429, {"error": {"message": "x", "code": "insufficient_quota"}}, ModelAccessDenied, "no credit left"),
    "500": (500, SAYS, ModelUnavailable, "try again later"),
    "529": (529, {"type": "error", "error": {"type": "overloaded_error"}}, ModelUnavailable, "try again later"),
    "redirect": (307, b"", ModelNotFound, "correct base_url"),
    "too long, OpenAI": (
        400,
        {"error": {"message": "too much", "type": "invalid_request_error", "code": "context_length_exceeded"}},
        ContextOverflow,
        "longer than the model can read",
    ),
    "too long, Anthropic": (
        400,
        {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 210000 tokens"}},
        ContextOverflow,
        "longer than the model can read",
    ),
    "too long, llama.cpp": (
        400,
        {"error": {"code": 400, "message": "the request exceeds the available context size. try increasing it"}},
        ContextOverflow,
        "longer than the model can read",
    ),
    "too long, Google": (
        400,
        {"error": {"message": "The input token count (9) exceeds the maximum number of tokens allowed (8)."}},
        ContextOverflow,
        "longer than the model can read",
    ),
    "a bad number": (
        400,
        {"error": {"message": "maximum number of tokens must be positive"}},
        ModelRequestInvalid,
        "must be positive",
    ),
    "no credit, Anthropic": (
        400,
        {"error": {"type": "invalid_request_error", "message": "Your credit balance is too low to access the API"}},
        ModelAccessDenied,
        "no credit left",
    ),
    "filtered": (400, {"error": {"message": "x", "code": "content_filter"}}, ModelRefused, "rephrase"),
    "error is text": (422, {"error": "plain words"}, ModelRequestInvalid, "plain words"),
    "detail": (422, {"detail": "vllm says so"}, ModelRequestInvalid, "vllm says so"),
    "a list": (500, [SAYS], ModelUnavailable, "the reason"),
    "no body": (500, b"", ModelUnavailable, "try again later"),
    "no JSON": (500, b"\xff\x00 upstream died \x1b[31m", ModelUnavailable, "upstream died"),
}


@pytest.mark.parametrize("wire", RENDER)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
async def test_a_status_is_explained(wire: str, case: Case) -> None:
    status, body, kind, words = case
    async with failing(refuse(status, body), wire) as (server, error):
        assert type(error) is kind
        assert error.status == status
        assert words in str(error)
        assert server.url in str(error) or kind in (ContextOverflow, ModelRefused)
        assert str(error).startswith(error.model)
        assert str(error).isprintable()


async def test_a_key_at_the_place_where_words_are_cut() -> None:
    told = [{"error": {"message": "x" * length + KEY}} for length in range(340, 500, 4)]
    events = [stream([*chat(HI)[:3], event(said)]) for said in told]
    async with serving(*[refuse(401, said) for said in told], *events) as server:
        model = connect("chat", server.url)
        for _ in range(2 * len(told)):
            with pytest.raises(ModelError) as caught:
                await hear(model)
            assert "sk-" not in str(check_error(caught.value))
            assert len(str(caught.value)) < 600
        await close_model(model)


async def test_a_key_of_another_scheme() -> None:
    said = {"error": {"message": "bad credentials dXNlcjpwYXNz"}}
    async with failing(refuse(401, said), headers={"authorization": "Basic dXNlcjpwYXNz"}) as (_, error):
        assert "bad credentials [redacted]" in str(error)


async def test_the_password_of_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(refuse(407)) as server:
        monkeypatch.setenv("https_proxy", server.url.replace("://", "://user:hunter%3222@"))
        monkeypatch.setenv("http_proxy", server.url.replace("://", "://user:hunter%3222@"))
        for scheme in ("http", "https"):
            model = open_model(
                "vllm:m", base_url=f"{scheme}://far.invalid/v1", retry=RetryPolicy(attempts=1, patience=0)
            )
            with pytest.raises(ModelError, match="407") as caught:
                await hear(model)
            assert "hunter" not in str(caught.value)
            await close_model(model)
        sent = [asked.headers["proxy-authorization"] for asked in server.asked]
    assert sent == ["Basic " + b64encode(b"user:hunter222").decode()] * 2


async def test_html_in_place_of_json() -> None:
    page = b"<!doctype html><html><head><title>Welcome to\n nginx</title></head><body>hello</body></html>"
    async with failing(refuse(502, page, "text/html")) as (_, error):
        assert type(error) is ModelUnavailable
        assert "an HTML page, 'Welcome to nginx'" in str(error)
    async with failing(refuse(200, page, "text/html")) as (_, error):
        assert type(error) is ModelResponseInvalid
        assert "sent text/html instead of an event stream: check base_url" in str(error)
    async with failing(refuse(200, page, "text/event-stream")) as (_, error):
        assert type(error) is ModelStreamBroken


async def test_json_in_place_of_a_stream() -> None:
    async with failing(refuse(200, {"choices": []})) as (_, error):
        assert "sent application/json instead of an event stream" in str(error)
    async with failing(refuse(200, {"error": {"message": "no model is loaded"}})) as (_, error):
        assert "no model is loaded" in str(error)
        assert (type(error), error.status, "answered 500" in str(error)) == (ModelUnavailable, None, False)


@pytest.mark.parametrize("wire", RENDER)
async def test_an_event_that_is_no_json(wire: str) -> None:
    for bad in (b"data: {oops\n\n", b'data: {"choices": 3, "type": 4}\n\n', b"data: [1]\n\n"):
        async with failing(stream([bad]), wire) as (server, error):
            assert type(error) is ModelResponseInvalid
            assert f"{server.url}" in str(error)
            assert "sent an event that cannot be read" in str(error)


async def test_an_endless_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retinue.wire.sse.MAX_EVENT", 100_000)
    monkeypatch.setattr(EventDecoder.__init__, "__defaults__", (100_000,))
    sent = 0

    async def endless(reply: Reply) -> None:
        nonlocal sent
        await reply.head()
        await reply.piece(b"data: ")
        while True:
            await reply.piece(b"x" * 10_000)
            sent += 10_000

    async with failing(endless) as (_, error):
        assert type(error) is ModelResponseInvalid
        assert "an event that is too long" in str(error)
        assert sent < 50_000_000


def test_the_longest_event_there_may_be() -> None:
    decoder = EventDecoder(10)
    assert decoder.feed(b"data: 1\n\n" * 10) == [b"1"] * 10
    decoder.feed(b"data: 4567")
    with pytest.raises(EventTooLong):
        decoder.feed(b"8")


@pytest.mark.parametrize("answer", [hang_after(head=False), hang_after(), hang_after(chat(HI)[:2])])
async def test_a_server_that_hangs(answer: Answer) -> None:
    async with failing(answer, idle_timeout=0.2) as (_, error):
        assert type(error) is ModelTimeout
        assert "was silent for 0.2 s: raise idle_timeout" in str(error)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_patience_of_nothing(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="idle_timeout must be more than 0 seconds"):
        open_model("vllm:x", idle_timeout=seconds)


async def test_an_error_that_drips() -> None:
    async def drip(reply: Reply) -> None:
        await reply.head(500, "text/plain")
        while True:
            await reply.piece(b"x")
            await asyncio.sleep(0.05)

    async with asyncio.timeout(90), failing(drip, idle_timeout=1.0) as (_, error):
        assert type(error) is ModelUnavailable
        assert "the server said: xx" in str(error)


async def test_nobody_listens() -> None:
    async with serving() as server:
        url = server.url
    model = connect("chat", url)
    with pytest.raises(ModelUnavailable, match="cannot connect to .*: is the server running?") as caught:
        await hear(model)
    check_error(caught.value)
    await close_model(model)


async def test_no_such_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_unknown(*args: Any, **options: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", is_unknown)  # to ask a name server takes seconds where there is none
    model = open_model("vllm:x", base_url="http://no-such-host.invalid/v1", retry=RetryPolicy(attempts=1, patience=0))
    with pytest.raises(ModelError, match="cannot connect to http://no-such-host.invalid/v1"):
        await hear(model)
    await close_model(model)


async def test_no_http_at_all() -> None:
    async def garbage(reply: Reply) -> None:
        reply.writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        await reply.writer.drain()
        await asyncio.sleep(0.05)
        reply.cut()

    async with failing(garbage) as (_, error):
        assert type(error) in (ModelResponseInvalid, ModelStreamBroken)


async def test_a_stream_that_breaks_off() -> None:
    for answer in (break_after(chat(HI)[:3]), stream(chat(HI)[:3]), stream([])):
        async with failing(answer) as (_, error):
            assert type(error) is ModelStreamBroken
            assert "before" in str(error)


@pytest.mark.parametrize(
    ("wire", "bad", "kind"),
    [
        ("chat", event({"error": {"message": "boom", "code": 503}}), ModelUnavailable),
        ("chat", event({"error": {"message": "boom", "code": 502}, "choices": [{"delta": {}}]}), ModelUnavailable),
        ("chat", chat_chunk({"content": ""}, "error"), ModelUnavailable),
        ("chat", event({"error": "overloaded"}), ModelUnavailable),
        ("chat", event({"error": "rate_limit_exceeded"}), ModelRateLimited),
        ("chat", event({"error": {"message": "slow down", "type": "rate_limit_exceeded"}}), ModelRateLimited),
        ("anthropic", event({"type": "error", "error": {"type": "overloaded_error"}}, "error"), ModelUnavailable),
        ("anthropic", event({"type": "error", "error": {"type": "rate_limit_error"}}, "error"), ModelRateLimited),
        (
            "anthropic",
            event({"type": "message_delta", "delta": {"stop_reason": "pause_turn"}}),
            ModelResponseInvalid,
        ),
        ("responses", event({"type": "error", "code": "server_error", "message": "boom"}, "error"), ModelUnavailable),
        (
            "responses",
            event({"type": "response.failed", "response": {"error": {"code": "rate_limit_exceeded", "message": "x"}}}),
            ModelRateLimited,
        ),
    ],
)
async def test_an_error_within_the_stream(wire: str, bad: bytes, kind: type[ModelError]) -> None:
    async with failing(stream([*RENDER[wire](HI)[:3], bad]), wire) as (_, error):
        assert type(error) is kind


async def test_what_cannot_be_sent_is_said_before_it_is_sent() -> None:
    async with serving(stream(chat(HI))) as server:
        for wire, part in (("chat", FilePart(url="http://x/y.pdf")), ("anthropic", ImagePart()), ("chat", ImagePart())):
            model = connect(wire, server.url)
            with pytest.raises(ModelRequestInvalid):
                await hear(model, ModelRequest(messages=(Message.user([part]),)))
        model = connect("chat", server.url)
        with pytest.raises(ModelRequestInvalid, match="no JSON form"):
            await hear(model, ModelRequest(messages=(Message.user("x"),), settings={"temperature": object()}))
        assert server.asked == []


async def test_odd_streams_that_are_fine() -> None:
    odd: dict[str, list[bytes]] = {
        "no [DONE]": chat(HI)[:-1],
        "CRLF": [piece.replace(b"\n", b"\r\n") for piece in chat(HI)],
        "CR": [piece.replace(b"\n", b"\r") for piece in chat(HI)],
        "no blank line at the end": [*chat(HI)[:-1], b"data: [DONE]"],
        "no space after the colon": [piece.replace(b"data: ", b"data:") for piece in chat(HI)],
        "ids and retries": [b"id: 7\nretry: 100\n" + piece for piece in chat(HI)],
        "a byte order mark": [b"\xef\xbb\xbf" + chat(HI)[1], *chat(HI)[2:]],
        "content in parts": [
            chat_chunk({"content": [{"type": "text", "text": "Hi"}, {"type": "other"}], "reasoning": {}}),
            *chat(HI)[3:],
        ],
        "data in two lines": [chat(HI)[1].replace(b',"object"', b',\ndata: "object"'), *chat(HI)[2:]],
    }
    for name, events in odd.items():
        for size in (None, 1):
            async with serving(stream(events, size)) as server:
                model = connect("chat", server.url)
                heard = await hear(model)
                assert (heard.text, heard.ends[0].stop_reason) == ("Hi", "stop"), name
                await close_model(model)


async def test_calls_as_some_servers_send_them() -> None:
    whole = {"id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}
    second = {"id": "c2", "function": {"name": "g", "arguments": "{}"}}
    events = [chat_chunk({"tool_calls": [whole, second]}), chat_chunk({}, "stop")]
    async with serving(stream(events)) as server:
        model = connect("chat", server.url)
        heard = await hear(model)
        await close_model(model)
    assert heard.called == [("c1", "f", {"a": 1}), ("c2", "g", {})]
    assert heard.ends[0].stop_reason == "tool_calls"


async def test_a_run_fails_with_the_words_and_the_code() -> None:
    async with serving(refuse(401, SAYS)) as server:
        model = connect("chat", server.url)
        run = Runtime([Agent("a", model)]).stream("a", "hi")
        errors: list[Any] = [event async for event in run if event.kind == "error"]
        result = await run.result()
        await close_model(model)
    assert result.status is RunStatus.FAILED
    assert (result.error or "").startswith("ModelAccessDenied: openai-chat:m: http://127.0.0.1")
    assert [(error.code, error.fatal) for error in errors] == [("access_denied", True)]


async def test_a_key_of_the_environment_is_sent_and_a_passed_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(stream(chat(HI))) as server:
        monkeypatch.setenv("OPENAI_API_KEY", " sk-env \n")
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        for key in (None, "sk-given"):
            model = open_model("openai:m", api_key=key)
            await hear(model)
            await close_model(model)
        sent = [(asked.path, asked.headers["authorization"]) for asked in server.asked]
    assert sent == [("/v1/chat/completions", "Bearer sk-env"), ("/v1/chat/completions", "Bearer sk-given")]


async def test_a_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(stream(chat(HI))) as server:
        monkeypatch.setenv("http_proxy", server.url)
        model = open_model("vllm:m", base_url="http://far.invalid/v1")
        assert (await hear(model)).text == "Hi"
        await close_model(model)
        assert server.asked[0].path == "http://far.invalid/v1/chat/completions"


def test_a_model_outlives_its_event_loop_and_needs_no_closing() -> None:
    code = """
import asyncio, sys
sys.path.insert(0, ".")
from retinue.models import open_model
from retinue.testing import KnownTurn, hear
from tests.models.server import serving, stream
from tests.models.streams import chat

async def main(port, model):
    async with serving(stream(chat(KnownTurn(text=("Hi",)))), port=port) as server:
        model = model or open_model("vllm:m", base_url=server.url)
        heard = await hear(model)
        print(heard.text)
        return int(server.url.rpartition(":")[2]), model
port, model = asyncio.run(main(0, None))
asyncio.run(main(port, model))
"""
    out = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=90)
    assert (out.stdout, out.stderr) == ("Hi\nHi\n", "")


def test_errors_can_be_copied() -> None:
    error = ModelRateLimited("slow", "a:b", 429, 3.0)
    again = copy.copy(error)
    assert (again.retry_after, str(again)) == (3.0, "a:b: slow")


async def test_half_a_chat_answer_is_no_answer() -> None:
    """A proxy sends [DONE] also where the server behind it broke off."""
    async with failing(stream([chat_chunk({"content": "half an ans"}), b"data: [DONE]\n\n"])) as (_, error):
        assert isinstance(error, ModelStreamBroken)
        assert "ended before it was complete" in str(error)


@pytest.mark.parametrize("wire", RENDER)
async def test_json_that_is_nested_too_deeply(wire: str) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    pieces = [
        b'data: {"type": "x", "choices": ' + deep + b"}\n\n",
        b'data: {"error": ' + deep + b"}\n\n",
        b"data: " + deep,
    ]
    for piece in pieces:
        async with failing(stream([piece]), wire) as (_, error):
            assert isinstance(error, ModelResponseInvalid | ModelStreamBroken)
    async with failing(refuse(400, deep), wire) as (_, error):
        assert isinstance(error, ModelRequestInvalid)
