"""Commands in containers: with the engine of this machine where it works, else with one that records what it is told."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from shutil import which

import pytest

from retinue import ConfigurationError, SandboxFilesystem
from retinue.workspace import SandboxLimits
from retinue.workspace.containers import ENGINES
from tests.prepared import PYTHON

from .. import inside
from .commands import Shell, processes_with, until, usable_image


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker that notes its arguments and runs the last ones itself, in the folder that is mounted. It confines nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "docker").write_text(
        "#!/usr/bin/python3\n"
        "import json, os, sys\n"
        f"with open({str(tmp_path / 'calls')!r}, 'a') as out: out.write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "words = sys.argv[1:]\n"
        "if words[0] == 'run':\n"
        "    for mount in [word for word in words if word.startswith('type=bind')][:1]:\n"
        "        os.chdir(mount.split(',')[1].partition('=')[2])\n"
        "    os.execv('/bin/sh', ['/bin/sh', *words[words.index('-c'):]])\n"
    )
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path / "calls"


MB = 2**20


def calls(engine: Path) -> list[list[str]]:
    return [json.loads(line) for line in engine.read_text().splitlines()]


def value(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


async def test_a_command_is_confined_and_removed(engine: Path, root: Path) -> None:
    limits = SandboxLimits(memory=1000, processes=7, cpu_seconds=5, disk=10**9, temporary=3000)
    files = SandboxFilesystem(root, image="debian:stable-slim", limits=limits, environment={"A": "b c"})
    assert await Shell(files)("echo hello > made; cat made") == "exit code: 0\nhello\n"
    assert (root / "made").read_text() == "hello\n"
    probe, run, removed = calls(engine)
    assert probe[-2] == "-c"
    assert {"--memory", "--pids-limit", "--read-only"} < {*probe}
    assert removed == ["rm", "--force", value(run, "--name")]
    expected = {
        "--network": "none",
        "--cap-drop": "ALL",
        "--security-opt": "no-new-privileges",
        "--memory": "1000",
        "--memory-swap": "1000",
        "--pids-limit": "7",
        "--pull": "never",
        "--workdir": "/workspace",
        "--mount": f"type=bind,source={root},target=/workspace",
        "--shm-size": "3000",
    }
    assert {option: value(run, option) for option in expected} == expected
    assert "--read-only" in run
    assert "A=b c" in run
    assert "cpu=5:5" in run
    assert not any(word.startswith("--privileged") or "docker.sock" in word for word in run)


async def test_the_network_is_never_that_of_the_machine(engine: Path, root: Path) -> None:
    await Shell(SandboxFilesystem(root, image="debian:stable-slim", network=True))("true")
    assert value(calls(engine)[1], "--network") == "bridge"


async def test_a_folder_that_was_replaced_is_noticed(engine: Path, root: Path, outside: Path) -> None:
    files = SandboxFilesystem(root, image="debian:stable-slim")
    command = files.command("cat secret.txt")
    root.rmdir()
    root.symlink_to(outside)
    ended = subprocess.run(command.argv, env=dict(command.environment), capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (126, "the folder was replaced while the container was made\n")


async def test_a_container_is_removed_after_a_timeout(engine: Path, root: Path) -> None:
    with pytest.raises(Exception, match="stopped after 1 s"):
        await Shell(SandboxFilesystem(root, image="busybox"))("sleep 60", timeout_seconds=1)
    assert calls(engine)[-1][:2] == ["rm", "--force"]


@pytest.mark.parametrize("image", ["", "--privileged", "a b", "-v/:/host", "x\n"])
def test_the_name_of_an_image_is_no_option(engine: Path, root: Path, image: str) -> None:
    with pytest.raises(ConfigurationError, match="not the name of an image"):
        SandboxFilesystem(root, image=image).check_commands()


@pytest.mark.parametrize("name", ["a,readonly", 'quo"te'])
async def test_a_path_that_could_be_read_as_options_is_refused(engine: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="comma or a quote"):
        SandboxFilesystem(tmp_path / name, image="busybox").command("true")


def test_without_an_engine_nothing_runs(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="neither docker nor podman on the PATH"):
        SandboxFilesystem(root, image="busybox").check_commands()


def stand_in(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_an_engine_that_does_not_work_is_passed_over(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    stand_in(tmp_path / "bin", "docker", "echo no daemon >&2; exit 125")
    stand_in(tmp_path / "bin", "podman", "exit 0")
    command = SandboxFilesystem(root, image="busybox").command("true")
    assert command.argv[0] == str(tmp_path / "bin/podman")
    assert command.cleanup[1:4] == ("rm", "--force", "--time")
    stand_in(tmp_path / "bin", "podman", "echo no image >&2; exit 125")
    with pytest.raises(
        ConfigurationError, match=r"docker cannot run .*\(no daemon\).*; podman cannot run .*\(no image\)"
    ):
        SandboxFilesystem(root, image="busybox").check_commands()


def test_the_engine_is_found_with_its_settings(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(
        tmp_path / "bin", "docker", 'test "$DOCKER_HOST" = unix:///run/mine && test -n "$HOME" && test -z "$MY_TOKEN"'
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MY_TOKEN", "secret")
    SandboxFilesystem(root, image="busybox").check_commands()


@pytest.mark.parametrize("how", ["script", "link"])
def test_a_docker_that_is_podman_gets_the_options_of_podman(
    how: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    stand_in(tmp_path / "real", "podman", f'echo "$@" >> {tmp_path / "calls"}')
    if how == "script":
        stand_in(tmp_path / "bin", "docker", f'echo "Emulate Docker CLI" >&2; exec {tmp_path / "real/podman"} "$@"')
    else:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/docker").symlink_to(tmp_path / "real/podman")
    command = SandboxFilesystem(root, image="busybox").command("true")
    assert command.argv[0] == str(tmp_path / "bin/docker")
    assert command.cleanup[1:5] == ("rm", "--force", "--time", "0")
    (probe,) = (tmp_path / "calls").read_text().splitlines()
    assert "--tmpfs /var/tmp:" in probe, "Podman makes it writable, with any size"


def test_a_probe_that_does_not_end_leaves_no_container(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    inside.wait_for_probe(monkeypatch, 0.5)
    noted = f'echo "$@" >> {tmp_path / "calls"}'
    stand_in(tmp_path / "bin", "docker", f'{noted}; test "$1" = rm || exec sleep 3600')
    with pytest.raises(ConfigurationError, match="docker cannot run the image busybox .*timed out"):
        SandboxFilesystem(root, image="busybox").check_commands()
    run, removed = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert removed == ["rm", "--force", run[run.index("--name") + 1]]


V1 = "Resource limits are not supported and ignored on cgroups V1 rootless systems"
NO_MEMORY = "WARNING: Your kernel does not support memory limit capabilities or the cgroup is not mounted. Limitation discarded."
NO_SWAP = "WARNING: Your kernel does not support swap limit capabilities or the cgroup is not mounted. Memory limited without swap."


@pytest.mark.parametrize(
    ("name", "warning", "without"),
    [
        ("podman", V1, {"memory", "processes"}),
        ("docker", NO_MEMORY, {"memory"}),
        ("docker", NO_SWAP, set[str]()),
        ("docker", "", set[str]()),
    ],
)
def test_a_limit_that_the_engine_ignores_is_not_in_force(
    name: str, warning: str, without: set[str], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    stand_in(tmp_path / "bin", name, f"echo '{warning}' >&2")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found = SandboxFilesystem(root, image="busybox").limits_in_force()
    for limit in ("memory", "processes"):
        expected = f"not limited: {name} ignores it on this machine" if limit in without else "container"
        assert found[limit] == expected
    unlimited = SandboxFilesystem(root, image="busybox", limits=SandboxLimits(memory=None))
    assert unlimited.limits_in_force()["memory"] == "not limited"


@pytest.mark.parametrize(("version", "user", "holds"), [(1, 1000, False), (2, 1000, True), (1, 0, True)])
def test_podman_without_root_holds_no_limit_with_cgroups_of_version_1(
    version: int, user: int, holds: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    stand_in(tmp_path / "bin", "podman", "exit 0")
    cgroups = tmp_path / "cgroup"
    cgroups.mkdir()
    if version == 2:
        (cgroups / "cgroup.controllers").write_text("memory pids")
    monkeypatch.setattr("retinue.workspace.containers.CGROUPS", str(cgroups))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = SandboxFilesystem(root, image="busybox").limits_in_force()
    assert (found["memory"] == "container", found["processes"] == "container") == (holds, holds)


@pytest.mark.skipif(not any(map(which, ENGINES)), reason="no docker or podman")
def test_an_image_that_is_not_there_is_refused(root: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot run the image retinue/none"):
        SandboxFilesystem(root, image="retinue/none").check_commands()


@pytest.fixture
def image() -> str:
    """An image that the engine of this machine can run."""
    found = usable_image()
    if found is None:
        pytest.skip("no engine here can run a small image")
    return found


async def test_with_the_engine_of_this_machine(image: str, root: Path, outside: Path) -> None:
    shell = Shell(SandboxFilesystem(root, image=image, environment={"COLOUR": "grey"}, readable=[outside / "inner"]))
    assert await shell("pwd; echo hi > made; cat made") == "exit code: 0\n/workspace\nhi\n"
    assert (root / "made").read_text() == "hi\n"
    assert (root / "made").stat().st_uid == os.getuid()
    assert "exit code: 0" not in await shell(f"cat {outside}/secret.txt")
    assert "exit code: 0" not in await shell("touch /usr/x")
    assert await shell("cat; echo $COLOUR; touch /tmp/x; exit 3") == "exit code: 3\ngrey\n"
    assert await shell("kill -9 $$") == "exit code: 137\n"
    assert await shell(f"cat {outside}/inner/secret.txt") == "exit code: 0\nTOP-SECRET\n"
    assert "exit code: 0" not in await shell(f"touch {outside}/inner/x")
    assert "0000000000000000" in await shell("grep CapEff /proc/self/status")


async def test_limits_with_the_engine_of_this_machine(image: str, root: Path) -> None:
    limits = SandboxLimits(memory=60 * MB, processes=20, cpu_seconds=5, disk=MB, temporary=MB)
    shell = Shell(SandboxFilesystem(root, image=image, limits=limits))
    assert await shell("x=aaaa; while :; do x=$x$x; done") == "exit code: 137\n"
    assert "fork" in await shell("for i in $(seq 100); do sleep 3600 & done")
    for place in ("/tmp", "/dev/shm", "/var/tmp", "/run"):
        answer = await shell(f"head -c 3000000 /dev/zero > {place}/big && echo written")
        assert "written" not in answer, place
    await shell("head -c 3000000 /dev/zero > big")
    assert (root / "big").stat().st_size <= MB


async def test_records_of_tasks_are_hidden_from_a_container(image: str, root: Path) -> None:
    (root / "agents/a/tasks").mkdir(parents=True)
    (root / "agents/a/tasks/t.json").write_text("TOP-SECRET")
    shell = Shell(SandboxFilesystem(root, image=image).without(lambda parts: parts[-1:] == ("tasks",)))
    assert "TOP-SECRET" not in await shell("cat agents/a/tasks/*")
    assert "exit code: 0" not in await shell("touch agents/a/tasks/x")
    assert "exit code: 0" not in await shell("mkdir agents/b")


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2, 0.5])
async def test_cancelling_ends_everything_in_a_container(image: str, root: Path, delay: float) -> None:
    mark = f"72.{os.getpid()}"
    line = f"trap '' TERM; setsid sh -c \"trap '' TERM; sleep {mark}\" & sleep {mark}"
    work = asyncio.create_task(Shell(SandboxFilesystem(root, image=image))(line))
    await asyncio.sleep(delay)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not processes_with(mark)


async def test_a_container_ends_with_the_process_that_started_it(image: str, root: Path) -> None:
    mark = f"73.{os.getpid()}"
    code = (
        "import asyncio; from retinue import SandboxFilesystem; from tests.workspace.commands import Shell\n"
        f"files = SandboxFilesystem({str(root)!r}, image={image!r})\n"
        f"asyncio.run(Shell(files)('sleep {mark}'))"
    )
    with subprocess.Popen([PYTHON, "-c", code], cwd=Path(__file__).parents[2]) as process:
        assert await until(lambda: len(processes_with(mark)) > 0)
        process.kill()
    assert await until(lambda: not processes_with(mark))
