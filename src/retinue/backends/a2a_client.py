"""The client of an A2A server: its card, the transports, and the bounds on what it may send."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc.aio
import httpx
from a2a.client.card_resolver import parse_agent_card
from a2a.client.client import Client, ClientCallContext, ClientConfig
from a2a.client.client_factory import ClientFactory
from a2a.types import a2a_pb2 as pb
from a2a.utils import errors
from google.protobuf import json_format, struct_pb2
from google.protobuf.message import Message

from ..core.content import to_json_value
from ..core.errors import ExecutionBackendError
from ..core.runs import Limits
from ..core.secrets import redact
from ..wire.a2a_budget import BUDGET, limits_json
from .a2a_http import TooMuch, make_http_client, origin_of
from .a2a_signature import CardVerifier, UntrustedCard
from .http_client import (
    ANSWER_SECONDS,
    MOST_BYTES,
    NO_ADDRESS,
    NOT_OFFERED,
    Garbled,
    NotOffered,
    NotSent,
    ServerClient,
    trace_headers,
)

M = TypeVar("M", bound=Message)

MOST_STREAM_BYTES = 10 * MOST_BYTES
CARD_BYTES = 1_000_000
CARD_PATH = "/.well-known/agent-card.json"
_ID = re.compile(r"[A-Za-z0-9_~@+=-][A-Za-z0-9._:~@+=-]{0,255}")
_AWAY = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED"})
_SCHEMES = {"grpc": "http", "grpcs": "https"}
_NOT_OFFERED = (
    errors.UnsupportedOperationError, errors.MethodNotFoundError, errors.TaskNotCancelableError, NotImplementedError
)  # fmt: skip


class UnknownTask(Exception):
    """The server does not know the task."""


class A2AClient(ServerClient):
    """Speaks to one A2A agent, whose card is under `url`; one that ends in `.json` is the address of the card.

    Requests go to the origin of the url and to `origins`, and nowhere else: interfaces of the card that are elsewhere are
    not used. With `card_key`, a card must be signed by that key."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        name: str = "",
        origins: Iterable[str] = (),
        card_key: str | bytes | None = None,
    ) -> None:
        super().__init__(url, headers, name)
        self.card_url = self.url if self.url.endswith(".json") else self.url + CARD_PATH
        self._origins = frozenset([origin_of(one) for one in (url, *origins)])
        self._verifier = None if card_key is None else CardVerifier(card_key)
        self._links: dict[asyncio.AbstractEventLoop, _Link] = {}

    async def open(self) -> Client:
        """Return the client of the SDK. The first time, read the card and choose a transport."""
        link = self._link()
        async with link.lock:
            if link.client is None:
                card = await self._read_card(link)
                link.client, link.card = self._connect(link, card), card
            return link.client

    def forget_card(self) -> None:
        """Read the card again the next time."""
        self._link().client = None

    @property
    def can_stream(self) -> bool:
        return self._link().card.capabilities.streaming

    def stop_streaming(self) -> None:
        """Use no streams from now on: the card promises them, but the server has none."""
        self._link().card.capabilities.streaming = False

    def _has_extension(self, uri: str) -> bool:
        return any(one.uri == uri for one in self._link().card.capabilities.extensions)

    def send(
        self,
        message_id: str,
        context_id: str,
        parts: Iterable[Any],
        task_id: str = "",
        limits: Limits | None = None,
    ) -> AsyncGenerator[pb.StreamResponse]:
        """Send text and data, with limits if the server takes them; yield the answers. Without streams there is one."""
        made = [
            pb.Part(text=part)
            if isinstance(part, str)
            else pb.Part(data=json_format.ParseDict(to_json_value(part), struct_pb2.Value()))
            for part in parts
        ]
        message = pb.Message(
            message_id=message_id, context_id=context_id, task_id=task_id, role=pb.ROLE_USER, parts=made
        )
        if limits is not None and self._has_extension(BUDGET):
            json_format.ParseDict(limits_json(limits), message.metadata)
        config = pb.SendMessageConfiguration(return_immediately=True)
        asked = pb.SendMessageRequest(message=message, configuration=config)
        return self._stream("send_message", asked)

    def subscribe(self, task_id: str) -> AsyncGenerator[pb.StreamResponse]:
        """Yield what happens to a task from now on."""
        return self._stream("subscribe", pb.SubscribeToTaskRequest(id=task_id))

    async def task(self, task_id: str) -> pb.Task:
        return await self._ask("get_task", pb.GetTaskRequest(id=task_id))

    async def cancel(self, task_id: str) -> pb.Task:
        """Ask the server to stop a task. Raise NotOffered if it has ended or cannot be stopped."""
        return await self._ask("cancel_task", pb.CancelTaskRequest(id=task_id))

    async def tasks(self, context_id: str) -> pb.ListTasksResponse:
        """Return the newest tasks of a conversation."""
        return await self._ask(
            "list_tasks", pb.ListTasksRequest(context_id=context_id, page_size=50, history_length=50)
        )

    async def close(self) -> None:
        link = self._links.pop(asyncio.get_running_loop(), None)
        if link is not None:
            if link.client is not None:
                await link.client.close()
            await link.http.aclose()

    # --- the card

    async def _read_card(self, link: _Link) -> pb.AgentCard:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                response = await link.http.get(self.card_url, headers={"accept": "application/json", **self._headers})
            response.raise_for_status()
            if len(response.content) > CARD_BYTES:
                raise ExecutionBackendError(self.name, f"the card of {self.url} has more than {CARD_BYTES:,} bytes")
            card = parse_agent_card(json.loads(redact(response.text, self._secrets)))
            if self._verifier is not None:
                self._verifier.check(card)
            return card
        except UntrustedCard as exc:
            raise ExecutionBackendError(self.name, f"the card of {self.url} is not trusted: {exc}") from None
        except (httpx.HTTPError, TimeoutError) as exc:
            raise self._problem(exc, "did not send its card") from None
        except (ValueError, RecursionError, json_format.ParseError) as exc:
            reason = self.words(str(exc))
            raise Garbled(f"{self.card_url} is not the card of an A2A agent ({reason}): check the url") from None

    def _connect(self, link: _Link, card: pb.AgentCard) -> Client:
        required = [extension.uri for extension in card.capabilities.extensions if extension.required]
        if required:
            raise self.error(f"requires extensions: {self.words(', '.join(required))}")
        found = list(card.supported_interfaces)
        usable = [one for one in found if self._is_allowed(one)]
        if not usable:
            others = self.words(", ".join(sorted({_shown_origin(one.url) for one in found}))) or "nowhere"
            problem = f"the card of {self.url} names no interface at its own address, only {others}"
            raise ExecutionBackendError(self.name, f"{problem}: allow one with A2AAgent(…, origins=[…])")
        del card.supported_interfaces[:]
        card.supported_interfaces.extend(usable)
        config = ClientConfig(
            httpx_client=link.http,
            grpc_channel_factory=self._channel,
            supported_protocol_bindings=["JSONRPC", "HTTP+JSON", "GRPC"],
        )
        try:
            return ClientFactory(config).create(card)
        except ValueError:
            offered = self.words(", ".join([one.protocol_binding for one in usable]))
            raise self.error(f"offers no transport that is known here, only {offered}") from None

    def _is_allowed(self, interface: pb.AgentInterface) -> bool:
        try:
            return origin_of(self._full(interface.url)) in self._origins
        except ValueError:
            return False

    def _full(self, url: str) -> str:
        """Return an address with its scheme: addresses of gRPC servers often have none, or a special one."""
        scheme, found, rest = url.partition("://")
        return f"{_SCHEMES.get(scheme, scheme)}://{rest}" if found else f"{urlsplit(self.url).scheme}://{url}"

    def _channel(self, url: str) -> Any:
        options = [
            ("grpc.max_receive_message_length", MOST_BYTES),
            ("grpc.enable_http_proxy", 0),
            ("grpc.keepalive_time_ms", 30_000),
        ]
        parts = urlsplit(self._full(url))
        if parts.scheme == "https":
            place = parts.netloc if parts.port else f"{parts.netloc}:443"
            trusted = os.environ.get("SSL_CERT_FILE")
            roots = None if trusted is None else Path(trusted).read_bytes()
            return grpc.aio.secure_channel(place, grpc.ssl_channel_credentials(roots), options)
        return grpc.aio.insecure_channel(parts.netloc, options)

    # --- requests

    async def _stream(self, operation: str, request: Message) -> AsyncGenerator[pb.StreamResponse]:
        client, total = await self.open(), 0
        stream = getattr(client, operation)(request, context=self._context(None))
        try:
            async for one in stream:
                size, clean = self._without_secrets(one)
                total += size
                if total > MOST_STREAM_BYTES:
                    raise self.error(f"sent more than {MOST_STREAM_BYTES:,} bytes")
                yield clean
        except ExecutionBackendError:
            raise
        except Exception as exc:
            raise self._problem(exc, "did not send the events of the task") from None
        finally:
            await stream.aclose()

    async def _ask(self, operation: str, request: Message) -> Any:
        client = await self.open()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await getattr(client, operation)(request, context=self._context(ANSWER_SECONDS))
                return self._without_secrets(answer)[1]
        except Exception as exc:
            raise self._problem(exc, "did not answer") from None

    def _without_secrets(self, message: M) -> tuple[int, M]:
        """Return the size of a message as JSON, and the message without credentials. Raise if it has no JSON form."""
        text = json_format.MessageToJson(message, indent=None, ensure_ascii=False)
        clean = redact(text, self._secrets)
        return len(text), message if clean == text else json_format.Parse(clean, type(message)())

    def _context(self, seconds: float | None) -> ClientCallContext:
        activated = {"A2A-Extensions": BUDGET} if self._has_extension(BUDGET) else {}
        return ClientCallContext(service_parameters={**trace_headers(), **activated, **self._headers}, timeout=seconds)

    def _link(self) -> _Link:
        loop = asyncio.get_running_loop()
        link = self._links.get(loop)
        if link is None:
            self._links = {known: kept for known, kept in self._links.items() if not known.is_closed()}
            link = self._links[loop] = _Link(make_http_client(self._origins, ANSWER_SECONDS))
        return link

    # --- errors

    def _problem(self, exc: BaseException, what: str) -> Exception:
        """Return the error of this module for one of the SDK, of httpx or of gRPC."""
        causes = _causes(exc)
        words = self.words(str(exc)) or type(exc).__name__
        if any(isinstance(one, errors.TaskNotFoundError) for one in causes):
            return UnknownTask(words)
        if isinstance(exc, _NOT_OFFERED):
            return NotOffered(words)
        if "CERTIFICATE_VERIFY_FAILED" in words:
            return self.untrusted(words)
        for one in causes:
            if isinstance(one, TooMuch):
                return self.error(str(one))
            if isinstance(one, httpx.HTTPStatusError):
                return self._problem_of_answer(one.response.status_code, words, what)
            if isinstance(one, httpx.ConnectError | httpx.ConnectTimeout):
                return NotSent(f"{self.url} cannot be reached ({words})")
            if isinstance(one, httpx.InvalidURL | httpx.UnsupportedProtocol):
                return self.error(NO_ADDRESS)
            if isinstance(one, httpx.RequestError | TimeoutError | OSError):
                return ConnectionError(f"{self.url} cannot be reached ({words})")
            if isinstance(one, grpc.aio.AioRpcError):
                return self._problem_of_grpc(one.code().name, words, what)
        if isinstance(exc, errors.A2AError) and type(exc).__module__ == errors.__name__:
            return self.error(f"{what}: {words}")
        return Garbled(f"{self.url} did not answer as an A2A server ({words}): check the url")

    def _problem_of_answer(self, status: int, words: str, what: str) -> Exception:
        if (problem := self.problem_of_status(status, words)) is not None:
            return problem
        is_offered = status not in NOT_OFFERED or "card" in what
        return self.refused(status, words, what) if is_offered else NotOffered(words)

    def _problem_of_grpc(self, code: str, words: str, what: str) -> Exception:
        if code in _AWAY:
            kind = NotSent if "failed to connect" in words else ConnectionError
            return kind(f"{self.url} cannot be reached ({words})")
        return NotOffered(words) if code == "UNIMPLEMENTED" else self.refused(code, words, what)


class _Link:
    """The connections of one event loop."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.lock = asyncio.Lock()
        self.client: Client | None = None
        self.card = pb.AgentCard()


def is_id(text: str) -> bool:
    """Return whether an id of a server has only safe characters: ids become part of addresses."""
    return _ID.fullmatch(text) is not None


def _shown_origin(url: str) -> str:
    return urlsplit(url).netloc or url.partition("/")[0]


def _causes(exc: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    one: BaseException | None = exc
    while one is not None and one not in found:
        found.append(one)
        one = one.__cause__
    return found
