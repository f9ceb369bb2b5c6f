"""A seeded share of `scripts/fuzz-http`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..effort import share


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_malformed_requests_fail_politely_and_change_nothing(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from .fuzz import fuzz  # not above: it loads schemathesis, which only the process that runs this need do

    is_postgres = kind == "postgres"
    url = request.getfixturevalue("postgres_url") if is_postgres else f"sqlite:///{tmp_path}/fuzzed.db"
    count = share(10_000, 120)
    tally = await fuzz(url, count, seed=17, folder=tmp_path, described=not is_postgres or count > 1_000)
    assert tally.problems == []
    assert tally.sent >= count
    assert not [status for status in tally.statuses if status.startswith("5")]
