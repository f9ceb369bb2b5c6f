"""`retinue serve` as a process: what it prints, its end, its workers, its tokens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from ..prepared import PYTHON
from ..waiting import until
from .processes import ROOT, TOKEN, Served, as_user, served

RUNS = "/api/v1/runs"
AGENTS = "tests.server.served:agents"


async def retinue(*words: str) -> str:
    process = await asyncio.create_subprocess_exec(PYTHON, "-m", "retinue", *words, stdout=PIPE, stderr=PIPE, cwd=ROOT)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_a_folder_is_served_with_a_token_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "lamp.md").write_text("The lamp burns paraffin.\n")
    async with served(str(tmp_path), token=None) as server:
        first, token, page, ready = server.lines
        assert first == f"serving assistant on {server.site.url}"
        assert (token.split()[0], ready) == ("token:", "ready")
        assert page == f"open {server.site.url}/#token={token.split()[1]}"
        run = await server.site.start("assistant", "Where is paraffin?")
        assert "lamp.md:1" in (await server.site.result(run["run_id"]))["response"]
        async with as_user(server, None) as nobody:
            assert (await nobody.get(RUNS)).status == 401
            assert (await nobody.get("/readyz")).status == 200
        assert await server.end() == 0
        assert "nothing is kept" in await server.errors()


@pytest.mark.parametrize(
    ("target", "signum"),
    [(AGENTS, signal.SIGTERM), (AGENTS, signal.SIGINT), ("tests.server.served:open_runtime", signal.SIGTERM)],
)
async def test_a_run_goes_on_after_a_restart(tmp_path: Path, target: str, signum: signal.Signals) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    database = ("--db", url, "--grace", "1")
    async with served(target, *database, folder=tmp_path) as server:
        run_id = (await server.site.start("waiter", "it"))["run_id"]
        await until((tmp_path / "it.pids").exists)
        stream = asyncio.create_task(server.site.all_events(f"{RUNS}/{run_id}/events"))
        waiting = asyncio.create_task(server.site.get(f"{RUNS}/{run_id}/result?wait=300"))
        await until(lambda: _are_asking(server))
        assert await server.end(signum) == 0
        seen, answer = await stream, await waiting
        assert (seen[-1].data["kind"], answer.status) == ("tool_call_ready", 202)
    (tmp_path / "it").touch()
    async with served(target, *database, folder=tmp_path) as server:
        assert (await server.site.result(run_id))["response"] == "done: it came"
        rest = await server.site.all_events(f"{RUNS}/{run_id}/events?after={seen[-1].id}")
        numbers = [event.data["seq"] for event in (*seen, *rest)]
        assert numbers == list(range(1, len(numbers) + 1))
    assert len((tmp_path / "it.pids").read_text().split()) == 2


async def _are_asking(server: Served) -> bool:
    """Return whether the stream is open, and the request for the result is at work beside this one."""
    metrics = (await server.site.get("/metrics")).body
    return "retinue_streams 1" in metrics and "retinue_http_requests_active 2" in metrics


async def test_a_tool_that_ignores_its_cancel_does_not_keep_the_process(tmp_path: Path) -> None:
    async with served(AGENTS, "--db", f"sqlite:///{tmp_path}/app.db", "--grace", "0", folder=tmp_path) as server:
        await server.site.start("deaf", "go")
        await until((tmp_path / "begun").exists)
        assert await server.end() == 0
        assert "not waiting for 1 asyncio task that ignored cancellation" in await server.errors()


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with served(AGENTS, "--db", f"sqlite:///{tmp_path}/app.db", folder=tmp_path) as server:
        # A body that does not come keeps the server from ending by itself.
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.site.url.rpartition(":")[2]))
        head = f"POST {RUNS} HTTP/1.1\r\nhost: x\r\nx-api-key: {TOKEN}\r\ncontent-length: 50\r\n"
        writer.write(f"{head}expect: 100-continue\r\n\r\n".encode())
        assert b"100 Continue" in await reader.readline()
        server.process.send_signal(signal.SIGTERM)

        async def is_closing() -> bool:
            return (await server.site.get("/readyz")).body.get("code") == "closing"

        await until(is_closing)
        refused = await server.site.post(RUNS, {"agent": "speaker", "input": "x"})
        assert (refused.status, refused.body["code"]) == (503, "closing")
        assert await server.end() == 128 + signal.SIGTERM
        writer.close()


async def test_the_access_log_has_run_ids_and_no_token(tmp_path: Path) -> None:
    async with served(AGENTS, "--verbose") as server:
        run_id = (await server.site.start("speaker"))["run_id"]
        await server.site.result(run_id)
        await server.site.get(f"{RUNS}/a%0Ab%1b/result?token={TOKEN}")
        await server.end()
        log = await server.errors()
    assert "POST /api/v1/runs 201" in log
    lines = [line for line in log.splitlines() if "retinue.access" in line]
    assert [line.rpartition(" ")[2] for line in lines] == [run_id, run_id, "a%0Ab%1B"]
    assert TOKEN not in log


async def test_tokens_of_the_database_are_accepted_beside_the_one_given(tmp_path: Path) -> None:
    database = ("--db", f"sqlite:///{tmp_path}/app.db")
    made = await retinue("tokens", "add", "ann", *database)
    listed = json.loads(await retinue("tokens", "list", "--json", *database))
    secret = made.splitlines()[-1]
    assert [(one["user_id"], one["scopes"], one["revoked_at"]) for one in listed] == [
        ("ann", ["read", "run", "answer"], None)
    ]
    assert secret.encode() not in b"".join(path.read_bytes() for path in tmp_path.glob("app.db*"))
    async with served(AGENTS, *database) as server, as_user(server, secret) as ann:
        assert (await ann.get("/api/v1/session")).body == {"user_id": "ann", "scopes": ["answer", "read", "run"]}
        assert (await server.site.get("/api/v1/session")).body["user_id"] == "local"
        assert "is revoked" in await retinue("tokens", "revoke", listed[0]["token_id"], *database)
        assert "was revoked before" in await retinue("tokens", "revoke", listed[0]["token_id"], *database)
    async with served(AGENTS, *database) as server, as_user(server, secret) as ann:
        assert (await ann.get("/api/v1/session")).status == 401


async def test_no_token_is_made_where_the_database_has_some(tmp_path: Path) -> None:
    options = ("--db", f"sqlite:///{tmp_path}/app.db")
    secret = (await retinue("tokens", "add", "ann", *options)).splitlines()[-1]
    async with served(AGENTS, *options, token=None) as server, as_user(server, secret) as ann:
        await _has_no_token_of_its_own(server)
        assert (await ann.get("/api/v1/session")).body["user_id"] == "ann"
        (listed,) = json.loads(await retinue("tokens", "list", "--json", *options))
        await retinue("tokens", "revoke", listed["token_id"], *options)
    async with served(AGENTS, *options, token=None) as server:
        assert (await server.site.get("/api/v1/session")).body["user_id"] == "local"


async def _has_no_token_of_its_own(server: Served) -> None:
    assert [line for line in server.lines if "rtn_" in line] == []
    assert "tokens: those of the database; see retinue tokens" in server.lines
    assert (await server.site.get("/api/v1/session")).status == 401


@pytest.mark.parametrize(("name", "kind"), [("wait_for", "a tool"), ("start_agents", "an async function")])
async def test_what_cannot_be_served_is_refused_in_one_line(name: str, kind: str) -> None:
    words = ("-W", "error", "-m", "retinue", "serve", f"tests.server.served:{name}", "--port", "0")
    process = await asyncio.create_subprocess_exec(PYTHON, *words, stdout=PIPE, stderr=PIPE, cwd=ROOT)
    out, err = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    (line,) = err.decode().splitlines()
    assert f"TARGET tests.server.served:{name}: it is {kind}: name an agent" in line


async def test_a_proxy_names_the_user(tmp_path: Path) -> None:
    async with served(AGENTS, "--user-header", "X-User") as server:
        assert len(server.lines) == 2
        answer = await server.site.get("/api/v1/session", headers={"x-user": "ann"})
        assert answer.body["user_id"] == "ann"
        assert (await server.site.get("/api/v1/session")).status == 401


async def test_a_server_without_tokens_knows_its_own_pages_only() -> None:
    async with served(AGENTS, "--no-auth") as server:
        run = {"agent": "speaker", "input": "x"}
        assert (await server.site.post(RUNS, run)).status == 201
        evil = {"origin": "https://evil.example"}
        assert (await server.site.post(RUNS, run, headers=evil)).body["code"] == "wrong_origin"
        async with server.site.session.ws_connect("/api/v1/events") as socket:
            await socket.close()
        assert (await server.site.refusal("/api/v1/events", **evil))[0] == 4403
        renamed = await server.site.get(RUNS, headers={"host": "evil.example"})
        assert (renamed.status, renamed.body["code"]) == (421, "wrong_host")
        assert (await server.site.refusal("/api/v1/events", host="evil.example"))[0] == 4421


async def test_a_refused_socket_is_not_an_error_of_the_server() -> None:
    async with served(AGENTS) as server, as_user(server, None) as nobody:
        for path in ("/api/v1/events", f"{RUNS}/none/events"):
            assert (await nobody.refusal(path))[0] == 4401
        await server.end()
        log = await server.errors()
    assert "ASGI" not in log


async def test_workers_share_a_port_and_are_replaced(tmp_path: Path) -> None:
    database = ("--db", f"sqlite:///{tmp_path}/app.db")
    secret = (await retinue("tokens", "add", "ann", *database)).splitlines()[-1]
    options = (*database, "--workers", "2")
    async with (
        served("tests.server.served:runtime", *options, token=None, folder=tmp_path) as server,
        as_user(server, secret) as ann,
    ):
        await _has_no_token_of_its_own(server)
        while len(_pids(tmp_path, "a")) < 2:
            await _start_alone(server, secret, tmp_path, "a")
        victim = _pids(tmp_path, "a").pop()
        (tmp_path / "dies").touch()  # the process that takes its place
        os.kill(victim, signal.SIGKILL)
        (tmp_path / "a").touch()
        for run in (await ann.get(RUNS)).body["items"]:
            assert (await ann.result(run["run_id"]))["response"] == "done: a came"
        (tmp_path / "b").touch()
        while len(_pids(tmp_path, "b") - {victim}) < 2:
            await _start_alone(server, secret, tmp_path, "b")
        assert await server.end() == 0
        errors = await server.errors()
        assert "a worker ended with exit code -9: another takes its place" in errors
        assert "a worker ended with exit code 7 before it listened: another is started" in errors
    for pid in _pids(tmp_path, "b"):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def _start_alone(server: Served, token: str, folder: Path, name: str) -> None:
    """Start a run over a connection of its own, which any worker may take, and wait until it works."""
    before = _lines(folder, name)
    async with as_user(server, token) as site:
        await site.start("waiter", name)
    await until(lambda: len(_lines(folder, name)) > len(before))


def _pids(folder: Path, name: str) -> set[int]:
    return {int(line) for line in _lines(folder, name)}


def _lines(folder: Path, name: str) -> list[str]:
    file = folder / f"{name}.pids"
    return file.read_text().split() if file.exists() else []
