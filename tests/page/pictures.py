"""Pictures of the page in six states, with the agents of `story.py`: dark, light, wide, and on a phone.

scripts/screenshots [FOLDER]
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

from .browsing import CHROMIUM, Server, serving, visiting

FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><include>/etc/fonts/fonts.conf</include>
<match><test name="family"><string>DejaVu Sans</string></test><edit name="family" mode="assign" binding="strong"><string>Inter</string></edit></match>
<match><test name="family"><string>system-ui</string></test><edit name="family" mode="assign" binding="strong"><string>Inter</string></edit></match>
<match><test name="family"><string>sans-serif</string></test><edit name="family" mode="assign" binding="strong"><string>Inter</string></edit></match>
<match><test name="family"><string>sans</string></test><edit name="family" mode="assign" binding="strong"><string>Inter</string></edit></match>
<match><test name="family"><string>ui-monospace</string></test><edit name="family" mode="assign" binding="strong"><string>JetBrains Mono</string></edit></match>
</fontconfig>"""
SIZES = {"": (1440, 1000), "-wide": (1920, 1080), "-phone": (375, 812)}
State = Callable[[Page, Server], None]


class Story:
    """The runs of the story, at the places where the pictures are taken."""

    def __init__(self, server: Server) -> None:
        self.server, self.runs = server, dict[str, Any]()

    def begin(self) -> None:
        for title in ("Draft the incident report", "Release notes for 4.3"):
            self.server.result(self.server.start_run("lead", title)["run_id"])
        self.runs["audit"] = self.server.start_run("auditor", "Audit 300 vendor contracts")
        self.runs["lead"] = self.server.start_run(
            "lead",
            "Checkout got slow after release 4.2. Find out why, prove it, and prepare the smallest fix. Ask me before you change a file.",
        )
        self.server.ask("PATCH", f"threads/{self.runs['lead']['thread_id']}", {"title": "Checkout slow since 4.2"})

    def show(self, page: Page, name: str, more: str = "") -> None:
        run = self.runs[name]
        page.goto(f"{self.server.url}/#/t/{run['thread_id']}{more}")
        page.locator(f'[data-run="{run["run_id"]}"], article.focus').first.wait_for()


def _questions(page: Page, count: int) -> None:
    expect(page.locator("article[data-question]")).to_have_count(count, timeout=60_000)


def choose(page: Page, tab: str) -> None:
    """Show a tab, where it has room beside the conversation."""
    if page.viewport_size is not None and page.viewport_size["width"] >= 1200:
        page.get_by_role("tab", name=tab).click()


def running(page: Page, story: Story) -> None:
    story.show(page, "lead")
    _questions(page, 2)
    page.locator('article[data-agent="patcher"]').click()
    page.mouse.move(0, 0)


def editing(page: Page, story: Story) -> None:
    story.show(page, "lead")
    _questions(page, 2)
    first, second = page.locator("article[data-question]").all()
    if "patcher" not in first.inner_text():
        first, second = second, first
    first.get_by_role("button", name="Edit").click()
    new = first.get_by_role("textbox", name="new")
    new.fill(new.input_value().replace("64", "48"))
    second.get_by_role("button", name="Reject").click()
    second.get_by_role("textbox", name="Reason").fill("The trace is enough. Do not leave our network.")


def roster(page: Page, story: Story) -> None:
    story.show(page, "audit")
    _questions(page, 2)
    page.locator('tr[data-status="waiting"]').first.click()


def first_visit(page: Page, story: Story) -> None:
    page.goto(f"{story.server.url}/#/")
    page.get_by_text("What should be done?").wait_for()


def finished(page: Page, story: Story) -> None:
    story.show(page, "lead")
    expect(page.locator('[data-ns=""]')).to_have_attribute("data-status", "completed", timeout=60_000)
    choose(page, "Tasks")


def reading(page: Page, story: Story) -> None:
    runs = story.server.runs_of(story.runs["lead"]["run_id"]).values()
    pool = next(run for run in runs if run["task"] == "Check the connection pool")
    calls = "/".join(part.removeprefix("tools:") for part in pool["ns"])
    story.show(page, "lead", f"/{story.runs['lead']['run_id']}/{calls}")
    expect(page.locator("article.focus")).to_have_attribute("data-status", "completed", timeout=60_000)
    choose(page, "Events")


def take(
    browser: Browser, server: Server, folder: Path, name: str, state: Callable[[Page, Story], None], story: Story
) -> None:
    for size, (width, height) in SIZES.items():
        for theme in ("dark", "light"):
            options: dict[str, Any] = {"viewport": {"width": width, "height": height}, "color_scheme": theme}
            options["device_scale_factor"] = 2
            with visiting(browser, server, **options) as page:
                state(page, story)
                page.wait_for_timeout(600)  # the last frame is drawn
                page.screenshot(path=folder / f"{name}{size}-{theme}.png")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp())
    (work / "fonts.conf").write_text(FONTS)
    (work / "services").mkdir()
    (work / "NOTES.md").write_text("# Release notes\n")
    os.environ["FONTCONFIG_FILE"] = str(work / "fonts.conf")
    assert CHROMIUM is not None, "the pictures need Chromium: apt-get install chromium fonts-inter fonts-jetbrains-mono"
    with sync_playwright() as playwright, serving(work, "tests.page.story:agents") as server:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--font-render-hinting=none"]
        )
        story = Story(server)
        story.begin()
        take(browser, server, folder, "first-visit", first_visit, story)
        take(browser, server, folder, "roster", roster, story)
        server.open_gate("traced")
        take(browser, server, folder, "running", running, story)
        take(browser, server, folder, "editing", editing, story)
        with visiting(browser, server) as page:
            editing(page, story)
            for button in page.get_by_role("button", name="Send answer").all()[::-1]:
                button.click()
            server.open_gate("replayed")
        take(browser, server, folder, "finished", finished, story)
        take(browser, server, folder, "reading", reading, story)
        browser.close()
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
