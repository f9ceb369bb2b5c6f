"""Engines to run the same tests on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ..places import FAST
from .team import Site

if TYPE_CHECKING:
    from .temporal import TemporalServer


@pytest.fixture(scope="session")
def _the_temporal_server() -> Iterator[TemporalServer]:
    from .temporal import temporal_server

    with temporal_server(inside=FAST) as server:
        yield server


@pytest.fixture
def temporal(_the_temporal_server: TemporalServer) -> TemporalServer:
    """The Temporal server of this session, started with the first test that asks for it, and running."""
    _the_temporal_server.start()
    return _the_temporal_server


@pytest.fixture(params=["postgres", "temporal"])
def site(request: pytest.FixtureRequest, postgres_url: str) -> Site:
    """An empty database and an engine."""
    engine = request.param
    return Site(postgres_url, engine if engine == "postgres" else request.getfixturevalue("temporal").engine())
