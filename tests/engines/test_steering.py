"""`retinue runs …` on runs that workers do: no agent is needed, and none is asked for."""

from __future__ import annotations

import asyncio

import pytest

from retinue import RunStatus
from retinue.client import Client
from retinue.core.errors import UnknownAgent

from ..server.serving import TOKEN, serving
from .crew import crew
from .processes import command
from .team import Site


async def test_runs_are_answered_and_cancelled(postgres_url: str) -> None:
    site = Site(postgres_url, "postgres")
    async with site.client() as client:
        async with site.worker():
            first, second = client.stream("clerk", "go"), client.stream("clerk", "go")
            await asyncio.gather(first.result(), second.result())
            code, said = await command("runs", "approve", first.run_id, "--db", postgres_url)
            assert (code, "clerk: paid 3" in said) == (0, True), said
        code, said = await command("runs", "cancel", second.run_id, "--db", postgres_url)
        assert code == 0, said
        assert (await client.result(second.run_id)).status is RunStatus.CANCELLED
        waiting = client.stream("echo", "go")
        await waiting.stored()
        _, said = await command("runs", "show", waiting.run_id, "--db", postgres_url)
        assert "it waits for a worker; see: retinue queues" in said
        code, said = await command("db", "check", "--db", postgres_url)
        assert (code, "takes it over" in said) == (0, False), said
        _, said = await command("queues", "--db", postgres_url)
        assert "default" in said


async def test_a_server_refuses_an_agent_it_does_not_have(postgres_url: str) -> None:
    site = Site(postgres_url, "postgres")
    async with serving(site.client(crew())) as server, Client(server.url, token=TOKEN) as client:
        with pytest.raises(UnknownAgent):
            await client.run("nobody", "go")
