"""The page in a browser, on a real server with scripted models."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from ..prepared import PYTHON
from .browsing import ROOT, TOKEN, Server, serving, show, visiting, wait_for

expect.set_options(timeout=30_000)


def card(page: Page, run: Any) -> Locator:
    return page.locator(f'article[data-run="{run["run_id"]}"]')


def questions(page: Page) -> Locator:
    return page.get_by_role("region", name="Questions").locator("article[data-question]")


def test_ten_children_with_the_same_task_each_have_their_own_words(browser: Browser, server: Server) -> None:
    with visiting(browser, server) as page:
        page.get_by_role("combobox", name="Agent").select_option("crowd")
        page.get_by_role("textbox", name="Message").fill("go")
        page.get_by_role("button", name="Send").click()
        cards = page.locator('article[data-agent="worker"]')
        expect(cards).to_have_count(10)
        page.reload()  # in the middle of their words
        expect(cards).to_have_count(10)
        run_id = page.locator('[data-ns=""]').get_attribute("data-run")
        assert run_id is not None
        server.open_gate("workers")
        expect(page.locator('[data-ns=""]')).to_have_attribute("data-status", "completed")
        for toggle in page.locator('article[data-agent="worker"] > .head > .toggle').all():
            toggle.click()
            expect(toggle).to_have_attribute("aria-expanded", "true")
        for toggle in page.locator('article[data-agent="helper"] > .head > .toggle').all():
            toggle.click()
        runs = server.runs_of(run_id)
        assert len(runs) == 21
        words = {one: set(re.findall(r"[hk]\d+w\d", str(run["messages"]))) for one, run in runs.items()}
        for one, run in runs.items():
            if run["ns"]:
                shown = card(page, run)
                expect(shown).to_have_attribute("data-ns", "|".join(run["ns"]))
                text = shown.locator(':scope > .body > .said-box > [data-part="text"]').all_inner_texts()
                own = {word for word in words[one] if word[0] == run["agent"].replace("worker", "k")[0]}
                assert set(re.findall(r"[hk]\d+w\d", " ".join(text))) == own
                parent = runs[run_id] if len(run["ns"]) == 1 else None
                assert shown.locator("xpath=ancestor::*[@data-part='call']").last.count() == 1
                assert (parent is not None) == (shown.locator("xpath=ancestor::article").count() == 0)


def test_questions_at_any_depth_are_answered_in_any_order(browser: Browser, server: Server) -> None:
    with visiting(browser, server) as page:
        run = server.start_run("chief", "see to all")
        show(page, server, run)
        expect(questions(page)).to_have_count(3)
        expect(page).to_have_title("(3) see to all")
        deep = page.locator('article[data-ns="tools:chief_0|tools:clerk_0"]')
        expect(deep).to_have_attribute("data-status", "waiting")
        expect(
            page.get_by_role("navigation", name="Threads").locator(f'[data-thread="{run["thread_id"]}"]')
        ).to_have_attribute("data-status", "waiting")
        # The name first, as text; then the payment two levels down, edited; then the other one, rejected.
        named = questions(page).filter(has=page.get_by_role("textbox", name="Answer"))
        named.get_by_role("textbox", name="Answer").fill("Rosa")
        named.get_by_role("button", name="Send answer").click()
        expect(questions(page)).to_have_count(2)
        edited = questions(page).filter(has_text="clerk › payer")
        edited.get_by_role("button", name="Edit").click()
        edited.get_by_role("textbox", name="amount").fill("5")
        expect(edited.get_by_role("textbox", name="JSON")).to_have_value('{"amount":5,"to":"ann"}')
        edited.get_by_role("button", name="Send answer").click()
        expect(questions(page)).to_have_count(1)
        questions(page).get_by_role("button", name="Reject").click()
        questions(page).get_by_role("textbox", name="Reason").fill("too dear")
        page.get_by_role("button", name="Send answer").click()
        expect(page.locator('[data-ns=""]')).to_have_attribute("data-status", "completed")
        response = server.result(run["run_id"])["response"]
        assert "paid 5 to ann" in response
        assert "too dear" in response
        assert "Rosa" in response
        expect(page.get_by_role("region", name="Questions")).to_have_count(0)


def test_nothing_is_approved_that_was_not_shown(browser: Browser, server: Server) -> None:
    with visiting(browser, server) as page:
        run = server.start_run("lengthy", "pay")
        show(page, server, run)
        approve = questions(page).get_by_role("button", name="Approve")
        expect(approve).to_be_disabled()
        questions(page).get_by_role("button", name="Show all 61 lines").click()
        expect(questions(page)).to_contain_text("line 59")
        approve.click()
        expect(page.locator('[data-ns=""]')).to_have_attribute("data-status", "completed")
        assert "line 59" in server.result(run["run_id"])["response"]


def test_a_child_is_stopped_and_another_fails_while_the_rest_goes_on(browser: Browser, server: Server) -> None:
    with visiting(browser, server) as page:
        run = server.start_run("mixed")
        show(page, server, run)
        hung = page.locator('article[data-agent="stuck"]')
        expect(hung).to_have_attribute("data-status", "running")
        broken = page.locator('article[data-agent="broken"]')
        expect(broken).to_have_attribute("data-status", "failed")
        expect(broken).to_contain_text("the disk is full")
        expect(page.locator('article[data-agent="quick"]')).to_have_attribute("data-status", "completed")
        hung.get_by_role("button", name="Stop stuck").click()
        expect(page.get_by_role("menuitem", name="This agent")).to_be_focused()
        page.keyboard.press("Enter")
        expect(hung).to_have_attribute("data-status", "cancelled")
        expect(page.locator('[data-ns=""]')).to_have_attribute("data-status", "completed")
        expect(page.locator('article[data-agent="quick"]')).to_have_attribute("data-status", "completed")


def test_a_server_that_is_killed_and_started_again_loses_nothing(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path) as server, visiting(browser, server) as page:
        run = server.start_run("reader")
        show(page, server, run)
        teller = page.locator('article[data-agent="teller"]')
        expect(teller).to_contain_text("t1w0")
        page.get_by_role("textbox", name="Message").fill("a draft")
        server.kill()
        expect(page.get_by_role("status", name="Connection")).to_have_text("Reconnecting")
        expect(teller).to_contain_text("t1w0")
        server.open_gate("teller")
        server.start()
        expect(page.get_by_role("status", name="Connection")).to_have_text("Live")
        expect(page.locator('[data-ns=""]')).to_have_attribute("data-status", "completed")
        expect(teller).to_contain_text(re.compile(r"t\d+w2"))
        expect(page.get_by_role("textbox", name="Message")).to_have_value("a draft")
        page.reload()
        expect(page.locator('[data-ns=""]')).to_have_attribute("data-status", "completed")


def test_a_background_child_outlives_its_run(browser: Browser, server: Server) -> None:
    with visiting(browser, server) as page:
        run = server.start_run("starter", "begin")
        show(page, server, run)
        root = page.locator('[data-ns=""]')
        expect(root).to_have_attribute("data-status", "completed")
        child = page.locator('article[data-agent="slow"]')
        expect(child).to_have_attribute("data-status", "running")
        page.get_by_role("tab", name="Tasks").click()
        expect(page.get_by_role("tabpanel")).to_contain_text("its run has ended, the task goes on")
        server.open_gate("background")
        expect(child).to_have_attribute("data-status", "completed")
        expect(child.locator('[data-part="text"]').first).to_contain_text("the slow work is done")


def test_what_a_model_writes_neither_runs_nor_loads(browser: Browser, server: Server) -> None:
    with visiting(browser, server) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        run = server.start_run("hostile")
        show(page, server, run)
        words = page.locator('[data-ns=""] [data-part="text"]').first
        expect(words).to_contain_text("<script>window.hacked = 1</script>")
        expect(words).to_contain_text("⟨202E⟩")
        assert page.evaluate("window.hacked") is None
        page.get_by_text("click", exact=True).click()
        assert page.evaluate("window.hacked") is None
        assert words.locator("img, script, iframe").count() == 0
        assert words.locator("a").evaluate_all("links => links.map(one => one.protocol)") == ["http:", "https:"]
        assert [
            url for url in asked if not url.startswith(server.url.replace("http", "")) and "127.0.0.1" not in url
        ] == []
        assert page.evaluate("document.querySelectorAll('*').length") < 3000


def test_another_user_sees_nothing(browser: Browser, tmp_path: Path, server: Server) -> None:
    run = server.start_run("many", "1")
    server.result(run["run_id"])
    with visiting(browser, server, token=None) as page:
        page.get_by_role("textbox", name="Token").fill("wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_have_text("Not valid here. Copy the token again.")
        page.get_by_role("textbox", name="Token").fill(bobs_token(server))
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("status", name="Connection")).to_have_text("Live")
        expect(page.get_by_role("navigation", name="Threads").locator("[data-thread]")).to_have_count(0)
        page.goto(f"{server.url}/#/t/{run['thread_id']}")
        expect(page.get_by_text("Not found, or not yours")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("textbox", name="Token")).to_be_visible()
        assert page.evaluate("document.cookie + JSON.stringify(sessionStorage)") == "{}"
        page.reload()
        expect(page.get_by_role("textbox", name="Token")).to_be_visible()


def bobs_token(server: Server) -> str:
    """Make a token of another user in the database of a server."""
    words = [
        PYTHON,
        "-m",
        "retinue",
        "tokens",
        "add",
        "bob",
        "--db",
        f"sqlite:///{server.folder}/app.db",
        "--shared-files",
    ]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()[-1]


def test_the_token_leaves_the_address_and_links_lead_to_cards(browser: Browser, server: Server) -> None:
    run = server.start_run("chief", "see to it")
    with visiting(browser, server) as page:
        assert TOKEN not in page.url
        show(page, server, run)
        link = f"{server.url}/#/t/{run['thread_id']}/{run['run_id']}/chief_0/clerk_0"
        page.goto(link)
        focused = page.locator('article[data-ns="tools:chief_0|tools:clerk_0"]')
        expect(focused).to_have_attribute("data-agent", "payer")
        expect(focused).to_have_accessible_name(re.compile("^payer, needs you"))
        page.goto(link.rpartition("/")[0] + "/nowhere")
        expect(page.locator('article[data-ns="tools:chief_0"]').first).to_be_visible()
        page.goto(f"{server.url}/#/t/{run['thread_id']}")
        page.get_by_role("main").click()
        page.keyboard.press("x")
        page.get_by_role("menuitem", name="Everything").click()
        expect(page.locator('[data-ns=""]')).to_have_attribute("data-status", "cancelled")


def test_a_fork_replaces_what_was_said_and_a_queued_turn_is_shown(browser: Browser, server: Server) -> None:
    run = server.start_run("reader", "tell me")
    with visiting(browser, server) as page:
        show(page, server, run)
        page.get_by_role("textbox", name="Message").fill("and then?")
        page.keyboard.press("Alt+Enter")
        queued = page.locator('[data-ns=""][data-status="queued"]')
        expect(queued).to_be_visible()
        expect(page.locator('[data-part="user"]')).to_have_text(["tell me", "and then?"])
        server.open_gate("teller")
        expect(page.locator('[data-ns=""][data-status="completed"]')).to_have_count(2)
        before = page.url
        page.get_by_role("button", name="Fork from here").first.click()
        box = page.get_by_role("textbox", name="Message")
        expect(box).to_have_value("tell me")
        box.fill("tell me more")
        page.get_by_role("button", name="Fork", exact=True).click()
        expect(page.locator('[data-part="user"]')).to_have_text(["tell me more"])
        expect(page.locator('[data-ns=""]')).to_have_attribute("data-status", "completed")
        assert page.url != before
        names = page.get_by_role("combobox", name="Agent").locator("option").all_inner_texts()
        assert "teller" not in names
        assert "reader" in names


def test_a_message_reaches_an_agent_at_work(browser: Browser, server: Server) -> None:
    run = server.start_run("guided")
    with visiting(browser, server) as page:
        show(page, server, run)
        listener = page.locator('article[data-agent="listener"]')
        expect(listener).to_have_attribute("data-status", "running")
        listener.get_by_role("button", name="Message listener").click()
        box = page.get_by_role("textbox", name="Message")
        expect(box).to_be_focused()
        box.fill("only the last week")
        box.press("Enter")
        expect(box).to_have_value("")
        listener.locator("> .head > .toggle").click()
        expect(listener.locator('[data-part="user"]')).to_have_text(["only the last week"])
        box.fill("and be short")  # to the root
        page.get_by_role("combobox", name="Agent").select_option("guided")
        box.press("Enter")
        root = page.locator('[data-ns=""]')
        expect(root.locator('> .turn [data-part="user"]')).to_have_text(["and be short"])
        server.open_gate("listened")
        expect(root).to_have_attribute("data-status", "completed")
        response = server.result(run["run_id"])["response"]
        assert "heard: only the last week" in response
        assert "told: and be short" in response


def test_old_threads_are_reached_and_found(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        for number in range(110):
            server.start_run("many", "0", thread_id=f"old-{number}")
        with visiting(browser, server) as page:
            oldest = page.locator('[data-thread="old-0"]')
            expect(page.locator("[data-thread]").first).to_be_visible()
            threads = page.get_by_role("group", name="Thread list")
            while not oldest.count():
                threads.evaluate("list => list.scrollTo(0, list.scrollHeight)")
                page.wait_for_timeout(20)
            server.ask("PATCH", "threads/old-0", {"title": "a needle"})
            page.get_by_role("searchbox", name="Search threads").fill("needle")
            expect(page.locator("[data-thread]")).to_have_count(1)
            expect(oldest).to_contain_text("a needle")


def test_many_children_are_rows_with_filters(browser: Browser, server: Server) -> None:
    run = server.start_run("many", "200")
    server.result(run["run_id"])
    with visiting(browser, server) as page:
        show(page, server, run)
        rows = page.locator("tr[data-run]")
        expect(rows.first).to_be_visible()
        assert rows.count() < 60
        expect(rows.first).to_have_attribute("data-ns", "tools:m_0")
        page.get_by_role("button", name="done 200").click()
        box = page.get_by_role("group", name="Agents", exact=True)
        box.evaluate("box => box.scrollTo(0, box.scrollHeight)")
        expect(page.locator('tr[data-ns="tools:m_199"]')).to_be_visible()
        assert page.evaluate("document.querySelectorAll('*').length") < 3000
        page.locator('tr[data-ns="tools:m_199"]').get_by_role("link").click()
        expect(page.locator('article[data-ns="tools:m_199"]')).to_contain_text("quick is done")


def test_a_thousand_words_a_second_leave_the_page_quiet(browser: Browser, server: Server) -> None:
    with visiting(browser, server) as page:
        run = server.start_run("streams", "100")
        show(page, server, run)
        expect(page.get_by_role("button", name="running 100")).to_be_visible()
        first = page.locator('tr[data-ns="tools:s_0"] [data-part="text"]')
        expect(first).to_contain_text(re.compile(r"s\d+"))
        before = first.inner_text()
        expect(first).not_to_have_text(before)
        assert page.evaluate("document.querySelectorAll('*').length") < 3000
        server.open_gate("streamed")
        expect(page.locator('[data-ns=""]')).to_have_attribute("data-status", "completed")
        expect(page.locator('[data-ns=""] > .said-box').last).to_contain_text("all streams have ended")


def test_the_page_works_by_keyboard(browser: Browser, server: Server) -> None:
    run = server.start_run("chief", "see to it")
    with visiting(browser, server) as page:
        show(page, server, run)
        expect(questions(page)).to_have_count(3)
        clerk = page.locator('article[data-ns="tools:chief_0"]')
        page.keyboard.press("j")
        expect(clerk).to_have_attribute("aria-current", "true")
        page.keyboard.press("h")
        expect(clerk.locator("> .head > .toggle")).to_have_attribute("aria-expanded", "false")
        page.keyboard.press("l")
        expect(clerk.locator("> .head > .toggle")).to_have_attribute("aria-expanded", "true")
        page.keyboard.press("Enter")
        expect(page.locator("article.focus")).to_have_attribute("data-agent", "clerk")
        page.keyboard.press("Escape")
        expect(page.locator('[data-ns=""]')).to_be_visible()
        page.keyboard.press("/")
        expect(page.get_by_role("searchbox", name="Search threads")).to_be_focused()
        page.keyboard.press("Escape")
        page.keyboard.press("2")
        expect(page.get_by_role("tab", name="Tasks")).to_have_attribute("aria-selected", "true")
        page.keyboard.press("Shift+T")
        expect(page.locator("html")).to_have_attribute("data-theme", re.compile("dark|light"))
        page.keyboard.press("?")
        expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("x")
        page.get_by_role("menuitem", name="Everything").press("Enter")
        expect(page.locator('[data-ns=""]')).to_have_attribute("data-status", "cancelled")


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_nothing_serious_hinders_people_with_other_means(
    browser: Browser, server: Server, axe: str, theme: Any
) -> None:
    run = server.start_run("chief", "see to it")
    wait_for(lambda: len(server.ask("GET", f"runs/{run['run_id']}/questions")["items"]) == 3)
    with visiting(browser, server, color_scheme=theme) as page:
        page.evaluate(axe)
        check_accessible(page)
        show(page, server, run)
        expect(questions(page)).to_have_count(3)
        questions(page).get_by_role("button", name="Edit").first.click()
        for tab in ("Timeline", "Tasks", "State", "Files", "Events")[: 5 if theme == "dark" else 1]:
            page.get_by_role("tab", name=tab).click()
            check_accessible(page)
        page.set_viewport_size({"width": 375, "height": 812})
        check_accessible(page)


def check_accessible(page: Page) -> None:
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in serious] == []
