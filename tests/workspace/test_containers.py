"""Commands in containers: with the engine of this machine where it works, else with one that records what it is told."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from shutil import which

import pytest

from retinue import ConfigurationError, SandboxFilesystem
from retinue.workspace import SandboxLimits
from retinue.workspace.containers import ENGINES

from .commands import Shell

IMAGES = ("debian:stable-slim", "debian:bookworm-slim", "busybox:latest", "alpine:latest")


def usable_image() -> str | None:
    """An image that an engine of this machine has and can run."""
    for engine in filter(which, ENGINES):
        for image in IMAGES:
            tried = subprocess.run(
                [engine, "run", "--rm", "--pull", "never", image, "true"], capture_output=True, check=False
            )
            if tried.returncode == 0:
                return image
    return None


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
        "    source = next(w for w in words if w.startswith('type=bind')).split(',')[1].partition('=')[2]\n"
        "    os.chdir(source)\n"
        "    os.execv('/bin/sh', ['/bin/sh', *words[words.index('-c'):]])\n"
    )
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path / "calls"


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
    assert probe[:2] == ["image", "inspect"]
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


@pytest.mark.skipif(not any(map(which, ENGINES)), reason="no docker or podman")
def test_an_image_that_is_not_there_is_refused(root: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot run the image retinue/none"):
        SandboxFilesystem(root, image="retinue/none").check_commands()


async def test_with_the_engine_of_this_machine(root: Path, outside: Path) -> None:
    image = usable_image()
    if image is None:
        pytest.skip("no engine here can run a small image")
    shell = Shell(SandboxFilesystem(root, image=image))
    assert await shell("pwd; echo hi > made; cat made") == "exit code: 0\n/workspace\nhi\n"
    assert (root / "made").read_text() == "hi\n"
    assert "exit code: 0" not in await shell(f"cat {outside}/secret.txt")
    assert "exit code: 0" not in await shell("touch /usr/x")
