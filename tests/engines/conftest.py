"""Engines to run the same tests on."""

from __future__ import annotations

import pytest

from .team import Site


@pytest.fixture(params=["postgres"])
def site(request: pytest.FixtureRequest, postgres_url: str) -> Site:
    """An empty database and an engine."""
    return Site(postgres_url, request.param)
