"""`retinue serve`: agents over HTTP, in one process or several."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.concurrency import Backoff, wait_for_first
from ..core.errors import ConfigurationError
from ..log.ownership import LEASE
from ..runtime import Runtime
from ..storage.sql import SqlStore
from ..storage.stores import open_store
from ..subagents.harness import HarnessAgent
from .agents import check_folder, choose_model, load_runtime, make_assistant, read_catalog, runtime_on, warn_of
from .config import apply_config
from .consent import make_permissions
from .database import VARIABLE, as_misuse, optional_url
from .interrupt import Interrupt
from .parsers import COMPLETED, FAILED
from .text import complain

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ..server import Auth
    from ..server.process import Tls


READY = "\x16ready"
"""The line by which a worker reports that it listens."""


_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two attempts to replace a worker."""


class Workers:
    """Starts the workers, replaces those that end, and stops them all."""

    def __init__(
        self, args: argparse.Namespace, listener: socket.socket, token: str | None, interrupt: Interrupt
    ) -> None:
        self._listener, self._number, self._interrupt = listener, args.workers, interrupt
        self._command = [sys.executable, "-m", "retinue", *args.argv, "--listen-fd", str(listener.fileno())]
        self._token = token
        self._processes: dict[asyncio.Task[int], Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        interrupt.clean_up = self._kill

    async def serve(self, announce: Callable[[], None]) -> int:
        stopping = asyncio.create_task(self._interrupt.wait())
        try:
            for _ in range(self._number):  # the first alone: it may have to create the database
                if not stopping.done() and (code := await self._start(stopping)) is not None:
                    return code
            if not stopping.done():
                announce()
            while not stopping.done():
                await asyncio.wait({stopping, *self._processes}, return_when=asyncio.FIRST_COMPLETED)
                if not stopping.done():
                    await self._replace(stopping)
            return COMPLETED
        finally:
            stopping.cancel()
            await self._stop()

    async def _start(self, stopping: asyncio.Task[None]) -> int | None:
        """Start a worker and wait until it listens; return its exit code if it ended before."""
        fd = self._listener.fileno()
        # A session of its own: Ctrl-C is for this process, which tells the workers once.
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, pass_fds=(fd,), start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({"token": self._token}).encode() + b"\n")
        ended = asyncio.create_task(process.wait())
        self._processes[ended] = process
        ready = asyncio.Event()
        reading = asyncio.create_task(_forward(process, ready))
        self._tasks.add(reading)
        reading.add_done_callback(self._tasks.discard)
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({waiting, ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if ended.done() and not ready.is_set():
            del self._processes[ended]
            return ended.result() if ended.result() > 0 else FAILED
        return None

    async def _replace(self, stopping: asyncio.Task[None]) -> None:
        """Start a worker for each that has ended, again and again until it listens: others may be at work."""
        for task in [task for task in self._processes if task.done()]:
            del self._processes[task]
            complain(f"a worker ended with exit code {task.result()}: another takes its place")
            backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
            while not stopping.done() and (code := await self._start(stopping)) is not None:
                complain(f"a worker ended with exit code {code} before it listened: another is started")
                await wait_for_first(asyncio.shield(stopping), seconds=backoff.next())

    async def _stop(self) -> None:
        self._listener.close()
        for task, process in self._processes.items():
            if not task.done():
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
        await asyncio.gather(*self._processes, *self._tasks)

    def _kill(self) -> None:
        for task, process in self._processes.items():
            if not task.done():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


async def _forward(process: Process, ready: asyncio.Event) -> None:
    """Print what a worker prints, but for the line that it is ready."""
    assert process.stdout is not None
    while piece := await process.stdout.read(65_536) if ready.is_set() else await process.stdout.readline():
        if piece == f"{READY}\n".encode():
            ready.set()
        else:
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()


_MEMORY = "memory:"
_SAFE_TOKEN = 8
"""Characters of a token where others can reach the server."""
_MAX_SECRET_FILE = 10_000
_GRPC_GRACE = 5.0


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the event loop of this command: uvloop, where there is one."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


async def serve(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Serve the agents of a folder or a module until a signal comes."""
    if any(find_spec(name) is None for name in ("uvicorn", "starlette", "httptools", "websockets")):
        raise ConfigurationError('the server is not installed: pip install "retinue[server]"')
    _check_options(args)
    is_worker = args.listen_fd is not None
    token = _read_token(args) if not is_worker else json.loads(sys.stdin.readline())["token"]
    runtime = make_runtime(args)
    if args.workers > 1 and not isinstance(runtime.store, SqlStore):
        raise ConfigurationError(f"--workers needs a database that they share: give --db URL, or set ${VARIABLE}")
    from ..server.process import Tls, bind

    tls = None if args.tls_cert is None else Tls(args.tls_cert, args.tls_key)
    if tls is not None:
        tls.check()
    with socket.socket(fileno=args.listen_fd) if is_worker else bind(args.host, args.port) as listener:
        if not is_worker:
            users: Sequence[str] = await _token_users(args, runtime) if _asks_for_token(args) else ()
            if token is None and _asks_for_token(args) and not users:
                token = f"rtn_{secrets.token_urlsafe(32)}"
            await _check_files(args, runtime, users, has_local=token is not None or args.no_auth)
            if args.workers > 1 and isinstance(runtime.store, SqlStore):
                await runtime.store.close()  # the workers open it, not this process
        server = _Server(args, runtime, listener, token, tls)
        if args.workers > 1 and not is_worker:
            return await Workers(args, listener, token, interrupt).serve(server.announce)
        await server.serve(partial(_stopped_or_left, interrupt) if is_worker else interrupt.wait)
        return COMPLETED


def _check_options(args: argparse.Namespace) -> None:
    if args.no_auth and not args.public and not _is_loopback(args.host):
        raise ConfigurationError(
            f"--no-auth on {args.host} lets everybody who can reach it run your agents: leave --no-auth out, or add "
            "--public if you mean it"
        )
    if args.user_header is not None and not re.fullmatch(r"[A-Za-z0-9-]{1,100}", args.user_header):
        raise ConfigurationError(f"--user-header {args.user_header!r} is not the name of a header, such as x-user")
    for origin in args.cors:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s?#]+", origin):
            raise ConfigurationError(f"--cors {origin!r} is not an origin: write it as https://app.example.com")
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ConfigurationError("--tls-cert and --tls-key belong together: give both")
    if not 0 <= args.port <= 65_535:
        raise ConfigurationError(f"--port {args.port} is not a port: give one from 1 to 65535, or 0 for any")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _asks_for_token(args: argparse.Namespace) -> bool:
    return not args.no_auth and args.user_header is None


async def _token_users(args: argparse.Namespace, runtime: Runtime) -> Sequence[str]:
    """Return the users who have a valid token in the database."""
    from ..server import TokenStore

    if not isinstance(runtime.store, SqlStore):
        return []
    with as_misuse():
        await runtime.store.open()
        return await TokenStore(runtime.store).users()


async def _check_files(args: argparse.Namespace, runtime: Runtime, users: Sequence[str], *, has_local: bool) -> None:
    """Refuse to serve several users files that are not divided, and note in the database that they are for one user."""
    from ..server import TokenStore
    from ..server.app import HOW_TO_DIVIDE, shared_agent
    from ..server.auth import LOCAL

    agent = None if args.shared_files else shared_agent(runtime)
    found = sorted({*users, LOCAL} if has_local else {*users})
    several = f"{', '.join(map(repr, found[:5]))} are users" if len(found) > 1 else ""
    if args.user_header is not None:
        several = "--user-header may name several users"
    if agent is not None and several:
        raise ConfigurationError(
            f"{several} of this server, and each would see the files of the others, because agent {agent.name!r} works in "
            f"{agent.files!r} for all of them: give --shared-files if that is meant, or {HOW_TO_DIVIDE} in code"
        )
    if isinstance(runtime.store, SqlStore) and _asks_for_token(args):
        with as_misuse():
            await TokenStore(runtime.store).note_one_user_files(None if agent is None else repr(agent.files))


def _read_token(args: argparse.Namespace) -> str | None:
    """Return the token of the command line, if there is one."""
    from ..server import OneToken

    token = args.token
    if args.token_file is not None:
        token = _read_secret(args.token_file, "token").decode(errors="replace").strip()
        if not token:
            raise ConfigurationError(f"{args.token_file!r} is empty: write a token into it, or leave --token-file out")
    if token is not None:
        OneToken(token)
        if len(token) < _SAFE_TOKEN and not _is_loopback(args.host):
            raise ConfigurationError(
                f"on {args.host} a token has at least {_SAFE_TOKEN} characters: others can reach this address and guess"
            )
    return token


def _read_secret(path: str, what: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_SECRET_FILE)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ConfigurationError(f"cannot read the {what} in {path!r}: {reason}") from exc


def make_runtime(args: argparse.Namespace) -> Runtime:
    """Return the runtime of TARGET, with the settings of `--config`."""
    return apply_config(args, _runtime_of_target(args))


def _runtime_of_target(args: argparse.Namespace) -> Runtime:
    """Return the runtime of TARGET. Runs at work are left to the next process when this one ends."""
    url = optional_url(args) or _MEMORY
    options: Any = {
        "serves": True,
        "engine": args.engine,
        "lease": getattr(args, "lease", LEASE),
        "max_takeovers": args.max_takeovers,
    }
    if not Path(args.target).is_dir() and re.match(r"[A-Za-z_][\w.]*:", args.target):
        chosen = args.db is not None
        return load_runtime(args.target, url, how="TARGET", is_chosen=chosen, **options)
    check_folder(args.target, "as TARGET, or MODULE:ATTR")
    store = open_store(url)
    harness = make_assistant(
        args.target,
        choose_model(args.model),
        store=store,
        consent=make_permissions(args),
        context_window=args.context_window,
    )
    return runtime_on([harness], store, **options)


def warn_of_target(args: argparse.Namespace, runtime: Runtime) -> None:
    """Say what is not as expected in a folder."""
    harness = next(iter(runtime.agents.values()), None)
    if isinstance(harness, HarnessAgent) and Path(args.target).is_dir():
        warn_of(args.model, read_catalog(harness).problems, args.target)


def _warn(args: argparse.Namespace, runtime: Runtime) -> None:
    """Say what may not be meant."""
    warn_of_target(args, runtime)
    if not isinstance(runtime.store, SqlStore):
        complain(f"nothing is kept: runs end with this process; give --db URL or set ${VARIABLE}")
    if args.user_header is not None and not _is_loopback(args.host):
        complain(f"whoever reaches {args.host} without the proxy can name any user in {args.user_header}")


class _Server(NamedTuple):
    """The agents of a command line, and the socket on which they are served."""

    args: argparse.Namespace
    runtime: Runtime
    listener: socket.socket
    token: str | None
    tls: Tls | None

    @property
    def url(self) -> str:
        host, port = self.listener.getsockname()[:2]
        scheme = "http" if self.args.tls_cert is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def announce(self) -> None:
        """Print where the server listens. A token is shown only if it was made here."""
        args, names = self.args, list(self.runtime.agents)
        if args.listen_fd is not None:
            print(READY, flush=True)
            return
        _warn(args, self.runtime)
        shown = self.token if args.token is None and args.token_file is None else None
        if args.json:
            print(json.dumps({"url": self.url, "token": shown, "agents": names}), flush=True)
            return
        made = "" if shown is None else f"token: {shown}\nopen {self.url}/#token={shown}\n"
        if self.token is None and _asks_for_token(args):
            made = "tokens: those of the database; see retinue tokens\n"
        print(f"serving {', '.join(names)} on {self.url}\n{made}ready", flush=True)

    async def serve(self, wait: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Serve in this process until the wait is over."""
        from ..server import A2AOptions, create_app
        from ..server.process import serve as serve_app

        args = self.args
        if not args.verbose:
            logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # not what is no HTTP
        key = None if args.a2a_key is None else _read_secret(args.a2a_key, "key")
        with as_misuse():
            await self.runtime._enter_first()  # pyright: ignore[reportPrivateUsage]  # not for callers
        try:
            app = create_app(
                self.runtime,
                auth=self._auth(),
                cors=args.cors,
                rate=args.rate,
                max_streams=args.max_streams,
                # Without tokens, a page of another name must not reach it.
                hosts=("localhost", "127.0.0.1", "[::1]", args.host) if args.no_auth and not args.public else (),
                a2a=A2AOptions(base=self.url, key=key, push_private=args.push_private),
                shared_files=args.shared_files,
            )
            async with self._grpc(app):
                await serve_app(app, self.listener, wait(), self._begin, args.grace, self.tls)
        finally:
            await self.runtime.close(args.grace)

    def _begin(self) -> None:
        """Announce the server, which listens now, and then continue interrupted runs: one of them may end this process."""
        self.announce()
        self.runtime._recover()  # pyright: ignore[reportPrivateUsage]  # not for callers

    def _auth(self) -> Auth:
        from ..server import NoAuth, OneToken, ProxyHeader, StoredTokens

        if self.args.user_header is not None:
            return ProxyHeader(self.args.user_header)
        if self.args.no_auth:
            return NoAuth()
        one = None if self.token is None else OneToken(self.token)
        if isinstance(self.runtime.store, SqlStore):
            return StoredTokens(self.runtime.store, one)
        assert one is not None
        return one

    @asynccontextmanager
    async def _grpc(self, app: Starlette) -> AsyncGenerator[None]:
        """Serve A2A over gRPC as well, where it is installed. Without --grpc-port, a port that is taken is no error."""
        args, server = self.args, None
        if app.state.a2a is not None and find_spec("grpc") is not None:
            from ..server.a2a_grpc import start_grpc

            port = args.grpc_port
            if port is None:
                port = 0 if args.port == 0 and args.workers == 1 else self.listener.getsockname()[1] + 1
            try:
                server = await start_grpc(
                    app, args.host, port, shared=args.workers > 1, listed=args.grpc_port is not None, tls=self.tls
                )
            except ConfigurationError as exc:
                if args.grpc_port is not None:
                    raise
                complain(f"A2A is not served over gRPC: {exc}")
        elif args.grpc_port is not None:
            raise ConfigurationError('--grpc-port is for A2A, which is not installed: pip install "retinue[a2a]"')
        try:
            yield
        finally:
            if server is not None:
                await server.stop(_GRPC_GRACE)


async def _stopped_or_left(interrupt: Interrupt) -> None:
    """Return at a signal, or when the process that started this worker has gone."""
    left = asyncio.Event()
    loop = asyncio.get_running_loop()

    def read() -> None:
        with suppress(BlockingIOError):
            if not os.read(sys.stdin.fileno(), 1024):
                loop.remove_reader(sys.stdin.fileno())
                left.set()

    loop.add_reader(sys.stdin.fileno(), read)
    await wait_for_first(interrupt.wait(), left.wait())
