"""Files that are not divided by user: one user works on them, unless the operator lets all share them."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from pathlib import Path

import pytest

from retinue import Agent, ConfigurationError, HarnessAgent, Permissions, Runtime
from retinue.server import OneToken, ProxyHeader, StoredTokens, TokenStore, User, create_app
from retinue.server.auth import NoAuth
from retinue.storage.sql import SqlStore
from retinue.storage.stores import sql_store
from retinue.stores import StoreFilesystem
from retinue.testing import ScriptedModel, call, say
from retinue.workspace import SandboxFilesystem
from tests.prepared import PYTHON

from ..a2a.calling import NEW, a2a_serving
from .processes import ROOT, as_user, served
from .serving import TOKEN, asking, serving


def reader(name: str = "reader", **options: object) -> HarnessAgent:
    """An agent that reads `note.txt`."""

    def turn(request: object) -> object:
        done = [m for m in request.messages if m.role == "tool"]  # pyright: ignore[reportAttributeAccessIssue]
        return say(done[-1].text) if done else call("read_file", {"path": "note.txt"}, id="read_1")

    return HarnessAgent(name, ScriptedModel(turn), **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("shared", [False, True])
async def test_only_the_first_user_works_on_files_that_are_not_divided(tmp_path: Path, shared: bool) -> None:
    (tmp_path / "note.txt").write_text("a secret")
    mine = reader(workspace=tmp_path)
    boss = Agent("boss", ScriptedModel(lambda request: say("I did it myself.")), subagents=["reader"])
    runtime = Runtime.open(f"sqlite:///{tmp_path}/app.db", agents=[mine, boss])
    assert isinstance(runtime.store, SqlStore)
    auth = StoredTokens(runtime.store)
    async with a2a_serving(runtime, auth=auth, shared_files=shared) as place:
        tokens = TokenStore(runtime.store)
        (first, ann), (_, bob) = [await tokens.add(name) for name in ("ann", "bob")]
        async with asking(place.url, ann) as anns, asking(place.url, bob) as bobs:
            said = await anns.result((await anns.start("reader"))["run_id"])
            assert "a secret" in said["response"]
            task = {"task_id": "t1", "agent_id": "reader", "input": "go"}
            for path, body in (
                ("/api/v1/runs", {"agent": "reader", "input": "go", "thread_id": "t"}),
                ("/api/v1/runs", {"agent": "boss", "input": "go"}),
                ("/tasks", task),
            ):
                answer = await bobs.post(path, body)
                assert answer.status == (201 if shared else 403)
                assert shared or answer.body["code"] == "files_not_shared"
            assert (await bobs.get("/api/v1/files/note.txt")).status == (200 if shared else 404)
        if shared:
            return
        for transport in NEW:
            async with place.caller(transport, "reader", bob, streaming=False) as caller:
                with pytest.raises(Exception, match=r"403|PERMISSION_DENIED|for one user"):
                    await caller.send("go")
        assert await runtime.store.user_of_thread("t") is None
        await tokens.add("ann")  # another token of the first user
        await tokens.revoke(first.token_id)
        assert await auth.first_user() == "ann"


async def test_runs_from_the_time_when_files_were_shared_do_not_go_on(tmp_path: Path) -> None:
    """Neither an answer nor a fork leads another user to the files again."""
    (tmp_path / "note.txt").write_text("a secret")
    url = f"sqlite:///{tmp_path}/app.db"
    asks = Permissions(ask=["read_file"])

    def opened() -> tuple[Runtime, StoredTokens]:
        runtime = Runtime.open(url, agents=[reader(workspace=tmp_path, plugins=[asks])])
        assert isinstance(runtime.store, SqlStore)
        return runtime, StoredTokens(runtime.store)

    runtime, auth = opened()
    async with a2a_serving(runtime, auth=auth, shared_files=True) as place:
        assert isinstance(runtime.store, SqlStore)
        (_, ann), (_, bob) = [await TokenStore(runtime.store).add(name) for name in ("ann", "bob")]
        async with asking(place.url, bob) as bobs:
            run_id = (await bobs.start("reader"))["run_id"]
            assert (await bobs.result(run_id))["status"] == "suspended"
            seq = (await bobs.get(f"/api/v1/runs/{run_id}/snapshot")).body["seq"]
            assert (await bobs.post("/tasks", {"task_id": "t1", "agent_id": "reader", "input": "go"})).status == 201
            await bobs.get("/tasks/t1/wait?timeout_seconds=30")
        async with asking(place.url, ann) as anns:
            of_ann = (await anns.start("reader"))["run_id"]
            assert (await anns.result(of_ann))["status"] == "suspended"
    runtime, auth = opened()
    async with a2a_serving(runtime, auth=auth) as place:
        async with asking(place.url, bob) as bobs:
            (name,) = [one["path"] for one in (await bobs.get(f"/api/v1/runs/{run_id}/questions")).body["items"]]
            yes = {"decisions": {name: {"action": "resume", "payload": {"approved": True}}}}
            for path, body in (
                (f"/api/v1/runs/{run_id}/decisions", yes),
                (f"/api/v1/runs/{run_id}/fork", {"after": seq, **yes}),
                ("/tasks/t1/resume", yes),
            ):
                answer = await bobs.post(path, body)
                assert (answer.status, answer.body["code"]) == (403, "files_not_shared"), path
            async with place.caller("JSONRPC", "reader", bob, streaming=False) as caller:
                with pytest.raises(Exception, match="403"):
                    await caller.send({"approved": True}, taskId=run_id)
            assert (await bobs.result(run_id))["status"] == "suspended"
        async with asking(place.url, ann) as anns:
            assert (await anns.post(f"/api/v1/runs/{of_ann}/decisions", yes)).status == 202
            assert "a secret" in (await anns.result(of_ann))["response"]


async def test_users_of_divided_files_are_kept_apart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    agents = [
        reader("sandboxed", filesystem=SandboxFilesystem(tmp_path / "files", isolation="user")),
        reader("stored", filesystem=StoreFilesystem(url)),
    ]
    runtime = Runtime.open(url, agents=agents)
    assert isinstance(runtime.store, SqlStore)
    async with serving(runtime, auth=StoredTokens(runtime.store)) as nobody:
        tokens = TokenStore(runtime.store)
        secrets = {name: (await tokens.add(name))[1] for name in ("ann", "../ann", "Ann")}
        for name, secret in secrets.items():
            async with asking(nobody.url, secret) as site:
                for agent in agents:
                    before = await site.result((await site.start(agent.name))["run_id"])
                    assert "not" in before["response"].lower()
                    path = f"/api/v1/files/note.txt?agent={agent.name}"
                    assert (await site.ask("PUT", path, data=f"of {name}".encode())).status == 200
                    after = await site.result((await site.start(agent.name))["run_id"])
                    assert f"of {name}" in after["response"]
    parts = sorted(path.name for path in (tmp_path / "files" / "users").iterdir())
    assert (len(parts), parts[0]) == (3, "ann")
    assert all(one == "ann" or one.startswith("~") for one in parts)


class Anybody:
    async def user_of(self, headers: Mapping[str, str]) -> User | None:
        return User(headers.get("x-api-key", ""))


def test_an_app_for_several_users_is_refused_unless_they_share_or_have_parts(tmp_path: Path) -> None:
    undivided = Runtime([Agent("boss", ScriptedModel([]), subagents=[reader(workspace=tmp_path)])])
    for auth in (ProxyHeader("x-user"), Anybody()):
        with pytest.raises(ConfigurationError, match=r"'reader' works in .* shared_files=True"):
            create_app(undivided, auth=auth)
        assert create_app(undivided, auth=auth, shared_files=True)
        parts = reader(filesystem=SandboxFilesystem(tmp_path, isolation="user"))
        no_tools = reader("mute", workspace=tmp_path, disable_filesystem=True)
        assert create_app(Runtime([parts, no_tools, Agent("plain", ScriptedModel([]))]), auth=auth)
    for auth in (OneToken(TOKEN), NoAuth()):
        assert create_app(undivided, auth=auth)


async def command(*words: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(PYTHON, "-m", "retinue", *words, stdout=PIPE, stderr=PIPE, cwd=ROOT)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_servers_that_start_at_once_note_the_same_folder(postgres_url: str) -> None:
    stores = [sql_store(postgres_url, "a test") for _ in range(4)]
    try:
        for store in stores:
            await store.open()
        await asyncio.gather(*[TokenStore(store).note_one_user_files("here") for store in stores])
        assert await TokenStore(stores[0]).one_user_files() == "here"
        await TokenStore(stores[0]).note_one_user_files(None)
        assert await TokenStore(stores[1]).one_user_files() is None
    finally:
        for store in stores:
            await store.close()


async def test_a_folder_is_served_to_one_user_unless_its_files_are_shared(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "note.txt").write_text("a secret")
    database = ("--db", f"sqlite:///{tmp_path}/app.db")
    serve, add = ("serve", str(folder), "--port", "0", *database), ("tokens", "add")

    async def refused(*words: str) -> str:
        code, out, err = await command(*words)
        (line,) = err.splitlines()
        assert (code, out, "--shared-files" in line) == (2, "", True)
        return line

    ann = (await command(*add, "ann", *database))[1].splitlines()[-1]
    assert "'ann', 'local' are users" in await refused(*serve, "--token", "a-long-token")
    assert "--user-header" in await refused(*serve, "--user-header", "x-user")
    async with served(str(folder), *database, token=None) as server, as_user(server, ann) as site:
        assert await site.start("assistant")
        assert str(folder) in await refused(*add, "bob", *database)
        assert (await command(*add, "ann", *database))[0] == 0
        assert (await command(*add, "bob", "--shared-files", *database))[0] == 0
        assert await site.start("assistant")
    assert "'ann', 'bob' are users" in await refused(*serve)
    assert "'ann', 'bob' are users" in await refused(*serve, "--workers", "2")
    async with served(str(folder), *database, "--shared-files", token=None):
        code, out, _ = await command(*add, "eve", "--json", *database)
        assert code == 0
        assert json.loads(out)["user_id"] == "eve"
