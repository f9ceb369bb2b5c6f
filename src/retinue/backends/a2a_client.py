"""The client of an A2A server: its card, the transports, and the bounds on what it may send."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ..core.content import to_json_value
from ..core.errors import ExecutionBackendError
from ..core.runs import Limits
from ..core.secrets import redact, secrets_of
from ..wire.a2a_budget import BUDGET, limits_json
from .a2a_http import TooMuch, make_http_client, origin_of
from .a2a_signature import CardVerifier, UntrustedCard
from .http_client import ANSWER_SECONDS, MOST_BYTES, Garbled, trace_headers

if TYPE_CHECKING:
    import httpx
    from a2a.client.client import Client, ClientCallContext
    from a2a.types.a2a_pb2 import AgentCard, AgentInterface

T = TypeVar("T")

MOST_STREAM_BYTES = 10 * MOST_BYTES
CARD_BYTES = 1_000_000
CARD_PATH = "/.well-known/agent-card.json"
_ID = re.compile(r"[A-Za-z0-9_~@+=-][A-Za-z0-9._:~@+=-]{0,255}")
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_AWAY = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED"})
_SCHEMES = {"grpc": "http", "grpcs": "https"}
_SHOWN = 300


class NotSent(ConnectionError):
    """No connection was made, so the server has not seen the request."""


class NotOffered(Exception):
    """The server does not have this operation, or not for a task in this state."""


class UnknownTask(Exception):
    """The server does not know the task."""


class A2AClient:
    """Speaks to one A2A agent, whose card is under `url`; one that ends in `.json` is the address of the card.

    A final refusal raises ExecutionBackendError, a failure that may pass raises ConnectionError. Requests go to the
    origin of the url and to `origins`, with the headers, and nowhere else: no redirect is followed, and interfaces of the
    card that are elsewhere are not used. With `card_key`, a card must be signed by that key. Credentials in the headers are redacted in all that the server returns."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        name: str = "",
        origins: Iterable[str] = (),
        card_key: str | bytes | None = None,
    ) -> None:
        self.url, self._headers, self._name = url.rstrip("/"), dict(headers or {}), name or url
        self.card_url = self.url if self.url.endswith(".json") else self.url + CARD_PATH
        self._origins = frozenset([origin_of(one) for one in (url, *origins)])
        self._secrets = secrets_of(self._headers)
        self._verifier = None if card_key is None else CardVerifier(card_key)
        self._links: dict[asyncio.AbstractEventLoop, _Link] = {}

    async def open(self) -> None:
        """Read the card, unless that was done before, and choose a transport."""
        link = self._link()
        async with link.lock:
            if link.client is None:
                card = await self._read_card(link)
                link.client, link.card = self._connect(link, card), card

    def forget_card(self) -> None:
        """Read the card again the next time."""
        self._link().client = None

    @property
    def can_stream(self) -> bool:
        card = self._link().card
        return card is not None and card.capabilities.streaming

    def _has_extension(self, uri: str) -> bool:
        card = self._link().card
        return card is not None and any(one.uri == uri for one in card.capabilities.extensions)

    def stop_streaming(self) -> None:
        """Use no streams from now on: the card promises them, but the server has none."""
        card = self._link().card
        if card is not None:
            card.capabilities.streaming = False

    async def send(
        self,
        message_id: str,
        context_id: str,
        parts: Iterable[Any],
        task_id: str = "",
        limits: Limits | None = None,
    ) -> AsyncGenerator[bytes]:
        """Send text and data, with limits if the server takes them; yield the answers, each a `StreamResponse` as JSON. Without streams there is one."""
        from a2a.types.a2a_pb2 import Message, Part, Role, SendMessageConfiguration, SendMessageRequest
        from google.protobuf import json_format, struct_pb2

        made = [
            Part(text=part)
            if isinstance(part, str)
            else Part(data=json_format.ParseDict(to_json_value(part), struct_pb2.Value()))
            for part in parts
        ]
        message = Message(
            message_id=message_id, context_id=context_id, task_id=task_id, role=Role.ROLE_USER, parts=made
        )
        if limits is not None and self._has_extension(BUDGET):
            json_format.ParseDict(limits_json(limits), message.metadata)
        asked = SendMessageRequest(message=message, configuration=SendMessageConfiguration(return_immediately=True))
        async with aclosing(self._stream(lambda client, context: client.send_message(asked, context=context))) as found:
            async for one in found:
                yield one

    async def subscribe(self, task_id: str) -> AsyncGenerator[bytes]:
        """Yield what happens to a task from now on, each a `StreamResponse` as JSON."""
        from a2a.types.a2a_pb2 import SubscribeToTaskRequest

        asked = SubscribeToTaskRequest(id=task_id)
        async with aclosing(self._stream(lambda client, context: client.subscribe(asked, context=context))) as found:
            async for one in found:
                yield one

    async def task(self, task_id: str) -> bytes:
        """Return a `Task` as JSON."""
        from a2a.types.a2a_pb2 import GetTaskRequest

        return await self._ask(lambda client, context: client.get_task(GetTaskRequest(id=task_id), context=context))

    async def cancel(self, task_id: str) -> bytes:
        """Ask the server to stop a task; return it as JSON. Raise NotOffered if it has ended or cannot be stopped."""
        from a2a.types.a2a_pb2 import CancelTaskRequest

        return await self._ask(
            lambda client, context: client.cancel_task(CancelTaskRequest(id=task_id), context=context)
        )

    async def tasks(self, context_id: str) -> bytes:
        """Return the newest tasks of a conversation, a `ListTasksResponse` as JSON."""
        from a2a.types.a2a_pb2 import ListTasksRequest

        asked = ListTasksRequest(context_id=context_id, page_size=50, history_length=50)
        return await self._ask(lambda client, context: client.list_tasks(asked, context=context))

    async def close(self) -> None:
        link = self._links.pop(asyncio.get_running_loop(), None)
        if link is not None:
            if link.client is not None:
                await link.client.close()
            await link.http.aclose()

    # --- the card

    async def _read_card(self, link: _Link) -> AgentCard:
        import httpx
        from a2a.client.card_resolver import parse_agent_card
        from google.protobuf.json_format import ParseError

        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                response = await link.http.get(self.card_url, headers={"accept": "application/json", **self._headers})
            response.raise_for_status()
            if len(response.content) > CARD_BYTES:
                raise ExecutionBackendError(self._name, f"the card of {self.url} has more than {CARD_BYTES:,} bytes")
            card = parse_agent_card(json.loads(redact(response.text, self._secrets)))
            if self._verifier is not None:
                self._verifier.check(card)
            return card
        except UntrustedCard as exc:
            raise ExecutionBackendError(self._name, f"the card of {self.url} is not trusted: {exc}") from None
        except (httpx.HTTPError, TimeoutError) as exc:
            raise self._problem(exc, "did not send its card") from None
        except (ValueError, RecursionError, ParseError) as exc:
            reason = self._words(str(exc))
            raise Garbled(f"{self.card_url} is not the card of an A2A agent ({reason}): check the url") from None

    def _connect(self, link: _Link, card: AgentCard) -> Client:
        from a2a.client.client import ClientConfig
        from a2a.client.client_factory import ClientFactory

        required = [extension.uri for extension in card.capabilities.extensions if extension.required]
        if required:
            raise ExecutionBackendError(
                self._name, f"{self.url} requires extensions: {self._words(', '.join(required))}"
            )
        found = list(card.supported_interfaces)
        usable = [one for one in found if self._is_allowed(one)]
        if not usable:
            others = self._words(", ".join(sorted({_shown_origin(one.url) for one in found}))) or "nowhere"
            problem = f"the card of {self.url} names no interface at its own address, only {others}"
            raise ExecutionBackendError(self._name, f"{problem}: allow one with A2AAgent(…, origins=[…])")
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
            offered = self._words(", ".join([one.protocol_binding for one in usable]))
            problem = f"{self.url} offers no transport that is known here, only {offered}"
            raise ExecutionBackendError(self._name, problem) from None

    def _is_allowed(self, interface: AgentInterface) -> bool:
        try:
            return origin_of(self._full(interface.url)) in self._origins
        except ValueError:
            return False

    def _full(self, url: str) -> str:
        """Return an address with its scheme: addresses of gRPC servers often have none, or a special one."""
        scheme, found, rest = url.partition("://")
        return f"{_SCHEMES.get(scheme, scheme)}://{rest}" if found else f"{urlsplit(self.url).scheme}://{url}"

    def _channel(self, url: str) -> Any:
        import grpc.aio

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

    async def _stream(
        self, start: Callable[[Client, ClientCallContext], AsyncGenerator[Any] | Any]
    ) -> AsyncGenerator[bytes]:
        client = await self._client()
        total = 0
        stream = start(client, self._context(None))
        try:
            async for one in stream:
                data = self._to_json(one)
                total += len(data)
                if total > MOST_STREAM_BYTES:
                    raise ExecutionBackendError(self._name, f"{self.url} sent more than {MOST_STREAM_BYTES:,} bytes")
                yield data
        except ExecutionBackendError:
            raise
        except Exception as exc:
            raise self._problem(exc, "did not send the events of the task") from None
        finally:
            await stream.aclose()

    async def _ask(self, start: Callable[[Client, ClientCallContext], Awaitable[Any]]) -> bytes:
        client = await self._client()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return self._to_json(await start(client, self._context(ANSWER_SECONDS)))
        except Exception as exc:
            raise self._problem(exc, "did not answer") from None

    def _to_json(self, message: Any) -> bytes:
        """Return a message as JSON without credentials."""
        from google.protobuf.json_format import MessageToJson

        return redact(MessageToJson(message, indent=None, ensure_ascii=False), self._secrets).encode(errors="replace")

    async def _client(self) -> Client:
        await self.open()
        client = self._link().client
        assert client is not None
        return client

    def _context(self, seconds: float | None) -> ClientCallContext:
        from a2a.client.client import ClientCallContext

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
        import httpx
        from a2a.utils import errors

        causes = _causes(exc)
        words = self._words(str(exc)) or type(exc).__name__
        if any(isinstance(one, errors.TaskNotFoundError) for one in causes):
            return UnknownTask(words)
        not_offered = (errors.UnsupportedOperationError, errors.MethodNotFoundError, errors.TaskNotCancelableError)
        if isinstance(exc, (*not_offered, NotImplementedError)):
            return NotOffered(words)
        if "CERTIFICATE_VERIFY_FAILED" in words:
            problem = f"{self.url} has a certificate that is not trusted ({words})"
            return ExecutionBackendError(self._name, f"{problem}: name its authority in the file $SSL_CERT_FILE")
        for one in causes:
            if isinstance(one, TooMuch):
                return ExecutionBackendError(self._name, f"{self.url} {one}")
            if isinstance(one, httpx.HTTPStatusError):
                return self._status_problem(one.response.status_code, words, what)
            if isinstance(one, httpx.ConnectError | httpx.ConnectTimeout):
                return NotSent(f"{self.url} cannot be reached ({words})")
            if isinstance(one, httpx.InvalidURL | httpx.UnsupportedProtocol):
                return ExecutionBackendError(self._name, f"{self.url} is not an address that can be asked")
            if isinstance(one, httpx.RequestError | TimeoutError | OSError):
                return ConnectionError(f"{self.url} cannot be reached ({words})")
            if (code := _grpc_code(one)) is not None:
                return self._grpc_problem(code, words, what)
        if isinstance(exc, errors.A2AError) and type(exc).__module__ == errors.__name__:
            return ExecutionBackendError(self._name, f"{self.url} {what}: {words}")
        return Garbled(f"{self.url} did not answer as an A2A server ({words}): check the url")

    def _status_problem(self, status: int, words: str, what: str) -> Exception:
        if 300 <= status < 400:
            problem = f"{self.url} answered {status}, a redirect, which is not followed: correct the url"
            return ExecutionBackendError(self._name, problem)
        if status in _TRANSIENT:
            return ConnectionError(f"{self.url} answered {status}: {words}")
        if status in (404, 405, 501) and "card" not in what:
            return NotOffered(words)
        advice = ": check the headers" if status in (401, 403) else ""
        return ExecutionBackendError(self._name, f"{self.url} {what}: {status} {words}{advice}")

    def _grpc_problem(self, code: str, words: str, what: str) -> Exception:
        if code in _AWAY and "failed to connect" in words:
            return NotSent(f"{self.url} cannot be reached ({words})")
        if code in _AWAY:
            return ConnectionError(f"{self.url} cannot be reached ({words})")
        if code == "UNIMPLEMENTED":
            return NotOffered(words)
        advice = ": check the headers" if code in ("UNAUTHENTICATED", "PERMISSION_DENIED") else ""
        return ExecutionBackendError(self._name, f"{self.url} {what}: {words}{advice}")

    def _words(self, said: str) -> str:
        return " ".join(redact(said, self._secrets).split())[:_SHOWN]


class _Link:
    """The connections of one event loop."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.lock = asyncio.Lock()
        self.client: Client | None = None
        self.card: AgentCard | None = None


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


def _grpc_code(exc: BaseException) -> str | None:
    code = getattr(exc, "code", None)
    found: Any = code() if callable(code) else None
    return found.name if type(found).__name__ == "StatusCode" else None
