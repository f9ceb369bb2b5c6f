"""What tests of several folders share."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from . import prepared
from .effort import IS_LONG
from .folding import FoldCheck, checked_folds
from .payers import Effects
from .places import FAST

if TYPE_CHECKING:
    from .databases import TestServer

# How long an example takes depends on what else the machine does: that is for benchmarks.
settings.register_profile("retinue", deadline=None, derandomize=not IS_LONG)
settings.load_profile("retinue")
prepared.install()
if FAST is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(FAST))  # the place of every `tmp_path`
gc.disable()  # until all is imported, of which nearly nothing is garbage


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Have each process of the whole suite import the tests in another order.

    After a checkout nothing is compiled, and pytest rewrites each assertion. So each process compiles a share of the files,
    and finds the rest compiled by the others.
    """
    config = session.config
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    paths = sorted(Path(__file__).parent.glob("*/test_*.py"))
    first = int(worker["workerid"].removeprefix("gw")) * len(paths) // worker["workercount"]
    for path in paths[first:] + paths[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # pytest imports it again, and reports that
            importlib.import_module(f"tests.{path.parent.name}.{path.stem}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of models together, in their random order: each process that has one imports SDKs for seconds."""
    ours = [item for item in items if "models" in item.path.parts]
    if ours:
        at = items.index(ours[0])
        others = [item for item in items[at:] if "models" not in item.path.parts]
        items[at:] = ours + others


def pytest_collection_finish() -> None:
    """Let no garbage collection look at the modules and items of the whole suite again, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=bool(os.environ.get("RETINUE_CHECK_PACKS")))
def check_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack each log that a test leaves, and compare what is read; for every test where RETINUE_CHECK_PACKS is set."""
    from .packing import install

    install(monkeypatch)


@pytest.fixture(autouse=bool(os.environ.get("RETINUE_CHECK_FOLDS")))
def fold_check(request: pytest.FixtureRequest) -> Iterator[FoldCheck | None]:
    """Check at every row that the live state is the fold of the log; for every test where RETINUE_CHECK_FOLDS is set."""
    if request.node.get_closest_marker("no_fold_check") is not None:
        yield None
        return
    with checked_folds() as check:
        yield check


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask servers again after milliseconds, where a process waits up to two seconds."""
    concurrency, a2a = "retinue.core.concurrency", "retinue.backends.a2a"
    first = {f"{concurrency}.FIRST_PAUSE": 0.002, f"{a2a}.FIRST_PAUSE": 0.002}
    for name, seconds in {**first, f"{concurrency}.LONGEST_PAUSE": 0.05}.items():
        monkeypatch.setattr(name, seconds)


@pytest.fixture(scope="session")
def _the_postgres_server() -> Iterator[TestServer]:
    from .connections import lent_connections
    from .databases import postgres_server

    with postgres_server(inside=FAST) as server, lent_connections():
        yield server


@pytest.fixture
def postgres_server(_the_postgres_server: TestServer) -> TestServer:
    """The PostgreSQL server of this session, started with the first test that asks for it, and running."""
    _the_postgres_server.start()
    return _the_postgres_server


@pytest.fixture
def postgres_url(postgres_server: TestServer) -> Iterator[str]:
    """The URL of a schema that nobody else has, with tables and no rows."""
    with postgres_server.empty_url() as url:
        yield url


@pytest.fixture
def new_postgres_url(postgres_server: TestServer) -> str:
    """The URL of a schema that does not exist yet."""
    return postgres_server.url()


@pytest.fixture
def new_connections(_the_postgres_server: TestServer) -> Iterator[None]:
    """Let stores of PostgreSQL have connections of their own, which end when they are closed."""
    from .connections import new_connections

    with new_connections():
        yield


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave runs without waiting for what runs."""
    from retinue.runtime.live import LiveRun

    real = LiveRun.leave
    monkeypatch.setattr(LiveRun, "leave", lambda run, grace: real(run, 0.0))  # type: ignore[misc]


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a new SQLite file."""
    return f"sqlite:///{tmp_path}/app.db"


@pytest.fixture
def effects(tmp_path: Path) -> Effects:
    """A file where agents note what they have done."""
    return Effects(tmp_path / "effects.txt")
