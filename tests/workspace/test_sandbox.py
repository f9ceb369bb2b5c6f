"""The sandbox: what commands see in it, what they cannot, and that nobody gets out of it. With the real bwrap."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retinue import ConfigurationError, ExecutionFailed, SandboxFilesystem
from retinue.core.errors import PathDenied
from retinue.core.filesystem import RunsCommands
from retinue.core.runs import RunIdentity
from tests.prepared import PYTHON

from .commands import Shell, begin, processes_with, until

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def shell(bwrap: None, root: Path) -> Shell:
    return Shell(SandboxFilesystem(root))


def fake_bwrap(folder: Path, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bwrap").chmod(0o755)
    return folder


async def test_a_command_works_on_the_files_of_the_sandbox(shell: Shell, root: Path) -> None:
    (root / "a.txt").write_text("one\n")
    assert await shell("pwd; cat a.txt; echo two > b.txt") == "exit code: 0\n/workspace\none\n"
    assert (root / "b.txt").read_text() == "two\n"
    assert SandboxFilesystem(root).read("b.txt") == b"two\n"
    assert await shell("echo out; echo err >&2; exit 3") == "exit code: 3\nout\nerr\n"
    assert await shell("kill -9 $$") == "exit code: 137\n"
    assert await shell("cat; echo done") == "exit code: 0\ndone\n"
    assert await shell("""printf '%s|' "a b" 'c"d' "$HOME" """) == 'exit code: 0\na b|c"d|/workspace|'


async def test_it_sees_nothing_else_of_this_machine(shell: Shell, root: Path, outside: Path) -> None:
    places = ["/root", "/home", str(Path.home()), str(PROJECT), str(outside), str(root), "/var", "/etc/passwd", "/sys"]
    for place in places:
        assert await shell(f"ls -d {place} 2>/dev/null") == "exit code: 2\n", place
    listed = (await shell("ls -A / && ls -A /tmp && ls -A /etc")).splitlines()[1:]
    known = "bin dev etc lib lib32 lib64 libx32 proc sbin tmp usr workspace alternatives ld.so.cache ld.so.conf"
    assert {*listed} <= {*known.split(), "ld.so.conf.d", "localtime", "ssl"}


async def test_the_system_cannot_be_changed(shell: Shell) -> None:
    for path in ("/x", "/etc/x", "/usr/x", "/usr/bin/x", "/bin/x", "/etc/alternatives/x"):
        assert "Read-only file system" in await shell(f"touch {path}"), path
    assert (await shell("touch /tmp/x && echo made; grep CapEff /proc/self/status")).split() == [
        *("exit", "code:", "0", "made", "CapEff:", "0000000000000000")
    ]
    assert await shell("ls -A /tmp") == "exit code: 0\n"
    for path in ("sys/kernel/core_pattern", "sys/kernel/hostname", "sysrq-trigger"):
        assert "exit code: 0" not in await shell(f": >> /proc/{path}"), path
        assert "exit code: 0" not in await shell(f"unshare -Urmpf --mount-proc sh -c ': >> /proc/{path}'"), path


async def test_the_environment_is_its_own(
    bwrap: None, root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = await Shell(SandboxFilesystem(root, environment={"COLOUR": "grey"}))("env; cat /proc/1/environ")
    assert "COLOUR=grey" in answer
    names = {line.partition("=")[0] for line in answer.replace("\0", "\n").splitlines()[1:] if line}
    assert names <= {*"PATH HOME LANG LC_ALL LC_CTYPE TZ TERM COLOUR PWD OLDPWD SHLVL _".split()}


async def test_there_is_no_network_unless_allowed(bwrap: None, root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        dial = f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo reached"
        command = f"bash -c '{dial}' 2>/dev/null"
        assert "reached" not in await Shell(SandboxFilesystem(root))(command)
        assert await Shell(SandboxFilesystem(root, network=True))(command) == "exit code: 0\nreached\n"


async def test_it_sees_and_ends_no_process_of_this_machine(shell: Shell) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            assert "exit code: 0" not in await shell(f"kill -9 {other.pid}")
            await shell("kill -9 -1")
            assert other.poll() is None
            pids = [int(pid) for pid in (await shell("ls /proc | grep '^[0-9]'")).split()[3:]]
            assert max(pids) < 100
        finally:
            other.kill()


async def test_a_time_limit_ends_everything_in_it(shell: Shell) -> None:
    mark = f"60.{os.getpid()}"
    background = f"setsid sh -c \"trap '' TERM; sleep {mark}\" & (trap '' TERM; sleep {mark}) & sleep {mark} & wait"
    with pytest.raises(ExecutionFailed, match=r"stopped after 1 s; output so far:\nbegun\n"):
        await shell(f"echo begun; {background}", timeout_seconds=1)
    assert not processes_with(mark)


async def test_what_it_leaves_running_ends_before_it_returns(shell: Shell) -> None:
    mark = f"3661.{os.getpid()}"
    many = f"for i in $(seq 200); do setsid sleep {mark} >/dev/null 2>&1 & done"  # to end many takes a while
    for _ in range(3):
        assert await shell(f"{many}; echo started") == "exit code: 0\nstarted\n"
        assert not processes_with(mark)


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.005, 0.01, 0.02, 0.1])
async def test_cancelling_ends_everything_in_it(shell: Shell, delay: float) -> None:
    mark = f"62.{os.getpid()}"
    work = asyncio.create_task(shell(f"sleep {mark} & sleep {mark}"))
    await asyncio.sleep(delay)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not processes_with(mark)


async def test_cancelling_ends_a_sandbox_that_was_slow_to_be_tied(
    bwrap: None, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first process in a sandbox closes what it has open before it is tied to the bwrap outside: have it close much.
    code = (
        "import os, resource, sys; most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; most = min(most, 20_000)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most)); null = os.open('/dev/null', os.O_RDONLY)\n"
        "for number in range(null + 1, most - 100): os.dup2(null, number)\n"
        f"os.execv({shutil.which('bwrap')!r}, sys.argv)"
    )
    (tmp_path / "slow.py").write_text(code)
    slow = fake_bwrap(
        tmp_path / "bin", f'exec {shlex.quote(sys.executable)} {shlex.quote(str(tmp_path / "slow.py"))} "$@"'
    )
    monkeypatch.setenv("PATH", f"{slow}{os.pathsep}{os.environ['PATH']}")
    shell, mark = Shell(SandboxFilesystem(root)), f"64.{os.getpid()}"
    for _ in range(5):
        work = asyncio.create_task(shell(f"sleep {mark} & sleep {mark}"))
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert not processes_with(mark)


async def test_it_ends_with_the_process_that_started_it(bwrap: None, root: Path) -> None:
    mark = f"63.{os.getpid()}"
    code = (
        "from retinue import SandboxFilesystem; from tests.workspace.commands import begin\n"
        f"begin(SandboxFilesystem({str(root)!r}).command('sleep {mark}')).wait()"
    )
    with subprocess.Popen([PYTHON, "-c", code], cwd=PROJECT) as process:
        assert await until(lambda: len(processes_with(mark)) > 0, 20)
        process.kill()
    assert await until(lambda: not processes_with(mark))


async def test_folders_may_be_made_readable(bwrap: None, root: Path, outside: Path) -> None:
    shell = Shell(SandboxFilesystem(root, readable=[outside]))
    assert await shell(f"cat {outside}/secret.txt") == "exit code: 0\nTOP-SECRET\n"
    assert "Read-only file system" in await shell(f"touch {outside}/x")


async def test_the_environment_is_what_was_given(bwrap: None, root: Path) -> None:
    given = {name: f"<{name}>" for name in ("id", "name", "state", "rest", "go", "OTHER")}
    shell = Shell(SandboxFilesystem(root, environment=given))
    assert await shell('echo "$id$name$state$rest$go$OTHER"') == "exit code: 0\n<id><name><state><rest><go><OTHER>\n"


async def test_links_that_lead_out_lead_nowhere(shell: Shell, root: Path, outside: Path) -> None:
    files = SandboxFilesystem(root)
    await shell(f"ln -s {outside}/secret.txt leak; ln -s {outside} folder; ln -s /etc etc")
    assert "exit code: 1" in await shell("cat leak")
    for path in ("leak", "folder/secret.txt", "etc/passwd"):
        with pytest.raises(PathDenied):
            files.read(path)
        with pytest.raises(PathDenied):
            files.write(path, b"x")
    with pytest.raises(ExecutionFailed, match="could not be started: .*link"):
        await Shell(files.below("folder"))("ls")


async def test_a_folder_that_is_swapped_for_a_link_is_not_entered(bwrap: None, root: Path, outside: Path) -> None:
    (root / "part").mkdir()
    files = SandboxFilesystem(root).below("part")
    command = files.command("ls; cat secret.txt")
    (root / "part").rmdir()
    (root / "part").symlink_to(outside)  # in the instant after the look
    with begin(command) as process:
        said, _ = process.communicate()
    assert (process.returncode, said) == (126, "the folder was replaced while the sandbox was made\n")


async def test_a_folder_below_is_all_its_commands_see(bwrap: None, root: Path) -> None:
    (root / "secret.txt").write_text("of the parent")
    below = SandboxFilesystem(root).below("part")
    assert await Shell(below)("ls -A; ls -A .. | wc -l; cat ../secret.txt 2>/dev/null; echo x > made") != ""
    assert (root / "part/made").read_text() == "x\n"
    assert "of the parent" not in await Shell(below)("cat ../secret.txt ../workspace/../secret.txt")


async def test_each_session_has_a_folder_that_is_found_again(bwrap: None, root: Path) -> None:
    def shell(thread_id: str) -> Shell:
        return Shell(SandboxFilesystem(root, isolation="session"), thread_id)

    await shell("one")("echo mine > note.txt")
    assert await shell("two")("ls -A; find / -name note.txt 2>/dev/null") == "exit code: 1\n"
    assert await shell("one")("cat note.txt") == "exit code: 0\nmine\n"
    assert (root / "sessions/one/note.txt").read_text() == "mine\n"


def run_of(thread_id: str = "t", **fields: Any) -> RunIdentity:
    return RunIdentity(run_id="r", thread_id=thread_id, agent="a", **fields)


def test_each_user_has_a_folder(root: Path) -> None:
    files = SandboxFilesystem(root, isolation="user")
    assert files.for_run(run_of("t", user_id="ann")).root == files.for_run(run_of("x", user_id="ann")).root
    assert files.for_run(run_of("t", user_id="ann")).root == str(root / "users/ann")
    with pytest.raises(ConfigurationError, match="give it a user_id"):
        files.for_run(run_of())


@pytest.mark.parametrize("key", ["..", ".", "../x", "a/b", "/etc", "x" * 300, "~a", "žluť", "", "a b"])
def test_a_key_that_is_no_name_is_a_folder_all_the_same(root: Path, key: str) -> None:
    files = SandboxFilesystem(root, isolation="session").for_run(run_of(key))
    files.write("a", b"1")
    assert Path(files.root).parent == root / "sessions"
    assert Path(files.root).name.startswith("~")


def test_children_work_in_the_folder_of_the_session_that_wanted_them(root: Path) -> None:
    files = SandboxFilesystem(root, isolation="session")
    child = run_of("sub-1", parent_thread_id="s", depth=1)
    assert files.below("part").for_run(child).root == str(root / "sessions/s/part")
    with pytest.raises(ConfigurationError, match=r"for_run\(ctx.run\)"):
        files.for_run(run_of("sub-2", parent_thread_id="sub-1", depth=2))
    bound = files.for_run(child)
    assert bound.for_run(run_of("sub-2", parent_thread_id="sub-1", depth=2)) is bound


def test_no_command_runs_in_the_root_of_a_divided_one(root: Path) -> None:
    with pytest.raises(ConfigurationError, match="which session is it"):
        SandboxFilesystem(root, isolation="session").command("ls")


def test_what_is_confined(root: Path) -> None:
    files = SandboxFilesystem(root)
    by_session = SandboxFilesystem(root, isolation="session")
    bound = by_session.for_run(run_of("s"))
    assert files.confines(files)
    assert files.confines(files.below("a/b"))
    assert files.confines(SandboxFilesystem(root))
    assert not files.below("a").confines(files)
    assert not files.below("a").confines(files.below("ab"))
    assert not files.confines(SandboxFilesystem(root / "a"))  # which could be made a link to anywhere
    assert not files.confines(SandboxFilesystem(root, network=True))
    assert not files.confines(SandboxFilesystem(root, readable=["/opt"]))
    assert not files.confines(by_session)
    assert by_session.confines(bound)
    assert by_session.confines(bound.below("x"))
    assert not by_session.confines(files)
    assert not bound.confines(by_session)
    assert not bound.confines(by_session.for_run(run_of("other")))


async def test_without_bwrap_commands_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(ExecutionFailed, match="no bwrap on the PATH: install it .*apt-get install bubblewrap"):
        await Shell(SandboxFilesystem(root))("touch made")
    assert not (root / "made").exists()
    SandboxFilesystem(root).write("a.txt", b"1")


async def test_a_bwrap_that_can_make_no_namespace_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = fake_bwrap(tmp_path / "fake", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    monkeypatch.setenv("PATH", str(fake))
    with pytest.raises(ExecutionFailed, match=r"\(bwrap: No permissions to create new namespace\): allow user names"):
        await Shell(SandboxFilesystem(root))("touch made")
    fake_bwrap(fake, "exit 7")
    with pytest.raises(ExecutionFailed, match=r"no sandbox here \(exit code 7\)"):
        await Shell(SandboxFilesystem(root))("touch made")
    (fake / "bwrap").write_text("not a program")
    with pytest.raises(ExecutionFailed, match="Exec format error"):
        await Shell(SandboxFilesystem(root))("touch made")
    assert not (root / "made").exists()


def test_misuse(root: Path) -> None:
    isolation: Any = "thread"
    with pytest.raises(ConfigurationError, match="isolation is 'shared', 'user' or 'session', not 'thread'"):
        SandboxFilesystem(root, isolation=isolation)
    with pytest.raises(PathDenied, match="outside of the sandbox"):
        SandboxFilesystem(root).at("/etc")
    assert isinstance(SandboxFilesystem(root), RunsCommands)
