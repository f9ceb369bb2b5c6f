"""The command line. One file a command; each is imported in full only when it is the one that was asked for."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn, TextIO

from ..core.errors import ConfigurationError, RetinueError, StoreError
from .exits import FAILED, INTERRUPTED, MISUSED, PIPE_CLOSED
from .text import clean, complain, is_unicode

COMMANDS = ("run", "agents", "tasks", "runs", "db", "demo")


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code; whatever goes wrong is one line on stderr that says what to do."""
    _make_writable()
    try:
        args = _parser().parse_args(argv)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else MISUSED
    try:
        with _logging(args.verbose):
            return args.execute(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return PIPE_CLOSED
    except Exception as exc:
        return _report(exc, args.verbose)


class _Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._negative_number_matcher = re.compile(r"-\d")  # -1d is a wrong time, not an option

    def error(self, message: str) -> NoReturn:
        complain(f"{message}; see {self.prog} --help")
        self.exit(MISUSED)


def _parser() -> argparse.ArgumentParser:
    from .. import __version__

    parser = _Parser(prog="retinue", description="A runtime for agents that delegate to sub-agents.")
    parser.add_argument("--version", action="version", version=f"retinue {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f".{name}", __name__).add_to(commands)
    return parser


def _report(exc: Exception, verbose: bool) -> int:
    if verbose:
        import traceback

        print(clean("".join(traceback.format_exception(exc))), file=sys.stderr)
    if isinstance(exc, RetinueError):
        complain(str(exc))
        is_unusable = isinstance(exc, StoreError) and exc.damaged
        return MISUSED if is_unusable or isinstance(exc, ConfigurationError) else FAILED
    more = "" if verbose else "; run it again with --verbose to see where"
    complain(f"unexpected {type(exc).__name__}: {exc}{more}")
    return FAILED


class _StderrHandler(logging.Handler):
    """Writes to what sys.stderr is at the time, which a live view may have put something before."""

    def emit(self, record: logging.LogRecord) -> None:
        print(clean(self.format(record)), file=sys.stderr)


@contextmanager
def _logging(verbose: bool) -> Generator[None]:
    """Log to stderr; without --verbose not at all, since what the user must know is said in one line."""
    logger, handler = logging.getLogger("retinue"), _StderrHandler() if verbose else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    if verbose:
        logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _make_writable() -> None:
    """What stdout cannot hold is written as escapes instead of failing; a stream that is closed swallows all."""
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None and not is_unicode(sys.stdout):
        reconfigure(errors="backslashreplace")


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _drop_stdout() -> None:
    """Nobody reads any more; Python would complain about that once more at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return
