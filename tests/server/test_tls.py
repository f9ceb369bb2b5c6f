"""TLS: `retinue serve --tls-cert --tls-key`, and clients that check the certificate."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from retinue import A2AAgent, Agent, Runtime
from retinue.server import create_app
from retinue.server.a2a_grpc import start_grpc
from retinue.server.process import Tls
from retinue.subagents import RemoteSubagentStub
from retinue.testing import ScriptedModel, call, say
from tests.a2a.test_signatures import Changed

from .agents import speaker
from .certificates import Certificates, make_certificates
from .processes import ROOT, TOKEN, served
from .serving import listening

HEADERS = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path / "tls")


async def told(agent: Agent) -> str:
    """Have a sub-agent do something; return what the tool of the parent answered."""
    turns = [call("task", {"subagent_type": agent.name, "description": "go"}), say("done")]
    async with Runtime([Agent("lead", ScriptedModel(turns), subagents=[agent])]) as runtime:
        result = await runtime.run("lead", "go")
    return next(message.text for message in result.messages if message.role == "tool")


async def test_a_server_with_a_certificate(
    files: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--db", f"sqlite:///{tmp_path}/a.db", "--tls-cert", files.cert, "--tls-key", files.key)
    async with served("tests.server.served:agents", *options, folder=tmp_path) as server:
        url = server.lines[0].split()[-1]
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=files.authority)
        async with aiohttp.ClientSession(url, headers=HEADERS, connector=aiohttp.TCPConnector(ssl=trusting)) as session:
            async with session.post("/api/v1/session") as response:
                assert "Secure" in response.headers["set-cookie"]
            async with session.get("/.well-known/agent-card.json") as response:
                card = await response.json()
            assert card["supportedInterfaces"][0]["url"].startswith(f"{url}/a2a/")
        async with aiohttp.ClientSession(url) as session:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get("/healthz")
        for remote in (
            A2AAgent("far", f"{url}/a2a/speaker", headers=HEADERS),
            RemoteSubagentStub("speaker", url=url, headers=HEADERS),
        ):
            assert "has a certificate that is not trusted" in await told(remote)
        monkeypatch.setenv("SSL_CERT_FILE", files.authority)
        assert await told(A2AAgent("far", f"{url}/a2a/speaker", headers=HEADERS)) == "abc"
        assert json.loads(await parent_in_a_process(url, files)) == ["abc", "abc"]


async def parent_in_a_process(url: str, files: Certificates) -> bytes:
    """Use the agent there over the task protocol, and through the client: their HTTP client reads the environment once."""
    script = f"""
import asyncio, json
from retinue.client import Client
from retinue.subagents import RemoteSubagentStub
from tests.server.test_tls import told

async def main():
    remote = RemoteSubagentStub("speaker", url={url!r}, headers={HEADERS!r})
    async with Client({url!r}, token={TOKEN!r}) as client:
        print(json.dumps([await told(remote), (await client.run("speaker", "go")).response]))

asyncio.run(main())
"""
    environment = {**os.environ, "SSL_CERT_FILE": files.authority}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=PIPE, cwd=ROOT, env=environment)
    out, _ = await process.communicate()
    return out


@pytest.mark.parametrize("scheme", ["https", "grpcs"])
async def test_grpc_with_a_certificate(files: Certificates, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    def only_grpc(card: Any) -> Any:
        port = app.state.a2a.cards.grpc_port
        interface = {"url": f"{scheme}://127.0.0.1:{port}", "protocolBinding": "GRPC", "protocolVersion": "1.0"}
        return {**card, "supportedInterfaces": [{**interface, "tenant": "speaker"}]}

    async with Runtime([speaker("a", "b")]) as far:
        app = create_app(far, auth=TOKEN)
        server = await start_grpc(app, "127.0.0.1", 0, tls=Tls(files.cert, files.key))
        try:
            async with listening(Changed(app, only_grpc)) as url:
                place = f"https://127.0.0.1:{app.state.a2a.cards.grpc_port}"
                remote = A2AAgent("far", f"{url}/a2a/speaker", headers=HEADERS, origins=[place])
                assert "has a certificate that is not trusted" in await told(remote)
                monkeypatch.setenv("SSL_CERT_FILE", files.authority)
                assert await told(remote) == "ab"
        finally:
            await server.stop(None)


def test_files_that_cannot_be_used_are_refused(files: Certificates, tmp_path: Path) -> None:
    other = make_certificates(tmp_path / "other")
    for cert, key in [(files.cert, other.key), (files.key, files.key), (files.cert, "/nowhere"), ("/nowhere", "")]:
        with pytest.raises(Exception, match="TLS cannot be used with") as caught:
            Tls(cert, key).check()
        assert "give a certificate and its key" in str(caught.value)
    Tls(files.cert, files.key).check()
