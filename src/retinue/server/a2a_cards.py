"""The A2A cards of the agents of a server, signed if it has a key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from email.utils import formatdate
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote

from a2a.server.request_handlers.response_helpers import agent_card_to_dict
from a2a.types import a2a_pb2 as pb
from google.protobuf.json_format import MessageToDict, ParseDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..core.agents import Agent
from ..core.errors import ConfigurationError
from ..wire.a2a_card import card_json
from .auth import NoAuth
from .http import error_response, json_response, not_found
from .service import Service

WELL_KNOWN = "/.well-known/agent-card.json"
_CACHED = "public, max-age=60"


class Cards:
    """Makes the cards. Addresses are those under which a client asked; `base` where a request names none."""

    def __init__(self, service: Service, version: str, base: str, key: bytes | None) -> None:
        self._service, self._version, self._base = service, version, base
        self.grpc_port: int | None = None
        self.names_grpc = True
        """True if the cards of agents name gRPC. That of the server and extended ones do."""
        self._signer = None if key is None else _make_signer(key)

    def card_of(self, agent: Agent, base: str = "", *, names_grpc: bool = True) -> pb.AgentCard:
        base = base or self._base or "http://localhost"
        host = base.partition("://")[2].partition("/")[0]
        name = host[: host.rfind(":")] if host.rfind(":") > host.rfind("]") else host
        grpc = f"{name}:{self.grpc_port}" if self.grpc_port is not None and names_grpc else None
        secured = not isinstance(self._service.auth, NoAuth)
        url = f"{base}/a2a/{quote(agent.name)}"
        card: Any = ParseDict(card_json(agent, url, self._version, grpc=grpc, secured=secured), pb.AgentCard())
        return card if self._signer is None else self._signer(card)

    def routes(self) -> list[Route]:
        """The routes of the cards, which need no token. The card of the server is that of its first agent.

        The cards of agents have the fields of version 0.3 beside those of 1.0. That of the server has not, because the
        schema of 1.0 allows no others.
        """
        began = formatdate(usegmt=True)

        async def card(request: Request) -> Response:
            agents, name = self._service.runtime.agents, request.path_params.get("agent")
            agent = agents.get(name or next(iter(agents), ""))
            if agent is None:
                return error_response(not_found("agent"))
            found = self.card_of(agent, base_of(request), names_grpc=name is None or self.names_grpc)
            shown = MessageToDict(found) if name is None else agent_card_to_dict(found)
            unsigned = {key: value for key, value in shown.items() if key != "signatures"}
            tag = hashlib.sha256(json.dumps(unsigned, sort_keys=True).encode()).hexdigest()[:32]
            headers = {"cache-control": _CACHED, "etag": f'W/"{tag}"', "vary": "host", "last-modified": began}
            if tag in request.headers.get("if-none-match", ""):
                return Response(status_code=304, headers=headers)
            return json_response(shown, headers=headers)

        return [Route(path, card) for path in (WELL_KNOWN, f"/a2a/{{agent}}{WELL_KNOWN}")]


def base_of(request: Request) -> str:
    """Return the address under which the server was asked."""
    return str(request.base_url).rstrip("/")


def _make_signer(key: bytes) -> Callable[[pb.AgentCard], pb.AgentCard]:
    """Return a function that signs cards: JWS with ES256 over the canonical JSON of the card."""
    if find_spec("jwt") is None or find_spec("cryptography") is None:
        raise ConfigurationError('signed cards need: pip install "pyjwt[crypto]"')
    from a2a.utils.signing import create_agent_card_signer
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError) as exc:
        raise ConfigurationError(f"the key of the cards cannot be read: {exc}") from exc
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.curve.name != "secp256r1":
        raise ConfigurationError("the key of the cards is an EC key on the curve P-256, as PEM without a password")
    public = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    head: Any = {"alg": "ES256", "kid": hashlib.sha256(public).hexdigest()[:16], "typ": "JOSE"}
    return create_agent_card_signer(key, head)
