"""Commands in containers, by the command line of Docker or Podman: a sandbox for hosts without bubblewrap."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from secrets import token_hex

from msgspec import Struct

from ..core.errors import ConfigurationError
from .limits import CGROUPS, SandboxLimits

ENGINES = ("docker", "podman")
_SETTINGS = ("DOCKER_", "CONTAINER", "XDG_RUNTIME_DIR", "PODMAN_")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")
# The folder may have been replaced by a link after the check. So the bound folder is compared from the inside first.
#
# A container does not end with the program that started it. So its input stays open as long as the owner lives, and a
# process in it ends everything at the end of the input.
_ENTER = (
    'test -z "$0" || test "$(stat -c %d:%i .)" = "$0" || '
    '{ echo "the folder was replaced while the container was made"; exit 126; }; exec 3<&0; '
    '(cat <&3 >/dev/null 2>&1; kill -9 -1) >/dev/null 2>&1 & exec /bin/sh -c "$1" </dev/null 3<&-'
)


_NAMED = {
    "memory": re.compile(r"\bmemory limit\b|\bresource limits\b", re.I),
    "processes": re.compile(r"\bpids[ -]limit\b|\bresource limits\b", re.I),
}
"""By limit: what an engine calls it in a warning."""
_IGNORED = re.compile(r"discarded|ignored|not supported|does not support", re.I)


class Mount(Struct, frozen=True):
    """A folder inside a sandbox: one of this machine, or an empty one that is read-only."""

    source: str | None
    target: str
    is_writable: bool = False


class Container(Struct, frozen=True):
    """Runs commands in containers of an image."""

    program: str
    image: str
    kind: str = "docker"
    """The engine whose options the program takes: a program named docker may be Podman's."""

    @staticmethod
    def candidates(image: str) -> list[Container]:
        """Return the engines of this machine. One may be there and not work, such as a docker without its service."""
        from shutil import which  # only here: it takes milliseconds to import

        if not _IMAGE.fullmatch(image):
            raise ConfigurationError(f"not the name of an image: {image!r}")
        programs = [program for engine in ENGINES if (program := which(engine)) is not None]
        if programs:
            return [Container(program, image, _kind_of(program)) for program in programs]
        raise ConfigurationError(
            f"a SandboxFilesystem with image={image!r} runs commands in containers, and there is neither docker nor "
            "podman on the PATH: install one, or leave disable_shell on"
        )

    @staticmethod
    def environment() -> dict[str, str]:
        """Return what the program that talks to the engine has to know. It is trusted."""
        return {name: os.environ[name] for name in os.environ if name in ("PATH", "HOME") or name.startswith(_SETTINGS)}

    def probe(self, limits: SandboxLimits, network: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return a command that succeeds if the engine can run containers of the image, with these limits, and the one
        that removes its container."""
        name = f"retinue-{token_hex(8)}"
        argv = (
            *self._run(name, limits, network),
            "--entrypoint",
            "/bin/sh",
            self.image,
            "-c",
            'command -v cat >/dev/null && command -v stat >/dev/null || { echo "it has no cat or no stat" >&2; exit 1; }',
        )
        return argv, self._removal(name)

    def ignored(self, warnings: str) -> dict[str, str]:
        """Return the limits that the engine ignores here, by what it wrote when it ran a container with all of them."""
        engine, found = os.path.basename(self.program), set[str]()
        for line in warnings.splitlines():
            if _IGNORED.search(line):
                found.update(name for name, words in _NAMED.items() if words.search(line))
        if self._is_podman and _is_without_cgroups():
            found.update(_NAMED)
        return dict.fromkeys(found, f"not limited: {engine} ignores it on this machine")

    def refusal(self, said: str) -> str:
        """Explain why the engine is not used, and what to do."""
        engine = os.path.basename(self.program)
        return (
            f"{engine} cannot run the image {self.image} ({said}): start its service, and fetch the image with: "
            f"{engine} pull {self.image}"
        )

    def command(
        self,
        line: str,
        mounts: Iterable[Mount],
        *,
        folder: str,
        identity: str,
        environment: Mapping[str, str],
        limits: SandboxLimits,
        network: bool,
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the command that runs a command line, and the one that removes its container, whatever runs in it."""
        name = f"retinue-{token_hex(8)}"
        argv = (
            *(*self._run(name, limits, network), "--interactive", "--workdir", folder),
            *[option for mount in mounts for option in self._mount(mount)],
            *[option for key, value in environment.items() for option in ("--env", f"{key}={value}")],
            *("--entrypoint", "/bin/sh", self.image, "-c", _ENTER, identity, line),
        )
        return argv, self._removal(name)

    def _removal(self, name: str) -> tuple[str, ...]:
        at_once = ("--time", "0") if self._is_podman else ()  # it would first wait for 10 s
        return (self.program, "rm", "--force", *at_once, name)

    def _run(self, name: str, limits: SandboxLimits, network: bool) -> Iterator[str]:
        """Yield the beginning of a command that runs a container, with the options that confine it."""
        yield from (self.program, "run", "--rm", "--name", name, "--init", "--pull", "never", "--log-driver", "none")
        yield from ("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only", "--hostname", "sandbox")
        yield from ("--network", "bridge" if network else "none", "--ipc", "private")
        yield from self._user()
        # Podman makes two more places writable, which would have any size.
        yield from _limit_options(limits, ("/tmp", "/run", "/var/tmp") if self._is_podman else ("/tmp",))

    def _mount(self, mount: Mount) -> Iterator[str]:
        if mount.source is None:
            as_empty = ",notmpcopyup" if self._is_podman else ""  # it would copy what the folder hides
            yield from ("--tmpfs", f"{mount.target}:ro,size=4096{as_empty}")
            return
        if any(char in mount.source + mount.target for char in ',"\n'):
            raise ConfigurationError(
                f"{mount.source!r} cannot be shown to a container: its path has a comma or a quote"
            )
        read_only = "" if mount.is_writable else ",readonly"
        yield from ("--mount", f"type=bind,source={mount.source},target={mount.target}{read_only}")

    @property
    def _is_podman(self) -> bool:
        return self.kind == "podman"

    def _user(self) -> Iterator[str]:
        """Yield the options with which files belong to the user of this process."""
        if hasattr(os, "getuid"):
            yield from ("--user", f"{os.getuid()}:{os.getgid()}")
            if self._is_podman and os.getuid():
                yield "--userns=keep-id"


def _kind_of(program: str) -> str:
    """Return the engine of a program. On some systems `docker` is a link to podman, or a script that starts it."""
    if os.path.basename(os.path.realpath(program)) == "podman":
        return "podman"
    try:
        with open(program, "rb") as stream:
            start = stream.read(4096)
    except OSError:
        return "docker"
    return "podman" if start.startswith(b"#!") and b"podman" in start else "docker"


def _is_without_cgroups() -> bool:
    """Return whether this process has no root rights on a system with cgroups of version 1, which Podman then cannot use."""
    is_root = not hasattr(os, "geteuid") or os.geteuid() == 0
    return not is_root and not os.path.exists(os.path.join(CGROUPS, "cgroup.controllers"))


def _limit_options(limits: SandboxLimits, temporary: Iterable[str]) -> Iterator[str]:
    size = "" if limits.temporary is None else f",size={limits.temporary}"
    for place in temporary:
        yield from ("--tmpfs", f"{place}:rw,exec,nosuid,nodev,mode=1777{size}")
    if limits.temporary is not None:
        yield from ("--shm-size", str(limits.temporary))
    if limits.memory is not None:
        yield from ("--memory", str(limits.memory), "--memory-swap", str(limits.memory))
    if limits.processes is not None:
        yield from ("--pids-limit", str(limits.processes))
    if limits.cpu_seconds is not None:
        yield from ("--ulimit", f"cpu={limits.cpu_seconds}:{limits.cpu_seconds}")
    if limits.disk is not None:
        yield from ("--ulimit", f"fsize={limits.disk}:{limits.disk}")
