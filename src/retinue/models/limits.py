"""Limits of a provider's account: those that were given, those that headers tell, and those that refusals teach.

Everything here is a function of times that are passed in; `gate.py` reads the clock.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from math import ceil, inf, isfinite, log2

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.gate import Rate

START = 8
"""Requests that an unknown account gets at first. While nothing is refused, the number doubles after each quiet moment."""
QUIET = 0.1
"""Seconds without a refusal that make a moment quiet."""
_UNHEARD = 0.25
"""The same where other processes may send too, and answers are still to begin."""
OPEN = 512
"""Requests in one second without a refusal after which an account counts as unlimited."""
MARGIN = 0.98
"""The part of a known limit that is used: clocks and networks are not exact."""
_BURST = 0.9
"""The part of a burst that is used at once, of those that headers tell."""
_REFUSAL = 0.5
"""Seconds after which a request that was not refused counts as accepted, though its answer has not begun."""
TOKEN_BURST = 6.0
"""Seconds of a given limit on tokens that may be used at once; a minute then has as many tokens less."""
DISTRUST = 60.0
"""Seconds in which headers are not believed, after a refusal that they contradict."""
_DAY = 86_400.0
_PROBE = 2.0
"""Seconds until one request more than `parallel` is tried; they double with each refusal."""
_PAUSE = 1.0
"""Seconds without a request after a refusal that names no time; they double while nothing is accepted in between."""
_SUM = 3.0
"""Seconds in which the admissions of several processes, each seen at its first refusal, add up to one limit."""


class Facts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The knowledge of an account that all processes share."""

    rate: float = 0.0
    """Requests a second; 0 if not known."""
    is_told: bool = False
    """True if headers tell the rate; otherwise it was learned from refusals and grows while nothing is refused."""
    burst: float = 0.0
    """Requests that the provider takes at once, as headers tell."""
    token_rate: float = 0.0
    """Tokens a second, as headers tell."""
    token_burst: float = 0.0
    learned_at: float = 0.0
    blocked_until: float = 0.0
    """The end of the longest `retry-after`."""
    seen: dict[str, float] = {}
    """Admissions in the second before the first refusal, by process."""


encode_facts = msgspec.json.encode
decode_facts = msgspec.json.Decoder(Facts).decode


class Told(Struct, frozen=True):
    """A limit as the headers of a response tell it."""

    limit: float
    remaining: float
    reset: float
    """Seconds until all of the limit remains again."""

    @property
    def used(self) -> float:
        return self.limit - self.remaining

    @property
    def rate(self) -> float | None:
        """The part of the limit that comes back in a second, None if nothing was used that tells it."""
        return self.used / self.reset if self.used > 0 and self.reset > 0 else None


def told_by(headers: Mapping[str, str], kind: str) -> Told | None:
    """Return the limit on "requests" or "tokens" that headers tell; None if they tell none or contradict themselves."""
    for limit, remaining, reset in _NAMES[kind]:
        if (most := headers.get(limit)) is None:
            continue
        try:
            told = Told(float(most), float(headers[remaining]), _seconds(headers[reset]))
        except (KeyError, ValueError, OverflowError):
            continue
        if 0 < told.limit < inf and 0 <= told.remaining <= told.limit and 0 <= told.reset <= _DAY:
            return told
    return None


def _names(kind: str) -> list[tuple[str, str, str]]:
    fields, found = ("limit", "remaining", "reset"), list[tuple[str, ...]]()
    found.append(tuple([f"x-ratelimit-{field}-{kind}" for field in fields]))
    for one in (kind, f"input-{kind}"):
        found.append(tuple([f"anthropic-ratelimit-{one}-{field}" for field in fields]))
    if kind == "requests":
        found.append(tuple([f"x-ratelimit-{field}" for field in fields]))
    return [(limit, remaining, reset) for limit, remaining, reset in found]


_NAMES = {kind: _names(kind) for kind in ("requests", "tokens")}
_PARTS = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s|d)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": _DAY}


def _seconds(given: str) -> float:
    """Return the seconds of "1m2.5s", "120ms", a number of seconds, or a time in ISO 8601 or since 1970."""
    given = given.strip()
    if parts := _PARTS.findall(given):
        if "".join(["".join(part) for part in parts]) != given:
            raise ValueError(given)
        return sum([float(number) * _UNITS[unit] for number, unit in parts])
    try:
        number = float(given)
    except ValueError:
        return max(0.0, datetime.fromisoformat(given).timestamp() - time.time())
    if not isfinite(number):
        raise ValueError(given)
    if number > 1e9:  # a time, in seconds or milliseconds
        number = max(0.0, (number / 1000 if number > 1e11 else number) - time.time())
    return number


class Sent(Struct, eq=False):
    """A request that was sent."""

    at: float
    number: int
    epoch: int
    """The number of times that this process had slowed down before it was sent."""
    is_probe: bool = False
    """True if it tries whether the account takes more, or anything again."""
    was_heard: bool = False
    """True once the provider began to answer it."""
    was_refused: bool = False
    tokens: float = 0.0
    """The tokens that it is estimated to use."""
    is_reserved: bool = False
    """True if the cursor of tokens has moved by them."""


class Limits:
    """The limits of one account as one process knows them, and how it learns more of them."""

    def __init__(self, given: Rate, owner: str, *, is_shared: bool = False) -> None:
        self.given, self._owner, self.is_shared = given, owner, is_shared
        self._start = START // 2 if is_shared else START  # other processes may begin at the same moment
        self.facts = Facts()
        self.epoch = 0
        self.in_flight: set[Sent] = set()
        self.parallel: int | None = None
        """The requests at once that the account takes, if a refusal showed that."""
        self._step, self._probe_after, self._probed_at = 1, _PROBE, -inf
        self._sent = self._streak = 0
        self._distrusted_until, self._remaining = -inf, 0.0
        self._recent: deque[Sent] = deque()
        """The requests of the last second."""
        self._trial_at, self._trial_sent, self._proven = -inf, 0, self._start
        self._doublings, self._heard_at = 0, -inf
        """How often the first number of requests was doubled in this second, and when the last answer began."""
        self.quiet = QUIET
        """Seconds after which a refusal would have come, if answers come too."""

    # --- what holds now

    def rate(self, now: float) -> float | None:
        """Return the requests a second that may be sent, None if no limit is known."""
        facts, rates = self.facts, list[float]()
        if self.given.requests_per_minute is not None:
            rates.append(self.given.requests_per_minute / 60 * MARGIN)
        if facts.rate:
            rates.append(facts.rate * (MARGIN if facts.is_told else _growth(now - facts.learned_at)))
        return min(rates, default=None)

    def slack(self) -> float:
        """Return the seconds that a send time may come before the cursor, because the provider takes a burst."""
        facts = self.facts
        if not (facts.is_told and facts.rate) or self.given.requests_per_minute is not None:
            return 0.0
        return max(0.0, facts.burst * _BURST - 1) / facts.rate

    def token_rate(self) -> tuple[float, float] | None:
        """Return the tokens a second, and the seconds of them that may be used at once; None if no limit is known."""
        if (given := self.given.tokens_per_minute) is not None:
            return given / (60 + TOKEN_BURST), TOKEN_BURST
        facts = self.facts
        return (facts.token_rate * MARGIN, _BURST * facts.token_burst / facts.token_rate) if facts.token_rate else None

    def trial_at(self, now: float) -> float:
        """Return when an account without known limits may be sent the next request."""
        if self._proven >= OPEN:
            return now
        if now - self._trial_at >= 1.0:
            self._proven = max(self._proven, self._trial_sent)
            self._trial_at, self._trial_sent, self._doublings = now, 0, 0
        if not self._wants_more():
            return max(self._trial_at, now)
        last = self._recent[-1].at
        if not self.in_flight:  # one call after another is no burst
            at = now
        elif self.is_shared and not all(sent.was_heard for sent in self.in_flight):
            at = last + _UNHEARD
        else:
            at = last + (self.quiet if self._heard_at >= last else QUIET)
        return max(at, now)

    def _wanted(self) -> int:
        """Return how often the first number of requests must be doubled for one more in this second."""
        return max(0, ceil(log2((self._trial_sent + 1) / self._proven)))

    def _wants_more(self) -> bool:
        return self._wanted() > self._doublings

    def is_doubling(self, now: float) -> bool:
        """Return whether an account without known limits is about to get more requests than before."""
        return self._proven < OPEN and now - self._trial_at < 1.0 and self._wants_more()

    def free_at(self, now: float) -> float:
        """Return when one more request may be under way: now, at a time, or `inf` for when one ends."""
        for probe in [sent for sent in self.in_flight if sent.is_probe and now - sent.at >= _REFUSAL]:
            self._passed(probe)
        if self.parallel is None or len(self.in_flight) < self.parallel:
            return now
        if any(sent.is_probe for sent in self.in_flight):
            return max(now + 0.001, self._probed_at + _REFUSAL)
        return max(now, self._probed_at + self._probe_after)

    # --- what happens

    def send(self, now: float, tokens: float, *, is_reserved: bool = False) -> Sent:
        is_probe = self.parallel is not None and len(self.in_flight) >= self.parallel
        if is_probe:
            self._probed_at = now
        self._doublings = max(self._doublings, self._wanted())
        self._sent += 1
        sent = Sent(
            at=now, number=self._sent, epoch=self.epoch, is_probe=is_probe, tokens=tokens, is_reserved=is_reserved
        )
        self.in_flight.add(sent)
        self._trial_sent += 1
        self._recent.append(sent)
        while self._recent[0].at < now - 1.0:
            self._recent.popleft()
        return sent

    def heard(self, sent: Sent, now: float) -> None:
        """The provider has accepted a request."""
        self._passed(sent)
        sent.was_heard, self._heard_at = True, now
        self._streak = 0

    def _passed(self, sent: Sent) -> None:
        """Raise the number of requests at once after one more than it was not refused, faster each time."""
        if sent.is_probe and self.parallel is not None and len(self.in_flight) > self.parallel:
            self.parallel += self._step
            self._step, self._probe_after, self._probed_at = self._step * 2, _PROBE, -inf
        sent.is_probe = False

    def ended(self, sent: Sent) -> None:
        self.in_flight.discard(sent)

    def begin_trial(self, now: float) -> None:
        """Forget what was learned: the provider was down, or is not known."""
        self.facts = Facts() if not self.facts.is_told else self.facts
        self.parallel, self._proven, self._trial_at, self._trial_sent, self._doublings = None, self._start, now, 0, 0
        self.epoch += 1

    def learn_told(self, headers: Mapping[str, str], sent: Sent, now: float) -> tuple[Facts, float, float] | None:
        """Read the headers of a response. Return new facts, and the seconds that both cursors are ahead; None if nothing is
        told. Headers tell how things stood when the request came, so the requests since then count on top."""
        if now < self._distrusted_until:
            return None
        ahead = token_ahead = 0.0
        facts = self.facts
        if (told := told_by(headers, "requests")) is not None and (rate := told.rate) is not None:
            if facts.is_told and facts.burst == told.limit and told.used < told.limit / 2:
                rate = facts.rate  # the more is used, the better the headers tell it
            facts = replace(facts, rate=rate, is_told=True, burst=told.limit, learned_at=now)
            ahead = sent.at - now + min(told.used + self._sent - sent.number, told.limit) / rate
            self._remaining = told.remaining
        if (told := told_by(headers, "tokens")) is not None and (rate := told.rate) is not None:
            if facts.token_burst == told.limit and told.used < told.limit / 2:
                rate = facts.token_rate
            facts = replace(facts, token_rate=rate, token_burst=told.limit)
            since = sum([each.tokens for each in self.in_flight if each.number > sent.number])
            token_ahead = sent.at - now + min(told.used + since, told.limit) / rate
        return None if facts is self.facts else (facts, ahead, token_ahead)

    def adopt(self, found: Facts, now: float) -> bool:
        """Use what another process has learned. Return True if this one adds what it was accepted in the same moment."""
        known, seen = self.facts, dict(found.seen)
        is_part = bool(seen) and not found.is_told and now - found.learned_at < _SUM
        own = known.seen.get(self._owner, 0.0) or float(self.accepted(now))
        adds = is_part and self._owner not in seen and own > 0
        if adds:
            seen[self._owner] = own
        self.facts = replace(
            found,
            seen=seen,
            rate=sum(seen.values()) if is_part else found.rate,
            blocked_until=max(known.blocked_until, found.blocked_until),
        )
        self.epoch += 1
        return adds

    def is_news(self, facts: Facts) -> bool:
        """Return whether facts differ so much from the known ones that others should know them."""
        known = self.facts
        pairs = ((known.rate, facts.rate), (known.token_rate, facts.token_rate), (known.burst, facts.burst))
        return known.is_told != facts.is_told or any(abs(old - new) > 0.1 * max(old, new) for old, new in pairs)

    def refused(self, sent: Sent, now: float, retry_after: float | None, words: str) -> Facts | None:
        """Learn from a refusal; return new facts, None if only this process learned something, or nothing."""
        self.in_flight.discard(sent)
        sent.was_refused = True
        under_way, is_old = len(self.in_flight), sent.epoch != self.epoch
        if sent.is_probe:
            self._step, self._probe_after = 1, min(2 * self._probe_after, 60.0)
            return None
        if under_way and (_CONCURRENCY.search(words) or self._shows_parallel(under_way, retry_after)):
            self.parallel = under_way
            self._step, self._probed_at = 1, now
            return None
        if retry_after is not None and not self.facts.rate and under_way:  # perhaps this, too
            self.parallel, self._step, self._probed_at = under_way, 1, now
        facts = self._slower(now, is_old)
        pause = retry_after or 0.0
        if not is_old and not facts.is_told:
            self._streak += 1
            pause = max(pause, 2 / facts.rate)
            if self._streak > 1 or retry_after is None:
                pause = max(pause, min(_PAUSE * 2 ** (self._streak - 1), 30.0))
        self.facts = replace(facts, blocked_until=max(facts.blocked_until, now + pause))
        return self.facts

    def accepted(self, now: float) -> int:
        """Return the number of requests of the last second that were not refused."""
        return sum([not each.was_refused for each in self._recent if each.at > now - 1.0])

    def _shows_parallel(self, under_way: int, retry_after: float | None) -> bool:
        """Return whether a refusal may mean too many requests at once: it names no time, and no other limit is known."""
        if retry_after is not None or self.facts.rate or self.given.requests_per_minute is not None:
            return False
        return self.parallel is None or self.parallel >= under_way > self.parallel / 1.5

    def _slower(self, now: float, is_old: bool) -> Facts:
        """Return facts with a lower rate."""
        facts = self.facts
        if facts.is_told and self._remaining < 1:  # as the headers say
            return replace(facts, blocked_until=max(facts.blocked_until, now + 1 / facts.rate))
        if facts.is_told:
            self._distrusted_until = now + DISTRUST
            facts = replace(facts, is_told=False, burst=0.0)
        is_first = not facts.rate or (is_old and bool(facts.seen) and now - facts.learned_at < 1.0)
        if not is_old or is_first:
            self.epoch += not is_old
        else:
            return facts
        if is_first:
            others = facts.seen if now - facts.learned_at < _SUM else {}
            seen = {**others, self._owner: float(max(self.accepted(now), 1))}
            return replace(facts, rate=sum(seen.values()), learned_at=now, seen=seen)
        effective, age = self.rate(now) or facts.rate, now - facts.learned_at
        if age < 1.0:  # it is still the same moment: a pause is enough
            return facts
        rate = effective / 2 if age < 3.0 else 0.95 * (min(facts.rate, effective) + effective) / 2
        return replace(facts, rate=rate, learned_at=now, seen={})


_CONCURRENCY = re.compile(r"concurren|in parallel|simultaneous", re.I)


def _growth(age: float) -> float:
    """Return the part of the last refused rate that is used so long after the refusal: it stays below for a while."""
    if age < 2:
        return 0.8 + 0.075 * age
    return 0.95 + 0.002 * (age - 2) ** 2
