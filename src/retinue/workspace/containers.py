"""Commands in containers, by the command line of Docker or Podman: a sandbox for hosts without bubblewrap."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from secrets import token_hex

from msgspec import Struct

from ..core.errors import ConfigurationError
from .limits import SandboxLimits

ENGINES = ("docker", "podman")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")
# The folder may have been replaced by a link after the check. So the bound folder is compared from the inside first.
_ENTER = (
    'test -z "$0" || test "$(stat -c %d:%i .)" = "$0" || '
    '{ echo "the folder was replaced while the container was made"; exit 126; }; exec /bin/sh -c "$1" </dev/null'
)


class Mount(Struct, frozen=True):
    """A folder inside a sandbox: one of this machine, or an empty one that is read-only."""

    source: str | None
    target: str
    is_writable: bool = False


class Container(Struct, frozen=True):
    """Runs commands in containers of an image."""

    program: str
    image: str

    @classmethod
    def find(cls, image: str) -> Container:
        """Return the engine of this machine."""
        from shutil import which  # only here: it takes milliseconds to import

        if not _IMAGE.fullmatch(image):
            raise ConfigurationError(f"not the name of an image: {image!r}")
        for engine in ENGINES:
            if (program := which(engine)) is not None:
                return cls(program, image)
        raise ConfigurationError(
            f"a SandboxFilesystem with image={image!r} runs commands in containers, and there is neither docker nor "
            "podman on the PATH: install one, or leave disable_shell on"
        )

    @property
    def probe(self) -> list[str]:
        """A command that succeeds if the engine works and has the image."""
        return [self.program, "image", "inspect", "--format", "{{.Id}}", self.image]

    def refusal(self, said: str) -> ConfigurationError:
        return ConfigurationError(
            f"{os.path.basename(self.program)} cannot run the image {self.image} ({said}): start its service, and fetch "
            f"the image with: {os.path.basename(self.program)} pull {self.image}"
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
            *(self.program, "run", "--rm", "--name", name, "--init", "--pull", "never", "--log-driver", "none"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only", "--hostname", "sandbox"),
            *("--network", "bridge" if network else "none", "--ipc", "private", "--workdir", folder),
            *self._user(),
            *_limit_options(limits),
            *[option for mount in mounts for option in _mount_options(mount)],
            *[option for key, value in environment.items() for option in ("--env", f"{key}={value}")],
            *("--entrypoint", "/bin/sh", self.image, "-c", _ENTER, identity, line),
        )
        return argv, (self.program, "rm", "--force", name)

    def _user(self) -> Iterator[str]:
        """Yield the options with which files belong to the user of this process."""
        if hasattr(os, "getuid"):
            yield from ("--user", f"{os.getuid()}:{os.getgid()}")
            if os.path.basename(self.program) == "podman" and os.getuid():
                yield "--userns=keep-id"


def _limit_options(limits: SandboxLimits) -> Iterator[str]:
    size = "" if limits.temporary is None else f",size={limits.temporary}"
    yield from ("--tmpfs", f"/tmp:rw,exec,nosuid,nodev{size}")
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


def _mount_options(mount: Mount) -> Iterator[str]:
    if mount.source is None:
        yield from ("--tmpfs", f"{mount.target}:ro,size=4096")
        return
    if any(char in mount.source + mount.target for char in ',"\n'):
        raise ConfigurationError(f"{mount.source!r} cannot be shown to a container: its path has a comma or a quote")
    read_only = "" if mount.is_writable else ",readonly"
    yield from ("--mount", f"type=bind,source={mount.source},target={mount.target}{read_only}")
