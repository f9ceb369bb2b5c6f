"""The interface at /api/v1: runs, threads, events, decisions, users and bad requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import Runtime
from retinue.server import NoAuth, StoredTokens, TokenStore
from retinue.storage.sql import SqlStore
from retinue.wire.resources import encode_cursor

from .agents import Gate, boss, speaker, twin_boss
from .serving import TOKEN, asking, serving

RUNS = "/api/v1/runs"


@pytest.fixture(params=["memory:", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.param if request.param == "memory:" else f"sqlite:///{tmp_path}/served.db"


async def test_a_run_is_started_followed_and_read(url: str) -> None:
    async with serving(Runtime.open(url, agents=[speaker("a", "b", "c")])) as site:
        started = await site.start("speaker")
        assert set(started) == {"run_id", "thread_id", "status"}
        result = await site.result(started["run_id"])
        assert (result["status"], result["response"]) == ("completed", "abc")
        events = await site.all_events(f"{RUNS}/{started['run_id']}/events")
        assert [int(event.id or 0) for event in events] == list(range(1, len(events) + 1))
        assert all(event.event == event.data["kind"] for event in events)
        assert (events[0].event, events[-1].event) == ("run_started", "run_finished")
        assert "".join(event.data["delta"] for event in events if event.event == "text_delta") == "abc"
        later = await site.all_events(f"{RUNS}/{started['run_id']}/events?after=3")
        assert later == events[3:]
        again = await site.all_events(f"{RUNS}/{started['run_id']}/events", **{"Last-Event-ID": "3"})
        assert again == events[3:]


async def test_live_events_come_one_by_one(url: str) -> None:
    gate = Gate()
    async with serving(Runtime.open(url, agents=[gate.agent()])) as site:
        run_id = (await site.start("gated"))["run_id"]
        events = site.events(f"{RUNS}/{run_id}/events?kinds=text_delta,run_finished")
        for word in ("one ", "two "):
            gate.say(word)
            event = await anext(events)
            assert event.data["delta"] == word
        gate.say(None)
        assert (await anext(events)).data["status"] == "completed"
        assert [event async for event in events] == []


async def test_a_question_below_is_answered_at_the_root(url: str) -> None:
    async with serving(Runtime.open(url, agents=[boss()])) as site:
        started = await site.start("boss")
        run_id, thread_id = started["run_id"], started["thread_id"]
        result = await site.result(run_id)
        assert (result["status"], list(result["suspended"])) == ("suspended", ["pay_1"])
        idle = await site.all_events(f"{RUNS}/{run_id}/events?until=idle")
        assert idle[-1].data["status"] == "suspended"
        questions = (await site.get(f"/api/v1/threads/{thread_id}/questions")).body["items"]
        assert [(one["path"], one["answer_to"]) for one in questions] == [("task_1/pay_1", run_id)]
        assert [one["ticket"]["path"] for one in questions] == [["task_1", "pay_1"]]
        threads = (await site.get("/api/v1/threads")).body["items"]
        assert [(one["thread_id"], one["children"], one["questions"]) for one in threads] == [(thread_id, 1, 1)]
        refused = await site.post(f"{RUNS}/{run_id}/decisions", {"decisions": {"nope": {"action": "cancel"}}})
        assert (refused.status, refused.body["code"]) == (409, "decision_refused")
        answer = {"action": "resume", "payload": {"approved": True}, "id": "d1"}
        path = questions[0]["path"]
        forged = await site.post(f"{RUNS}/{run_id}/decisions", {"decisions": {path: {**answer, "by": "the president"}}})
        assert (forged.status, "by" in forged.body["detail"]) == (422, True), "the server knows who decides"
        taken = await site.post(f"{RUNS}/{run_id}/decisions", {"decisions": {questions[0]["path"]: answer}})
        assert (taken.status, taken.body["thread_id"]) == (202, thread_id)
        rest = await site.all_events(f"{RUNS}/{run_id}/events?after={idle[-1].id}")
        assert rest[-1].data["response"] == "boss: clerk: paid 3"
        approval = {"tool": "pay", "answer": "approved", "by": "local"}
        assert (await site.result(run_id))["receipt"]["approvals"] == [approval]
        again = await site.post(f"{RUNS}/{run_id}/decisions", {"decisions": {questions[0]["path"]: answer}})
        assert (again.status, again.body["status"]) == (202, "completed")
        assert [event.data["seq"] for event in idle + rest] == list(range(1, len(idle + rest) + 1))
        assert (await site.get(f"/api/v1/threads/{thread_id}/questions")).body["items"] == []


async def test_a_decision_that_comes_again_reaches_no_other_question(url: str) -> None:
    async with serving(Runtime.open(url, agents=[twin_boss()])) as site:
        run_id = (await site.start("boss"))["run_id"]
        assert list((await site.result(run_id))["suspended"]) == ["first/pay_1", "second/pay_1"]
        yes = {"action": "resume", "payload": {"approved": True}}
        taken = await site.post(f"{RUNS}/{run_id}/decisions", {"decisions": {"first/pay_1": yes}})
        assert taken.status == 202
        assert list((await site.result(run_id))["suspended"]) == ["second/pay_1"]
        for name, why in [
            ("first/pay_1", "'first/pay_1' was answered already"),
            ("pay_1", "more than one call is meant by 'pay_1'"),
            ("permission_pay_1", "more than one call is meant by 'permission_pay_1'"),
        ]:
            again = await site.post(f"{RUNS}/{run_id}/decisions", {"decisions": {name: yes}})
            assert (again.status, again.body["code"]) == (409, "decision_refused")
            assert why in again.body["detail"]
            assert "it waits for: second/pay_1" in again.body["detail"]
        questions = (await site.get(f"{RUNS}/{run_id}/questions")).body["items"]
        assert [one["path"] for one in questions] == ["second/pay_1"]
        no = {"action": "cancel"}
        assert (await site.post(f"{RUNS}/{run_id}/decisions", {"decisions": {"second/pay_1": no}})).status == 202
        assert (await site.result(run_id))["status"] == "completed"


async def test_the_reason_of_a_rejection_reaches_the_model_and_the_event(url: str) -> None:
    async with serving(Runtime.open(url, agents=[boss()])) as site:
        for action in ("reject", "cancel"):
            run_id = (await site.start("boss"))["run_id"]
            await site.result(run_id)
            answer = {"action": action, "reason": "too dear"}
            assert (await site.post(f"{RUNS}/{run_id}/decisions", {"decisions": {"pay_1": answer}})).status == 202
            assert "too dear" in (await site.result(run_id))["response"]
            resumed = await site.all_events(f"{RUNS}/{run_id}/events?kinds=tool_call_resumed&ns=tools:task_1")
            (decision,) = [event.data["decision"] for event in resumed]
            assert (decision.get("reason") or decision["payload"]["message"]) == "too dear"


async def test_a_field_that_an_action_does_not_use_is_refused(url: str) -> None:
    async with serving(Runtime.open(url, agents=[boss()])) as site:
        run_id = (await site.start("boss"))["run_id"]
        await site.result(run_id)
        for answer, why in [
            ({"action": "resume", "payload": {"approved": False}, "reason": "no"}, "'resume' has no reason"),
            ({"action": "approve", "reason": "yes"}, "'approve' has no reason"),
            ({"action": "answer", "payload": 1, "reason": "x"}, "'answer' has no reason"),
            ({"action": "cancel", "payload": {"message": "no"}}, "'cancel' has no payload"),
            ({"action": "reject", "payload": "no"}, "payload of the action 'reject' is an object"),
            ({"action": "reject", "payload": {"message": "a"}, "reason": "b"}, "not both"),
        ]:
            refused = await site.post(f"{RUNS}/{run_id}/decisions", {"decisions": {"pay_1": answer}})
            assert (refused.status, refused.body["code"]) == (422, "invalid_body"), answer
            assert why in refused.body["detail"], refused
        assert (await site.result(run_id))["status"] == "suspended"


async def test_the_snapshot_is_the_tree_and_its_place_in_the_log(url: str) -> None:
    async with serving(Runtime.open(url, agents=[boss()])) as site:
        run_id = (await site.start("boss"))["run_id"]
        await site.result(run_id)
        snapshot = (await site.get(f"{RUNS}/{run_id}/snapshot")).body
        events = await site.all_events(f"{RUNS}/{run_id}/events?until=idle")
        assert snapshot["seq"] == events[-1].data["seq"]
        (task,) = snapshot["run"]["calls"]
        (clerk,) = task["children"]
        assert (clerk["agent"], clerk["ns"], clerk["status"]) == ("clerk", ["tools:task_1"], "suspended")
        assert clerk["calls"][0]["ticket"]["action"] == "tool:pay"
        assert snapshot["run"]["usage"]["requests"] == 1
        assert snapshot["run"]["total_usage"]["requests"] == 2
        below = (await site.get(f"{RUNS}/{run_id}/snapshot?ns=tools:task_1")).body
        assert below["run"] == clerk
        children = (await site.get(f"{RUNS}/{run_id}/children")).body["items"]
        assert [(one["call_id"], one["agent"]) for one in children] == [("task_1", "clerk")]
        missing = await site.get(f"{RUNS}/{children[0]['run_id']}")
        assert (missing.status, missing.body["code"]) == (404, "not_found")
        assert missing.body["detail"].endswith("a sub-agent that a run waits for is found under its root run, by ns")
        only = await site.all_events(f"{RUNS}/{run_id}/events?until=idle&ns=tools:task_1")
        assert only
        assert all(event.data["ns"] == ["tools:task_1"] for event in only)


async def test_a_thread_keeps_its_messages_and_its_stream(url: str) -> None:
    async with serving(Runtime.open(url, agents=[speaker("hi")])) as site:
        made = await site.post("/api/v1/threads", {"thread_id": "t1"})
        assert made.status == 201
        assert (await site.post("/api/v1/threads", {"thread_id": "t1"})).status == 409
        runs: list[str] = []
        stream = site.events("/api/v1/threads/t1/events?kinds=run_started,run_finished")
        for _ in range(2):
            runs.append((await site.start("speaker", thread_id="t1"))["run_id"])
            started, finished = await anext(stream), await anext(stream)
            assert (started.event, finished.event) == ("run_started", "run_finished")
            assert (started.id or "").startswith(f"{runs[-1]}:")
        await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        rest = await site.all_events(f"/api/v1/threads/t1/events?until=idle&after={finished.id}")
        assert rest == []
        second = await site.all_events(f"/api/v1/threads/t1/events?until=idle&after={runs[1]}:0")
        assert {event.data["run_id"] for event in second} == {runs[1]}
        messages = (await site.get("/api/v1/threads/t1/messages")).body["items"]
        assert [(one["role"], one["text"]) for one in messages] == [("user", "go"), ("assistant", "hi")] * 2
        page = (await site.get("/api/v1/threads/t1/messages?limit=3")).body
        last = (await site.get(f"/api/v1/threads/t1/messages?limit=3&cursor={page['next_cursor']}")).body
        assert (page["items"] + last["items"], last["next_cursor"]) == (messages, None)
        assert (await site.ask("DELETE", "/api/v1/threads/t1")).status == 204
        assert (await site.get("/api/v1/threads/t1")).status == 404
        assert (await site.get(f"{RUNS}/{runs[0]}")).status == 404


async def test_lists_come_in_pages(url: str) -> None:
    async with serving(Runtime.open(url, agents=[speaker("hi")])) as site:
        made = [(await site.start("speaker"))["run_id"] for _ in range(5)]
        for run_id in made:
            await site.result(run_id)
        found: list[str] = []
        cursor = ""
        while cursor is not None:
            page = (await site.get(f"{RUNS}?limit=2{cursor and f'&cursor={cursor}'}")).body
            found += [one["run_id"] for one in page["items"]]
            cursor = page["next_cursor"]
        assert found == made[::-1]
        assert len((await site.get(f"{RUNS}?status=completed")).body["items"]) == 5
        for path in (RUNS, "/api/v1/tasks"):
            refused = await site.get(f"{path}?status=done")
            assert (refused.status, refused.body["code"]) == (422, "invalid_query"), path


async def test_a_thread_shows_the_same_time_alone_and_in_the_list(url: str) -> None:
    async with serving(Runtime.open(url, agents=[speaker("hi")])) as site:
        await site.post("/api/v1/threads", {"thread_id": "empty"})
        await site.result((await site.start("speaker", thread_id="used"))["run_id"])
        listed = (await site.get("/api/v1/threads")).body["items"]
        assert [one["thread_id"] for one in listed] == ["used", "empty"]
        for one in listed:
            assert (await site.get(f"/api/v1/threads/{one['thread_id']}")).body["used_at"] == one["used_at"]


async def test_a_busy_thread_is_refused_and_a_run_is_cancelled(url: str) -> None:
    gate = Gate()
    async with serving(Runtime.open(url, agents=[gate.agent()])) as site:
        run_id = (await site.start("gated", thread_id="t1"))["run_id"]
        busy = await site.post(RUNS, {"agent": "gated", "input": "x", "thread_id": "t1"})
        assert (busy.status, busy.body["code"]) == (409, "thread_busy")
        assert (await site.get(f"{RUNS}/{run_id}/result")).status == 202
        assert (await site.ask("DELETE", "/api/v1/threads/t1")).status == 409
        cancelled = await site.post(f"{RUNS}/{run_id}/cancel", {"reason": "enough"})
        assert (cancelled.status, cancelled.body["status"]) == (200, "cancelled")
        assert (await site.result(run_id))["status"] == "cancelled"


async def test_a_fork_takes_another_course(url: str) -> None:
    async with serving(Runtime.open(url, agents=[boss()])) as site:
        run_id = (await site.start("boss"))["run_id"]
        await site.result(run_id)
        place = (await site.get(f"{RUNS}/{run_id}/snapshot")).body["seq"]
        decisions = {"pay_1": {"action": "resume", "payload": {"approved": False, "message": "no"}}}
        forked = await site.post(f"{RUNS}/{run_id}/fork", {"after": place, "decisions": decisions})
        assert forked.status == 201
        assert forked.body["thread_id"] != run_id.replace("run", "thread")
        assert "no" in (await site.result(forked.body["run_id"]))["response"]
        assert (await site.result(run_id))["status"] == "suspended"


async def test_a_websocket_carries_the_same_events(url: str) -> None:
    async with serving(Runtime.open(url, agents=[speaker("a", "b")])) as site:
        run_id = (await site.start("speaker"))["run_id"]
        await site.result(run_id)
        events = [event.data for event in await site.all_events(f"{RUNS}/{run_id}/events")]
        async with site.socket(f"{RUNS}/{run_id}/events") as socket:
            assert await socket.all() == events
        async with site.socket("/api/v1/events") as socket:
            await socket.send(subscribe="x", run_id=run_id, after=len(events) - 1)
            await socket.send(subscribe="y", run_id="nope")
            await socket.send()
            got = [await socket.news() for _ in range(4)]
        assert {"subscription": "x", "id": str(len(events)), "event": events[-1]} in got
        assert {"subscription": "x", "ended": True} in got
        assert {one["error"]["code"] for one in got if "error" in one} == {"not_found", "invalid"}


async def test_another_users_things_are_not_there(tmp_path: Path) -> None:
    runtime = Runtime.open(f"sqlite:///{tmp_path}/served.db", agents=[boss()])
    assert isinstance(runtime.store, SqlStore)
    tokens = TokenStore(runtime.store)
    async with serving(runtime, auth=StoredTokens(runtime.store)) as nobody:
        _, ann = await tokens.add("ann")
        bob_token, bob = await tokens.add("bob")
        _, reader = await tokens.add("ann", ["read"])
        async with (
            asking(nobody.url, ann) as anns,
            asking(nobody.url, bob) as bobs,
            asking(nobody.url, reader) as reads,
        ):
            started = await anns.start("boss")
            run_id, thread_id = started["run_id"], started["thread_id"]
            await anns.result(run_id)
            assert (await reads.result(run_id))["status"] == "suspended"
            assert (await bobs.get(RUNS)).body["items"] == []
            assert (await bobs.get("/api/v1/threads")).body["items"] == []
            decisions = {"decisions": {"pay_1": {"action": "cancel"}}}
            attempts: list[tuple[str, str, Any]] = [
                ("GET", f"{RUNS}/@", None),
                ("GET", f"{RUNS}/@/result", None),
                ("GET", f"{RUNS}/@/events", None),
                ("GET", f"{RUNS}/@/snapshot", None),
                ("GET", f"{RUNS}/@/children", None),
                ("GET", f"{RUNS}/@/tasks", None),
                ("GET", f"{RUNS}/@/questions", None),
                ("POST", f"{RUNS}/@/cancel", {}),
                ("POST", f"{RUNS}/@/decisions", decisions),
                ("POST", f"{RUNS}/@/fork", {"after": 1, "input": "x"}),
                ("GET", "/api/v1/threads/@", None),
                ("GET", "/api/v1/threads/@/messages", None),
                ("GET", "/api/v1/threads/@/state", None),
                ("GET", "/api/v1/threads/@/events", None),
                ("GET", "/api/v1/threads/@/questions", None),
                ("DELETE", "/api/v1/threads/@", None),
            ]
            for method, path, body in attempts:
                real = path.replace("@", run_id if path.startswith(RUNS) else thread_id)
                theirs = await bobs.ask(method, real, body)
                missing = await bobs.ask(method, path.replace("@", "missing"), body)
                assert theirs.status == missing.status == 404, path
                assert theirs.body["detail"] == missing.body["detail"]
                assert (await nobody.ask(method, real, body)).status == 401
                assert (await nobody.ask(method, real, body, headers={"x-api-key": "wrong"})).status == 401
            busy = await bobs.post(RUNS, {"agent": "boss", "input": "x", "thread_id": thread_id})
            assert busy.status == 404
            assert (await bobs.post("/api/v1/threads", {"thread_id": thread_id})).status == 404
            forbidden = await reads.post(f"{RUNS}/{run_id}/cancel")
            assert (forbidden.status, forbidden.body["code"]) == (403, "forbidden")
            assert (await anns.result(run_id))["status"] == "suspended"
            assert (await bobs.get("/metrics")).status == 403
            await tokens.revoke(bob_token.token_id)
            assert [token.revoked_at is None for token in await tokens.list()] == [True, False, True]


async def test_a_page_has_a_cookie_and_only_its_own_origin() -> None:
    async with serving(Runtime(agents=[speaker("hi")])) as site:
        session = await site.post("/api/v1/session")
        assert session.body["user_id"] == "local"
        cookie = session.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        jar = {"cookie": cookie.partition(";")[0]}
        async with asking(site.url, None) as page:
            assert (await page.get(RUNS, headers=jar)).status == 200
            run = {"agent": "speaker", "input": "x"}
            assert (await page.post(RUNS, run, headers=jar)).status == 403
            assert (await page.post(RUNS, run, headers={**jar, "origin": "http://evil.example"})).status == 403
            assert (await page.post(RUNS, run, headers={**jar, "origin": site.url})).status == 201


@pytest.mark.parametrize("auth", [TOKEN, NoAuth()])
async def test_pages_of_other_origins_need_leave(auth: str | NoAuth) -> None:
    app, run = "https://app.example.com", {"agent": "speaker", "input": "x"}
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with serving(Runtime(agents=[speaker("hi")]), auth=auth, cors=[app]) as site:
        for origin, allowed in ((app, app), ("https://evil.example", None)):
            for answer in (
                await site.ask("OPTIONS", RUNS, headers={"origin": origin, **asks}),
                await site.get(RUNS, headers={"origin": origin}),
                await site.get(f"{RUNS}/missing", headers={"origin": origin}),
            ):
                assert answer.headers.get("access-control-allow-origin") == allowed
            started = await site.post(RUNS, run, headers={"origin": origin})
            assert started.status == (403 if allowed is None and isinstance(auth, NoAuth) else 201)
    async with serving(Runtime(agents=[speaker("hi")]), auth=auth, cors=["*"]) as site:
        answer = await site.post(RUNS, run, headers={"origin": "https://evil.example"})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.status == (403 if isinstance(auth, NoAuth) else 201)


async def test_bad_requests_get_one_sentence() -> None:
    async with serving(Runtime(agents=[speaker("hi")]), max_body=10_000) as site:
        run_id, thread_id, _ = (await site.start("speaker")).values()
        await site.result(run_id)
        for body, status, code in (
            (b"{", 400, "not_json"),
            (b'{"agent": "speaker", "input": "x", "context": {"x": ' + b"[" * 9_000, 400, "not_json"),
            (b"x" * 20_000, 413, "too_large"),
            (b"[]", 422, "invalid_body"),
            (b'{"agent": "speaker"}', 422, "invalid_body"),
            (b'{"agent": 3, "input": "x"}', 422, "invalid_body"),
            (b'{"agent": "speaker", "input": {}}', 422, "invalid_body"),
            (b'{"agent": "speaker", "input": "x", "more": 1}', 422, "invalid_body"),
            (b'{"agent": "speaker", "input": "x", "thread_id": "a b"}', 422, "invalid_body"),
            (b'{"agent": "speaker", "input": "x", "thread_id": "."}', 422, "invalid_body"),
            (b'{"agent": "speaker", "input": "x", "thread_id": ".."}', 422, "invalid_body"),
            (b'{"agent": "speaker", "input": "x", "thread_id": "a\\n"}', 422, "invalid_body"),
            (b'{"agent": "speaker", "input": "x", "limits": {"steps": -1}}', 422, "invalid_body"),
            (b'{"agent": "speaker", "input": "x", "limits": {"step": 1}}', 422, "invalid_body"),
            (b'{"agent": "speaker", "input": "x", "limits": {"steps": "1"}}', 422, "invalid_body"),
            (b'{"agent": "speaker", "input": [{"role": "tool", "content": "x"}]}', 422, "invalid_body"),
            (b'{"agent": "speaker", "input": "x", "state": {"nope": 1}}', 422, "invalid"),
            (b'{"agent": "nobody", "input": "x"}', 404, "unknown_agent"),
        ):
            answer = await site.ask("POST", RUNS, data=body)
            assert (answer.status, answer.body["code"]) == (status, code), body[:80]
            assert "\n" not in answer.body["detail"]
            assert "regex" not in answer.body["detail"]
        for path, status in (
            (f"{RUNS}?limit=0", 422),
            (f"{RUNS}?limit=x", 422),
            (f"{RUNS}?cursor=zzz", 422),
            (f"{RUNS}/{run_id}/events?after=-1", 422),
            (f"{RUNS}/{run_id}/events?after=x", 422),
            (f"{RUNS}/{run_id}/events?after=999", 422),
            (f"{RUNS}/{run_id}/events?kinds=nope", 422),
            (f"{RUNS}/{run_id}/events?until=never", 422),
            (f"{RUNS}/{run_id}/events?merge=-1", 422),
            (f"{RUNS}/{run_id}/result?wait=x", 422),
            (f"/api/v1/threads/{thread_id}/messages?cursor={encode_cursor((-1.0, ''))}", 422),
            ("/api/v1/threads/nope/events", 404),
            ("/api/v1/agents/nope", 404),
            ("/nowhere", 404),
        ):
            answer = await site.get(path)
            assert answer.status == status, path
            assert set(answer.body) >= {"detail", "code"}
        assert (await site.ask("PUT", RUNS)).status == 405
        assert len((await site.get(RUNS)).body["items"]) == 1


async def test_a_server_that_ends_tells_its_readers() -> None:
    gate = Gate()
    runtime = Runtime(agents=[gate.agent()])
    async with serving(runtime) as site:
        run_id = (await site.start("gated"))["run_id"]
        gate.say("x")
        async with site.session.get(f"{RUNS}/{run_id}/events?kinds=text_delta") as response:
            while b"data:" not in await response.content.readline():
                pass
            assert TOKEN not in str(response.headers)
            site.service.close()
            assert b"retry: 500" in await response.read()
        gate.say(None)


async def test_a_run_whose_process_has_gone_is_orphaned(tmp_path: Path) -> None:
    gate = Gate()
    url = f"sqlite:///{tmp_path}/served.db"
    async with Runtime.open(url, agents=[gate.agent()], on_close="leave") as runtime:
        run = runtime.stream("gated", "go", user_id="local")
        await run.stored()
    async with serving(Runtime.open(url, agents=[speaker("x")])) as site:  # it cannot continue the run
        shown = (await site.get(f"{RUNS}/{run.run_id}")).body
        assert (shown["status"], shown["orphaned"]) == ("running", True)
        assert [one["orphaned"] for one in (await site.get(RUNS)).body["items"]] == [True]
