"""`retinue runs` on databases that other processes wrote, as a user types it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from pathlib import Path

import pytest

from retinue import RunStatus
from retinue.cli import steering
from retinue.storage.schema import DELTAS_KIND
from retinue.storage.sqlite import SqliteStore

from ..storage.stored import put_run, sql
from . import staff
from .conftest import Cli, finished, started


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def url(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RETINUE_DB", f"sqlite:///{path}")
    return f"sqlite:///{path}"


def stored(path: Path, *runs: tuple[str, RunStatus, str]) -> None:
    async def put() -> None:
        store = SqliteStore(str(path))
        for place, (run_id, status, thread_id) in enumerate(runs):
            at = time.time() - 3600 + place
            await put_run(store, run_id, status, thread_id=thread_id, user_id=f"user-{thread_id}", at=at)
        await store.close()

    asyncio.run(put())


def test_list_is_a_table_newest_first(cli: Cli, url: str, path: Path) -> None:
    stored(
        path,
        ("run_a", RunStatus.COMPLETED, "t1"),
        ("run_b", RunStatus.FAILED, "t2"),
        ("run_c", RunStatus.SUSPENDED, "t3"),
        ("run_d", RunStatus.RUNNING, "t4"),
    )
    code, out, err = cli("runs", "list")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].split() == ["run", "status", "agent", "thread", "started", "took"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["run_d", "running", "assistant", "t4"],
        ["run_c", "suspended", "assistant", "t3"],
        ["run_b", "failed", "assistant", "t2"],
        ["run_a", "completed", "assistant", "t1"],
    ]
    assert [line.rpartition("  ")[2] for line in lines[2:]] == ["waits: May I write a.md?", "it broke", "All is well."]
    assert re.search(r"  (59|60) min \d+ s +All is well", lines[4])
    for args, found in (
        (["--thread", "t2"], ["run_b"]),
        (["--user", "user-t1"], ["run_a"]),
        (["--status", "suspended"], ["run_c"]),
        (["--limit", "2"], ["run_d", "run_c"]),
    ):
        assert [run["run_id"] for run in json.loads(cli("runs", "list", "--json", *args).out)] == found
    none = cli("runs", "list", "--thread", "t9")
    assert (none.code, none.out) == (0, "")
    assert "has no such runs" in none.err
    (waits,) = json.loads(cli("runs", "list", "--json", "--thread", "t3").out)
    assert waits["waits_for"]["call_1"]["id"] == "ticket_1"
    assert waits["ended_at"] is None


def test_a_new_database_has_no_runs_yet(cli: Cli, url: str, path: Path) -> None:
    assert cli("db", "migrate").code == 0
    assert cli("runs", "list") == (0, "", f"retinue: {path} has no runs yet\n")


def test_show_draws_the_tree_and_says_how_to_answer(cli: Cli, url: str, path: Path) -> None:
    stored(path, ("run_c", RunStatus.SUSPENDED, "t3"), ("run_b", RunStatus.FAILED, "t2"))
    code, out, _ = cli("runs", "show", "run_c")
    lines = out.splitlines()
    assert code == 0
    assert lines[:3] == ["run: run_c", "status: suspended", "agent: assistant"]
    assert "tokens: 100 in, 20 out" in lines
    tree = lines[lines.index("assistant: How is it?") :]
    assert tree[1] == "  step 1"
    assert tree[2].startswith('    suspended write_file(path="a.md")  ')
    assert tree[3].startswith("suspended: 1 step, 1 call, 120 tokens, ")
    assert "  call_1 (ticket ticket_1): permission: May I write a.md?" in lines
    assert '    with {"path":"a.md"}' in lines
    assert lines[-3].startswith("answer with one of these, and --target MODULE:ATTR or --workspace DIR")
    assert lines[-2:] == ["  retinue runs answer run_c VALUE", "  retinue runs deny run_c --message TEXT"]
    failed = cli("runs", "show", "run_b", "--json")
    shown = json.loads(failed.out)
    assert (shown["status"], shown["error"]) == ("failed", "it broke")
    assert shown["tree"]["steps"][0]["calls"][0]["status"] == "succeeded"
    assert (shown["usage"]["input_tokens"], shown["usage"]["cached_tokens"]) == (100, 0)


def test_a_run_that_cannot_be_read_is_named_and_the_others_are_listed(cli: Cli, url: str, path: Path) -> None:
    stored(path, *[(f"run_{name}", RunStatus.COMPLETED, name) for name in "abc"])
    sql(path, "UPDATE runs SET result = '{' WHERE run_id = 'run_b'")
    code, out, err = cli("runs", "list")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, ["run", "run_c", "run_a"])
    assert f"{path}: what is stored of run 'run_b' cannot be read" in err
    assert len(err.splitlines()) == 1
    checked = cli("db", "check", "--db", url)
    assert (checked.code, "run 'run_b': its result: cannot be read" in checked.out) == (1, True)


def test_a_run_whose_process_is_gone_is_listed_so(cli: Cli, url: str, path: Path) -> None:
    stored(path, ("run_c", RunStatus.SUSPENDED, "t3"), ("run_d", RunStatus.RUNNING, "t4"))
    sql(path, "UPDATE logs SET owner = 'elsewhere/1/1/x', lease_until = 1 WHERE log_id = 'run_d'")
    lines = cli("runs", "list").out.splitlines()
    assert [line.endswith("no process works on it now") for line in lines] == [False, True, False]
    assert [run["orphaned"] for run in json.loads(cli("runs", "list", "--json").out)] == [True, False]
    assert json.loads(cli("runs", "show", "run_d", "--json").out)["orphaned"] is True


def test_events_are_one_a_line(cli: Cli, url: str, path: Path) -> None:
    stored(path, ("run_a", RunStatus.COMPLETED, "t1"))
    lines = cli("runs", "events", "run_a").out.splitlines()
    assert [line.split()[3] for line in lines][:3] == ["run_started", "step_started", "text_delta"]
    assert len(lines) == 11
    assert lines[7].endswith('call_id=call_1 tool_name=write_file args={"path":"a.md"}')
    after = cli("runs", "events", "run_a", "--after", "9", "--json").out.splitlines()
    assert [json.loads(line)["seq"] for line in after] == [10, 11]
    assert cli("runs", "events", "run_a", "--follow", "--after", "10").out.count("\n") == 1


@pytest.mark.parametrize("action", [["show"], ["events"], ["cancel"], ["resume"], ["fork", "--at", "1"]])
def test_an_unknown_run_is_said_so(cli: Cli, url: str, path: Path, action: list[str]) -> None:
    stored(path, ("run_a", RunStatus.COMPLETED, "t1"))
    code, out, err = cli("runs", *action, "run_x")
    assert (code, out) == (2, "")
    assert err == f"retinue: there is no run 'run_x' in {path}; see: retinue runs list\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["list", "--limit", "x"], "'x' is not a whole number above 0"),
        (["list", "--limit", "0"], "'0' is not a whole number above 0"),
        (["list", "--limit", "-1"], "'-1' is not a whole number above 0"),
        (["list", "--limit", "9" * 19], "is not a whole number above 0"),
        (["events", "run_a", "--after", "-3"], "'-3' is not a whole number of 0 or more"),
        (["events", "run_a", "--after", "1.5"], "'1.5' is not a whole number of 0 or more"),
        (["list", "--status", "odd"], "--status: unknown value 'odd'; choose from queued, running"),
        (["resume", "run_c"], "what is the answer? It waits for: call_1 (ticket ticket_1)"),
        (["resume", "run_c", "--approve", "call_1={"], "--approve call_1: '{' is not JSON"),
        (["resume", "run_c", "--approve", "=1"], "a decision is on a call"),
        (["resume", "run_c", "--approve", "call_1", "--cancel", "call_1=no"], "two decisions on 'call_1'"),
        (["resume", "run_a", "--approve", "call_1"], "has ended already: completed"),
        (["resume", "run_d"], "is being worked on: follow it with retinue runs events run_d --follow"),
        (["resume", "run_c", "--approve", "c", "--workspace", "missing"], "there is no folder 'missing'"),
        (["resume", "run_c", "--approve", "c", "--target", "clerk"], "write MODULE:ATTR"),
        (["resume", "run_c", "--approve", "c", "--target", "no.such:thing"], "ModuleNotFoundError"),
        (["resume", "run_c", "--approve", "c", "--target", "tests.cli.staff:nobody"], "has no attribute 'nobody'"),
        (["resume", "run_c", "--approve", "c", "--target", "tests.cli.staff:NOT_AN_AGENT"], "it gives 3, not an agent"),
        (["resume", "run_c", "--approve", "c", "--target", "tests.cli.staff:broken"], "RuntimeError: no staff today"),
        (["resume", "run_c", "--approve", "c", "--target", "tests.cli.staff:clerk"], "unknown agent 'assistant'"),
        (["cancel", "run_c", "--target", "tests.cli.staff:everyone"], "name one that has it with --target"),
    ],
)
def test_what_cannot_be_done_is_one_line(cli: Cli, url: str, path: Path, args: list[str], says: str) -> None:
    stored(
        path,
        ("run_a", RunStatus.COMPLETED, "t1"),
        ("run_c", RunStatus.SUSPENDED, "t3"),
        ("run_d", RunStatus.RUNNING, "t4"),
    )
    code, out, err = cli("runs", *args)
    assert (code, out) == (2, "")
    assert err.startswith("retinue: ")
    assert says in err
    assert err.count("\n") == 1


def test_a_process_that_does_not_stop_was_asked(
    cli: Cli, url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steering, "CANCEL_TIMEOUT", 0.3)
    stored(path, ("run_a", RunStatus.COMPLETED, "t1"), ("run_d", RunStatus.RUNNING, "t4"))
    asked = cli("runs", "cancel", "run_d", "--reason", "too slow")
    assert asked.code == 1
    assert "was asked to stop, and has not yet" in asked.err
    (wish,) = sql(path, "SELECT kind, body, reply FROM inbox WHERE log_id = 'run_d'")
    assert (wish[0], json.loads(wish[1])["reason"], wish[2]) == ("cancel", "too slow", None)
    late = cli("runs", "cancel", "run_a")
    assert (late.code, "has ended already: completed" in late.err) == (1, True)


@pytest.mark.parametrize("target", ["clerk", "everyone", "on"])
def test_a_waiting_run_is_answered_by_another_process(url: str, target: str) -> None:
    run_id = asyncio.run(staff.ask(url, "clerk", "Sign the lease"))
    shown = finished("runs", "show", run_id)
    assert f"  retinue runs approve {run_id}\n" in shown.out
    wrong = finished("runs", "resume", run_id, "--target", f"tests.cli.staff:{target}", "--approve", "call_sign=3")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "does not fit its schema: 3 is not of type" in wrong.err
    answered = finished("runs", "resume", run_id, "--target", f"tests.cli.staff:{target}", "--approve", "ticket_1")
    assert (answered.code, answered.err) == (0, "")
    assert 'It said: {"approved": true}' in answered.out.replace('":t', '": t')
    again = finished("runs", "show", run_id)
    assert "status: completed" in again.out
    assert again.out.count("\n  step ") == 2
    assert again.out.count("sign(") == 1
    assert '\n    ok     sign(paper="lease")  ' in again.out
    assert "\ncompleted: 2 steps, 1 call, " in again.out


def test_children_that_wait_under_one_name_are_answered_by_their_paths(url: str) -> None:
    run_id = asyncio.run(staff.ask(url, "manager", "Have both signed"))
    resume = ("runs", "resume", run_id, "--target", "tests.cli.staff:everyone", "--approve")
    either = finished(*resume, "call_sign")
    assert (either.code, "it waits for: first/call_sign, second/call_sign" in either.err) == (2, True)
    one = finished(*resume, "second/call_sign")
    waits = "the run still waits for first/call_sign (Sign lease?)"
    assert (one.code, one.err) == (0, f"retinue: answered; {waits}; see: retinue runs show {run_id}\n")
    for name, why in [("call_sign", "more than one call is meant"), ("second/call_sign", "was answered already")]:
        again = finished(*resume, name)
        assert (again.code, why in again.err, "it waits for: first/call_sign" in again.err) == (2, True, True)
    both = finished(*resume, "first/call_sign")
    assert (both.code, both.err) == (0, "")
    shown = finished("runs", "show", run_id).out
    assert [shown.count(f" ok     {call}(") for call in ("task", "sign")] == [2, 2]
    assert "\ncompleted: 2 steps, 4 calls, " in shown


TARGET = ("--target", "tests.cli.staff:everyone")


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (["approve", "RUN"], '"approved":true'),
        (["approve", "RUN", "call_sign"], '"approved":true'),
        (["deny", "RUN", "--message", "not today"], "not today"),
        (["deny", "RUN", *TARGET, "ticket_1", "--message", "never"], "never"),
        (["answer", "RUN", '{"approved": true, "by": "Ida"}'], '"by":"Ida"'),
        (["answer", "RUN", "call_sign", '{"approved": false}'], '"approved":false'),
        (["answer", "RUN", "--json", "call_sign", '{"approved": false}'], "run_finished"),
    ],
)
def test_a_question_is_answered_in_one_command(cli: Cli, url: str, action: list[str], said: str) -> None:
    run_id = asyncio.run(staff.ask(url, "clerk", "Sign the lease"))
    words = [run_id if word == "RUN" else word for word in action]
    answered = cli("runs", *words, *([] if "--target" in words else TARGET))
    assert (answered.code, answered.err) == (0, "")
    assert said in answered.out.replace('": ', '":')


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (["approve"], "It said: paid 1000"),
        (["approve", "--args", '{"amount": 5}'], "It said: paid 5"),
        (["deny"], "a human said no"),
        (["deny", "--message", "too much"], "too much"),
        (["answer", "paid by hand"], "It said: paid by hand"),
    ],
)
def test_a_permission_is_answered_in_one_command(cli: Cli, url: str, action: list[str], said: str) -> None:
    run_id = asyncio.run(staff.ask(url, "cashier", "Pay it"))
    name, *words = action
    wrong = cli("runs", "approve", run_id, "--args", "[5]", *TARGET)
    assert (wrong.code, "--args: '[5]' is not a JSON object" in wrong.err) == (2, True)
    wrong = cli("runs", "approve", run_id, "--args", '{"amount": "much"}', *TARGET)
    assert (wrong.code, 'args.amount: "much" is not of type "integer"' in wrong.err) == (2, True)
    answered = cli("runs", name, run_id, *words, *TARGET)
    assert (answered.code, answered.err) == (0, "")
    assert said in answered.out


def test_of_several_questions_one_is_named(cli: Cli, url: str) -> None:
    run_id = asyncio.run(staff.ask(url, "manager", "Have both signed"))
    for words in (["approve", run_id], ["deny", run_id], ["answer", run_id, "yes"]):
        several = cli("runs", *words, *TARGET)
        assert (several.code, several.out, several.err.count("\n")) == (2, "", 1)
        assert (
            "2 calls wait, name one of them as CALL: first/call_sign (Sign lease?), second/call_sign (Sign lease?)"
            in several.err
        )
    shown = cli("runs", "show", run_id).out
    for place in ("first/call_sign", "second/call_sign"):
        assert f"  retinue runs approve {run_id} {place}\n" in shown
        assert f"  retinue runs deny {run_id} {place} --message TEXT\n" in shown
    assert cli("runs", "approve", run_id, "second/call_sign", *TARGET).code == 0
    assert cli("runs", "deny", run_id, *TARGET).code == 0
    late = cli("runs", "approve", run_id, *TARGET)
    assert (late.code, "has ended already: completed; it waits for nothing" in late.err) == (2, True)


@pytest.mark.parametrize("action", [["resume", "--approve", "call_sign"], ["cancel"]])
def test_an_agent_of_ones_own_code_is_asked_for(cli: Cli, url: str, folder: Path, action: list[str]) -> None:
    run_id = asyncio.run(staff.ask(url, "clerk", "Sign the lease"))
    code, out, err = cli("runs", *action, run_id, "--workspace", str(folder))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (
        f"the agent 'clerk' is not declared in '{folder}': name it with --target MODULE:ATTR if it is in your code"
        in err
    )
    assert json.loads(cli("runs", "show", run_id, "--json").out)["status"] == "suspended"


def test_a_waiting_run_is_told_no(cli: Cli, url: str) -> None:
    run_id = asyncio.run(staff.ask(url, "clerk", "Sign the lease"))
    args = ("--target", "tests.cli.staff:clerk", "--cancel", "call_sign=never", "--json")
    answered = finished("runs", "resume", run_id, *args)
    assert answered.code == 0
    events = [json.loads(line) for line in answered.out.splitlines()]
    assert events[-1]["kind"] == "run_finished"
    assert "never" in events[-1]["response"]


def test_a_waiting_run_is_cancelled_by_another_process(cli: Cli, url: str) -> None:
    run_id = asyncio.run(staff.ask(url, "clerk", "Sign the lease"))
    args = ("--target", "tests.cli.staff:clerk", "--reason", "not needed")
    stopped = finished("runs", "cancel", run_id, *args, "--json")
    (record,) = json.loads(cli("runs", "list", "--json").out)
    assert (stopped.code, json.loads(stopped.out)) == (0, record)
    assert (record["status"], record["error"], record["ended_at"] is None) == ("cancelled", "not needed", False)


def test_a_run_is_forked(cli: Cli, url: str) -> None:
    run_id = asyncio.run(staff.ask(url, "clerk", "Sign the lease"))
    events = [json.loads(line) for line in cli("runs", "events", run_id, "--json").out.splitlines()]
    waits, asked = events[-1]["seq"], next(e["seq"] for e in events if e["kind"] == "tool_call_ready")
    target = ("--target", "tests.cli.staff:clerk")
    early = finished("runs", "fork", run_id, "--at", str(asked), *target)
    assert (early.code, early.err.count("\n")) == (2, 1)
    assert f"cannot be forked at event {asked}, where work is in progress; it can be at: " in early.err
    wrong = finished("runs", "fork", run_id, "--at", str(waits), *target, "--approve", "call_sign=3")
    assert (wrong.code, "does not fit its schema" in wrong.err) == (2, True)
    for answer, said in (("--approve", '"approved"'), ("--cancel", "never")):
        given = "call_sign=never" if answer == "--cancel" else "call_sign"
        done = finished("runs", "fork", run_id, "--at", str(waits), *target, answer, given)
        assert done.code == 0, done.err
        assert f" continues as run {run_id} stood after event {waits}\n" in done.err
        assert said in done.out
    same = finished("runs", "fork", run_id, "--at", str(waits), *target)
    assert (same.code, "the run waits for 1 answer; see: retinue runs show run_" in same.err) == (1, True)
    both = cli("runs", "fork", run_id, "--at", "1", "--input", "Again", "--approve", "call_sign", *target)
    assert (both.code, "leave one of them out" in both.err) == (2, True)
    runs = json.loads(cli("runs", "list", "--json").out)
    assert sorted(run["status"] for run in runs) == ["completed", "completed", "suspended", "suspended"]
    assert len({run["thread_id"] for run in runs}) == 4
    again = finished(
        "runs", "fork", runs[-1]["run_id"], "--at", str(waits), *target, "--approve", "call_sign", "--json"
    )
    assert json.loads(again.out.splitlines()[-1])["kind"] == "run_finished"
    assert json.loads(cli("db", "check", "--json").out) == {"ok": True, "findings": []}


def test_a_run_that_has_ended_is_forked_with_another_input(cli: Cli, url: str, folder: Path) -> None:
    args = ("--workspace", str(folder), "--model", "offline:rules")
    assert cli("run", "What does the lamp burn?", *args, "--db", url).code == 0
    (record,) = json.loads(cli("runs", "list", "--json").out)
    last = len(cli("runs", "events", record["run_id"]).out.splitlines())
    none = cli("runs", "fork", record["run_id"], "--at", str(last), *args)
    assert (none.code, "give the fork an input to continue with" in none.err) == (2, True)
    done = cli("runs", "fork", record["run_id"], "--at", str(last), "--input", "How many barrels?", *args)
    assert (done.code, "three barrels" in done.out) == (0, True)


def at_work(url: str) -> tuple[subprocess.Popen[bytes], str]:
    """A process that works on a slow run, and the id of that run."""
    code = f"import asyncio; from tests.cli import staff; print(asyncio.run(staff.ask({url!r}, 'slow', 'go')))"
    process = started(program=code, stderr=None)
    path = url.removeprefix("sqlite:///")
    while not (Path(path).exists() and (rows := _begun(path))):
        assert process.poll() is None, "it ended before it began"
        time.sleep(0.02)
    return process, rows[0][0]


def _begun(path: str) -> list[tuple[str]]:
    try:
        return list(sql(path, f"SELECT log_id FROM events WHERE kind = '{DELTAS_KIND}'"))
    except Exception:
        return []  # the tables are not there yet


def test_a_run_of_a_live_process_is_followed_and_cancelled(url: str) -> None:
    process, run_id = at_work(url)
    follower = started("runs", "events", run_id, "--follow")
    assert "I begin." in finished("runs", "events", run_id).out
    assert finished("runs", "send", run_id, "and this") == (0, "", "")
    assert "message_added" in finished("runs", "events", run_id).out
    stopped = finished("runs", "cancel", run_id, "--reason", "enough")
    assert (stopped.code, stopped.out) == (0, f"run {run_id} cancelled: enough\n")
    out, _ = follower.communicate(timeout=90)
    assert out.decode().splitlines()[-1].split()[3] == "run_finished"
    late = finished("runs", "send", run_id, "too late")
    assert (late.code, "takes no message: it is cancelled" in late.err) == (1, True)
    process.communicate(timeout=90)
    assert process.returncode == 0


def left(url: str) -> str:
    """A run whose process was killed."""
    process, run_id = at_work(url)
    process.kill()
    process.communicate(timeout=90)
    return run_id


def test_a_run_of_a_dead_process_is_shown_and_said_to_be_left(url: str) -> None:
    run_id = left(url)
    shown = finished("runs", "show", run_id)
    assert "status: running" in shown.out
    assert f"no process works on it now: retinue runs resume {run_id} continues it" in shown.err
    checked = finished("db", "check")
    assert checked.code == 0
    assert f"warning: run '{run_id}': the process " in checked.out
    assert " is gone: the next runtime that opens this database takes it over\n" in checked.out
    assert re.search(r"\nrunning: 1 step, 0 calls, [\d.]+ m?s so far\n", shown.out)
    follower = started("runs", "events", run_id, "--follow")
    assert follower.stderr is not None
    assert b"no process works on it now" in follower.stderr.readline()
    follower.kill()
    follower.communicate()


def test_a_run_of_a_dead_process_is_gone_on_with(url: str) -> None:
    run_id = left(url)
    early = finished("runs", "resume", run_id, "--target", "tests.cli.staff:slow", "--approve", "call_1")
    assert (early.code, "waits for nothing yet" in early.err) == (2, True)
    done = finished("runs", "resume", run_id, "--target", "tests.cli.staff:slow", env={"HURRY": "1"})
    assert (done.code, done.err) == (0, "")
    assert "I begin. I end." in done.out
    assert "\ncompleted: 1 step, 0 calls, " in done.out
    shown = finished("runs", "show", run_id).out
    assert "status: completed" in shown
    assert "\ncompleted: 1 step, 0 calls, " in shown


def test_a_run_of_a_dead_process_is_cancelled(url: str) -> None:
    run_id = left(url)
    stopped = finished("runs", "cancel", run_id, "--target", "tests.cli.staff:slow")
    assert (stopped.code, stopped.out) == (0, f"run {run_id} cancelled\n")


def test_run_keeps_what_it_is_told_to(cli: Cli, url: str, folder: Path) -> None:
    args = ("run", "What does the lamp burn?", "--workspace", str(folder), "--model", "offline:rules")
    assert cli(*args, "--db", url).code == 0
    (record,) = json.loads(cli("runs", "list", "--json").out)
    assert record["status"] == "completed"
    shown = cli("runs", "show", record["run_id"])
    assert "assistant: What does the lamp burn?" in shown.out
    assert re.search(r"    ok     list_files\(\)  \d+ ms", shown.out)
    assert "- lamp.md:3: The lamp burns paraffin." in shown.out
    assert json.loads(cli("db", "check", "--json").out) == {"ok": True, "findings": []}
    refused = cli(*args, "--db", "app.db")
    assert (refused.code, "not the URL of a store: 'app.db'" in refused.err) == (2, True)
