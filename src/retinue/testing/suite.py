"""The base of the conformance suites."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Suite(Generic[T]):
    """Checks of a contract, one by one: `for check in suite.checks(): await check()`.

    `make` returns an empty implementation. `reopen` returns another one on the same data, as another process has it;
    without it, data is only read through the object that wrote it. Each check is written as a method `check_…` of what
    it needs, and is called without arguments: `_run` makes that anew.
    """

    def __init__(self, make: Callable[[], T], reopen: Callable[[T], T] | None = None) -> None:
        self._make, self._reopen = make, reopen

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, check in list(vars(cls).items()):
            if name.startswith("check_"):
                setattr(cls, name, cls._prepared(check))

    @staticmethod
    def _prepared(check: Callable[..., Any]) -> Callable[[Suite[Any]], Any]:
        @wraps(check)
        def run(suite: Suite[Any]) -> Any:
            return suite._run(check)

        return run

    def _run(self, check: Callable[..., Any]) -> Any:
        return check(self, self._make())

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the checks, for a parametrised test."""
        return sorted([name for name in dir(cls) if name.startswith("check_")])

    def checks(self) -> list[Callable[[], Any]]:
        return [getattr(self, name) for name in self.names()]

    def _readers(self, made: T) -> list[T]:
        """Return the given one and, with `reopen`, another on the same data."""
        return [made] if self._reopen is None else [made, self._reopen(made)]
