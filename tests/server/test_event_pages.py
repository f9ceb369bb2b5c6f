"""Stored events as pages of JSON: forwards from a number, backwards from another, filtered as a stream is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import Runtime
from retinue.server import event_pages

from .agents import boss, speaker
from .serving import Site, serving

RUNS = "/api/v1/runs"
JSON = {"accept": "application/json"}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/a.db"


async def page(site: Site, run_id: str, **query: Any) -> Any:
    answer = await site.get(f"{RUNS}/{run_id}/events", params=query, headers=JSON)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json"), answer
    assert set(answer.body) == {"items", "next_cursor", "last_seq"}
    return answer.body


async def pages(site: Site, run_id: str, cursor: str, **query: Any) -> list[list[Any]]:
    """Return the items of all pages, by following the cursor in this parameter."""
    found: list[list[Any]] = []
    while True:
        one = await page(site, run_id, **query)
        found.append(one["items"])
        if one["next_cursor"] is None:
            return found
        query[cursor] = one["next_cursor"]


async def test_pages_are_the_events_of_the_stream(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Runtime.open(url, agents=[boss()])) as site:
        run_id = (await site.start("boss"))["run_id"]
        await site.result(run_id)
        events = [event.data for event in await site.all_events(f"{RUNS}/{run_id}/events?until=idle")]
        last = len(events)
        assert await page(site, run_id) == {"items": events, "next_cursor": None, "last_seq": last}
        assert await page(site, run_id, after=last) == {"items": [], "next_cursor": None, "last_seq": last}
        assert (await page(site, run_id, after=3, before=7))["items"] == events[3:6]
        assert (await page(site, run_id, before=7, limit=2))["items"] == events[4:6]
        assert (await page(site, run_id, before=1))["items"] == []
        for at_once, most in ((1000, 20_000), (3, 5)):
            monkeypatch.setattr(event_pages, "AT_ONCE", at_once)
            monkeypatch.setattr(event_pages, "MOST_READ", most)
            for limit in (1, 4, last, 1000):
                forwards = await pages(site, run_id, "after", limit=limit)
                assert [event for items in forwards for event in items] == events
                assert all(len(items) <= limit for items in forwards)
                backwards = await pages(site, run_id, "before", limit=limit, before=last + 1)
                assert [event for items in reversed(backwards) for event in items] == events
                for query in ({"kinds": "run_started,run_finished"}, {"ns": "tools:task_1"}):
                    stream = f"{RUNS}/{run_id}/events?until=idle&" + "&".join(f"{k}={v}" for k, v in query.items())
                    wanted = [event.data for event in await site.all_events(stream)]
                    found = await pages(site, run_id, "after", limit=limit, **query)
                    assert [event for items in found for event in items] == wanted
                    found = await pages(site, run_id, "before", limit=limit, before=last + 1, **query)
                    assert [event for items in reversed(found) for event in items] == wanted


async def test_fields_of_streams_are_refused_in_pages_and_the_other_way_round(url: str) -> None:
    async with serving(Runtime.open(url, agents=[boss()])) as site:
        run_id = (await site.start("boss"))["run_id"]
        for query in ("until=idle", "merge=5", "after=x", "kinds=nope", "limit=0", "limit=1001", "before=0"):
            refused = await site.get(f"{RUNS}/{run_id}/events?{query}", headers=JSON)
            assert refused.status == 422, query
        for query in ("limit=5", "before=3"):
            refused = await site.get(f"{RUNS}/{run_id}/events?{query}")
            assert (refused.status, refused.body["code"]) == (422, "invalid_query"), query
            assert "application/json" in refused.body["detail"]
        both = {"accept": "text/event-stream, application/json"}
        async with site.session.get(f"{RUNS}/{run_id}/events?until=idle", headers=both) as response:
            assert response.content_type == "text/event-stream"
        missing = await site.get(f"{RUNS}/run_nope/events", headers=JSON)
        assert (missing.status, missing.body["code"]) == (404, "not_found")


async def test_the_last_events_come_whatever_their_size(url: str) -> None:
    async with serving(Runtime.open(url, agents=[speaker(*(f"{n}" * 90_000 for n in range(8)))])) as site:
        run_id = (await site.start("speaker"))["run_id"]
        await site.result(run_id)
        kinds = [event["kind"] for event in (await page(site, run_id, before=10_000))["items"]]
        assert kinds[-3:] == ["inference_finished", "step_finished", "run_finished"]
        assert kinds.count("text_delta") == 8
