"""Signatures of A2A cards: a card is used only if the key that its user trusts has signed it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigurationError

if TYPE_CHECKING:
    from a2a.types.a2a_pb2 import AgentCard


class UntrustedCard(Exception):
    """A card without a signature of the key."""


class CardVerifier:
    """Checks that a card was signed with a key. The names of keys and the addresses of key sets in it mean nothing."""

    def __init__(self, key: str | bytes) -> None:
        if find_spec("jwt") is None or find_spec("cryptography") is None:
            raise ConfigurationError('card_key needs: pip install "pyjwt[crypto]"')
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        # A signature cannot choose an algorithm for another kind of key.
        algorithms: dict[type[Any], list[str]] = {
            ec.EllipticCurvePublicKey: ["ES256", "ES384", "ES512"],
            rsa.RSAPublicKey: ["RS256", "PS256"],
            ed25519.Ed25519PublicKey: ["EdDSA"],
        }
        try:
            public = load_pem_public_key(key.encode() if isinstance(key, str) else key)
        except (ValueError, TypeError) as exc:
            raise ConfigurationError(f"card_key is a public key as PEM, which this is not: {exc}") from exc
        fitting = [names for kind, names in algorithms.items() if isinstance(public, kind)]
        if not fitting:
            raise ConfigurationError("card_key is an EC, RSA or Ed25519 key")
        self._key, self._algorithms = key, fitting[0]

    def check(self, card: AgentCard) -> None:
        """Raise UntrustedCard unless one signature of the card is by the key."""
        from a2a.utils.signing import NoSignatureError, SignatureVerificationError, create_signature_verifier

        try:
            create_signature_verifier(lambda kid, jku: self._key, self._algorithms)(card)
        except NoSignatureError:
            raise UntrustedCard("it is not signed") from None
        except SignatureVerificationError:
            raise UntrustedCard("no signature of it is by the key that was given") from None
