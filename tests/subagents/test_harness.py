"""The harness: when it has sub-agents, where they work, what they are told, and what general-purpose mirrors."""

from __future__ import annotations

import builtins
import os
import socket
from pathlib import Path
from typing import Any, cast

import pytest

from retinue import (
    Agent,
    Compaction,
    ConfigurationError,
    HarnessAgent,
    HookContext,
    LocalFilesystem,
    Permissions,
    Plugin,
    Registrar,
    RunStatus,
    Runtime,
    StateCommand,
    StateKey,
    StoreFilesystem,
    SubagentDeclaration,
    ToolContext,
    ToolOutput,
    tool,
)
from retinue.subagents.prompt import SUBAGENT_CONTEXT
from retinue.testing import RecordingSink, ScriptedModel, call, say
from retinue.workspace.context import AGENTS_FILES, WorkspaceContext
from tests.subagents.stage import Stage, declare, harness, offered, spawn, stage, system, told, write

FILE_TOOLS = ["read_file", "write_file", "edit_file", "list_files", "glob_files", "grep_files"]
AGENT_TOOLS = ["agent_spawn", "agent_send", "agent_list", "agent_close"]


@tool
async def lookup(key: str) -> str:
    """Find a record."""
    return f"record of {key}"


@tool
async def publish(text: str) -> str:
    """Publish a text."""
    return "published"


@pytest.mark.parametrize(
    ("options", "has_them"),
    [
        ({}, True),
        ({"leaf": True}, False),
        ({"disable_subagents": True}, False),
        ({"leaf": True, "subagents": [SubagentDeclaration("a", "b")]}, False),
        ({"disable_filesystem": True, "disable_workspace_context": True}, True),
        ({"general_purpose": False}, True),
    ],
)
async def test_when_sub_agents_are_installed(tmp_path: Path, options: dict[str, Any], has_them: bool) -> None:
    agent = harness(tmp_path, **options)
    result = await Runtime([agent]).run("boss", "go")
    assert result.status is RunStatus.COMPLETED
    (request,) = stage(agent).requests
    files = [] if options.get("disable_filesystem") else FILE_TOOLS
    assert [name for name in offered(request) if not name.startswith("task_")] == files + (AGENT_TOOLS * has_them)
    shows_section = has_them and options.get("general_purpose", True)
    assert (request.messages[0].role == "system") is shows_section
    assert ("# Sub-agents" in system(request)) is shows_section
    assert agent.has_subagents is has_them


async def test_without_a_model_it_has_none_and_says_why_it_cannot_run(tmp_path: Path) -> None:
    agent = HarnessAgent("boss", workspace=tmp_path, subagents=[SubagentDeclaration("a", "b")])
    assert (agent.has_subagents, agent.catalog, agent.model) == (False, None, None)
    with pytest.raises(ConfigurationError, match="agent 'boss' has no model"):
        await Runtime([agent]).run("boss", "go")


async def test_without_a_model_of_its_own_it_runs_on_the_one_given_with_the_run(tmp_path: Path) -> None:
    agent = HarnessAgent("boss", workspace=tmp_path)
    model = ScriptedModel([say("hi")])
    assert (await Runtime([agent]).run("boss", "go", model=model)).response == "hi"
    assert offered(model.requests[0]) == FILE_TOOLS


MAIN = "MAIN RULES"
DEFINED = "DEFINED RULES"


def context_of(text: str) -> str:
    return f'What the workspace says about itself:\n\n<file path="AGENTS.md">\n{text}\n</file>'


ROWS = [
    pytest.param(None, SUBAGENT_CONTEXT, MAIN, ".", id="1 general-purpose"),
    pytest.param({"workspace": "defs/r"}, f"{DEFINED}\n\n{SUBAGENT_CONTEXT}", None, "defs/r", id="2 path, isolated"),
    pytest.param(
        {"workspace": "defs/r", "mode": "shared"}, f"{DEFINED}\n\n{SUBAGENT_CONTEXT}", MAIN, ".", id="3 path, shared"
    ),
    pytest.param({"inline": "INLINE"}, f"INLINE\n\n{SUBAGENT_CONTEXT}", None, "agents/r/workspace", id="4 isolated"),
    pytest.param({"inline": "INLINE", "mode": "shared"}, f"INLINE\n\n{SUBAGENT_CONTEXT}", MAIN, ".", id="5 shared"),
    pytest.param({"workspace": "empty"}, SUBAGENT_CONTEXT, None, "empty", id="2 without AGENTS.md"),
    pytest.param({"workspace": "empty", "mode": "shared"}, SUBAGENT_CONTEXT, MAIN, ".", id="3 without AGENTS.md"),
    pytest.param({}, SUBAGENT_CONTEXT, None, "agents/r/workspace", id="4 without a text"),
    pytest.param({"workspace": "."}, f"{MAIN}\n\n{SUBAGENT_CONTEXT}", None, ".", id="2 in the main workspace"),
    pytest.param(
        {"workspace": ".", "mode": "shared"}, f"{MAIN}\n\n{SUBAGENT_CONTEXT}", None, ".", id="3 of the main workspace"
    ),
]


def working(request: Any) -> Any:
    if request.messages[-1].role == "user":
        return call("write_file", {"path": "made.txt", "content": "x"})
    return say("made")


@pytest.mark.parametrize("source", ["code", "markdown"])
@pytest.mark.parametrize(("options", "base", "agents_file", "folder"), ROWS)
async def test_the_five_rows_of_workspaces(
    tmp_path: Path, source: str, options: dict[str, Any] | None, base: str, agents_file: str | None, folder: str
) -> None:
    write(tmp_path, {"AGENTS.md": MAIN, "defs/r/AGENTS.md": DEFINED, "empty/x": ""})
    declared: list[SubagentDeclaration] = []
    if options is not None and source == "code":
        declared = [SubagentDeclaration("r", "d", **options)]
    elif options is not None:
        given = {"mode": options.get("mode"), "path": options.get("workspace")}
        front = "description: d\nworkspace:\n" + "".join([f"  {k}: {v}\n" for k, v in given.items() if v])
        declare(tmp_path, "r", front.rstrip(), options.get("inline", ""))
    name = "general-purpose" if options is None else "r"
    agent = harness(tmp_path, spawn(name, "the task"), child=working, subagents=declared)
    result = await Runtime([agent]).run("boss", "go")
    assert told(result) == [
        f"agent_key: agent:{name}:<1>\nagent_id: {name}\nsession_id: sub-<1>\nstatus: ok\nreply:\nmade"
    ]
    first = stage(agent).of_children[0]
    assert system(first) == "\n\n".join([base, *([context_of(agents_file)] if agents_file else [])])
    assert [message.text for message in first.messages[1:]] == ["the task"]
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("made.txt")] == [
        "made.txt" if folder == "." else f"{folder}/made.txt"
    ]


async def test_the_folder_of_an_isolated_sub_agent_is_made_and_its_agents_file_is_told(tmp_path: Path) -> None:
    own = tmp_path / "agents/r/workspace"
    agent = harness(tmp_path, spawn("r", "a"), spawn("r", "b"), subagents=[SubagentDeclaration("r", "d", inline="I")])
    assert not own.exists()
    runtime = Runtime([agent])
    await runtime.run("boss", "go", thread_id="t")
    assert own.is_dir()
    (own / "AGENTS.md").write_text("OWN")
    stage(agent).go_on(spawn("r", "c"), say("end"))
    await runtime.run("boss", "go", thread_id="t")
    shown = [system(request) for request in stage(agent).of_children]
    assert shown == [f"I\n\n{SUBAGENT_CONTEXT}"] * 2 + [f"I\n\n{SUBAGENT_CONTEXT}\n\n{context_of('OWN')}"]


async def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    own = tmp_path / "agents/r/workspace"

    def remove(request: Any) -> Any:
        own.rmdir()
        return spawn("r", "again")

    agent = harness(tmp_path, spawn("r", "x"), remove, subagents=[SubagentDeclaration("r", "d")])
    await Runtime([agent]).run("boss", "go")
    assert own.is_dir()


async def test_a_shell_without_files_has_its_folder_too(tmp_path: Path) -> None:
    def child(request: Any) -> Any:
        return call("shell", {"command": "pwd"}) if len(request.messages) == 2 else say(request.messages[-1].text)

    agent = harness(
        tmp_path,
        spawn("r", "x"),
        child=child,
        subagents=[SubagentDeclaration("r", "d")],
        disable_filesystem=True,
        disable_shell=False,
    )
    result = await Runtime([agent]).run("boss", "go")
    assert told(result)[0].endswith(f"reply:\nexit code: 0\n{tmp_path}/agents/r/workspace\n")


async def test_a_definition_is_read_when_it_is_spawned_and_may_serve_several(tmp_path: Path) -> None:
    write(tmp_path, {"defs/r/AGENTS.md": "\ufeffFIRST\n"})
    twins = [
        SubagentDeclaration(name, "d", workspace="./defs/r", mode=mode)
        for name, mode in (("a", "isolated"), ("b", "shared"))
    ]

    def change(request: Any) -> Any:
        write(tmp_path, {"defs/r/AGENTS.md": "SECOND VERSION"})
        return spawn("a", "again")

    agent = harness(tmp_path, [spawn("a", "x"), spawn("b", "y")], change, subagents=twins)
    await Runtime([agent]).run("boss", "go")
    bases = [system(request).partition("\n\n")[0] for request in stage(agent).of_children]
    assert bases == ["FIRST", "FIRST", "SECOND VERSION"]


async def test_no_context_file_is_shown_twice_and_the_budget_cuts_where_it_shows(tmp_path: Path) -> None:
    write(tmp_path, {"AGENTS.md": "RULES", "docs/a.md": "A" * 100})
    files = ["docs/a.md", "./AGENTS.md", "docs/../docs/a.md", "gone.md", "../out.md"]
    agent = harness(tmp_path, context_files=files, max_context_tokens=20, general_purpose=False)
    sink = RecordingSink()
    await Runtime([agent]).run("boss", "go", sinks=[sink])
    cut = f"{'A' * 75}\n[25 more characters do not fit: read docs/a.md with read_file]"
    shown = f'<file path="AGENTS.md">\nRULES\n</file>\n\n<file path="docs/a.md">\n{cut}\n</file>'
    assert system(stage(agent).requests[0]) == f"What the workspace says about itself:\n\n{shown}"
    assert [event.data for event in sink.of("custom")] == [
        {
            "type": "workspace_context",
            "problems": [
                "gone.md: there is no such file to show to the model",
                "../out.md: it leads out of the workspace",
            ],
        }
    ]


async def test_context_files_are_read_again_only_where_they_have_changed(tmp_path: Path) -> None:
    class Counting(LocalFilesystem):
        reads = 0

        def read(self, path: str) -> bytes:
            self.reads += 1
            return super().read(path)

    write(tmp_path, {"AGENTS.md": "ONE"})
    files = Counting(tmp_path)
    agent = HarnessAgent("boss", Stage(say("1"), say("2"), say("3")), filesystem=files, general_purpose=False)
    runtime = Runtime([agent])
    await runtime.run("boss", "go")
    await runtime.run("boss", "go")
    assert files.reads == 1
    write(tmp_path, {"AGENTS.md": "OTHER"})
    await runtime.run("boss", "go")
    assert files.reads == 2
    assert [system(request) for request in stage(agent).requests] == [context_of(t) for t in ("ONE", "ONE", "OTHER")]


noted: StateKey[list[str], str] = StateKey(
    "noted", list[str], update=str, reduce=lambda known, new: [*known, new], merge="commutative", default=list[str]
)


class Notes(Plugin):
    """State, a tool and hooks, to see what of it a child has."""

    name = "notes"

    def __init__(self, inherited: bool) -> None:
        self.inherited, self.seen = inherited, list[tuple[str, str]]()

    def register(self, r: Registrar) -> None:
        r.key(noted)
        r.tool(count)
        r.hook("before_inference", self.watch)

    def watch(self, ctx: HookContext) -> StateCommand | None:
        self.seen.append((ctx.run.agent, ctx.phase))
        return None


@tool
async def count(ctx: ToolContext) -> ToolOutput:
    """Count."""
    return ToolOutput(f"{len(ctx.state(noted))} noted", update={noted: "one"})


@pytest.mark.parametrize("inherited", [False, True])
async def test_general_purpose_has_the_tools_state_and_hooks_of_its_parent_once(
    tmp_path: Path, inherited: bool
) -> None:
    def child(request: Any) -> Any:
        done = len(request.messages) // 2
        return call("count") if done < 3 else say(request.messages[-1].text)

    notes = Notes(inherited)
    agent = harness(
        tmp_path,
        spawn("general-purpose", "x"),
        child=child,
        tools=[lookup],
        plugins=[notes],
        settings={"temperature": 0},
    )
    result = await Runtime([agent]).run("boss", "go")
    assert told(result)[0].endswith("status: ok\nreply:\n1 noted")
    request = stage(agent).of_children[0]
    assert offered(request) == ["lookup", *FILE_TOOLS, "count"]
    assert dict(request.settings) == {"temperature": 0}
    hook = "before_inference"
    assert notes.seen == [("boss", hook), *[("general-purpose", hook)] * 3, ("boss", hook)]


@pytest.mark.parametrize("options", [{}, {"disable_filesystem": True}, {"builtin_tools": []}])
async def test_the_folder_of_an_isolated_child_is_made_whatever_its_tools_are(tmp_path: Path, options: Any) -> None:
    declared = SubagentDeclaration("r", "d", inline="x")
    await Runtime([harness(tmp_path, spawn("r", "x"), subagents=[declared], **options)]).run("boss", "go")
    assert (tmp_path / "agents/r/workspace").is_dir()


class Brings(Plugin):
    """A plugin with two tools."""

    name = "brings"

    def register(self, r: Registrar) -> None:
        @tool
        def fetch() -> str:
            """Fetch it."""
            return "done"

        @tool
        def post() -> str:
            """Post it."""
            return "done"

        r.tool(fetch)
        r.tool(post)


@pytest.mark.parametrize(
    ("given", "has"),
    [
        ({}, ["lookup", "fetch", "post"]),
        ({"tools": ["fetch"]}, ["fetch"]),
        ({"tools": ["lookup", "post"]}, ["lookup", "post"]),
        ({"tools": []}, []),
        ({"disallowed_tools": ["post"]}, ["lookup", "fetch"]),
    ],
)
async def test_a_declared_child_inherits_the_tools_of_plugins(tmp_path: Path, given: Any, has: list[str]) -> None:
    declared = SubagentDeclaration("r", "d", builtin_tools=[], **given)
    agent = harness(tmp_path, spawn("r", "x"), tools=[lookup], plugins=[Brings()], subagents=[declared])
    await Runtime([agent]).run("boss", "go")
    assert agent.catalog is not None
    assert agent.catalog.problems == ()
    assert offered(stage(agent).of_children[0]) == has


@pytest.mark.parametrize("inherited", [False, True])
async def test_a_declared_child_has_the_state_of_inherited_tools_and_only_inherited_hooks(
    tmp_path: Path, inherited: bool
) -> None:
    class Keys(Notes):
        name = "keys"

        def register(self, r: Registrar) -> None:
            r.key(noted)
            r.hook("before_inference", self.watch)

    def child(request: Any) -> Any:
        return call("count") if len(request.messages) == 2 else say(request.messages[-1].text)

    notes = Keys(inherited)
    declared = SubagentDeclaration("r", "d", tools=["count"], builtin_tools=[])
    agent = harness(tmp_path, spawn("r", "x"), child=child, tools=[count], plugins=[notes], subagents=[declared])
    result = await Runtime([agent]).run("boss", "go")
    assert told(result)[0].endswith("status: ok\nreply:\n0 noted")
    assert [name for name, _ in notes.seen] == ["boss", *["r"] * 2 * inherited, "boss"]


async def test_general_purpose_has_the_settings_of_its_parent(tmp_path: Path) -> None:
    write(tmp_path, {"AGENTS.md": "RULES", "more.md": "MORE"})
    compaction = Compaction(max_tokens=1_000_000)
    parent = HarnessAgent(
        "boss",
        "testing:x",
        "You are the boss.",
        [lookup],
        max_steps=7,
        conflicts="last_wins",
        workspace=tmp_path,
        context_files=["more.md"],
        max_context_tokens=123,
        compaction=compaction,
        tool_result_limit=456,
        builtin_tools=["read_file", "shell"],
        disable_shell=False,
    )
    mirror = parent.mirror("general-purpose")
    same = ("max_steps", "conflicts", "settings", "files", "context_files", "max_context_tokens", "compaction")
    same = (*same, "tool_result_limit", "result_limit", "own_tools", "builtin_names", "disable_filesystem")
    same = (*same, "disable_shell", "disable_workspace_context")
    assert {name: getattr(mirror, name) for name in same} == {name: getattr(parent, name) for name in same}
    assert (mirror.model, mirror.leaf, mirror.has_subagents, mirror.catalog) == (None, True, False, None)
    assert mirror.instructions == SUBAGENT_CONTEXT
    assert [plugin.name for plugin in mirror.plugins] == ["workspace_context", "compaction", "result_files"]


@pytest.mark.parametrize(
    ("switch", "tools"),
    [
        ({"disable_filesystem": True}, ["lookup"]),
        ({"disable_shell": False}, ["lookup", *FILE_TOOLS, "shell"]),
        ({"disable_filesystem": True, "disable_shell": False}, ["lookup", "shell"]),
        ({"disable_workspace_context": True}, ["lookup", *FILE_TOOLS]),
        ({"builtin_tools": ["read_file"]}, ["lookup", "read_file"]),
    ],
)
@pytest.mark.parametrize("name", ["general-purpose", "declared", "by-file"])
async def test_the_switches_of_a_parent_hold_for_its_children(
    tmp_path: Path, switch: dict[str, Any], tools: list[str], name: str
) -> None:
    write(tmp_path, {"AGENTS.md": "RULES"})
    declare(tmp_path, "by-file", "description: d\nworkspace: {mode: shared}")
    declared = SubagentDeclaration("declared", "d", mode="shared")
    agent = harness(tmp_path, spawn(name, "x"), tools=[lookup], subagents=[declared], **switch)
    result = await Runtime([agent]).run("boss", "go")
    assert told(result)[0].endswith("reply:\ndid x")
    (request,) = stage(agent).of_children
    assert offered(request) == tools
    assert ("RULES" in system(request)) is ("disable_workspace_context" not in switch)


async def test_long_results_of_a_child_are_kept_in_its_own_workspace(tmp_path: Path) -> None:
    @tool
    async def much() -> str:
        """Say much."""
        return "x" * 1000

    def child(request: Any) -> Any:
        return call("much", id="c") if len(request.messages) == 2 else say(request.messages[-1].text[-200:])

    declared = SubagentDeclaration("r", "d")
    agent = harness(
        tmp_path,
        [spawn("general-purpose", "x"), spawn("r", "x")],
        child=child,
        tools=[much],
        tool_result_limit=100,
        subagents=[declared],
    )
    await Runtime([agent]).run("boss", "go")
    for folder in (tmp_path, tmp_path / "agents/r/workspace"):
        assert (folder / "tool_results/c.txt").read_text() == "x" * 1000


@pytest.mark.parametrize("way", ["off", "code", "factory", "file"])
async def test_general_purpose_can_be_switched_off_or_overridden(tmp_path: Path, way: str) -> None:
    own = SubagentDeclaration("general-purpose", "my own", inline="MINE")
    if way == "file":
        declare(tmp_path, "general-purpose", "description: my own", "MINE")
    given: dict[str, Any] = {
        "off": {"general_purpose": False},
        "code": {"subagents": [own]},
        "factory": {"subagent_factories": {"general-purpose": ("my own", lambda ctx: Agent("g", Stage(), "MINE"))}},
        "file": {},
    }[way]
    agent = harness(tmp_path, **given)
    await Runtime([agent]).run("boss", "go")
    assert agent.catalog is not None
    assert [entry.description for entry in agent.catalog.entries.values()] == ([] if way == "off" else ["my own"])
    assert agent.catalog.problems == ()


async def test_making_one_looks_at_no_file_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError(f"I/O: {args}")

    for module, names in (
        (os, "open stat lstat scandir listdir mkdir makedirs"),
        (builtins, "open"),
        (socket, "socket"),
    ):
        for name in names.split():
            monkeypatch.setattr(module, name, refuse)
    workspace = tmp_path / "none"
    declared = [SubagentDeclaration("a", "b", workspace="defs"), SubagentDeclaration("c", "d", url="http://e.example")]
    agent = HarnessAgent(
        "boss",
        Stage(),
        "",
        [lookup],
        workspace=workspace,
        subagents=declared,
        subagent_factories={"f": lambda ctx: Agent("f")},
        context_files=["x.md"],
        workspace_roots=["../shared"],
        disable_shell=False,
    )
    assert agent.catalog is not None
    assert list(agent.catalog.entries) == ["general-purpose", "a", "c", "f"]
    Runtime([agent])
    monkeypatch.undo()
    assert not workspace.exists()


async def test_it_works_wherever_an_agent_does(tmp_path: Path) -> None:
    write(tmp_path, {"AGENTS.md": "RULES"})

    def fresh(name: str) -> HarnessAgent:
        return harness(tmp_path, spawn("general-purpose", "sub"), name=name)

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        outcome = await ctx.run_child(fresh("child"), "work")
        return f"{outcome.status}: {outcome.response}"

    ways = {
        "delegate": Agent("top", ScriptedModel([call("delegate"), say("done")]), tools=[delegate]),
        "as_tool": Agent(
            "top",
            ScriptedModel([call("agent_run_helper", {"prompt": "x"}), say("done")]),
            tools=[fresh("helper").as_tool()],
        ),
        "task": Agent(
            "top",
            ScriptedModel([call("task", {"subagent_type": "helper", "description": "x"}), say("done")]),
            subagents=[fresh("helper")],
        ),
    }
    answers = {way: [told(await Runtime([top]).run("top", "go")), top.name] for way, top in ways.items()}
    assert answers == {
        "delegate": [["completed: end"], "top"],
        "as_tool": [["end"], "top"],
        "task": [["end"], "top"],
    }
    heir = fresh("heir")
    top = Agent("top", ScriptedModel([call("transfer_to_heir", {})]), handoffs=[heir])
    result = await Runtime([top]).run("top", "go")
    assert (result.status, result.response) == (RunStatus.COMPLETED, "end")
    assert "# Sub-agents" in system(stage(heir).requests[0])
    assert told(result)[1].endswith("status: ok\nreply:\ndid sub")


async def test_two_harnesses_hand_over_each_with_its_own_sub_agents(tmp_path: Path) -> None:
    second = harness(
        tmp_path / "b", spawn("only-b", "x"), name="second", subagents=[SubagentDeclaration("only-b", "d")]
    )
    first = harness(tmp_path / "a", call("transfer_to_second", {}), name="first", handoffs=[second])
    result = await Runtime([first]).run("first", "go")
    assert (result.status, result.response) == (RunStatus.COMPLETED, "end")
    assert told(result)[1].endswith("status: ok\nreply:\ndid x")
    assert system(stage(first).requests[0]).count("# Sub-agents") == 1
    assert system(stage(second).of_parent[0]).count("# Sub-agents") == 1
    assert "only-b" not in system(stage(first).requests[0])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"subagents": [3]}, "a sub-agent is a SubagentDeclaration, an Agent or a name, not 3"),
        ({"builtin_tools": ["raed_file"]}, "builtin_tools is a list of some of read_file, "),
        ({"builtin_tools": "read_file"}, "builtin_tools is a list of some of read_file, "),
        ({"filesystem": "notes"}, "agent 'boss': filesystem is not a path: write workspace='notes'"),
        ({"max_context_tokens": -1}, "max_context_tokens must be 0 or more, got -1"),
        ({"subagent_factories": {"c": ("only text",)}}, "sub-agent 'c': a factory is a function of a ToolContext"),
        ({"subagent_factories": {"c": "name"}}, "sub-agent 'c': a factory is a function of a ToolContext"),
        (
            {"filesystem": StoreFilesystem("sqlite:///unused.db"), "disable_shell": False, "disable_filesystem": True},
            "agent 'boss': no command can be run on the files of .*: leave disable_shell on",
        ),
        ({"tools": [tool(name="read_file")(lambda: "x")]}, "has two tools named 'read_file'"),
    ],
)
async def test_misuse_is_an_error_at_once(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        harness(tmp_path, **options)


def test_a_workspace_is_a_path() -> None:
    with pytest.raises(ConfigurationError, match="agent 'boss': workspace is the path of a folder, not 5"):
        HarnessAgent("boss", "offline:rules", workspace=cast("Any", 5))


async def test_permissions_of_a_parent_hold_for_every_kind_of_child(tmp_path: Path) -> None:
    ran: list[str] = []

    @tool
    async def danger() -> str:
        """Dangerous."""
        ran.append("danger")
        return "boom"

    def child(request: Any) -> Any:
        return (
            [call("danger"), call("write_file", {"path": "a", "content": "b"})]
            if len(request.messages) == 2
            else say("x")
        )

    def loose(ctx: ToolContext) -> Agent:
        model = ScriptedModel([call("danger"), say("x")])
        return Agent("loose", model, tools=[danger], plugins=[Permissions(allow=["*"])])

    agent = harness(
        tmp_path,
        [spawn(name, "x") for name in ("general-purpose", "declared", "loose")],
        child=child,
        tools=[danger],
        plugins=[Permissions(deny=["danger", "write_file"])],
        subagents=[SubagentDeclaration("declared", "d", mode="shared")],
        subagent_factories={"loose": loose},
    )
    sink = RecordingSink()
    result = await Runtime([agent]).run("boss", "go", sinks=[sink])
    assert [text.splitlines()[3] for text in told(result)] == ["status: ok"] * 3
    assert ran == []
    assert not (tmp_path / "a").exists()
    refused = [event.status for event in sink.of("tool_call_finished") if event.tool_name in ("danger", "write_file")]
    assert refused == ["failed"] * 5


async def test_claude_md_is_read_beside_agents_md_unless_it_is_the_same(tmp_path: Path) -> None:
    write(tmp_path, {"AGENTS.md": "RULES", "CLAUDE.md": "MORE RULES"})
    context = WorkspaceContext(LocalFilesystem(tmp_path), AGENTS_FILES)
    context.refresh()
    assert context.text == f'{context_of("RULES")}\n\n<file path="CLAUDE.md">\nMORE RULES\n</file>'
    write(tmp_path, {"CLAUDE.md": "RULES\n"})
    context.refresh()
    assert (context.text, context.problems) == (context_of("RULES"), ())
    (tmp_path / "CLAUDE.md").unlink()
    (tmp_path / "CLAUDE.md").symlink_to("AGENTS.md")
    context.refresh()
    assert (context.text, context.problems) == (context_of("RULES"), ())
