"""The command line. `parsers` declares the commands; the module of the one that is used is imported and run here."""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib import import_module

from ..core.errors import ConfigurationError, RetinueError, StoreError
from .parsers import COMPLETED, FAILED, INTERRUPTED, MISUSED, PIPE_CLOSED, parse
from .text import clean, complain, count, is_unicode


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code; an error is one line on stderr that says what to do."""
    _make_writable()
    verbose = False
    try:
        try:
            args = parse(argv)
            verbose = args.verbose
            with _logging(verbose, warns=args.command in ("serve:serve", "worker:work")):
                code = _run(args)
        except SystemExit as exc:  # from argparse
            code = exc.code if isinstance(exc.code, int) else MISUSED
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # or Python would report the closed pipe again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as exc:
        return _report(exc, verbose)


def _run(args: argparse.Namespace) -> int:
    if args.command is None:
        args.parser.print_help()
        return COMPLETED
    import asyncio

    name, _, function = args.command.partition(":")
    module = import_module(f".{name}", __name__)
    execute = getattr(module, function)
    if len(inspect.signature(execute).parameters) == 1:
        return asyncio.run(execute(args))
    from .interrupt import Interrupt

    factory = module.loop_factory() if hasattr(module, "loop_factory") else None
    with Interrupt() as interrupt, asyncio.Runner(loop_factory=factory) as runner:
        code = runner.run(execute(args, interrupt))
        if ignoring := runner.run(_cancel_rest()):  # the runner would wait for them for ever
            complain(f"not waiting for {count(ignoring, 'asyncio task')} that ignored cancellation")
            sys.stdout.flush()
            os._exit(code)
        return code


async def _cancel_rest() -> int:
    """Cancel what a command has left; return the number of tasks that ignore it."""
    import asyncio

    from ..core.concurrency import LAST_MOMENT, cancel_all

    rest = asyncio.all_tasks() - {asyncio.current_task()}
    await cancel_all(rest, LAST_MOMENT)
    return sum(not task.done() for task in rest)


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
    """Write to the current sys.stderr, which a live view may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print(clean(self.format(record)), file=sys.stderr)


@contextmanager
def _logging(verbose: bool, *, warns: bool) -> Generator[None]:
    """Log to stderr with --verbose; else nothing, or only warnings of a command that works for long."""
    logger = logging.getLogger("retinue")
    handler = (
        _StderrHandler(logging.NOTSET if verbose else logging.WARNING) if verbose or warns else logging.NullHandler()
    )
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
    """Write what stdout cannot encode as escapes; replace closed streams by the null device."""
    sys.stdout, sys.stderr = [one or open(os.devnull, "w", encoding="utf-8") for one in (sys.stdout, sys.stderr)]
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None and not is_unicode(sys.stdout):
        reconfigure(errors="backslashreplace")
