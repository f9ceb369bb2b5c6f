"""scripts/peers: agents of other projects as sub-agents here, and clients of other projects at our server.

Each peer is installed in an environment of its own. What a peer cannot do by its own rules is told as such.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct

from retinue import A2AAgent, Agent, Decision, RunStatus, Runtime
from retinue.backends import remote
from retinue.events import RunFinished, TextDelta
from retinue.subagents import RemoteSubagentStub
from retinue.testing import ScriptedModel, call, say
from tests.a2a.processes import sample
from tests.server.processes import TOKEN, Served, served

PROGRAMS = Path(__file__).parent / "programs"
SERVED = "tests.peers.served:runtime"
SECONDS = 60.0


class Peer(Struct):
    """Packages, and the programs that are a server or a client with them."""

    packages: list[str]
    server: str = ""
    client: str = ""
    protocol: str = "a2a"
    cannot: dict[str, str] = {}
    """Scenarios that it does not support, and how it shows."""


PEERS = {
    "fasta2a": Peer(
        ["fasta2a", "uvicorn"],
        "fasta2a_server.py",
        cannot=dict.fromkeys(("question", "login"), "it makes a new task of an answer"),
    ),
    "adk": Peer(["google-adk[a2a]"], "adk_server.py", "adk_client.py"),
    "a2a-js": Peer(["@a2a-js/sdk", "express"], "js_server.mjs", "js_client.mjs"),
    "a2a-0.3": Peer(["a2a-sdk<0.4", "httpx"], client="a2a_03_client.py"),
    "langgraph": Peer(
        ["langgraph-cli[inmem]"],
        "langgraph_graph.py",
        protocol="langgraph",
        cannot={"login": "its questions are all alike"},
    ),
}


# --- environments


def install(name: str, peer: Peer, folder: Path) -> Path:
    """Install a peer with its programs in a folder of its own, unless it is there."""
    place = folder / name
    is_js = any(program.endswith(".mjs") for program in (peer.server, peer.client))
    if not place.exists():
        print(f"installing {name}: {' '.join(peer.packages)}", flush=True)
        place.mkdir(parents=True)
        if is_js:
            run = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(place), *peer.packages]
        else:
            subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
            run = [str(place / "venv/bin/pip"), "install", "--quiet", *peer.packages]
        subprocess.run(run, check=True, stderr=subprocess.DEVNULL)
    for program in (peer.server, peer.client):
        if program:
            shutil.copy(PROGRAMS / program, place)
    if peer.protocol == "langgraph":
        (place / "langgraph.json").write_text(
            json.dumps({"dependencies": ["."], "graphs": {"words": f"./{peer.server}:graph"}})
        )
    return place


def command(place: Path, program: str, *words: str) -> list[str]:
    if program.endswith(".mjs"):
        return ["node", str(place / program), *words]
    return [str(place / "venv/bin/python"), str(place / program), *words]


class Server:
    """The server of a peer, as a process."""

    def __init__(self, peer: Peer, place: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.peer, self.url = peer, f"http://127.0.0.1:{port}"
        self._path = "/.well-known/agent-card.json"
        words = command(place, peer.server, str(port))
        if peer.protocol == "langgraph":
            words = [str(place / "venv/bin/langgraph"), "dev", "--no-browser", "--no-reload", "--port", str(port)]
            self._path = "/ok"
        log = (place / "server.log").open("wb")
        self._process = subprocess.Popen(words, cwd=place, stdout=log, stderr=log, start_new_session=True)

    async def ready(self) -> None:
        async with aiohttp.ClientSession(self.url) as session:
            for _ in range(600):
                try:
                    async with session.get(self._path) as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)
        raise RuntimeError("its server did not start")

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
        self._process.wait()

    def boss(self, text: str) -> Agent:
        """An agent that gives a task to the peer's and repeats what it is told."""
        if self.peer.protocol == "a2a":
            far: Agent = A2AAgent("words", self.url)
        else:
            far = RemoteSubagentStub("words", url=self.url, protocol="langgraph")

        def turn(request: Any) -> Any:
            if request.messages[-1].role == "tool":
                return say(f"Done: {request.messages[-1].text}")
            return call("task", {"subagent_type": "words", "description": text}, id="c1")

        return Agent("boss", ScriptedModel(turn), subagents=[far])


# --- their servers


async def stream(server: Server) -> str:
    async with Runtime([server.boss("say one two three")]) as runtime:
        run = runtime.stream("boss", "go")
        pieces = [event.delta async for event in run if isinstance(event, TextDelta) and event.ns]
        result = await run.result()
    assert result.response == "Done: one two three", result.response
    assert "".join(pieces) == "one two three", pieces
    return f"{len(pieces)} pieces"


async def question(server: Server) -> str:
    return await _asked(server, "ask Which one?", RunStatus.WAITING_INPUT)


async def login(server: Server) -> str:
    return await _asked(server, "login Which one?", RunStatus.WAITING_AUTH)


async def _asked(server: Server, text: str, status: RunStatus) -> str:
    """Have the peer ask, and answer it. Its child waits as `status` says."""
    async with Runtime([server.boss(text)]) as runtime:
        run = runtime.stream("boss", "go")
        waiting = await run.result()
        assert waiting.status is RunStatus.SUSPENDED, waiting.response
        ends = [event.status async for event in run if isinstance(event, RunFinished) and event.ns]
        assert ends == [status], ends
        ((name, ticket),) = waiting.suspended.items()
        assert "Which one?" in ticket.message, ticket
        result = await runtime.resume(run.run_id, {name: Decision.resume("the red one")})
    assert result.response == "Done: You said the red one.", result.response
    return "answered"


async def at_work(runtime: Runtime) -> Any:
    """Start a run whose sub-agent never ends, and return it when that works."""
    run = runtime.stream("boss", "go")
    async for event in run:
        if event.kind == "run_started" and event.ns:
            break
    await asyncio.sleep(0.5)
    return run


async def cancel(server: Server) -> str:
    async with Runtime([server.boss("hang")]) as runtime:
        run = await at_work(runtime)
        await runtime.cancel(run.run_id)
        assert (await run.result()).status is RunStatus.CANCELLED
        ends = [event async for event in runtime.events(run.run_id) if isinstance(event, RunFinished) and event.ns]
    assert ends[0].error == "cancelled", ends[0].error
    return "stopped there"


async def two(server: Server) -> str:
    async with Runtime([server.boss("say one two")]) as first, Runtime([server.boss("say three four")]) as second:
        results = await asyncio.gather(first.run("boss", "go"), second.run("boss", "go"))
    assert [result.response for result in results] == ["Done: one two", "Done: three four"], results
    return "apart"


async def dies(server: Server) -> str:
    remote.PATIENCE = 3.0
    async with Runtime([server.boss("hang")]) as runtime:
        run = await at_work(runtime)
        server.kill()
        result = await run.result()
    assert "did not complete: failed" in (result.response or ""), result.response
    return "failed, said so"


async def use_server(name: str, peer: Peer, place: Path) -> dict[str, str]:
    server = Server(peer, place)
    try:
        await server.ready()
        return {
            one.__name__: await outcome(lambda one=one: one(server), peer.cannot.get(one.__name__))
            for one in (stream, question, login, cancel, two, dies)
        }
    finally:
        server.kill()


async def outcome(scenario: Callable[[], Awaitable[str]], cannot: str | None) -> str:
    try:
        async with asyncio.timeout(SECONDS):
            return await scenario()
    except Exception as exc:
        return cannot or f"FAILED: {type(exc).__name__} {' '.join(str(exc).split())[:200]}"


# --- their clients


async def use_client(name: str, peer: Peer, place: Path) -> dict[str, str]:
    """Return what a client has found. When its task waits for a file, the server is killed and started again."""
    found: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["FAR_URL"] = (await stack.enter_async_context(sample(folder / "far"))).url

        async def start(port: int = 0) -> Served:
            database = f"sqlite:///{folder}/a.db"
            return await stack.enter_async_context(served(SERVED, "--db", database, folder=folder, port=port))

        server = await start()
        url, null = server.site.url, asyncio.subprocess.DEVNULL
        words = command(place, peer.client, url, TOKEN)
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, stderr=null)
        stack.callback(lambda: process.returncode is None and process.kill())
        assert process.stdout is not None
        async with asyncio.timeout(2 * SECONDS):
            async for line in process.stdout:
                scenario, _, text = line.decode().rstrip("\n").partition(": ")
                if scenario == "waits":
                    await server.end(signal.SIGKILL)
                    server = await start(int(url.rpartition(":")[2]))
                    (folder / text).touch()
                else:
                    found[scenario] = text if text in EXPECTED.get(scenario.split()[-1], ()) else f"FAILED: {text}"
            await process.wait()
    return found


ANSWERED = "done: You said the red one."
EXPECTED = {
    "stream": ("abc", "abc COMPLETED", "abc completed"),
    "question": (
        "INPUT_REQUIRED then done: paid 3",
        "input-required then done: paid 3",
        f"mock_function_call_for_required_user_input then {ANSWERED}",
    ),
    "login": (
        f"AUTH_REQUIRED then {ANSWERED}",
        f"auth-required then {ANSWERED}",
        "mock_function_call_for_required_user_auth",
    ),
    "cancel": ("CANCELED", "canceled"),
    "dies": ("COMPLETED", "completed"),
    "two": ("abc, abc", "abc COMPLETED, abc COMPLETED", "abc completed, abc completed"),
    "conversation": ("abc then abc",),
}


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", help=f"of {', '.join(PEERS)}; all by default")
    parser.add_argument("--keep", type=Path, help="a folder for the environments, which are used again")
    args = parser.parse_args()
    has_failed = False
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.peers or PEERS:
            peer = PEERS[name]
            place = install(name, peer, args.keep or Path(temporary))
            for kind, program, use in (("server", peer.server, use_server), ("client", peer.client, use_client)):
                if program:
                    for scenario, text in (await use(name, peer, place)).items():
                        print(f"{name:<10} {kind:<7} {scenario:<20} {text}", flush=True)
                        has_failed = has_failed or text.startswith("FAILED")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
