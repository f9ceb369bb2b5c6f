"""A browser, and servers as processes, for the tests of the page."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from ..prepared import PYTHON

ROOT = Path(__file__).parents[2]
TOKEN = "token-of-the-page"
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


class Server:
    """`retinue serve` in a process, which can be killed and started again on its port and database."""

    def __init__(self, folder: Path, target: str = "tests.page.agents:agents") -> None:
        self.folder, self.target, self.port = folder, target, 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = [PYTHON, "-m", "retinue", "serve", self.target, "--port", str(self.port), "--token", TOKEN]
        words += ["--db", f"sqlite:///{self.folder}/app.db", "--shared-files"]
        environment = {**os.environ, "SERVED_FOLDER": str(self.folder)}
        self._process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=environment
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("serving"):
                self.port = int(line.rpartition(":")[2])
            if line == "ready\n":
                return
        raise AssertionError("the server has ended before it was ready")

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def open_gate(self, name: str) -> None:
        (self.folder / name).touch()

    def ask(self, method: str, path: str, body: Any = None, token: str = TOKEN) -> Any:
        headers = {"authorization": f"Bearer {token}", "accept": "application/json", "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data, headers, method=method)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def start_run(self, agent: str, input: str = "go", **more: Any) -> Any:
        return self.ask("POST", "runs", {"agent": agent, "input": input, **more})

    def runs_of(self, run_id: str) -> dict[str, Any]:
        """Return the runs of a tree by their ids."""
        found: dict[str, Any] = {}

        def add(run: Any) -> None:
            found[run["run_id"]] = run
            for one in run["calls"]:
                for child in one["children"]:
                    add(child)

        if (root := self.ask("GET", f"runs/{run_id}/snapshot")["run"]) is not None:
            add(root)
        return found

    def result(self, run_id: str) -> Any:
        return self.ask("GET", f"runs/{run_id}/result?wait=60")


@contextmanager
def serving(folder: Path, target: str = "tests.page.agents:agents") -> Iterator[Server]:
    server = Server(folder, target)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def wait_for(holds: Callable[[], Any]) -> Any:
    """Return the first true value of a condition; the timeout of the test is the deadline."""
    while not (value := holds()):
        time.sleep(0.02)
    return value


@contextmanager
def visiting(browser: Browser, server: Server, token: str | None = TOKEN, **options: Any) -> Iterator[Page]:
    """Open the page in a context of its own. Errors of the page fail the test."""
    options = {"viewport": {"width": 1440, "height": 1000}, "reduced_motion": "reduce", **options}
    context = browser.new_context(**options)
    problems: list[str] = []
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{server.url}/" if token is None else f"{server.url}/#token={token}")
    try:
        if token is not None:
            page.locator("[data-link]").get_by_text("Live").wait_for(state="attached")
        yield page
        assert problems == []
    finally:
        context.close()


def show(page: Page, server: Server, run: Any) -> None:
    """Show the thread of a run."""
    page.goto(f"{server.url}/#/t/{run['thread_id']}")
    page.locator(f'[data-ns=""][data-run="{run["run_id"]}"]').wait_for()
