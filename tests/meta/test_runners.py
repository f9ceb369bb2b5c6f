"""Servers of tests leave no connection open, whatever moment they end in."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from retinue import Runtime
from tests.remote.proxy import Proxy
from tests.runners import AppRunner
from tests.server.serving import serving


@asynccontextmanager
async def application() -> AsyncIterator[int]:
    runner = AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@asynccontextmanager
async def proxied() -> AsyncIterator[int]:
    async with serving(Runtime([])) as site, Proxy(urlsplit(site.url).port or 0) as proxy:
        yield proxy.port


@pytest.mark.parametrize("opened", [application, proxied])
@pytest.mark.parametrize("turns", range(7))
def test_a_connection_that_comes_last_is_closed(opened: type, turns: int) -> None:
    async def connect() -> socket.socket:
        async with opened() as port:
            client = socket.create_connection(("127.0.0.1", port))
            for _ in range(turns):
                await asyncio.sleep(0)
        return client

    with asyncio.Runner() as runner, runner.run(connect()) as client:
        client.settimeout(30)
        try:
            assert client.recv(1) == b""
        except ConnectionResetError:
            pass
    gc.collect()  # a transport that was left open would warn
