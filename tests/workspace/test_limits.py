"""What a command in a sandbox may take, and the sockets it cannot reach. With the real bwrap."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex

import pytest

from retinue import ConfigurationError, ExecutionFailed, SandboxFilesystem
from retinue.workspace import SandboxLimits
from retinue.workspace.limits import Cgroup, folder_size, socket_filter

from .commands import Shell

pytestmark = pytest.mark.usefixtures("bwrap")
PYTHON = Path("/usr/bin/python3")
needs_python = pytest.mark.skipif(not PYTHON.exists(), reason="needs /usr/bin/python3, which a sandbox shows")
MB = 2**20


def python(program: str) -> str:
    return f"{PYTHON} -c {shlex.quote(program)} 2>&1"


@pytest.fixture
def limited(root: Path) -> Callable[..., Shell]:
    return lambda **limits: Shell(SandboxFilesystem(root, limits=SandboxLimits(**limits)))


@needs_python
async def test_memory(limited: Callable[..., Shell]) -> None:
    program = python("data = bytearray(300 * 2**20); print(len(data))")
    assert "MemoryError" in await limited(memory=100 * MB)(program)
    assert await limited(memory=1000 * MB)(program) == f"exit code: 0\n{300 * MB}\n"


async def test_processor_time(limited: Callable[..., Shell]) -> None:
    # The shell ends by SIGXCPU (24) or, where both limits are one, by SIGKILL.
    answer = await limited(cpu_seconds=1)("while :; do :; done")
    assert answer.splitlines()[0] in ("exit code: 152", "exit code: 137")


async def test_one_file(limited: Callable[..., Shell], root: Path) -> None:
    answer = await limited(disk=MB)("head -c 20000000 /dev/zero > big; ls")
    assert (root / "big").stat().st_size <= MB
    assert "big" in answer


async def test_the_folder(limited: Callable[..., Shell], root: Path) -> None:
    line = "i=0; while :; do i=$((i+1)); head -c 1000000 /dev/zero > f$i; done"
    with pytest.raises(ExecutionFailed, match="its folder has more than 10,485,760 bytes"):
        await limited(disk=10 * MB)(line, timeout_seconds=100)
    assert await limited(disk=10 * MB)("rm f*; ls") == "exit code: 0\n"  # there is a way back


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
async def test_temporary_files(limited: Callable[..., Shell], place: str) -> None:
    answer = await limited(temporary=MB)(f"head -c 20000000 /dev/zero > {place}/big; stat -c %s {place}/big")
    assert "No space left" in answer
    assert int(answer.split()[-1]) <= MB
    assert "Read-only" in await limited()("touch /dev/x")


@needs_python
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="runs a command as another user")
def test_processes(tmp_path: Path, root: Path) -> None:
    """Root has no such limit, so the command is run as another user."""
    for folder in (root, *tmp_path.parents[:3], tmp_path):
        folder.chmod(0o777)
    command = SandboxFilesystem(root, limits=SandboxLimits(processes=20)).command(
        python(
            "import os, time\n"
            "for made in range(200):\n"
            "    try:\n"
            "        pid = os.fork()\n"
            "    except BlockingIOError:\n"
            "        break\n"
            "    if not pid: time.sleep(60); os._exit(0)\n"
            "print('made', made)"
        )
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            command.argv,
            env=dict(command.environment),
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            user=65534,
            group=65534,
            extra_groups=[],
        )
        theirs.close()
        ready = ours.recv(1)
        if not ready:
            pytest.skip(f"another user can make no sandbox here: {process.communicate()[0]}")
        ours.sendall(b"\n")
        out, _ = process.communicate(timeout=60)
    words = out.split()
    assert words[0] == "made", out
    assert 1 <= int(words[1]) < 20


def test_what_holds_each_limit_is_reported(root: Path) -> None:
    found = SandboxFilesystem(root).limits_in_force()
    assert found["cpu_seconds"] == "rlimit of each process"
    assert found["memory"] in ("cgroup", "rlimit of each process")
    if os.geteuid() == 0 and found["memory"] != "cgroup":
        assert found["processes"] == "not limited: root has no such limit without a cgroup"
    without = SandboxFilesystem(root, limits=SandboxLimits(memory=None)).limits_in_force()
    assert without["memory"] == "not limited"


@pytest.mark.parametrize("value", [0, -1, 1.5, "1G", True and 0])
def test_a_limit_is_a_number(value: object) -> None:
    with pytest.raises(ConfigurationError, match="memory is a whole number above 0"):
        SandboxLimits(memory=value)  # pyright: ignore[reportArgumentType]


def test_a_cgroup_that_cannot_be_used_is_refused(root: Path, tmp_path: Path) -> None:
    files = SandboxFilesystem(root, limits=SandboxLimits(cgroup=str(tmp_path)))
    with pytest.raises(ConfigurationError, match="no cgroup can be made in"):
        files.check_commands()


def test_a_command_enters_its_cgroup_first(tmp_path: Path) -> None:
    """With a folder in place of a cgroup: the kernel's part is not tested here."""
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")
    found = Cgroup.find(SandboxLimits(cgroup=str(tmp_path)))
    assert found is not None
    argv, cleanup = found.enclosed(
        ("/bin/sh", "-c", 'echo "$1" $$', "x", "a 'b'"), SandboxLimits(memory=5 * MB, processes=7)
    )
    out = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    (made,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    settings = {path.name: path.read_text().strip() for path in made.iterdir()}
    assert settings.pop("cgroup.procs") == out[-1]
    assert settings == {"memory.max": "5242880", "memory.swap.max": "0", "pids.max": "7", "memory.oom.group": "1"}
    assert out[:2] == ["a", "'b'"]
    for path in made.iterdir():
        path.unlink()
    subprocess.run(cleanup, check=True)
    assert list(made.parent.glob("retinue-*")) == []


def test_the_size_of_a_folder_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "a" / "loop").symlink_to("/")
    assert 100_000 <= folder_size(str(tmp_path), 10**9) < 200_000
    assert folder_size(str(tmp_path), 10) > 10


REACH = """
import socket, sys
tries = {
    "stream": lambda: socket.socket(socket.AF_UNIX).connect(NAME),
    "datagram": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", NAME),
    "pair": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", NAME),
    "raw": lambda: socket.socketpair(socket.AF_UNIX, 3)[0].sendto(b"x", NAME),
}
for name, reach in tries.items():
    try:
        reach()
        print(name, "reached")
    except OSError as exc:
        print(name, "refused")
one, other = socket.socketpair()
one.send(b"x")
try:
    print(other.recv(1).decode(), socket.socket(socket.AF_INET).connect(("127.0.0.1", PORT)))
except OSError:
    print("no network")
"""


@needs_python
@pytest.mark.parametrize("network", [False, True])
async def test_no_local_socket_of_this_machine_is_reached(root: Path, network: bool) -> None:
    name = f"\0retinue-test-{token_hex(8)}"
    with (
        socket.socket(socket.AF_UNIX) as stream,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        stream.bind(name)
        stream.listen()
        datagram.bind(f"{name}d")
        datagram.setblocking(False)
        program = REACH.replace("PORT", str(server.getsockname()[1]))
        for address in (name, f"{name}d"):
            answer = await Shell(SandboxFilesystem(root, network=network))(
                python(program.replace("NAME", repr(address)))
            )
            lines = answer.splitlines()[1:]
            assert lines[:4] == ["stream refused", "datagram refused", "pair refused", "raw refused"]
            assert ("x None" in lines) == network  # pairs and the network work
        with pytest.raises(BlockingIOError):
            datagram.recv(1)


def test_a_machine_whose_system_calls_are_unknown_has_no_network() -> None:
    assert len(socket_filter("aarch64")) == len(socket_filter("x86_64")) == 128
    with pytest.raises(ConfigurationError, match="x86_64 and aarch64 only, not on riscv64"):
        socket_filter("riscv64")
