"""`retinue serve` is killed: its tasks go on, and whoever subscribed finds them again."""

from __future__ import annotations

import contextlib
import signal
import socket
from pathlib import Path

import pytest

from ..server.processes import TOKEN, served
from ..waiting import until
from .calling import ALL, NEW, answers, calling, states, task_of

AGENTS = "tests.server.served:runtime"


@pytest.mark.parametrize("transport", ALL)
async def test_tasks_survive_the_death_of_the_server(transport: str, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/app.db"
    async with served(AGENTS, "--db", database, "--grpc-port", "0", folder=tmp_path) as first:
        async with calling(first.site.url, transport, "payer", TOKEN) as caller:
            asked = await caller.send("pay", messageId="asks")
            waits = task_of(asked)
        async with calling(first.site.url, transport, "waiter", TOKEN) as caller:
            stream = caller.stream("it")
            works = task_of([await anext(stream)])
            await until((tmp_path / "it.pids").exists)
            await first.end(signal.SIGKILL)
    async with served(AGENTS, "--db", database, "--grpc-port", "0", folder=tmp_path) as second:
        async with calling(second.site.url, transport, "waiter", TOKEN) as caller:
            assert (await caller.get(works))["status"]["state"] == "TASK_STATE_WORKING"
            again = caller.subscribe(works)
            updates = [await anext(again)]
            assert updates[0]["task"]["history"][0]["parts"] == [{"text": "it"}]
            (tmp_path / "it").touch()
            updates += [one async for one in again]
            assert states(updates) == ["working", "completed"]
            assert answers(updates) == "done: it came"
        async with calling(second.site.url, transport, "payer", TOKEN) as caller:
            task = await caller.get(waits)
            assert (task["status"]["state"], task["history"][0]["messageId"]) == ("TASK_STATE_INPUT_REQUIRED", "asks")
            assert task["status"]["message"] == asked[-1]["statusUpdate"]["status"]["message"]
            assert answers(await caller.send({"approved": True}, taskId=waits)) == "done: paid 3"


def two_free_ports() -> int:
    """Return a port that is free together with the next one, which gRPC takes; other tests use ports at the same time."""
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                next_one.bind(("127.0.0.1", port + 1))
                return port


async def test_any_worker_answers_for_a_task(tmp_path: Path) -> None:
    database, port = f"sqlite:///{tmp_path}/app.db", two_free_ports()
    options = ("--db", database, "--workers", "2")
    async with served(AGENTS, *options, token=None, folder=tmp_path, port=port) as server:
        (token,) = (line.removeprefix("token: ") for line in server.lines if line.startswith("token: "))
        assert (await server.site.get("/api/v1/session")).body["user_id"] == "local"
        card = (await server.site.get("/.well-known/agent-card.json")).body
        assert card["supportedInterfaces"][2]["url"] == f"127.0.0.1:{port + 1}"
        own = (await server.site.get("/a2a/payer/.well-known/agent-card.json")).body
        assert "GRPC" not in [one["protocolBinding"] for one in own["supportedInterfaces"]]
        for transport in (one for one in ALL if one != "GRPC"):
            async with calling(server.site.url, transport, "payer", token, streaming=False) as caller:
                task_id = task_of(await caller.send("pay"))
            async with calling(server.site.url, transport, "payer", token) as caller:
                assert answers(await caller.send({"approved": True}, taskId=task_id)) == "done: paid 3"


async def test_nodes_of_one_database_answer_cancel_and_follow_each_others_tasks(
    postgres_url: str, tmp_path: Path
) -> None:
    options = ("--db", postgres_url, "--grpc-port", "0")
    async with (
        served(AGENTS, *options, folder=tmp_path) as first,
        served(AGENTS, *options, folder=tmp_path) as second,
    ):
        for transport in NEW:
            async with (
                calling(first.site.url, transport, "payer", TOKEN) as here,
                calling(second.site.url, transport, "payer", TOKEN) as there,
            ):
                task_id = task_of(await here.send("pay"))
                assert states([{"task": await there.get(task_id)}]) == ["input_required"]
                follows = here.subscribe(task_id)
                updates = [await anext(follows)]
                assert answers(await there.send({"approved": True}, taskId=task_id)) == "done: paid 3"
                updates += [one async for one in follows]
                assert states(updates) == ["input_required", "working", "completed"]
                assert {one.id for one in (await here.list()).tasks} == {one.id for one in (await there.list()).tasks}
            async with (
                calling(first.site.url, transport, "waiter", TOKEN) as here,
                calling(second.site.url, transport, "waiter", TOKEN) as there,
            ):
                stream = here.stream(f"never {transport}")
                task_id = task_of([await anext(stream)])
                assert (await there.cancel(task_id))["status"]["state"] == "TASK_STATE_CANCELED"
                assert states([one async for one in stream])[-1] == "canceled"
