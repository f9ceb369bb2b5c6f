"""`retinue agents list` and `validate`, and `retinue run --agent`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from .conftest import Cli


def declare(folder: Path, path: str, *fields: str, body: str = "You look at lamps.") -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(["---", *fields, "---", "", body, ""]), encoding="utf-8")
    return file


@pytest.fixture
def crew(folder: Path) -> Path:
    """A folder with sub-agents that are as they should be."""
    declare(folder, "subagents/keeper.md", "description: Keeps the light.", "workspace: {mode: shared}", "maxIters: 4")
    declare(folder, "subagents/clerk.md", "description: Counts.", "builtin_tools: [read_file]", "model: offline:rules")
    declare(folder, "defs/AGENTS.md", "not: read")
    declare(folder, "subagents/pilot.md", "description: Steers.", "workspace: {path: defs}", body="")
    declare(folder, ".claude/agents/any.md", "name: mate", "description: Helps out.", "tools: Read, Grep")
    return folder


@pytest.fixture
def faulty(folder: Path) -> Path:
    declare(folder, "subagents/good.md", "description: Good.", "workspace: {mode: shared}")
    declare(folder, "subagents/nothing.md", "model: offline:rules", "limits: {tonnes: 3}")
    declare(folder, "subagents/odd.md", "description: Odd.", "tools: [fly]", "colour: red", "model: nobody:x")
    (folder / "subagents/open.md").write_text("---\ndescription: x\n")
    declare(folder, "subagents/out.md", "description: Out.", "workspace: {path: ../elsewhere}", body="")
    declare(folder, ".claude/agents/good.md", "name: good", "description: The same name.")
    return folder


def test_list_shows_every_sub_agent_in_a_table(cli: Cli, crew: Path) -> None:
    code, out, err = cli("agents", "list", str(crew))
    assert (code, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split() == ["id", "source", "workspace", "model", "steps"]
    rows = [re.split(r" {2,}", line) for line in lines if not line.startswith(" ")]
    assert rows == [
        ["general-purpose", "built in", "shared", "parent's", "16"],
        ["clerk", "subagents/clerk.md", "isolated", "offline:rules", "10"],
        ["keeper", "subagents/keeper.md", "shared", "parent's", "4"],
        ["pilot", "subagents/pilot.md", "isolated (defs)", "parent's", "10"],
        ["mate", ".claude/agents/any.md", "shared", "parent's", "10"],
    ]
    below = [line.strip() for line in lines if line.startswith("    ")]
    assert below[0].startswith("Works as you do, with your tools and in your workspace, on a task of several steps")
    assert below[below.index("Counts.") :] == [
        *("Counts.", "Tools: read_file"),
        *("Keeps the light.", "Tools: all"),
        *("Steers.", "Tools: all"),
        *("Helps out.", "Tools: read_file, grep_files"),
    ]
    assert max(map(len, lines)) <= 100


def test_an_empty_list_of_tools_is_not_shown_as_all(cli: Cli, folder: Path) -> None:
    declare(folder, "subagents/r.md", "description: d", "tools: []")
    lines = [line.strip() for line in cli("agents", "list", str(folder)).out.splitlines()]
    assert lines[-1] == "Tools: read_file, write_file, edit_file, list_files, glob_files, grep_files"


def test_listing_changes_nothing_in_the_folder(cli: Cli, crew: Path) -> None:
    before = sorted(crew.rglob("*"))
    cli("agents", "list", str(crew))
    cli("agents", "validate", str(crew))
    assert sorted(crew.rglob("*")) == before


def test_list_as_json(cli: Cli, crew: Path) -> None:
    agents = {agent["id"]: agent for agent in json.loads(cli("agents", "list", str(crew), "--json").out)}
    assert list(agents) == ["general-purpose", "clerk", "keeper", "pilot", "mate"]
    assert agents["clerk"] == {
        "id": "clerk",
        "description": "Counts.",
        "source": "subagents/clerk.md",
        "mode": "isolated",
        "definition": None,
        "model": "offline:rules",
        "max_steps": 10,
        "tools": ["read_file"],
        "has_all_tools": False,
        "timeout": None,
    }
    assert agents["pilot"]["definition"] == "defs"


def test_the_current_folder_is_the_default(cli: Cli, crew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(crew)
    assert "keeper" in cli("agents", "list").out
    assert cli("agents", "validate").out == "4 declared sub-agents can be used, no problems\n"


def test_on_a_terminal_descriptions_fit_it(cli: Cli, crew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    lines = [line for line in cli("agents", "list", str(crew)).out.splitlines() if line.startswith("    ")]
    assert max(map(len, lines)) <= 60
    assert len(lines) > 10


def test_list_tells_of_problems_and_of_a_folder_without_declarations(cli: Cli, folder: Path) -> None:
    code, out, err = cli("agents", "list", str(folder))
    assert (code, out.splitlines()[1].split()[0]) == (0, "general-purpose")
    assert err == f"retinue: {str(folder)!r} declares no sub-agents: write one as subagents/<id>.md\n"
    declare(folder, "subagents/a.md", "colour: red")
    outcome = cli("agents", "list", str(folder))
    assert outcome.code == 0
    assert outcome.err == f"retinue: 2 problems; see: retinue agents validate {folder}\n"


def test_validate_prints_file_line_field_and_message(cli: Cli, faulty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(faulty.parent)
    code, out, err = cli("agents", "validate", faulty.name)
    assert (code, err) == (1, "")
    errors, warnings, verdict = out.strip().split("\n\n")
    at = f"{faulty.name}/subagents"
    outside = (
        "'../elsewhere' is outside the main workspace: move it in, or allow a folder above it in code, with "
        "HarnessAgent(workspace_roots=…)"
    )
    tools = "edit_file, glob_files, grep_files, list_files, read_file, write_file"
    limit = "there is no such limit; there are depth, children, parallel, steps, tokens, cost, seconds"
    assert errors.splitlines() == [
        "Errors:",
        f"{faulty.name}/.claude/agents/good.md: 'good' is declared in subagents/good.md, which counts",
        f"{at}/nothing.md: description: is missing: say when to use this sub-agent and what it gives back",
        f"{at}/nothing.md:3: limits.tonnes: {limit}",
        f"{at}/odd.md:3: tools: its parent has no tool 'fly'; it has {tools}",
        f"{at}/open.md:1: its front matter is not closed: end it with a line ---",
        f"{at}/out.md:3: workspace.path: {outside}",
    ]
    assert [line.split(": ")[:2] for line in warnings.splitlines()[1:]] == [
        [f"{at}/odd.md:4", "colour"],
    ]
    assert warnings.startswith("Warnings:\n")
    assert verdict == "6 errors, 1 warning; 1 declared sub-agent can be used"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nobody:x", "clerk: unknown model provider 'nobody' in 'nobody:x'"),
        ("qwen3-max", "'qwen3-max' names no provider: the parent's is used"),
    ],
)
def test_warnings_alone_are_no_failure(cli: Cli, crew: Path, model: str, says: str) -> None:
    declare(crew, "subagents/clerk.md", "description: Counts.", f"model: {model}")
    code, out, _ = cli("agents", "validate", str(crew))
    assert code == 0
    title, warning, *verdict = out.splitlines()
    assert (title, verdict) == ("Warnings:", ["", "4 declared sub-agents can be used, with 1 warning"])
    assert warning.startswith(f"{crew}/subagents/clerk.md:3: model: {says}")


def test_validate_as_json(cli: Cli, faulty: Path) -> None:
    code, out, _ = cli("agents", "validate", str(faulty), "--json")
    told = json.loads(out)
    assert (code, told["ok"], told["agents"]) == (1, False, ["good"])
    assert {
        "severity": "error",
        "file": "subagents/open.md",
        "line": 1,
        "field": None,
        "message": "its front matter is not closed: end it with a line ---",
    } in told["problems"]
    assert [problem["severity"] for problem in told["problems"]].count("warning") == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["list", "missing"], "there is no folder 'missing': create it, or give another as DIR"),
        (["validate", "missing"], "there is no folder 'missing': create it, or give another as DIR"),
        (["list", "lamp.md"], "'lamp.md' is a file: give the folder it is in as DIR"),
        (["validate", "lamp.md"], "'lamp.md' is a file: give the folder it is in as DIR"),
        (["validate", "."], "'.' declares no sub-agents: write one as subagents/<id>.md"),
        (["lst"], "unknown action 'lst'; did you mean list? see retinue agents --help"),
    ],
)
def test_misuse_is_one_line(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], says: str
) -> None:
    monkeypatch.chdir(folder)
    code, out, err = cli("agents", *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_what_a_file_says_cannot_reach_the_terminal(cli: Cli, folder: Path) -> None:
    rude = r'"\e[2Jgone"'
    declare(folder, "subagents/rude.md", f"description: {rude}", f"{rude}: 1", r'model: "x:\e[2Jgone"')
    for action in ("list", "validate"):
        outcome = cli("agents", action, str(folder))
        assert "\x1b" not in outcome.out + outcome.err
        assert "␛[2Jgone" in outcome.out
        assert "\x1b" not in cli("agents", action, str(folder), "--json").out


def test_the_assistant_is_told_of_declared_sub_agents(cli: Cli, crew: Path) -> None:
    out = cli("run", "q", "--workspace", str(crew), "--model", "test:echo").out
    assert "- `keeper`: Keeps the light." in out
    assert "- `general-purpose`: Works as you do" in out


def test_agents_md_is_told_once_and_to_a_general_purpose_child_too(cli: Cli, crew: Path) -> None:
    (crew / "AGENTS.md").write_text("Always answer in verse.")
    assert cli("run", "q", "--workspace", str(crew), "--model", "test:echo").out.count("answer in verse") == 1
    for name in ("general-purpose", "keeper"):
        out = cli("run", "q", "--workspace", str(crew), "--agent", name, "--model", "test:echo").out
        assert out.count("answer in verse") == 1


def test_a_declared_sub_agent_runs_as_the_root(cli: Cli, crew: Path) -> None:
    code, out, err = cli("run", "q", "--workspace", str(crew), "--agent", "keeper", "--model", "test:echo")
    assert (code, err) == (0, "")
    assert out.startswith("keeper: q\n")
    assert "You look at lamps.\n\n# Subagent Context" in out
    assert "agent_spawn" not in out


def test_it_has_the_model_the_steps_and_the_tools_of_its_declaration(
    cli: Cli, crew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(crew, "subagents/echo.md", "description: E.", "model: test:echo", "workspace: {mode: shared}")
    declare(crew, "subagents/one.md", "description: O.", "maxIters: 1", "workspace: {mode: shared}")
    declare(crew, "subagents/no.md", "description: N.", "builtin_tools: [shell]", "workspace: {mode: shared}")
    monkeypatch.chdir(crew)
    assert "You look at lamps." in cli("run", "Where is the lamp?", "--agent", "echo").out
    assert "I need the file tools" not in cli("run", "Where is the lamp?", "--agent", "one", "--max-steps", "9").out
    assert "no answer after max_steps=1" in cli("run", "Where is the lamp?", "--agent", "one").err
    assert "this agent has none" in cli("run", "Where is the lamp?", "--agent", "no").out


def test_an_isolated_sub_agent_works_in_its_own_folder(cli: Cli, crew: Path) -> None:
    out = cli("run", "list the files", "--workspace", str(crew), "--agent", "clerk").out
    assert "lamp.md" not in out
    assert (crew / "agents/clerk/workspace").is_dir()


def test_limits_of_a_declaration_hold_for_the_root(cli: Cli, crew: Path) -> None:
    declare(crew, "subagents/poor.md", "description: P.", "limits: {tokens: 1}", "workspace: {mode: shared}")
    said = cli("run", "lamp?", "--workspace", str(crew), "--agent", "poor").err
    assert "the limit on tokens is too small for the first request" in said


def test_an_unknown_sub_agent_lists_those_there_are(cli: Cli, crew: Path) -> None:
    code, out, err = cli("run", "q", "--workspace", str(crew), "--agent", "captain", "--model", "offline:rules")
    assert (code, out) == (2, "")
    assert err == (
        "retinue: there is no sub-agent 'captain' here; there are: clerk, general-purpose, keeper, mate, pilot\n"
    )


def test_a_sub_agent_whose_folder_is_gone_is_one_line(cli: Cli, crew: Path) -> None:
    (crew / "agents").write_text("a file where its folder would go")
    outcome = cli("run", "q", "--workspace", str(crew), "--agent", "clerk", "--model", "offline:rules")
    assert outcome.code == 2
    assert outcome.err.startswith("retinue: the sub-agent 'clerk' cannot work: ")


def test_errors_in_declarations_are_mentioned_once(cli: Cli, faulty: Path) -> None:
    outcome = cli("run", "hello", "--workspace", str(faulty), "--model", "offline:rules")
    assert outcome.code == 0
    assert outcome.err == f"retinue: 6 errors in declared sub-agents; see: retinue agents validate {faulty}\n"


def test_sub_agents_of_another_folder_can_be_used(
    cli: Cli, crew: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "fog.md").write_text("Fog all day.\n")
    out = cli(
        "run", "q", "--workspace", str(other), "--subagents", str(crew), "--agent", "keeper", "--model", "test:echo"
    ).out
    assert out.startswith("keeper: q\n")
    declare(other, "subagents/keeper.md", "description: Of this folder.")
    err = cli("run", "hello", "--workspace", str(other), "--subagents", str(crew), "--model", "offline:rules").err
    assert err == f"retinue: 1 error in declared sub-agents; see: retinue agents validate {other}\n"


def test_the_sub_agents_of_the_workspace_are_not_taken_twice(cli: Cli, crew: Path) -> None:
    where = ("--workspace", str(crew), "--subagents", f"{crew}/.")
    assert cli("run", "hello", *where, "--model", "offline:rules").err == ""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("missing", "there is no folder 'missing': create it, or give another with --subagents"),
        ("defs", "'defs/subagents' has no Markdown files: give another --subagents"),
    ],
)
def test_a_wrong_folder_for_sub_agents_is_one_line(
    cli: Cli, crew: Path, monkeypatch: pytest.MonkeyPatch, given: str, says: str
) -> None:
    monkeypatch.chdir(crew)
    code, out, err = cli("run", "q", "--subagents", given)
    assert (code, out, err) == (2, "", f"retinue: {says}\n")


@pytest.mark.skipif(os.name != "posix", reason="a POSIX shell")
def test_the_shell_is_there_only_when_asked_for(cli: Cli, folder: Path) -> None:
    def tried(*extra: str) -> list[str]:
        out = cli("run", "q", "--workspace", str(folder), "--model", "test:shell", "--json", *extra).out
        events = [json.loads(line) for line in out.splitlines()]
        return [event["message"]["parts"][0]["text"] for event in events if event["kind"] == "tool_call_finished"]

    assert tried("--shell", "--yes") == ["exit code: 0\nhello from here\n"]
    (refused,) = tried()
    assert refused.startswith("not_found: ")
