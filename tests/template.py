"""The process that `tests/prepared.py` forks: it makes the imports that programs of tests need, then waits for requests."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import threading
import types
import warnings
from typing import Any

MODULES = (
    "a2a.server.request_handlers.grpc_handler",
    "a2a.server.routes",
    "aiohttp",
    "pydantic",
    "retinue.backends.a2a_client",
    "retinue.backends.tasks_http",
    "retinue.cli.database",
    "retinue.cli.demo",
    "retinue.cli.run",
    "retinue.cli.serve",
    "retinue.cli.steering",
    "retinue.cli.worker",
    "retinue.client",
    "retinue.engines.postgres",
    "retinue.engines.temporal",
    "retinue.engines.temporal_worker",
    "retinue.server.a2a_http",
    "retinue.storage.postgres",
    "retinue.storage.sqlite",
    "retinue.testing",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.auto",
    "uvloop",
    "yaml",
)
_CLONE_PARENT = 0x8000
_SIGCHLD = 17


def main(number: int, clone: int) -> dict[str, Any]:
    """Answer requests; return one of them in each process that is forked for it."""
    with warnings.catch_warnings():  # an import that warns fails, as in a program with -W error
        warnings.simplefilter("error")
        for name in MODULES:
            importlib.import_module(name)
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a thread cannot be forked"
    gc.collect()
    gc.freeze()  # so that collections in forks copy no pages
    end = socket.socket(fileno=number)
    call = ctypes.CDLL(None).syscall
    while True:
        try:
            size = end.recv(4)
            if not size:
                os._exit(0)
            _, files, _, _ = socket.recv_fds(end, 1, 3)
            data = b""
            while len(data) < int.from_bytes(size, "little"):
                data += end.recv(int.from_bytes(size, "little") - len(data))
        except KeyboardInterrupt:
            os._exit(0)
        ctypes.pythonapi.PyOS_BeforeFork()
        pid = call(clone, _CLONE_PARENT | _SIGCHLD, 0, 0, 0, 0)  # a sibling: its parent waits for it
        if pid == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
            for target, file in enumerate(files):
                os.dup2(file, target)
            os.closerange(3, 4096)
            end.detach()
            return json.loads(data)
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        for file in files:
            os.close(file)
        end.sendall(pid.to_bytes(4, "little", signed=True))


def prepare(request: dict[str, Any]) -> types.ModuleType:
    """Make this process what a new interpreter would be before it runs a program; return its main module."""
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.stdin = open(0, closefd=False)
    for number, name in ((1, "stdout"), (2, "stderr")):
        errors = "strict" if number == 1 else "backslashreplace"
        line_by_line = number == 2 or os.isatty(number)
        made = open(number, "w", buffering=1 if line_by_line else -1, errors=errors, closefd=False)
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
    sys.__stdin__ = sys.stdin
    if request["strict"]:
        sys.warnoptions[:] = ["error"]
        warnings.simplefilter("error")
    kind, what = request["kind"], request["what"]
    sys.argv = [what if kind == "file" else kind, *request["argv"]]
    sys.path[0] = "" if kind == "-c" else request["cwd"] if kind == "-m" else os.path.dirname(os.path.abspath(what))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    return module


def run(request: dict[str, Any]) -> None:
    """Run a program as the main one."""
    module, what = prepare(request), request["what"]
    if request["kind"] == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    elif request["kind"] == "-c":
        exec(compile(what, "<string>", "exec"), module.__dict__)
    else:
        with open(what, "rb") as file:
            code = compile(file.read(), what, "exec")
        module.__file__ = what
        exec(code, module.__dict__)


def free(modules: set[str]) -> None:
    """Free what a program has made and left behind, in its modules and ours; `modules` were there before it."""
    ours = [name for name in modules if name.partition(".")[0] in ("asyncio", "retinue")]
    for name in ["__main__", *(sys.modules.keys() - modules), *ours]:
        getattr(sys.modules.get(name), "__dict__", {}).clear()
    gc.collect()


def end(code: object, modules: set[str]) -> None:
    """End a program without freeing the memory of the template, which would copy it."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if sys.warnoptions:
        free(modules)
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code & 0xFF if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    request = main(int(sys.argv[1]), int(sys.argv[2]))
    modules = set(sys.modules)
    try:
        run(request)
        code: object = None
    except SystemExit as exc:
        code = exc.code
    except Exception as exc:
        sys.excepthook(type(exc), exc, exc.__traceback__)
        code = 1
    end(code, modules)
