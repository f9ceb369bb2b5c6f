"""The catalog: five sources, one list; clashes, mistakes and escapes are refused and reported, the rest is there."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    ConfigurationError,
    HarnessAgent,
    LocalFilesystem,
    RunStatus,
    Runtime,
    SubagentDeclaration,
    ToolContext,
    UnknownAgent,
    tool,
)
from retinue.core.filesystem import Stamp
from retinue.errors import PathDenied
from retinue.testing import RecordingSink, ScriptedModel, call, say
from tests.subagents.stage import Stage, declare, harness, offered, send, spawn, stage, system, told, write
from tests.waiting import let_others_run

CLAUDE = ".claude/agents"


def helper(ctx: ToolContext) -> Agent:
    return Agent("made", ScriptedModel([say("made to order")]))


def problems(agent: HarnessAgent) -> list[str]:
    assert agent.catalog is not None
    return [str(problem) for problem in agent.catalog.problems]


def sources(agent: HarnessAgent) -> dict[str, str]:
    assert agent.catalog is not None
    return {entry.id: entry.source for entry in agent.catalog.entries.values()}


async def looked(agent: HarnessAgent, **options: Any) -> HarnessAgent:
    """The agent after a run, in which the catalog is read."""
    result = await Runtime([agent, *options.pop("others", ())]).run(agent.name, "go", **options)
    assert (result.status, result.error) == (RunStatus.COMPLETED, None)
    return agent


async def test_all_sources_make_one_list_in_a_fixed_order(tmp_path: Path) -> None:
    declare(tmp_path, "zeta")
    declare(tmp_path, "beta")
    declare(tmp_path, "file", "name: other\ndescription: by another tool", folder=CLAUDE)
    write(tmp_path, {"subagents/deep/hidden.md": "---\ndescription: a\n---\n", "subagents/notes.txt": "x"})
    known = Agent("known", ScriptedModel([]), description="an agent by its name")
    agent = harness(
        tmp_path,
        subagents=[SubagentDeclaration("coded", "in code"), Agent("object", Stage(), description="an agent"), "known"],
        subagent_factories={"factory": ("made to order", helper), "bare": helper},
    )
    await looked(agent, others=[known])
    assert agent.catalog is not None
    assert {entry.id: (entry.source, entry.description) for entry in agent.catalog.entries.values()} | {
        "general-purpose": "checked elsewhere"
    } == {
        "general-purpose": "checked elsewhere",
        "coded": ("code", "in code"),
        "object": ("code", "an agent"),
        "known": ("code", "an agent by its name"),
        "beta": ("subagents/beta.md", "d"),
        "zeta": ("subagents/zeta.md", "d"),
        "other": (".claude/agents/file.md", "by another tool"),
        "factory": ("factory", "made to order"),
        "bare": ("factory", "bare"),
    }
    assert list(agent.catalog.entries) == "general-purpose coded object known beta zeta other factory bare".split()
    assert problems(agent) == []


async def test_every_source_can_be_spawned(tmp_path: Path) -> None:
    declare(tmp_path, "by-file")
    declare(tmp_path, "file", "name: other\ndescription: d", folder=CLAUDE)
    names = ["general-purpose", "coded", "object", "known", "by-file", "other", "factory", "later"]

    async def later(ctx: ToolContext) -> Agent:
        await asyncio.sleep(0)
        return helper(ctx)

    agent = harness(
        tmp_path,
        [spawn(name, "x") for name in names],
        subagents=[
            SubagentDeclaration("coded", "in code"),
            Agent("object", ScriptedModel([say("object here")])),
            "known",
        ],
        subagent_factories={"factory": helper, "later": later},
    )
    runtime = Runtime([agent, Agent("known", ScriptedModel([say("known here")]))])
    result = await runtime.run("boss", "go")
    replies = [text.rpartition("reply:\n")[2] for text in told(result)]
    assert replies == [
        "did x",
        "did x",
        "object here",
        "known here",
        "did x",
        "did x",
        "made to order",
        "made to order",
    ]


@pytest.mark.parametrize(
    ("options", "places"),
    [
        (
            {"subagents": [SubagentDeclaration("a", "b"), SubagentDeclaration("a", "c")]},
            "both in subagents",
        ),
        ({"subagents": [SubagentDeclaration("a", "b"), Agent("a", "x:y")]}, "both in subagents"),
        ({"subagents": ["a", Agent("a", "x:y")]}, "both in subagents"),
        (
            {"subagents": [SubagentDeclaration("a", "b")], "subagent_factories": {"a": helper}},
            "one in subagents and one in subagent_factories",
        ),
    ],
)
async def test_one_name_twice_in_code_is_an_error_that_names_both(
    tmp_path: Path, options: dict[str, Any], places: str
) -> None:
    agent = harness(tmp_path, **options)
    problem = f"agent 'boss' has two sub-agents named 'a', {places}: rename one"
    with pytest.raises(ConfigurationError, match=problem):
        Runtime([agent])
    with pytest.raises(ConfigurationError, match=problem):
        await Runtime().run(agent, "go")


@pytest.mark.parametrize("name", ["../x", "a/b", "", "-", "a b", "a.b", ".", "a\n"])
async def test_a_name_that_is_none_is_refused_in_code(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="a name is a letter or digit of any script"):
        SubagentDeclaration(name, "d")
    ways: list[dict[str, Any]] = [{"subagents": [name]}, {"subagent_factories": {name: helper}}]
    for options in ways:
        with pytest.raises(ConfigurationError, match="a name is a letter"):
            Runtime([harness(tmp_path, **options)])


async def test_an_agent_that_is_only_named_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownAgent, match="unknown agent 'ghost'; known: boss"):
        await Runtime([harness(tmp_path, subagents=["ghost"])]).run("boss", "go")


async def test_an_agent_that_is_only_named_is_that_of_the_runtime_it_runs_in(tmp_path: Path) -> None:
    agent = harness(tmp_path, spawn("known", "x"), say("end"), spawn("known", "x"), subagents=["known"])
    first = Runtime([agent, Agent("known", ScriptedModel([say("first")]))])
    second = Runtime([agent, Agent("known", ScriptedModel([say("second")] * 2))])
    second.stream(
        agent, "go", thread_id="unused", model=ScriptedModel([say("x")])
    )  # the second has seen the agent last
    assert [told(await runtime.run("boss", "go"))[0].rpartition("\n")[2] for runtime in (first, second)] == [
        "first",
        "second",
    ]


async def test_a_file_that_clashes_is_skipped_and_reported(tmp_path: Path) -> None:
    for name in ("coded", "made", "mine", "good"):
        declare(tmp_path, name, "description: from a file")
    declare(tmp_path, "one", "name: mine\ndescription: from another tool", folder=CLAUDE)
    declare(tmp_path, "two", "name: twin\ndescription: first", folder=CLAUDE)
    declare(tmp_path, "zwo", "name: twin\ndescription: second", folder=CLAUDE)
    agent = harness(tmp_path, subagents=[SubagentDeclaration("coded", "c")], subagent_factories={"made": helper})
    sink = RecordingSink()
    await looked(agent, sinks=[sink])
    assert sources(agent) == {
        "general-purpose": "built in",
        "coded": "code",
        "good": "subagents/good.md",
        "mine": "subagents/mine.md",
        "twin": ".claude/agents/two.md",
        "made": "factory",
    }
    expected = [
        "subagents/coded.md: 'coded' is declared in code, which counts",
        "subagents/made.md: 'made' is declared in factory, which counts",
        ".claude/agents/one.md: 'mine' is declared in subagents/mine.md, which counts",
        ".claude/agents/zwo.md: 'twin' is declared in .claude/agents/two.md, which counts",
    ]
    assert problems(agent) == expected
    assert [event.data for event in sink.of("custom")] == [{"type": "subagents", "problems": expected}]


async def test_one_bad_file_never_hides_the_good_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    declare(tmp_path, "good")
    folder = tmp_path / "subagents"
    bad = {
        "binary": b"\xff\xfe\x00",
        "empty": b"",
        "huge": b"x" * 1_000_000,
        "unclosed": b"---\na: b",
        "deep": b"---\ndescription: a\nx: " + b"[" * 9000 + b"\n---\n",
        "number": b"---\ndescription: a\nlimits: {tokens: 1e999}\n---\n",
        "key": b"---\n? {a: b}\n: c\n---\n",
        "bad name": b"---\ndescription: a\n---\n",
    }
    for name, data in bad.items():
        (folder / f"{name}.md").write_bytes(data)
    (folder / "folder.md").mkdir()
    (folder / "link.md").symlink_to(folder / "good.md")
    os.mkfifo(folder / "pipe.md")
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff.md"))).write_text("x")
    agent = await looked(harness(tmp_path))
    assert list(sources(agent)) == ["general-purpose", "good"]
    assert [str(p).partition(": ")[0].partition(":")[0] for p in problems(agent)] == [
        f"subagents/{name}.md" for name in sorted([*bad, "link", "pipe"]) + ["\\udcff"]
    ]
    assert [record.getMessage() for record in caplog.records if record.name == "retinue.subagents.catalog"] == problems(
        agent
    )
    assert "subagents/link.md: it is a symbolic link, and links are not followed" in problems(agent)
    assert "subagents/pipe.md: it is a pipe, a device or a socket, not a file" in problems(agent)


class Counting(LocalFilesystem):
    """Says which files were read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[str] = []

    def read(self, path: str) -> bytes:
        self.reads.append(path)
        return super().read(path)


async def test_changed_files_are_read_again_between_runs_and_others_are_not(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        declare(tmp_path, name, f"description: {name}")
    files = Counting(tmp_path)
    agent = HarnessAgent("boss", Stage(*[say("end")] * 5), filesystem=files, general_purpose=False)
    runtime = Runtime([agent])

    async def listed() -> tuple[list[str], list[str]]:
        files.reads.clear()
        await runtime.run("boss", "go")
        shown = system(stage(agent).requests[-1]).partition("Available agent ids:\n")[2]
        return sorted(files.reads), shown.splitlines()

    assert await listed() == (
        ["subagents/a.md", "subagents/b.md", "subagents/c.md"],
        ["- `a`: a", "- `b`: b", "- `c`: c"],
    )
    assert (await listed())[0] == []
    declare(tmp_path, "b", "description: changed")
    (tmp_path / "subagents/c.md").unlink()
    declare(tmp_path, "d", "description: new")
    assert await listed() == (["subagents/b.md", "subagents/d.md"], ["- `a`: a", "- `b`: changed", "- `d`: new"])
    (tmp_path / "subagents/b.md").write_text("broken")
    assert await listed() == (["subagents/b.md"], ["- `a`: a", "- `d`: new"])
    assert problems(agent) == [
        "subagents/b.md:1: it has no front matter: begin with a line ---, then fields, then a line ---"
    ]
    os.rename(tmp_path / "subagents", tmp_path / "gone")
    assert await listed() == ([], [])
    assert problems(agent) == []


async def test_very_many_files_are_looked_at_one_by_one_only_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.subagents.markdown.MANY", 2)
    folder = tmp_path / "subagents"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.md").write_text(f"---\ndescription: {name}\n---\n")
    catalog = HarnessAgent("boss", "offline:rules", workspace=tmp_path).catalog
    assert catalog is not None

    def descriptions() -> list[str]:
        catalog.refresh()
        return [entry.description for entry in catalog.entries.values() if entry.declaration is not None]

    assert descriptions() == ["a", "b", "c"]
    (folder / "d.md").write_text("---\ndescription: d\n---\n")
    assert descriptions() == ["a", "b", "c", "d"]
    with (folder / "a.md").open("w") as written_to:  # its folder does not change
        written_to.write("---\ndescription: new\n---\n")
    assert descriptions() == ["a", "b", "c", "d"]
    monkeypatch.setattr("retinue.subagents.markdown.PATIENCE", 0.0)
    assert descriptions() == ["new", "b", "c", "d"]


async def test_a_sub_agent_written_in_one_run_is_there_in_the_next(tmp_path: Path) -> None:
    text = "---\ndescription: helps\n---\nI help."
    agent = harness(
        tmp_path,
        call("write_file", {"path": "subagents/helper.md", "content": text}),
        spawn("helper", "x"),
        say("end"),
        spawn("helper", "x"),
    )
    runtime = Runtime([agent])
    assert (
        told(await runtime.run("boss", "go"))[1]
        == "Error: Unknown agent_id: helper\nAvailable agent ids: general-purpose"
    )
    assert told(await runtime.run("boss", "go"))[0].endswith("status: ok\nreply:\ndid x")


async def test_a_run_that_begins_while_another_reads_waits_for_it(tmp_path: Path) -> None:
    reading, gate = threading.Event(), threading.Event()

    class Slow(LocalFilesystem):
        is_slow = False

        def stamps(self, path: str = "", suffix: str = "") -> dict[str, Stamp]:
            found = super().stamps(path, suffix)
            if path == CLAUDE and self.is_slow:
                self.is_slow = False
                reading.set()
                gate.wait()
            return found

    for number in range(20):  # too many to look at without leaving the event loop
        declare(tmp_path, f"a{number}")
    files = Slow(tmp_path)
    agent = HarnessAgent("boss", Stage(*[say("end")] * 3), filesystem=files)
    runtime = Runtime([agent])
    await runtime.run("boss", "go")
    declare(tmp_path, "new")
    files.is_slow = True
    first = runtime.stream("boss", "go")
    await asyncio.to_thread(reading.wait)
    second = runtime.stream("boss", "go")
    await let_others_run()
    gate.set()
    await second.result()
    await first.result()
    assert ["- `new`: d" in system(request) for request in stage(agent).requests] == [False, True, True]


async def test_files_are_read_beside_the_event_loop_the_first_time(tmp_path: Path) -> None:
    threads: set[str] = set()

    class Watched(LocalFilesystem):
        def read(self, path: str) -> bytes:
            threads.add(threading.current_thread().name)
            return super().read(path)

    declare(tmp_path, "a")
    await looked(HarnessAgent("boss", Stage(say("end")), filesystem=Watched(tmp_path)))
    assert threads
    assert threading.main_thread().name not in threads


@tool
async def lookup() -> str:
    """Find a record."""
    return "found"


@tool
async def publish() -> str:
    """Publish."""
    return "published"


FILES = ["read_file", "write_file", "edit_file", "list_files", "glob_files", "grep_files"]


@pytest.mark.parametrize(
    ("given", "tools"),
    [
        ({}, ["lookup", "publish", *FILES]),
        ({"tools": ["lookup"]}, ["lookup", *FILES]),
        ({"tools": []}, FILES),
        ({"tools": ["read_file", "grep_files"]}, ["read_file", "grep_files"]),
        ({"tools": ["lookup", "read_file"], "builtin_tools": ["list_files"]}, ["lookup"]),
        ({"tools": ["agent_spawn"]}, FILES),
        ({"builtin_tools": ["read_file"]}, ["lookup", "publish", "read_file"]),
        ({"builtin_tools": []}, ["lookup", "publish"]),
        ({"tools": ["publish"], "builtin_tools": ["list_files", "shell"]}, ["publish", "list_files"]),
        (
            {"disallowed_tools": ["publish", "write_file"]},
            ["lookup", *[name for name in FILES if name != "write_file"]],
        ),
        ({"tools": ["lookup"], "disallowed_tools": ["lookup"], "builtin_tools": []}, []),
    ],
)
@pytest.mark.parametrize("source", ["code", "file"])
async def test_an_allowlist_filters_what_is_inherited_and_builtin_tools_what_is_built_in(
    tmp_path: Path, given: dict[str, Any], tools: list[str], source: str
) -> None:
    declared: list[Any] = []
    if source == "code":
        declared = [SubagentDeclaration("r", "d", **given)]
    else:
        declare(tmp_path, "r", "\n".join(["description: d", *[f"{key}: {names}" for key, names in given.items()]]))
    agent = harness(tmp_path, spawn("r", "x"), tools=[lookup, publish], subagents=declared)
    await Runtime([agent]).run("boss", "go")
    (request,) = stage(agent).of_children
    assert offered(request) == tools


TOOLS = "edit_file, glob_files, grep_files, list_files, lookup, publish, read_file, write_file"


async def test_names_without_effect_are_warned_of_with_file_and_line(tmp_path: Path) -> None:
    declare(tmp_path, "r", "description: d\ntools: [lookup, task_list,\n  shell]\nbuiltin_tools: [read_file, shell]")
    declared = SubagentDeclaration("coded", "d", tools=["ghost"])
    agent = await looked(harness(tmp_path, tools=[lookup, publish], subagents=[declared]))
    assert problems(agent) == [
        f"sub-agent 'coded' in code: tools: its parent has no tool 'ghost'; it has {TOOLS}",
        "subagents/r.md:3: tools: task_list has no effect: a declared sub-agent starts none itself",
        "subagents/r.md:3: tools: its parent has no shell, so r gets none",
        "subagents/r.md:5: builtin_tools: its parent has no shell, so r gets none",
    ]
    assert agent.catalog is not None
    assert all(problem.is_warning for problem in agent.catalog.problems)
    assert list(sources(agent)) == ["general-purpose", "coded", "r"]


async def test_a_file_with_an_unknown_tool_is_skipped_and_reported(tmp_path: Path) -> None:
    declare(tmp_path, "a", "description: d\ntools: [lookup, ghost]")
    declare(tmp_path, "b", "description: d\ndisallowed_tools: [publihs]")
    declare(tmp_path, "c", "description: d\ntools: [lookup]")
    (tmp_path / ".claude/agents/team").mkdir(parents=True)
    for name, tools in (("d", "Read, Grpe"), ("e", "Read, Grep")):
        text = f"---\nname: {name}\ndescription: d\ntools: {tools}\n---\n"
        (tmp_path / f".claude/agents/team/{name}.md").write_text(text)
    agent = await looked(harness(tmp_path, tools=[lookup, publish]))
    assert problems(agent) == [
        f"subagents/a.md:3: tools: its parent has no tool 'ghost'; it has {TOOLS}",
        f"subagents/b.md:3: disallowed_tools: its parent has no tool 'publihs'; it has {TOOLS}; did you mean publish?",
        f".claude/agents/team/d.md:4: tools: its parent has no tool 'Grpe'; it has {TOOLS}",
    ]
    assert list(sources(agent)) == ["general-purpose", "c", "e"]


@pytest.mark.parametrize(
    ("tools", "has"),
    [
        (["lookup", "ghost"], ["lookup"]),
        (["reed_file"], []),
        (["read_file", "ghost"], ["read_file"]),
        (
            ["lookup", "task_list"],
            ["edit_file", "glob_files", "grep_files", "list_files", "lookup", "read_file", "write_file"],
        ),
    ],
)
async def test_an_unknown_tool_in_code_never_widens_what_a_sub_agent_has(
    tmp_path: Path, tools: list[str], has: list[str]
) -> None:
    declared = SubagentDeclaration("r", "d", tools=tools)
    agent = harness(tmp_path, spawn("r", "x"), tools=[lookup, publish], subagents=[declared])
    await Runtime([agent]).run("boss", "go")
    (request,) = stage(agent).of_children
    assert sorted(offered(request)) == has


OUTSIDE = "is outside the main workspace: move it in, or allow a folder above it in code, with HarnessAgent(workspace_roots=…)"


async def test_a_model_without_a_provider_is_warned_of_and_the_parents_used(tmp_path: Path) -> None:
    declare(tmp_path, "r", "description: d\nmodel: qwen3-max")
    declared = SubagentDeclaration("coded", "d", model="qwen3-max")
    agent = harness(tmp_path, [spawn("coded", "x"), spawn("r", "y")], subagents=[declared])
    await Runtime([agent]).run("boss", "go")
    warning = "model: 'qwen3-max' names no provider: the parent's is used; write provider:model"
    assert problems(agent) == [f"sub-agent 'coded' in code: {warning}", f"subagents/r.md:3: {warning}"]
    assert len(stage(agent).of_children) == 2


async def test_a_folder_that_defines_a_sub_agent_and_is_not_there_is_reported(tmp_path: Path) -> None:
    declare(tmp_path, "r", "description: d\nworkspace:\n  path: ./defs/r", body="")
    declared = SubagentDeclaration("coded", "d", workspace="defs/c")
    agent = await looked(harness(tmp_path, subagents=[declared]))
    assert problems(agent) == [
        "sub-agent 'coded' in code: workspace: there is no folder 'defs/c': coded has no instructions",
        "subagents/r.md:4: workspace.path: there is no folder './defs/r': r has no instructions",
    ]
    assert list(sources(agent)) == ["general-purpose", "coded", "r"]
    (tmp_path / "defs/c").mkdir(parents=True)
    stage(agent).go_on(say("end"))
    assert [problem[:14] for problem in problems(await looked(agent))] == ["subagents/r.md"]


async def test_fields_that_a_server_decides_are_warned_of(tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_steps": 3, "mode": "shared", "tools": ["x"], "disallowed_tools": ["y"]}
    declared = [
        SubagentDeclaration("far", "d", url="http://far.example", **given),
        SubagentDeclaration("farther", "d", url="http://far.example", timeout=3, agent="far"),
    ]
    agent = await looked(harness(tmp_path, subagents=declared))
    fields = [problem.removeprefix("sub-agent 'far' in code: ").partition(":")[0] for problem in problems(agent)]
    assert sorted(fields) == ["disallowed_tools", "max_steps", "mode", "tools"]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    write(tmp_path, {"outside/AGENTS.md": "TOP SECRET", "outside/inner/AGENTS.md": "INNER SECRET", "main/x": ""})
    return tmp_path / "outside"


@pytest.mark.parametrize("path", ["../outside", "defs/../../outside", "..", "/etc", "{outside}", "{outside}/inner"])
@pytest.mark.parametrize("source", ["code", "written by itself"])
async def test_a_definition_outside_the_workspace_is_refused_and_reported(
    tmp_path: Path, outside: Path, path: str, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    main, path = tmp_path / "main", path.format(outside=outside)
    text = f"---\ndescription: d\nworkspace:\n  mode: isolated\n  path: {path}\n---\n"
    declared = [SubagentDeclaration("r", "d", workspace=path)] if source == "code" else []
    agent = harness(main, subagents=declared)
    if source != "code":
        stage(agent).go_on(call("write_file", {"path": "subagents/r.md", "content": text}), say("end"))
    runtime = Runtime([agent])
    for _ in range(2 - len(declared)):
        await runtime.run("boss", "go")
    stage(agent).go_on(spawn("r", "x"), say("end"))
    result = await runtime.run("boss", "go")
    where = "sub-agent 'r' in code: workspace" if source == "code" else "subagents/r.md:5: workspace.path"
    assert problems(agent) == [f"{where}: {path!r} {OUTSIDE}"]
    assert [record.getMessage() for record in caplog.records] == problems(agent)
    assert told(result) == ["Error: Unknown agent_id: r\nAvailable agent ids: general-purpose"]
    assert stage(agent).of_children == []


@pytest.mark.parametrize("root", ["../outside", "{outside}", "..", "/"])
async def test_a_definition_outside_is_taken_from_a_root_that_allows_it(
    tmp_path: Path, outside: Path, root: str
) -> None:
    declared = [
        SubagentDeclaration("a", "d", workspace="../outside/inner"),
        SubagentDeclaration("b", "d", workspace=outside, mode="shared"),
        SubagentDeclaration("c", "d", workspace=tmp_path / "main/defs"),
    ]
    write(tmp_path / "main", {"defs/AGENTS.md": "OWN"})
    roots = [root.format(outside=outside)]
    agent = harness(tmp_path / "main", [spawn(name, "x") for name in "abc"], subagents=declared, workspace_roots=roots)
    result = await Runtime([agent]).run("boss", "go")
    assert problems(agent) == []
    assert [text.rpartition("\n")[2] for text in told(result)] == ["did x"] * 3
    bases = sorted(system(request).partition("\n\n")[0] for request in stage(agent).of_children)
    assert bases == ["INNER SECRET", "OWN", "TOP SECRET"]


async def test_a_root_is_no_prefix(tmp_path: Path, outside: Path) -> None:
    write(tmp_path, {"outside-too/AGENTS.md": "SECRET"})
    declared = SubagentDeclaration("a", "d", workspace="../outside-too")
    agent = await looked(harness(tmp_path / "main", subagents=[declared], workspace_roots=["../outside"]))
    assert problems(agent) == [f"sub-agent 'a' in code: workspace: '../outside-too' {OUTSIDE}"]


LINK = "it is a symbolic link, and links are not followed"


async def test_a_folder_of_declarations_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    declare(tmp_path / "outside", "evil")
    declare(tmp_path / "outside", "evil", "name: evil\ndescription: d", folder=CLAUDE)
    main = tmp_path / "main"
    main.mkdir()
    (main / "subagents").symlink_to(tmp_path / "outside/subagents")
    (main / ".claude").symlink_to(tmp_path / "outside/.claude")
    agent = await looked(harness(main))
    assert list(sources(agent)) == ["general-purpose"]
    assert problems(agent) == [f"subagents: {LINK}", f".claude/agents: {LINK}"]


@pytest.mark.parametrize(
    ("link", "target", "answer"),
    [
        ("defs", "outside", f"MAIN/defs: {LINK}"),
        ("defs/AGENTS.md", "outside/AGENTS.md", f"AGENTS.md: {LINK}"),
        ("agents/own", "outside", f"MAIN/agents/own/workspace: {LINK}"),
        ("agents/own/workspace", "outside", f"MAIN/agents/own/workspace: {LINK}"),
    ],
)
async def test_a_link_on_the_way_to_a_sub_agents_folder_is_not_followed(
    tmp_path: Path, outside: Path, link: str, target: str, answer: str
) -> None:
    main = tmp_path / "main"
    (main / link).parent.mkdir(parents=True, exist_ok=True)
    (main / link).symlink_to(tmp_path / target)
    name = "defined" if link.startswith("defs") else "own"
    declared = [SubagentDeclaration("defined", "d", workspace="defs"), SubagentDeclaration("own", "d", inline="I")]
    agent = harness(main, spawn(name, "x"), subagents=declared)
    result = await Runtime([agent]).run("boss", "go")
    (text,) = told(result)
    assert text == f"Error: agent '{name}' could not be run: {answer.replace('MAIN', str(main))}"
    assert sorted(path.name for path in outside.iterdir()) == ["AGENTS.md", "inner"]
    assert stage(agent).of_children == []


async def test_a_child_cannot_reach_the_files_around_its_folder(tmp_path: Path) -> None:
    write(tmp_path, {"main/secret.txt": "S", "main/defs/AGENTS.md": "D"})
    paths = ["../secret.txt", "../../../secret.txt", str(tmp_path / "main/secret.txt"), "agents/../../../../secret.txt"]

    def child(request: Any) -> Any:
        if len(request.messages) == 2:
            return [call("read_file", {"path": path}) for path in paths]
        return say("\n".join([message.text for message in request.messages[3:]]))

    declared = [SubagentDeclaration("own", "d"), SubagentDeclaration("defined", "d", workspace="defs")]
    agent = harness(tmp_path / "main", [spawn("own", "x"), spawn("defined", "x")], child=child, subagents=declared)
    result = await Runtime([agent]).run("boss", "go")
    for text in told(result):
        lines = text.partition("reply:\n")[2].splitlines()
        assert ["leads out of the workspace" in line or "it is absolute" in line for line in lines] == [True] * 4


async def test_a_child_has_no_wider_shell_or_filesystem_than_its_parent(tmp_path: Path) -> None:
    declare(
        tmp_path, "by-file", "description: d\nbuiltin_tools: [shell, write_file, read_file]\nworkspace: {mode: shared}"
    )
    declared = SubagentDeclaration("coded", "d", builtin_tools=["shell", "write_file", "read_file"], mode="shared")
    agent = harness(
        tmp_path, [spawn("coded", "x"), spawn("by-file", "x")], subagents=[declared], builtin_tools=["read_file"]
    )
    await Runtime([agent]).run("boss", "go")
    assert [offered(request) for request in stage(agent).of_children] == [["read_file"]] * 2


async def test_names_of_any_script_spawn_work_in_their_folders_and_are_sent_messages(tmp_path: Path) -> None:
    declare(tmp_path, "评审")
    agent = harness(
        tmp_path,
        [spawn("评审", "x", label="a"), spawn("re\u0301vu", "x"), spawn("caf\u00e9", "x")],
        send("y", label="a"),
        subagents=[SubagentDeclaration("r\u00e9vu", "d", inline="x"), "cafe\u0301"],
        subagent_factories={"fe\u0301e": helper},
    )
    known = Agent("caf\u00e9", ScriptedModel([say("known")]), description="d")
    result = await Runtime([agent, known]).run("boss", "go")
    assert [text.splitlines()[-1] for text in told(result)] == ["did x", "did x", "known", "did y"]
    assert (tmp_path / "agents/评审/workspace").is_dir()
    assert list(sources(agent)) == ["general-purpose", "r\u00e9vu", "caf\u00e9", "评审", "f\u00e9e"]


def test_the_tool_of_an_agent_needs_a_name_that_models_accept() -> None:
    agent = Agent("评审", "x:y")
    refusal = "评审' must be 1 to 128 ASCII letters"
    with pytest.raises(ConfigurationError, match=refusal):
        Agent("a", "x:y", tools=[agent.as_tool()])
    with pytest.raises(ConfigurationError, match=refusal):
        Agent("a", "x:y", handoffs=[agent])


async def test_without_looking_at_the_workspace_no_file_declares_anything(tmp_path: Path) -> None:
    declare(tmp_path, "a")
    agent = harness(tmp_path, disable_filesystem=True, disable_workspace_context=True)
    assert list(sources(await looked(agent))) == ["general-purpose"]
    assert list(sources(await looked(harness(tmp_path, disable_filesystem=True)))) == ["general-purpose", "a"]


async def test_a_root_outside_is_under_the_rules_of_the_parents_filesystem(tmp_path: Path, outside: Path) -> None:
    class ReadOnly(LocalFilesystem):
        def write(self, path: str, data: bytes) -> None:
            raise PathDenied(path, "nothing is written here")

    def child(request: Any) -> Any:
        if len(request.messages) == 2:
            return call("write_file", {"path": "AGENTS.md", "content": "changed"})
        return say(request.messages[-1].text)

    declared = [SubagentDeclaration("r", "d", workspace="../outside"), SubagentDeclaration("s", "d", mode="shared")]
    agent = HarnessAgent(
        "boss",
        Stage([spawn("r", "x"), spawn("s", "x")], say("end"), child=child),
        filesystem=ReadOnly(tmp_path / "main"),
        workspace_roots=[".."],
        subagents=declared,
    )
    result = await Runtime([agent]).run("boss", "go")
    assert [text.rpartition("reply:\n")[2] for text in told(result)] == [
        "denied: AGENTS.md: nothing is written here"
    ] * 2
    assert (outside / "AGENTS.md").read_text() == "TOP SECRET"
