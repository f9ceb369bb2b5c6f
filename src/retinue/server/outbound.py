"""Requests of the server to addresses that users have given.

The rule is about the address that a socket connects to: it is checked for each connection, whether the host is a literal
or a name. So no spelling of a host and no answer of a name server leads to this machine or its network.
"""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

import aiohttp
from yarl import URL

_GLOBAL = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


class Outbound:
    """The addresses that the server may reach for its users: the open internet, or with `private` this machine and its network, too."""

    def __init__(self, *, private: bool) -> None:
        self._private = private

    def read_url(self, text: str) -> URL:
        """Return an address as the client will use it. Raise ValueError if nothing may be sent to it."""
        try:
            url = URL(text)
        except ValueError:
            url = URL()
        host = (url.host or "").rstrip(".")
        if url.scheme not in ("http", "https") or not host or url.user is not None or url.password is not None:
            raise ValueError("an address is http://… or https://…, without a user")
        if not self._private and (host == "localhost" or host.endswith(".localhost") or _is_private_literal(host)):
            raise ValueError("this machine and its network are not allowed here")
        return url

    def session(self, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
        """Return a session whose connections go only where users may reach. The caller closes it."""
        factory = None if self._private else _open_socket
        connector = aiohttp.TCPConnector(socket_factory=factory, use_dns_cache=False)
        return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout)


def is_public(address: str) -> bool:
    """Return whether a literal address is on the open internet, also as an IPv6 address that leads to an IPv4 one."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, IPv6Address):
        inner = _ipv4_behind(found)
        if inner is None:
            return found in _GLOBAL and found.is_global
        found = inner
    return found.is_global and not found.is_multicast and not found.is_reserved


def _ipv4_behind(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that a mapped, 6to4 or NAT64 address leads to."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour


def _is_private_literal(host: str) -> bool:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:  # a name: what it leads to is seen when it is connected
        return False
    return not is_public(host)


def _open_socket(info: tuple[Any, ...]) -> socket.socket:
    """Return the socket for a connection; raise OSError for an address that users may not reach."""
    family, kind, protocol, _, address = info
    if not is_public(address[0]):
        raise OSError(None, f"{address[0]} is an address of this machine or its network")
    return socket.socket(family, kind, protocol)
