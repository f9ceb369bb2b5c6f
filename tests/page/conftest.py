"""One browser for the tests of a process, and one server for those of a module."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from .browsing import CHROMIUM, ROOT, Server, serving


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for the tests of one module: while Playwright runs, no other test of this process can have an event loop."""
    assert CHROMIUM is not None, "the tests of the page need Debian's Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("page")) as server:
        yield server


@pytest.fixture(scope="session")
def axe() -> str:
    """Return the program that finds what hinders people with other means than eyes and a mouse."""
    subprocess.run([ROOT / "scripts/page", "--packages"], check=True, capture_output=True)
    return (ROOT / "clients/node_modules/axe-core/axe.min.js").read_text()
