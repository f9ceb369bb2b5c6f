"""A workspace with something secret next to it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from retinue.core.agents import Agent
from retinue.core.concurrency import CancellationToken
from retinue.core.context import ToolContext
from retinue.core.errors import ConfigurationError
from retinue.core.runs import RunIdentity
from retinue.core.state import Snapshot
from retinue.workspace import LocalFilesystem, SandboxFilesystem, file_tools
from retinue.workspace.folders import ResolvedFolder
from tests.workspace.capabilities import bound_by_permissions


@pytest.fixture
def permissions(tmp_path: Path) -> Iterator[None]:
    """Permissions count in this test, also for the superuser."""
    with bound_by_permissions():
        (tmp_path / "probe").touch(0)
        with pytest.raises(PermissionError):
            (tmp_path / "probe").open()
        yield


class ResolvingFilesystem(LocalFilesystem):
    """As on a system that cannot open files relative to a folder."""

    _folder_type = ResolvedFolder


@pytest.fixture(
    params=[LocalFilesystem, ResolvingFilesystem, SandboxFilesystem], ids=["anchored", "resolved", "sandbox"]
)
def kind(request: pytest.FixtureRequest) -> type[LocalFilesystem]:
    return request.param


def why_not() -> str:
    """Why there can be no sandbox on this machine; empty where there can."""
    try:
        SandboxFilesystem(".").check_commands()
    except ConfigurationError as exc:
        return str(exc)
    return ""


@pytest.fixture(scope="module")
def bwrap() -> None:
    """There is a bwrap that works; where there is none, the reason is told."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    (folder / "secret.txt").write_text("TOP-SECRET\n")
    (folder / "inner" / "secret.txt").write_text("TOP-SECRET\n")
    return folder


@pytest.fixture(params=[LocalFilesystem, SandboxFilesystem], ids=["local", "sandbox"])
def files(root: Path, request: pytest.FixtureRequest) -> LocalFilesystem:
    return request.param(root)


Call = Callable[..., Coroutine[Any, Any, Any]]


def context(cancellation: CancellationToken | None = None) -> ToolContext:
    return ToolContext(
        call_id="call_1",
        tool_name="files",
        run=RunIdentity(run_id="r", thread_id="t", agent="a"),
        agent=Agent("a"),
        snapshot=Snapshot({}, {}, 0),
        emit=lambda _: None,
        cancellation=cancellation or CancellationToken(),
    )


@pytest.fixture
def call(files: LocalFilesystem) -> Call:
    """Call a tool as an agent would, arguments checked against its schema."""
    toolbox = Agent("a", tools=file_tools(files)).toolbox

    async def call(name: str, cancellation: CancellationToken | None = None, /, **args: Any) -> Any:
        assert toolbox[name].check.problems(args) == []
        return await toolbox[name].tool.execute(args, context(cancellation))

    return call
