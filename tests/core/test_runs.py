"""Limits that are set or not, and usage that a sum can take."""

from __future__ import annotations

import copy
import pickle
from enum import IntEnum
from math import inf, nan
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue import ConfigurationError, Limits, Usage
from retinue.core.rows import Private, StoredRequest
from retinue.core.runs import DEFAULT_LIMITS, Above, Grant, limits_of_run

FIELDS = Limits.__struct_fields__
SOME = st.builds(
    Limits, **{name: st.integers(1, 9) for name in ("depth", "children", "parallel")}
) | st.fixed_dictionaries({}, optional={name: st.integers(1, 9) for name in FIELDS}).map(lambda found: Limits(**found))


@given(SOME, SOME | st.none(), st.booleans())
def test_what_a_caller_gives_lifts_no_limit_that_an_agent_sets(
    own: Limits, asked: Limits | None, over_network: bool
) -> None:
    found = limits_of_run(own, asked, over_network=over_network) or Limits()
    agents = own.with_defaults() if over_network else own
    for name in FIELDS:
        set_ = [limit for limits in (agents, asked or Limits()) if (limit := limits.get(name)) is not None]
        assert found.get(name) == min(set_, default=None)
    assert (limits_of_run(own, found, over_network=False) or Limits()) == found, "narrowing twice changes nothing"


def test_a_caller_in_this_process_may_go_beyond_defaults_and_one_over_a_network_may_not() -> None:
    wide = Limits(children=1_000_000, depth=9)
    assert limits_of_run(Limits(), wide, over_network=False) == wide
    assert (
        limits_of_run(Limits(), wide, over_network=True) == DEFAULT_LIMITS == Limits(depth=3, children=256, parallel=32)
    )
    assert limits_of_run(Limits(children=500), wide, over_network=True) == Limits(depth=3, children=500, parallel=32)
    assert limits_of_run(Limits(), Limits(), over_network=False) is None


@given(SOME)
def test_limits_are_stored_and_read_with_what_is_not_set(limits: Limits) -> None:
    for kind, record in (
        (Limits, limits),
        (StoredRequest, StoredRequest(limits=limits)),
        (Private, Private(grants={"run": Grant("run", limits)}, granted=limits)),
        (Above, Above(log_id="log", run_id="run", limits=limits)),
    ):
        assert msgspec.json.decode(msgspec.json.encode(record), type=kind) == record
    assert pickle.loads(pickle.dumps(limits)) == copy.copy(limits) == limits


@pytest.mark.parametrize("name", FIELDS)
def test_a_limit_that_nothing_reaches_is_kept_as_one_that_fits_arithmetic(name: str) -> None:
    assert Limits(**{name: 10**400}) == Limits(**{name: 2**53})
    if name in ("cost", "seconds"):
        assert Limits(**{name: inf}) == Limits(**{name: 2**53})  # pyright: ignore[reportArgumentType]


def test_limits_show_what_is_set() -> None:
    assert repr(Limits()) == "Limits()"
    assert repr(Limits(depth=3, cost=0.5)) == "Limits(depth=3, cost=0.5)"
    assert msgspec.json.encode(Limits()) == b"{}"
    assert msgspec.json.encode(Limits(children=256)) == b'{"children":256}'
    assert Limits() == Limits(steps=None) != Limits(children=256)


@pytest.mark.parametrize("name", Usage.__struct_fields__)
@pytest.mark.parametrize(
    ("said", "counts"),
    [(-5, 0), (-1e300, 0), (nan, 0), (inf, 0), (-inf, 0), (10**40, 2**53), (10**400, 2**53), (7, 7), (True, 1)],
)
def test_usage_is_a_number_that_can_be_added(name: str, said: Any, counts: float) -> None:
    assert getattr(Usage(**{name: said}), name) == counts
    if said == said and abs(said) < 1e40:
        body = msgspec.json.encode({name: int(said) if abs(said) < 1e9 else said})
        if name == "cost" or b"e" not in body:
            assert getattr(msgspec.json.decode(body, type=Usage), name) == counts


COUNTS = st.integers(-(2**60), 2**60)
USAGE = st.builds(Usage, input_tokens=COUNTS, output_tokens=COUNTS, requests=COUNTS, cost=st.floats())


@given(st.lists(USAGE, max_size=6), USAGE)
def test_a_sum_of_usage_never_falls(added: list[Usage], other: Usage) -> None:
    total = Usage()
    for one in added:
        before, total = total, total + one
        assert all(getattr(total, name) >= getattr(before, name) for name in Usage.__struct_fields__)
    assert min(msgspec.structs.astuple(total - other)) >= 0
    assert total.at_least(other) - other == total - other
    assert msgspec.json.decode(msgspec.json.encode(total), type=Usage) == total


@pytest.mark.parametrize("name", Usage.__struct_fields__)
@pytest.mark.parametrize("said", [True, 1.5, float(2**53), IntEnum("Sizes", ["SMALL"])["SMALL"]])
def test_usage_of_any_kind_of_number_can_be_stored_and_read(name: str, said: Any) -> None:
    usage = Usage(**{name: said})
    assert msgspec.json.decode(msgspec.json.encode(usage), type=Usage) == usage
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(usage), type=Usage) == usage


def test_usage_that_is_no_number_is_refused_by_name() -> None:
    for value in ("5", None, [1]):
        with pytest.raises(ConfigurationError, match=r"Usage.output_tokens is .*: give a number"):
            Usage(output_tokens=value)  # pyright: ignore[reportArgumentType]
