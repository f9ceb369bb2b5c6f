"""Requests of the server to addresses of users: the address of the connection decides."""

from __future__ import annotations

import aiohttp
import pytest
from yarl import URL

from retinue.server.outbound import Outbound, is_public

TIMEOUT = aiohttp.ClientTimeout(total=15)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "240.0.0.1", "::", "::1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "ff02::1",
        "::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::808:808", "2002:7f00:1::",
        "2002:a9fe:a9fe::1", "2001:0:a:b:c:d:80ff:fffe", "2001:db8::1", "localhost", "",
    ],
)  # fmt: skip
def test_what_is_not_on_the_open_internet(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1", "2606:4700::1111"]
)
def test_what_is_on_the_open_internet(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "１２７.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "127.1", "2130706433"]
)
async def test_no_connection_leads_to_this_machine(host: str) -> None:
    """Also where the url was not checked."""
    async with Outbound(private=False).session(TIMEOUT) as session:
        with pytest.raises(aiohttp.ClientError, match=r"this machine|not a canonical"):
            await session.get(URL(f"http://{host}:9/"))


def test_an_address_is_read_as_the_client_reads_it() -> None:
    assert str(Outbound(private=False).read_url("HTTP://Exämple.com/a b")) == "http://xn--exmple-cua.com/a%20b"
    assert Outbound(private=True).read_url("http://１２７.0.0.1/").host == "127.0.0.1"
    with pytest.raises(ValueError, match="not allowed"):
        Outbound(private=False).read_url("http://１２７.0.0.1/")
