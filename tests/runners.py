"""Servers in the event loop of a test that leave no connection open."""

from __future__ import annotations

import asyncio

from aiohttp import web

from .waiting import let_others_run


async def stop_listening(*servers: asyncio.Server) -> None:
    """Close the listening sockets of servers, and return when every accepted connection has its protocol.

    A server that closes between the two forgets the connection: asyncio leaves it open, and it warns in a later test.
    """
    for server in servers:
        for listener in server.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
    await let_others_run()
    for server in servers:
        server.close()


class AppRunner(web.AppRunner):
    """Closes at its end also the connections that were accepted a moment before."""

    async def cleanup(self) -> None:
        servers = [getattr(site, "_server", None) for site in self.sites]
        await stop_listening(*(server for server in servers if server is not None))
        await super().cleanup()
