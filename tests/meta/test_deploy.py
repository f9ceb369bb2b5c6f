"""The commands in deploy/ work, as plain processes: without containers and systemd, in other folders and on other ports."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from retinue.cli.parsers import parse
from retinue.client import Client
from retinue.runs import RunResult
from tests.prepared import PYTHON

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def accepts(*command: str) -> Any:
    """Return what the command line reads in a command; it ends with an error where it does not fit."""
    return parse(list(command))


def test_compose_starts_two_servers_on_one_database() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    servers = [compose["services"][name] for name in ("one", "two")]
    for server in servers:
        assert accepts(*server["command"]).target == "/workspace"
        assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
        assert server["environment"]["RETINUE_DB"].endswith("@db/retinue")
        for volume in server["volumes"]:
            assert (DEPLOY / volume.partition(":")[0]).is_dir()
    assert len({tuple(server["ports"]) for server in servers}) == 2


def test_the_image_is_built_of_files_that_reach_the_build() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists()
            assert name.split("/")[0] in allowed
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    assert accepts(*yaml.safe_load(command)).db == "sqlite:////data/retinue.db"


def test_the_service_starts_a_server() -> None:
    unit = (DEPLOY / "retinue.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    program, *command = shlex.split(line)
    assert program.endswith("/retinue")
    assert accepts(*command).db.startswith("sqlite:////var/lib/retinue/")


# --- as processes

QUESTION = "What is 2 + 2?"


@asynccontextmanager
async def running(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> AsyncIterator[list[str]]:
    """Run a command of `retinue` and wait until it says that it is ready. Yield what it has said."""
    given = {**os.environ, **environment}
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-m", "retinue", *words, cwd=folder, env=given, stdout=PIPE, stderr=STDOUT
    )
    try:
        said: list[str] = []
        assert process.stdout is not None
        while not said or not said[-1].endswith("ready"):
            line = await process.stdout.readline()
            assert line, said
            said.append(line.decode().rstrip())
        yield said
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def address(said: list[str]) -> str:
    (found,) = [
        re.sub(r"//0\.0\.0\.0", "//127.0.0.1", word)
        for line in said
        if not line.startswith("open ")
        for word in line.split()
        if "://" in word
    ]
    return found


async def asks(url: str, token: str) -> RunResult:
    async with Client(url, token=token) as client:
        return await client.run(next(iter(await client.agents())), QUESTION)


async def test_the_servers_and_the_worker_of_compose(postgres_url: str, tmp_path: Path) -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert services["one"]["environment"]["RETINUE_MODEL"] == "${RETINUE_MODEL:-offline:rules}"
    environment = {"RETINUE_DB": postgres_url, "RETINUE_MODEL": "offline:rules"}
    shutil.copytree(DEPLOY / "workspace", tmp_path / "workspace")

    def words_of(name: str) -> list[str]:
        return [word.replace("/workspace", str(tmp_path / "workspace")) for word in services[name]["command"]]

    added = subprocess.run(
        [PYTHON, "-m", "retinue", "tokens", "add", "ann"],
        env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    token = added.stdout.split()[-1]
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(running([*words_of(name), "--port", "0"], environment, tmp_path))
            for name in ("one", "two")
        ]
        await stack.enter_async_context(running(words_of("worker"), environment, tmp_path))
        one, two = [address(said) for said in servers]
        async with Client(one, token=token) as here, Client(two, token=token) as there:
            run = here.stream(next(iter(await here.agents())), QUESTION)
            await run.stored()
            result = await there.result(run.run_id)
    assert result.status == "completed"
    assert result.response


async def test_the_command_of_the_service(tmp_path: Path) -> None:
    unit = (DEPLOY / "retinue.service").read_text().replace("/var/lib/retinue", str(tmp_path))
    found = dict(re.findall(r"^(ExecStartPre|ExecStart|WorkingDirectory)=(.*)$", unit, re.MULTILINE))
    subprocess.run(shlex.split(found["ExecStartPre"]), check=True)
    (tokens,) = re.findall(r"/bin/retinue (tokens add .*)$", unit, re.MULTILINE)
    command = [PYTHON, "-m", "retinue", *shlex.split(tokens)]
    added = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    words = [*shlex.split(found["ExecStart"])[1:], "--port", "0"]
    folder = Path(found["WorkingDirectory"])
    async with running(words, {"RETINUE_MODEL": "offline:rules"}, folder) as said:
        result = await asks(address(said), added.stdout.split()[-1])
    assert result.status == "completed"


async def test_the_command_and_the_health_check_of_the_image(tmp_path: Path) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    (health, command) = [yaml.safe_load(found) for found in re.findall(r"CMD (\[.*\])$", text, re.MULTILINE)]
    (tmp_path / "workspace").mkdir()
    words = [
        re.sub("^/workspace", f"{tmp_path}/workspace", word).replace("////data", f"///{tmp_path}") for word in command
    ]
    async with running([*words, "--port", "0"], {"RETINUE_MODEL": "offline:rules"}, tmp_path) as said:
        checked = [PYTHON, *[word.replace("http://127.0.0.1:8123", address(said)) for word in health[1:]]]
        assert health[0] == "python"
        assert await asyncio.to_thread(subprocess.call, checked) == 0
        (token,) = [line.split()[1] for line in said if line.startswith("token: ")]
        assert (await asks(address(said), token)).status == "completed"
