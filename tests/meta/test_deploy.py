"""The files in deploy/ name commands, options and files that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from retinue.cli.parsers import parse

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
