"""How runs begin while processes die: who waits for whom, and who is given up."""

from __future__ import annotations

import pytest

from retinue.core.probation import Probation, is_given_up, judge, pause_after
from retinue.core.stores import Losses


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def probation(clock: Clock) -> Probation:
    return Probation(clock=clock)


def die(probation: Probation, *owners: str) -> None:
    probation.note_deaths(dict.fromkeys(owners, 0.0))


def test_progress_is_more_than_one_step() -> None:
    assert judge(Losses(3, 7, 5, is_alone=True), 8) == Losses(3, 8, 5, is_alone=True), (
        "one step is what a recovery makes"
    )
    assert judge(Losses(3, 7, 5, is_alone=True), 9) == Losses(1, 9, 5)


def test_pauses_grow() -> None:
    assert [pause_after(lost) for lost in (0, 1, 2, 3, 4, 20)] == [0, 1, 2, 4, 8, 60]


def test_only_what_was_lost_too_often_or_alone_is_given_up() -> None:
    assert not is_given_up(Losses(5), 5, 100)
    assert is_given_up(Losses(6), 5, 0)
    assert not is_given_up(Losses(1, is_alone=True), 5, 4)
    assert is_given_up(Losses(1, is_alone=True), 5, 5)
    assert is_given_up(Losses(1), 0, 1)


def test_one_death_holds_nobody_up(probation: Probation) -> None:
    die(probation, "a")
    assert all(probation.may_begin(f"r{n}", is_suspect=False) for n in range(1000))
    assert not probation.begin("r1", lambda: 0, is_suspect=False)


def test_in_a_row_of_deaths_one_run_begins_at_a_time(probation: Probation, clock: Clock) -> None:
    die(probation, "a", "b", "c")
    assert probation.is_strict
    steps = {"r1": 4}
    assert probation.may_begin("r1", is_suspect=False)
    assert probation.begin("r1", lambda: steps["r1"], is_suspect=False)
    assert [probation.may_begin(name, is_suspect=False) for name in ("r2", "r3")] == [False, False]
    steps["r1"] = 5
    assert not probation.may_begin("r2", is_suspect=False)
    steps["r1"] = 6  # two steps: it does not kill
    assert not probation.may_begin("r3", is_suspect=False), "first come, first served"
    assert probation.may_begin("r2", is_suspect=False)
    assert probation.begin("r2", lambda: 0, is_suspect=False)
    clock.now += 30
    assert probation.may_begin("r3", is_suspect=False), "it has worked for long enough"
    clock.now += 31
    assert probation.places() > 1000, "nothing has died for a minute"


def test_a_run_that_ends_or_gives_up_waiting_makes_room(probation: Probation) -> None:
    die(probation, "a", "b", "c")
    probation.begin("r1", lambda: 0, is_suspect=False)
    assert not probation.may_begin("r2", is_suspect=False)
    assert not probation.may_begin("r3", is_suspect=False)
    probation.leave("r2")
    probation.leave("r1")
    assert probation.may_begin("r3", is_suspect=False)


def test_a_suspect_waits_for_all_others_and_holds_them_up(probation: Probation) -> None:
    die(probation, "a", "b", "c")
    probation.begin("r1", lambda: 0, is_suspect=False)
    assert not probation.may_begin("s1", is_suspect=True)
    assert not probation.may_begin("r2", is_suspect=False)
    probation.leave("r1")
    assert not probation.may_begin("s1", is_suspect=True), "a run that is no suspect waits"
    assert probation.may_begin("r2", is_suspect=False)
    probation.leave("r2")
    assert probation.may_begin("s1", is_suspect=True)
    assert probation.begin("s1", lambda: 0, is_suspect=True)
    assert not probation.may_begin("s2", is_suspect=True)


def test_one_suspect_at_a_time_also_when_nothing_has_died_lately(probation: Probation) -> None:
    assert probation.may_begin("s1", is_suspect=True)
    assert probation.begin("s1", lambda: 0, is_suspect=True)
    assert not probation.may_begin("s2", is_suspect=True)
    assert not probation.has_place_for_suspect()


def test_a_reserved_place_counts(probation: Probation) -> None:
    die(probation, "a", "b", "c")
    probation.reserve("r1")
    assert probation.places() == 0
    assert probation.may_begin("r1", is_suspect=True)
