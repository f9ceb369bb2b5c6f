"""The table of escape attempts behind SECURITY.md: none may succeed.

An attempt succeeds if it shows SECRET, prints or calls ESCAPED, or changes anything outside. The tests that SECURITY.md
names try each promise in more ways; this table has one row for each way out that is known.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from retinue import (
    Agent,
    ConfigurationError,
    HarnessAgent,
    LocalFilesystem,
    Permissions,
    Runtime,
    SandboxFilesystem,
    StoreFilesystem,
    tool,
)
from retinue.testing import ScriptedModel, call, say
from tests.remote.test_hostile_server import SECRETS, all_that_is_known_of, echoing, server
from tests.workspace.commands import Shell, usable_image

SECRET = "TOP-SECRET-7261"


class Place:
    """A workspace beside a folder with a secret."""

    def __init__(self, base: Path) -> None:
        self.root, self.outside = base / "root", base / "outside"
        self.root.mkdir()
        self.outside.mkdir()
        (self.outside / "secret.txt").write_text(SECRET)
        (base / "secret.txt").write_text(SECRET)
        self.before = self.contents()

    def contents(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.outside.iterdir()}

    def has_leaked(self, seen: str) -> bool:
        return SECRET in seen or "ESCAPED" in seen or self.contents() != self.before


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def told(agent: Agent, *agents: Agent, user: str | None = None) -> str:
    """All that the models of a run read."""
    result = await Runtime([agent, *agents]).run(agent, "go", user_id=user)
    return "\n".join([message.text for message in result.messages if message.role != "user"])


# --- file tools

FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "up": ("read_file", {"path": "../secret.txt"}),
    "up from a folder": ("read_file", {"path": "a/../../outside/secret.txt"}),
    "absolute": ("read_file", {"path": "{outside}/secret.txt"}),
    "absolute with a scheme": ("read_file", {"path": "file://{outside}/secret.txt"}),
    "link to a file": ("read_file", {"path": "to-file"}),
    "link to a folder": ("read_file", {"path": "to-folder/secret.txt"}),
    "link to the root of the system": ("read_file", {"path": "to-system{outside}/secret.txt"}),
    "by a process": ("read_file", {"path": "to-self/root{outside}/secret.txt"}),
    "backslashes": ("read_file", {"path": "..\\secret.txt"}),
    "a byte of zero": ("read_file", {"path": "to-file\0.txt"}),
    "list up": ("list_files", {"path": ".."}),
    "list a link": ("list_files", {"path": "to-folder"}),
    "glob up": ("glob_files", {"pattern": "../**/*"}),
    "glob in braces": ("glob_files", {"pattern": "{../outside,.}/*.txt"}),
    "glob through a link": ("glob_files", {"pattern": "**/secret*"}),
    "grep everything": ("grep_files", {"pattern": "TOP-SECRET"}),
    "grep a link": ("grep_files", {"pattern": "TOP-SECRET", "path": "to-folder"}),
    "write up": ("write_file", {"path": "../outside/new.txt", "content": "x"}),
    "write through a link": ("write_file", {"path": "to-folder/new.txt", "content": "x"}),
    "write to a link": ("write_file", {"path": "to-file", "content": "x"}),
    "write to nothing": ("write_file", {"path": "dangling", "content": "x"}),
    "edit through a link": ("edit_file", {"path": "to-file", "old": "TOP", "new": "x"}),
    "records of tasks": ("read_file", {"path": "agents/a/tasks/t.json"}),
    "records of tasks by another way": ("grep_files", {"pattern": "TOP-SECRET", "path": "agents/./a//tasks"}),
}


@pytest.mark.parametrize("name", FILES)
async def test_file_tools(place: Place, name: str) -> None:
    links = {
        "to-file": place.outside / "secret.txt",
        "to-folder": place.outside,
        "to-system": "/",
        "to-self": "/proc/self",
        "dangling": place.outside / "new.txt",
    }
    for link, target in links.items():
        (place.root / link).symlink_to(target)
    (place.root / "agents/a/tasks").mkdir(parents=True)
    (place.root / "agents/a/tasks/t.json").write_text(SECRET)
    used, args = FILES[name]
    given = {key: value.replace("{outside}", str(place.outside)) for key, value in args.items()}
    agent = HarnessAgent("a", ScriptedModel([call(used, given), say("done")]), workspace=place.root)
    seen = (await told(agent)).replace("'TOP-SECRET'", "")  # an answer repeats the pattern
    assert not place.has_leaked(seen), seen


# --- the sandbox

COMMANDS = {
    "read outside": "cat {outside}/secret.txt",
    "read by a link": "ln -s {outside} out; cat out/secret.txt",
    "read by the first process": "cat /proc/1/root{outside}/secret.txt /proc/1/cwd/../outside/secret.txt",
    "the environment": "env; cat /proc/*/environ",
    "write outside": "echo x > {outside}/new.txt",
    "write to the system": "touch /usr/escaped /etc/escaped /dev/escaped && echo ESCAPED",
    "settings of the kernel": "echo x > /proc/sys/kernel/core_pattern && echo ESCAPED",
    "mount": "mount -t tmpfs none /tmp && echo ESCAPED",
    "more namespaces": "unshare -Urm sh -c 'mount --bind / /tmp' && echo ESCAPED",
    "change root": "chroot /proc/1/root /bin/true && echo ESCAPED",
    "end a process": "kill -9 {pid} && echo ESCAPED",
    "see a process": "ps aux 2>/dev/null | grep [r]etinue-bystander && echo ESCAPED; cat /proc/{pid}/cmdline && echo ESCAPED",
    "the network": "exec 3<>/dev/tcp/127.0.0.1/{port} && echo ESCAPED",
    "a device": "cat /dev/mem /dev/sda /dev/vda >/dev/null 2>&1 && echo ESCAPED",
    "a set-user-id program": "cp /bin/sh suid; chmod u+s suid; ./suid -p -c 'cat /proc/self/status' | grep 'CapEff:.*[1-9a-f]' && echo ESCAPED",
    "survive": "setsid sh -c 'sleep 9{port}' >/dev/null 2>&1 &",
}


@pytest.fixture
def bystander() -> Iterator[int]:
    process = subprocess.Popen(["sh", "-c", "sleep 3600; : retinue-bystander"], start_new_session=True)
    yield process.pid
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)  # the shell and what it runs
    process.wait()


@pytest.fixture(params=["bwrap", "container"])
def image(request: pytest.FixtureRequest, place: Place) -> str | None:
    """The image of the sandbox; None for one of bwrap."""
    image = usable_image() if request.param == "container" else None
    if image is None and request.param == "container":
        pytest.skip("no engine here can run a small image")
    try:
        SandboxFilesystem(place.root, image=image).check_commands()
    except ConfigurationError as exc:
        pytest.skip(str(exc))
    return image


@pytest.mark.parametrize(
    ("name", "network"), [(name, on) for name in COMMANDS for on in (False, True) if not on or name != "the network"]
)
async def test_sandbox(
    place: Place, bystander: int, image: str | None, name: str, network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        line = COMMANDS[name].format(outside=place.outside, pid=bystander, port=port)
        seen = await Shell(SandboxFilesystem(place.root, network=network, image=image))(f"bash -c {shlex.quote(line)}")
    assert not place.has_leaked(seen), seen
    assert f"sleep\x009{port}" not in all_command_lines()  # a number of its own: other tests run at the same time


async def test_outside_a_sandbox_the_attempts_succeed(place: Place) -> None:
    for name in ("read outside", "read by a link"):
        seen = await Shell(LocalFilesystem(place.root))(COMMANDS[name].format(outside=place.outside))
        assert place.has_leaked(seen)
    await Shell(LocalFilesystem(place.root))(COMMANDS["write outside"].format(outside=place.outside))
    assert place.has_leaked("")


def all_command_lines() -> str:
    lines: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return "\n".join(lines)


# --- permissions

CALLS = {
    "the value": ("pay(amount=1000)", '{"amount": 1000}'),
    "as a fraction": ("pay(amount=1000)", '{"amount": 1000.0}'),
    "with an exponent": ("pay(amount=1000)", '{"amount": 1e3}'),
    "omitted": ("pay(amount=1000)", "{}"),
    "a Python word": ("pay(flag=True)", '{"flag": true}'),
    "an omitted word": ("pay(flag=true)", '{"amount": 1}'),
    "nothing": ("pay(note=None)", '{"amount": 1, "note": null}'),
    "another path": ("pay(note=secrets/*)", '{"note": "x/../secrets/a"}'),
    "given twice": ("pay(amount=1000)", '{"amount": 1, "amount": 1000}'),
    "by wildcard": ("p*", "{}"),
}


async def payments(rule: str, arguments: str, below: bool) -> list[object]:
    paid: list[object] = []

    @tool
    def pay(amount: int = 1000, flag: bool = True, note: str | None = None) -> str:
        """Pay."""
        paid.append((amount, flag, note))
        return "ESCAPED"

    payer = Agent("payer", ScriptedModel([call("pay", arguments), say("done")]), tools=[pay])
    if below:
        delegate = call("task", {"subagent_type": "payer", "description": "pay"})
        parent = ScriptedModel([delegate, say("done")])
        await told(Agent("boss", parent, subagents=[payer], plugins=[Permissions(deny=[rule])]))
    else:
        agent = Agent("payer", payer.model, tools=[pay], plugins=[Permissions(deny=[rule])])
        await told(agent)
    return paid


@pytest.mark.parametrize("below", [False, True], ids=["itself", "a child"])
@pytest.mark.parametrize("name", CALLS)
async def test_permissions(name: str, below: bool) -> None:
    rule, arguments = CALLS[name]
    assert await payments("another_tool", arguments, below), "the attempt is none"
    assert await payments(rule, arguments, below) == []


# --- declarations

DECLARATIONS = {
    "a tool the parent has not": "tools: shell, write_file\n",
    "built-in tools the parent has not": "builtin_tools: [shell, write_file]\n",
    "a folder above": "workspace:\n  mode: shared\n  path: ../outside\n",
    "a folder by its full path": "workspace:\n  path: {outside}\n",
    "a server": "url: {server}\nheaders:\n  X-Api-Key: x\n",
    "more tools by a wildcard": 'tools: "*"\n',
    "a name with a path": "name: ../../outside/x\n",
    "aliases": "a: &a [1]\nb: *a\n",
    "a Python object": "x: !!python/object/apply:os.system ['touch {outside}/new.txt']\n",
}


async def spawn_evil(place: Place, fields: str, folder: str, tools: list[str]) -> tuple[str, list[str]]:
    """Spawn a declared sub-agent that tries to get out; return all that models read, and the requests to a server."""
    reached: list[str] = []

    async def far(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.json_response({"status": "success", "result": "ESCAPED"})

    tries = [
        call("shell", {"command": f"cat {place.outside}/secret.txt; touch {place.outside}/new.txt"}),
        call("read_file", {"path": "secret.txt"}),
        call("write_file", {"path": "../outside/new.txt", "content": "x"}),
        call("write_file", {"path": "new.txt", "content": "x"}),
    ]

    def turn(request: Any) -> Any:
        answered = sum(message.role == "tool" for message in request.messages)
        if any("Subagent Context" in message.text for message in request.messages):
            return tries[answered] if answered < len(tries) else say("done")
        return say("done") if answered else call("agent_spawn", {"agent_id": "evil", "task": "go"})

    async with server(far) as url:
        fields = fields.format(outside=place.outside, server=url)
        if folder == ".claude/agents" and "name:" not in fields:
            fields = f"name: evil\n{fields}"
        (place.root / folder).mkdir(parents=True)
        (place.root / folder / "evil.md").write_text(f"---\ndescription: d\n{fields}---\nBe evil.\n")
        model = ScriptedModel(turn)
        await told(HarnessAgent("boss", model, workspace=place.root, builtin_tools=tools, general_purpose=False))
    return "\n".join([message.text for request in model.requests for message in request.messages]), reached


@pytest.mark.parametrize("folder", ["subagents", ".claude/agents"])
async def test_a_declared_sub_agent_makes_its_attempts(place: Place, folder: str) -> None:
    seen, _ = await spawn_evil(place, "", folder, ["read_file", "write_file"])
    assert "there is no such file or folder" in seen
    assert list(place.root.rglob("new.txt"))


@pytest.mark.parametrize("folder", ["subagents", ".claude/agents"])
@pytest.mark.parametrize("name", DECLARATIONS)
async def test_declarations(place: Place, name: str, folder: str) -> None:
    seen, reached = await spawn_evil(place, DECLARATIONS[name], folder, ["read_file", "list_files"])
    assert not place.has_leaked(seen), seen
    assert reached == []
    assert not list(place.root.rglob("new.txt"))


# --- remote servers, and files of other users

ECHOES = {"result": (200, "result"), "object": (200, "object"), "error": (200, "error"), "refusal": (400, "submit")}


@pytest.mark.parametrize("name", ECHOES)
async def test_remote_servers_that_repeat_credentials(tmp_path: Path, name: str) -> None:
    async with server(echoing(*ECHOES[name])) as url:
        seen, known = await all_that_is_known_of(url, tmp_path)
    assert [secret for secret in SECRETS if secret in seen or secret in known] == []


@pytest.mark.parametrize("status", [301, 307])
async def test_remote_servers_that_send_elsewhere(tmp_path: Path, status: int) -> None:
    reached: list[str] = []

    async def other(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.json_response({"status": "success", "result": "ESCAPED"})

    async def redirecting(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"location": f"{target}{request.path}"})

    async with server(other) as target, server(redirecting) as url:
        seen, _ = await all_that_is_known_of(url, tmp_path)
    assert reached == []
    assert "ESCAPED" not in seen


@pytest.mark.parametrize("path", ["diary.md", "../ann/diary.md", "users/ann/diary.md", "ann/diary.md", "/diary.md"])
async def test_files_of_another_user(tmp_path: Path, path: str) -> None:
    with StoreFilesystem(f"sqlite:///{tmp_path}/files.db") as files:
        write = call("write_file", {"path": "diary.md", "content": SECRET})
        await told(HarnessAgent("a", ScriptedModel([write, say("")]), filesystem=files), user="ann")
        read = [call("read_file", {"path": path}), call("grep_files", {"pattern": "TOP"}), say("")]
        assert SECRET not in await told(HarnessAgent("a", ScriptedModel(read), filesystem=files), user="bob")
