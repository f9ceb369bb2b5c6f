"""Trying prefixes: cut a program's log in many places, continue each, and compare the ends."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec

from .ends import check_log, cut_of, same_end
from .scenes import Scene
from .tape import End, Tape, continued, undisturbed


class WrongEnd(AssertionError):
    """A run that was cut and continued did not come to the end that it should."""


def _clock_of(scene: Scene) -> dict[str, Any]:
    """Return a clock that stands still for a program with a limit on time, whose end says how much of it was used."""
    return {"clock": lambda: 1_000.0} if scene.limits is not None and scene.limits.seconds is not None else {}


async def try_cut(whole: End, tape: Tape, cut: int, scene: Scene, chance: Random) -> tuple[End, bool]:
    """Continue one prefix and check its end; what came of it, and whether something is unknown."""
    late, bare = chance.random() < 0.5, chance.random() < 0.5
    try:
        other = await continued(tape, cut, scene.plan, late=late, bare=bare, **_clock_of(scene))
        check_log(other)
        left = cut_of(tape, cut, other.world)
        same_end(whole, other, left)
    except Exception as exc:
        row = tape.rows[cut - 1] if cut else None
        what = "nothing" if row is None else row.event.kind if row.event is not None else f"row {row.private}"
        place = "0" if row is None else f"{row.seq}.{row.sub}"
        wrong = WrongEnd(f"cut after {cut} rows, at {place} ({what}), late={late}, bare={bare}: {exc!r}")
        wrong.add_note(f"The program: {msgspec.json.encode(scene).decode()}")
        raise wrong from exc
    return other, bool(left.unknown)


async def try_program(scene: Scene, chance: Random, cuts: int | None = None, chains: int = 0) -> Counter[str]:
    """Continue some prefixes of a program, or all; and chains of three cuts, each of what came of the one before."""
    whole = await undisturbed(scene.plan, scene.limits, **_clock_of(scene))
    check_log(whole)
    counts: Counter[str] = Counter(programs=1, rows=len(whole.tape.entries), runs=len(whole.tree.runs))
    places = whole.tape.cuts()
    for cut in places if cuts is None else sorted(chance.sample(places, min(cuts, len(places)))):
        _, is_unknown = await try_cut(whole, whole.tape, cut, scene, chance)
        counts.update(prefixes=1, unknown=int(is_unknown))
    for _ in range(chains):
        tape = whole.tape
        for _ in range(3):
            other, is_unknown = await try_cut(whole, tape, chance.choice(tape.cuts()), scene, chance)
            tape = other.tape
            counts.update(prefixes=1, chained=1, unknown=int(is_unknown))
    return counts
