"""A folder of this machine as a sandbox: an agent's files are in it, and its commands see nothing else.

Files are reached as in any local folder. Commands run in namespaces of their own, made by bubblewrap (`bwrap`), or in
containers (`containers.py`). `limits.py` says what they may take.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Literal, Self

from ..core.errors import ConfigurationError, PathDenied
from ..core.filesystem import Command, Filesystem, name_of_part
from ..core.runs import RunIdentity
from .containers import Container, Mount
from .limits import SET_LIMITS, Cgroup, SandboxLimits, socket_filter
from .local import READ_LIMIT, LocalFilesystem

Isolation = Literal["shared", "user", "session"]

WORKSPACE = "/workspace"
"""The folder of the files inside the sandbox."""
AGENTS_FOLDER = "agents"
"""Holds a folder for each agent, with records that commands must not add to."""

_SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIMITS = SandboxLimits()
_PASSED_ON = ("LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM")
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "ssl/certs", "ssl/openssl.cnf")
_NETWORK_SETTINGS = ("resolv.conf", "hosts", "nsswitch.conf", "ca-certificates", "pki")
_PROBE_SECONDS = 20
_FILTER_FD = "9"

# Ending bwrap ends the sandbox only once its first process sleeps, waiting for its children. So the command waits for
# that, reports that it is ready, and begins on a signal.
#
# The folder may have been replaced by a link after the check. So the bound folder is compared from the inside first.
_ENTER = (
    'until (read -r id name state rest && test "$state" = S) </proc/1/stat; do :; done; '
    "echo >&0; (read -r go) || exit 125; "
    'test "$(PATH=/usr/bin:/bin stat -c %d:%i .)" = "$0" || '
    '{ echo "the folder was replaced while the sandbox was made"; exit 126; }; '
    f'{{ {SET_LIMITS} }} 2>/dev/null; exec /bin/sh -c "$1" </dev/null'
)


class _Means:
    """The means of this machine to run commands, found once and shared by all that is below."""

    def __init__(self) -> None:
        self.program: list[str] = []
        """The bwrap that is known to work here, with its first option."""
        self.container: Container | None = None
        self.ignored: dict[str, str] = {}
        """The limits that its engine ignores here, with the reason."""
        self.cgroup: Cgroup | None = None
        self.has_sizes = True
        """True if bwrap can limit the size of `/tmp`."""
        self.filter = -1
        """A file with the seccomp program for commands with a network."""


class SandboxFilesystem(LocalFilesystem):
    """The files below `root`, on which commands run in a sandbox of their own. Making one looks at no file.

    A command sees these files as its working folder, the programs of the system read-only, and a `/tmp` of its own that
    ends with it. It sees no other file, no process and, without `network`, no network of this machine, and gets an
    environment that holds nothing but `environment`, a PATH and the language. Whatever it started ends with it. Even
    with `network`, it reaches no local socket of this machine. `limits` bounds what it may take.

    With `image`, commands run in containers of that image instead, by Docker or Podman.

    What is in `root` stays from run to run. With `isolation="user"` or `"session"`, each user or each conversation
    works in a folder of its own below `root`, and its sub-agents work there too. `root` itself then holds what
    instructs the agents (AGENTS.md, declarations) and the records of tasks, and no agent can reach it.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        isolation: Isolation = "shared",
        network: bool = False,
        limits: SandboxLimits = _LIMITS,
        image: str | None = None,
        readable: Iterable[str | os.PathLike[str]] = (),
        environment: Mapping[str, str] | None = None,
        read_limit: int = READ_LIMIT,
        fsync: bool = False,
    ) -> None:
        super().__init__(root, read_limit=read_limit, fsync=fsync)
        if isolation not in ("shared", "user", "session"):
            raise ConfigurationError(f"isolation is 'shared', 'user' or 'session', not {isolation!r}")
        self.isolation: Isolation = isolation
        self.network = network
        self.limits, self.image = limits, image
        self.readable = tuple([os.path.abspath(folder) for folder in readable])
        """Folders of this machine that commands may read, where they are."""
        self.environment = dict(environment or {})
        self._means = _Means()

    @property
    def is_divided(self) -> bool:
        return self.isolation != "shared"

    def at(self, root: str) -> Self:
        raise PathDenied(root, "it is outside of the sandbox: move it in")

    def for_run(self, run: RunIdentity) -> Self:
        """Return the folder of a run, created if needed. It is not divided further."""
        if self.isolation == "shared":
            return self
        made = copy(self)
        made.isolation = "shared"
        made._anchor = os.path.join(self._anchor, f"{self.isolation}s", name_of_part(self._key(run)))
        made.root = os.path.join(made._anchor, *self._base)
        made.make_folder("")
        return made

    def confines(self, other: Filesystem) -> bool:
        """Return whether the other is this one, a folder below it, or a part of it, and its commands see no more."""
        if not isinstance(other, SandboxFilesystem):
            return False
        # By the folder they were made for, not by where that leads: a path below this one may be made a link.
        same = (self.isolation, self._anchor) == (other.isolation, other._anchor) or self._has_part(other)
        narrower = self.network >= other.network and {*other.readable} <= {*self.readable}
        alike = (self.limits, self.image) == (other.limits, other.image)
        return alike and same and other._base[: len(self._base)] == self._base and narrower

    def check_commands(self) -> None:
        """Check once that bwrap, or an engine for containers, is there and can make a sandbox."""
        means = self._means
        if means.program or means.container is not None:
            return
        if self.image is not None:
            refused: list[str] = []
            for found in Container.candidates(self.image):
                argv, removal = found.probe(self.limits, self.network)
                works, said = _try(argv, found.environment(), removal)
                if works:
                    means.container, means.ignored = found, found.ignored(said)
                    return
                refused.append(found.refusal(said))
            raise ConfigurationError("; ".join(refused))
        from shutil import which  # only here: it takes milliseconds to import

        means.cgroup = Cgroup.find(self.limits)
        if self.network and means.filter < 0:
            means.filter = os.memfd_create("retinue-filter")
            os.write(means.filter, socket_filter(os.uname().machine))
        program = which("bwrap")
        if program is None:
            raise ConfigurationError(
                "a SandboxFilesystem runs commands with bubblewrap, and there is no bwrap on the PATH: install it "
                "(Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap), give image= to use "
                "containers, or leave disable_shell on"
            )
        # A bwrap before 0.8 does not know the first option, one before 0.7 not the sizes; all the rest holds without.
        for options, means.has_sizes in ((["--disable-userns"], True), ([], True), ([], False)):
            works, said = _try([*self._filtered([program, *options, *self._walls(), "--", "/bin/sh", "-c", ":"])])
            if works:
                means.program = [program, *options]
                break
        else:
            raise ConfigurationError(
                f"bwrap can make no sandbox here ({said}): allow user namespaces to this user (sysctl "
                "kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0, an AppArmor profile for bwrap; in "
                "a container, a seccomp profile that has them), or leave disable_shell on"
            )

    def command(self, line: str) -> Command:
        """Return a shell in a sandbox of its own, with these files as its working folder."""
        if self.is_divided:
            raise ConfigurationError(f"which {self.isolation} is it? for_run gives the folder to run commands in")
        self.check_commands()
        self.make_folder("")
        with self._folder(()) as folder:
            status = folder.own_stat()
        identity, limits, means = f"{status.st_dev}:{status.st_ino}", self.limits, self._means
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment = {"HOME": WORKSPACE} | passed_on | self.environment
        disk = None if limits.disk is None else (self.root, limits.disk)
        mounts = [Mount(self.root, WORKSPACE, True), *self._kept_records()]
        if means.container is not None:
            argv, cleanup = means.container.command(
                line,
                [*mounts, *[Mount(folder, folder) for folder in self.readable]],
                folder=WORKSPACE,
                identity=identity if sys.platform == "linux" else "",
                environment=environment,
                limits=limits,
                network=self.network,
            )
            return Command(argv, "/", means.container.environment(), False, cleanup, disk, is_held=True)
        argv = (
            *means.program,
            *self._walls(),
            *[option for mount in mounts for option in _bind(mount)],
            *("--remount-ro", "/", "--chdir", WORKSPACE, "--"),
            *("/bin/sh", "-c", _ENTER, identity, line, *limits.words()),
        )
        argv, cleanup = tuple(self._filtered(argv)), ()
        if means.cgroup is not None:
            argv, cleanup = means.cgroup.enclosed(argv, limits)
        return Command(argv, "/", {"PATH": _SEARCHED} | environment, True, cleanup, disk)

    def limits_in_force(self) -> dict[str, str]:
        """Return what holds each limit here. Blocking."""
        self.check_commands()
        means, given = self._means, self.limits
        has_group = means.container is not None or means.cgroup is not None
        group = "container" if means.container is not None else "cgroup"
        is_root = hasattr(os, "geteuid") and os.geteuid() == 0
        alone = "not limited: root has no such limit without a cgroup" if is_root else "rlimit of the sandbox"
        sizes = "size of the file systems" if means.has_sizes else "not limited: bwrap before 0.7"
        active = {
            "memory": group if has_group else "rlimit of each process",
            "processes": group if has_group else alone,
            "cpu_seconds": "rlimit of each process",
            "disk": "rlimit of each file, and the folder is watched",
            "temporary": sizes,
            **means.ignored,
        }
        return {name: how if getattr(given, name) is not None else "not limited" for name, how in active.items()}

    def _key(self, run: RunIdentity) -> str:
        """Return the user or session that the folder belongs to. A child works in the folder of its parent's conversation."""
        if self.isolation == "user":
            if not run.user_id:
                raise ConfigurationError("each user has a sandbox, and this run has none: give it a user_id")
            return run.user_id
        if run.depth > 1:
            raise ConfigurationError(
                "each session has a sandbox, and this run is too deep to tell its session: give the agent above it "
                "filesystem=ctx.agent.files.for_run(ctx.run)"
            )
        return run.parent_thread_id or run.thread_id

    def _has_part(self, other: SandboxFilesystem) -> bool:
        """Return whether the other is the folder of one user or session."""
        parts = os.path.join(self._anchor, f"{self.isolation}s")
        return self.is_divided and not other.is_divided and os.path.dirname(other._anchor) == parts

    def _walls(self) -> Iterator[str]:
        """Yield the options of a sandbox, except for its working folder."""
        yield from ("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try")
        if not self.network:
            yield "--unshare-net"
        yield from ("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox")
        yield from ("--uid", "1000", "--gid", "1000", "--ro-bind", "/usr", "/usr")
        for path in _SYSTEM:
            if os.path.islink(path):
                yield from ("--symlink", os.readlink(path), path)
            elif os.path.isdir(path):
                yield from ("--ro-bind", path, path)
        if self.network:
            yield from ("--seccomp", _FILTER_FD)
        for name in (*_SETTINGS, *(_NETWORK_SETTINGS if self.network else ())):
            yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
        # Read-only, as a superuser is one to /proc/sys even without capabilities and in a namespace.
        most = self.limits.temporary if self._means.has_sizes else None
        size = () if most is None else ("--size", str(most))
        yield from ("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", *size, "--tmpfs", "/dev/shm")
        yield from ("--remount-ro", "/dev", *size, "--tmpfs", "/tmp")
        for folder in self.readable:
            yield from ("--ro-bind", folder, folder)

    def _filtered(self, argv: Iterable[str]) -> Iterator[str]:
        """Yield a command with the seccomp program as a file that is open."""
        if self.network:
            yield from ("/bin/sh", "-c", f'exec "$@" {_FILTER_FD}<"$0"', f"/proc/{os.getpid()}/fd/{self._means.filter}")
        yield from argv

    def _kept_records(self) -> Iterator[Mount]:
        """Yield the folders over those which are kept back: a command sees them empty, and can add no agent."""
        if self._kept_back is None or len(self._base) > 2:
            return
        if self._base:
            if self._base[0].lower() == AGENTS_FOLDER:
                raise PathDenied(self.root, "records of tasks are below it, so no command runs there")
            return
        self.make_folder(AGENTS_FOLDER)
        yield Mount(os.path.join(self.root, AGENTS_FOLDER), f"{WORKSPACE}/{AGENTS_FOLDER}")
        for agent in [entry.path for entry in self.list(AGENTS_FOLDER) if entry.is_dir]:
            for path in [entry.path for entry in self.list(agent) if entry.is_dir]:
                target = f"{WORKSPACE}/{path}"
                is_hidden = self._kept_back(tuple(path.split("/")))
                yield Mount(None, target) if is_hidden else Mount(os.path.join(self.root, path), target, True)


def _bind(mount: Mount) -> tuple[str, ...]:
    if mount.source is None:
        return ("--tmpfs", mount.target, "--remount-ro", mount.target)
    return ("--bind" if mount.is_writable else "--ro-bind", mount.source, mount.target)


def _try(
    argv: Sequence[str], environment: Mapping[str, str] | None = None, removal: Sequence[str] = ()
) -> tuple[bool, str]:
    """Run a program; return whether it succeeds, and its error output. After a time limit, `removal` ends what it began."""
    try:
        ended = _run(argv, environment)
    except subprocess.TimeoutExpired as exc:
        if removal:
            with suppress(OSError, subprocess.TimeoutExpired):
                _run(removal, environment)
        return False, str(exc)
    except OSError as exc:
        return False, str(exc)
    said = ended.stderr.decode(errors="replace").strip()
    return ended.returncode == 0, said or f"exit code {ended.returncode}"


def _run(argv: Sequence[str], environment: Mapping[str, str] | None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        argv,
        env=environment or {},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_PROBE_SECONDS,
        check=False,
    )
