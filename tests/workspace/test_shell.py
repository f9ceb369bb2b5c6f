"""The shell tool: where it runs, what it tells, and that nothing it started outlives it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest

from retinue.core.errors import ExecutionFailed, InvalidArguments
from retinue.workspace import LocalFilesystem
from retinue.workspace.shell import MOST_OUTPUT
from tests.prepared import PYTHON

from .commands import Shell, is_alive, until

pytestmark = pytest.mark.skipif(os.name == "nt", reason="it is a POSIX shell")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(LocalFilesystem(tmp_path))


def pid_in(path: Path) -> int:
    return int(path.read_text())


async def test_a_command_runs_in_the_workspace_and_tells_its_code_and_output(shell: Shell, tmp_path: Path) -> None:
    assert await shell("pwd") == f"exit code: 0\n{tmp_path}\n"
    assert await shell("echo out; echo err >&2; exit 3") == "exit code: 3\nout\nerr\n"
    assert await shell("true") == "exit code: 0\n"
    assert await shell("no-such-command-here 2>/dev/null") == "exit code: 127\n"
    assert await shell("kill -9 $$") == "exit code: -9\n"
    assert shell.shown == f"{tmp_path}\nout\nerr\n"


async def test_it_has_no_input(shell: Shell) -> None:
    assert await shell("cat; echo done") == "exit code: 0\ndone\n"


async def test_it_sees_nothing_secret_of_the_environment(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:pw@h/db")
    monkeypatch.setenv("LANG", "C.UTF-8")
    names = {line.partition("=")[0] for line in (await shell("env")).splitlines()[1:]}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} <= {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "TZ",
        "TMPDIR",
        "TERM",
    }
    assert {"PATH", "LANG"} <= names


async def test_a_timeout_stops_the_whole_group_and_keeps_what_was_written(shell: Shell, tmp_path: Path) -> None:
    command = "echo begun; (trap '' TERM; sh -c 'echo $$ > stubborn; exec sleep 60') & sleep 60 & echo $! > plain; wait"
    with pytest.raises(ExecutionFailed, match=r"stopped after 1 s; output so far:\nbegun\n$"):
        await shell(command, timeout_seconds=1)
    for name in ("stubborn", "plain"):
        assert await until(lambda name=name: not is_alive(pid_in(tmp_path / name))), name


async def test_cancelling_stops_the_whole_group(shell: Shell, tmp_path: Path) -> None:
    work = asyncio.create_task(shell("sleep 60 & echo $! > one; echo $$ > two; wait"))
    assert await until(lambda: (tmp_path / "two").exists() and (tmp_path / "two").read_text() != "")
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    for name in ("one", "two"):
        assert await until(lambda name=name: not is_alive(pid_in(tmp_path / name))), name


@pytest.mark.parametrize("turns", range(8))
async def test_cancelling_while_it_starts_stops_the_whole_group_too(shell: Shell, tmp_path: Path, turns: int) -> None:
    work = asyncio.create_task(shell("sleep 60 & echo $! > begun; mv begun one; wait"))
    for _ in range(turns):
        await asyncio.sleep(0)
    time.sleep(0.1)  # the command gets on while the event loop does not
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    started = (tmp_path / "one").exists()
    assert not started or await until(lambda: not is_alive(pid_in(tmp_path / "one")))


@pytest.mark.parametrize("how", ["sleep 3600 &", "sleep 3600 >/dev/null 2>&1 &", "(trap '' TERM; sleep 3600) &"])
async def test_what_a_command_leaves_running_neither_holds_it_nor_outlives_it(
    shell: Shell, tmp_path: Path, how: str
) -> None:
    answer = await shell(f"{how} echo $! > left; echo started", timeout_seconds=60)
    assert answer == "exit code: 0\nstarted\n"
    assert await until(lambda: not is_alive(pid_in(tmp_path / "left")))


@pytest.mark.parametrize(
    "how",
    [
        "setsid sh -c '{}' &",
        "env -i setsid sh -c '{}' >/dev/null 2>&1 &",
        "(setsid sh -c '({}) & exit' &);",
        "setsid sh -c 'trap \"\" TERM HUP INT; {}' &",
    ],
)
@pytest.mark.parametrize("ends", ["echo started", "echo started; kill -9 $$", "echo started; sleep 3600"])
async def test_what_left_the_group_neither_holds_the_call_nor_outlives_it(
    shell: Shell, tmp_path: Path, how: str, ends: str
) -> None:
    left = how.format("echo $$ > away; sleep 3600")
    line = f"{left} until [ -s away ]; do sleep 0.01; done; {ends}"
    if "sleep 3600" in ends:
        with pytest.raises(ExecutionFailed, match="started"):
            await shell(line, timeout_seconds=1)
    else:
        code = -9 if "kill" in ends else 0
        assert await shell(line, timeout_seconds=60) == f"exit code: {code}\nstarted\n"
    assert not is_alive(pid_in(tmp_path / "away"))


async def test_nothing_outlives_the_program_that_ran_the_command(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from retinue import LocalFilesystem; from tests.workspace.commands import Shell; "
        "asyncio.run(Shell(LocalFilesystem(sys.argv[1]))('setsid sh -c \"echo \\$\\$ > away; sleep 3600\" & sleep 3600'))"
    )
    process = subprocess.Popen([PYTHON, "-c", program, str(tmp_path)])
    assert await until(lambda: (tmp_path / "away").exists() and (tmp_path / "away").read_text() != "")
    process.kill()
    process.wait()
    assert await until(lambda: not is_alive(pid_in(tmp_path / "away")))


async def test_huge_output_is_cut_and_counted(shell: Shell) -> None:
    answer = await shell("head -c 3000000 /dev/zero | tr '\\0' x")
    assert answer == f"exit code: 0\n{'x' * MOST_OUTPUT}\n[2,000,000 more characters]"
    assert len(shell.shown) == MOST_OUTPUT


async def test_output_without_end_is_stopped_with_the_command(shell: Shell) -> None:
    with pytest.raises(ExecutionFailed, match="stopped after 1 s") as caught:
        await shell("yes", timeout_seconds=1)
    assert len(str(caught.value)) < MOST_OUTPUT + 200


async def test_characters_are_put_together_again_and_bytes_that_are_none_are_replaced(shell: Shell) -> None:
    assert await shell(r"printf '\303'; sleep 0.1; printf '\274\377'") == "exit code: 0\nü\ufffd"
    assert await shell(r"printf '\303'") == "exit code: 0\n\ufffd"


@pytest.mark.parametrize("seconds", [0, -1])
async def test_a_timeout_below_a_second_is_refused(shell: Shell, seconds: int) -> None:
    with pytest.raises(InvalidArguments, match=f"timeout_seconds must be 1 or more, got {seconds}"):
        await shell("true", timeout_seconds=seconds)


async def test_a_folder_that_is_not_there_is_an_answer(tmp_path: Path) -> None:
    with pytest.raises(ExecutionFailed, match="the shell could not be started: .*none"):
        await Shell(LocalFilesystem(tmp_path / "none"))("true")


async def test_a_command_that_cannot_be_passed_on_is_an_answer(shell: Shell) -> None:
    with pytest.raises(ExecutionFailed, match="embedded null byte"):
        await shell("echo a\0b")
