"""Probation: how a process begins runs while processes of its store die.

A run that kills its process is continued by the next one, and kills that too. So each death of an owner is counted in the
log (`Losses`), and the count begins again when the log has made progress: more than one step since the last death. One step
is no progress: a call with an unknown outcome ends, the model answers, and the next call kills again.

Invariants:
- A suspect, a log that was lost twice without progress (once, if `max_takeovers` is 1), begins alone: after all other work, after a pause that grows, and
  not before the run that is on probation has made two steps, has ended or has worked for 30 seconds.
- While processes die one after the other, every run begins so. A death then accuses one run, so at most
  `max_takeovers` deaths and one for each run that kills are needed.
- Only a log whose owners died more often than `max_takeovers`, or that began with nothing else at work in its process
  while processes died that often, is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic

from msgspec import Struct
from msgspec.structs import replace

SUSPECT = 2
"""Deaths without progress that make a log a suspect, if `max_takeovers` is not smaller."""
MAX_TAKEOVERS = 5
LONGEST_PAUSE = 60.0
"""The longest pause before a suspect is tried again, in seconds."""
RECENT, EPISODE = 60.0, 600.0
"""Seconds in which deaths slow down the start of runs, and in which they count together against a run that was alone."""
PROVEN_STEPS, PROVEN_SECONDS = 2, 30.0
"""The steps, or the seconds, after which a run is on probation no more."""
_PLACES = {0: 1_000_000, 1: 1_000_000, 2: 4}
"""The number of runs on probation at once, by recent deaths; after more deaths it is one."""


class Losses(Struct, frozen=True):
    """The number of processes that died while they worked on a log, as the row of the log has it."""

    count: int = 0
    """Deaths of its owners since it last made progress."""
    steps: int = 0
    """The steps of its tree at the last death that was judged."""
    epoch: int = 0
    """The epoch of the last owner that died: if the next owner has the epoch after it, that death is not judged yet."""
    is_alone: bool = False
    """True if nothing else was at work in its process since it began, while processes were dying."""


def pause_after(lost: int) -> float:
    """Return the seconds before a log is continued that was lost so often before its present loss."""
    return 0.0 if lost == 0 else min(LONGEST_PAUSE, 2.0 ** (lost - 1))


def judge(losses: Losses, steps: int) -> Losses:
    """Return the losses of a log after the death of its owner, which its claim has counted, from the steps of its tree."""
    if steps > losses.steps + 1:
        return Losses(1, steps, losses.epoch)
    return replace(losses, steps=steps)


def is_given_up(losses: Losses, max_takeovers: int, deaths: int) -> bool:
    """Return whether a log is not continued any more, after so many deaths of any owners within `EPISODE`."""
    return losses.count > max_takeovers or (losses.is_alone and deaths >= max(max_takeovers, 1))


class _Entry(Struct):
    """A run on probation."""

    since: float
    steps: Callable[[], int] | None = None
    """The steps of its tree; None until it is at work."""
    before: int = 0


class Probation:
    """The runs of one process that are on probation, and those that wait to begin."""

    def __init__(self, max_takeovers: int = MAX_TAKEOVERS, clock: Callable[[], float] = monotonic) -> None:
        self.max_takeovers, self._clock = max_takeovers, clock
        self.suspect_from = min(SUSPECT, max(max_takeovers, 1))
        """Deaths without progress that make a log a suspect: more deaths count only if it was the only one."""
        self._deaths: dict[str, float] = {}
        self._entries: dict[str, _Entry] = {}
        self.is_active = False
        """True while processes die, a run is on probation, or one is noted as alone."""
        self.alone = set[str]()
        """The runs that are noted as alone in this process."""
        self._waiting: dict[str, bool] = {}
        """The runs that wait, in order; True for a suspect."""

    def note_deaths(self, found: Mapping[str, float]) -> None:
        """Note owners that died, each with the seconds since then."""
        now = self._clock()
        self.is_active |= bool(found)
        for owner, seconds in found.items():
            self._deaths.setdefault(owner, now - seconds)

    def places(self) -> int:
        """Return how many more runs may begin now, suspects apart."""
        self._forget_proven()
        now = self._clock()
        self._deaths = {owner: at for owner, at in self._deaths.items() if now - at < RECENT}
        self.is_active = bool(self._deaths or self._entries or self.alone)
        return max(0, _PLACES.get(len(self._deaths), 1) - len(self._entries))

    @property
    def is_strict(self) -> bool:
        """True if one run may begin at a time."""
        return len(self._deaths) not in _PLACES

    def has_place_for_suspect(self) -> bool:
        """Return whether a suspect may begin now: nothing is on probation or waits to begin."""
        self.places()
        return not self._entries and not any(not is_suspect for is_suspect in self._waiting.values())

    def reserve(self, run_id: str) -> None:
        """Keep a place for a run that was just claimed."""
        self._entries[run_id] = _Entry(self._clock())
        self.is_active = True

    def may_begin(self, run_id: str, *, is_suspect: bool) -> bool:
        """Return whether a run may begin now. If not, it waits in line: ask again, or call `leave`."""
        if run_id in self._entries or (not is_suspect and self.places() >= _PLACES[1]):
            return True
        self._waiting.setdefault(run_id, is_suspect)
        first = next(name for name, other in self._waiting.items() if other == is_suspect)
        return first == run_id and (self.has_place_for_suspect() if is_suspect else self.places() > 0)

    def begin(self, run_id: str, steps: Callable[[], int], *, is_suspect: bool) -> bool:
        """Put a run that begins on probation, if that is needed now; return whether it is there."""
        self._waiting.pop(run_id, None)
        is_needed = run_id in self._entries or is_suspect or self.places() < _PLACES[1]
        if is_needed:
            self._entries[run_id] = _Entry(self._clock(), steps, steps())
            self.is_active = True
        return is_needed

    def leave(self, run_id: str) -> None:
        """Note that a run works here no more, or waits no more."""
        self._entries.pop(run_id, None)
        self._waiting.pop(run_id, None)
        self.alone.discard(run_id)

    def _forget_proven(self) -> None:
        now = self._clock()
        for run_id, entry in list(self._entries.items()):
            made = 0 if entry.steps is None else entry.steps() - entry.before
            if made >= PROVEN_STEPS or now - entry.since >= PROVEN_SECONDS:
                del self._entries[run_id]
