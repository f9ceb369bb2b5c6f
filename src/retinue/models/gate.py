"""The gates of a runtime: each admits the requests to one account, in turns of its users, when the provider takes them.

Invariants: the send times that all processes hand out are at most as many as the known limit allows, whatever dies. A
request is sent only with a send time of the present generation that is at most `STALE` seconds old. A request that waits
holds no connection. Who owns what: the queue and the requests under way belong to this process and one event loop; the
cursor, what was learned and the slots of `Rate(parallel=…)` belong to the row of the account (`core/gate.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from urllib.parse import urlsplit

from msgspec import Struct

from ..core.concurrency import Jobs, wait_for_first
from ..core.errors import ModelError, ModelRateLimited, ModelUnavailable, StoreError
from ..core.gate import SLOT_LEASE, Account, GateRow, GateTable, LocalGateTable, Rate, Wait, WaitReason
from .limits import Facts, Limits, Sent, decode_facts, encode_facts

_log = logging.getLogger(__name__)

STALE = 1.0
"""Seconds after which a send time that was not used is void."""
BATCH = 0.5
"""Seconds of send times that a process reserves at once."""
SHOWN_AFTER = 1.0
"""Seconds of waiting after which a run shows that it waits."""
SETTLE = 0.1
"""Seconds between the first answer after an outage and the next request."""
_THIS_MACHINE, _NEAR = ("127.0.0.1", "localhost", "::1"), 0.02
"""Seconds in which a server on this machine would refuse a request; elsewhere it is as `Limits` has it."""
_LOOK = 0.5
"""Seconds between two looks at what other processes have learned, while requests are sent."""
_SLOT_LOOK, _HAND_ON = 2.0, 1.0
"""Seconds between two attempts to get a slot without a notification, and in which a process hands its slots on by itself."""
_GROWTH = 1.5
"""How much longer each pause of an outage is than the one before, up to a third of the longest delay of the RetryPolicy."""
_BATCH_OF_SLOTS = 8


class Pauses(Struct, frozen=True):
    """The patience and the pauses of a model, as its RetryPolicy says."""

    first: float
    longest: float
    patience: float


class Waiter(Struct, eq=False):
    user: str
    place: int
    """Its place among all requests that came to the gate; a refused request keeps it."""
    tokens: float
    turn: asyncio.Future[Sent]


class _Line:
    """Requests that wait: users take turns, and the oldest request of a user comes first."""

    def __init__(self) -> None:
        self._users: dict[str, deque[Waiter]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._users.values()))

    def add(self, waiter: Waiter) -> None:
        queue = self._users.setdefault(waiter.user, deque())
        place = len(queue)
        while place and queue[place - 1].place > waiter.place:
            place -= 1
        queue.insert(place, waiter)

    def remove(self, waiter: Waiter) -> None:
        queue = self._users.get(waiter.user)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._users[waiter.user]

    def first(self) -> Waiter:
        return next(iter(self._users.values()))[0]

    def pop(self) -> Waiter:
        """Remove and return the next request; its user goes to the end."""
        user, queue = next(iter(self._users.items()))
        waiter = queue.popleft()
        del self._users[user]
        if queue:
            self._users[user] = queue
        return waiter

    def before(self, waiter: Waiter) -> int:
        """Return the number of requests that are sent before this one."""
        own = self._users.get(waiter.user, deque())
        turns = own.index(waiter) if waiter in own else 0
        others = [len(queue) for user, queue in self._users.items() if user != waiter.user]
        return turns + sum([min(count, turns + 1) for count in others])


class _Outage(Struct, eq=False):
    """Nothing is accepted: one request after each pause tries again."""

    reason: WaitReason
    message: str
    since: float
    pause: float
    until: float
    """When the next request may try."""


class Gate:
    """The gate of one account in one process."""

    def __init__(self, account: Account, scope: str, rate: Rate, table: GateTable, owner: str) -> None:
        self.account, self._scope, self.table, self.owner = account, scope, table, owner
        self.id, self._row, self._offset, self._looked_at = "", GateRow(), 0.0, -inf
        is_shared = not isinstance(table, LocalGateTable)
        self.limits, self.line = Limits(rate, owner, is_shared=is_shared), _Line()
        if (urlsplit(account.origin).hostname or "") in _THIS_MACHINE:
            self.limits.quiet = _NEAR
        self._times: deque[float] = deque()
        """Reserved send times."""
        self.outage: _Outage | None = None
        self.refusal: tuple[WaitReason, str] = ("rate_limit", "")
        """The last refusal, in its words."""
        self.last_accepted, self.refused_count, self._arrived = -inf, 0, 0
        self._slots = _Slots(self, self.limits.given.parallel)
        self.wake, self.jobs = asyncio.Event(), Jobs("the gate of a provider's account failed")
        self._serving: asyncio.Task[None] | None = None

    def now(self) -> float:
        """Return the time by the clock of the table."""
        return asyncio.get_running_loop().time() + self._offset

    def since_accepted(self) -> float:
        """Return the seconds since the provider has last accepted a request."""
        return self.now() - self.last_accepted

    def is_stale(self, sent: Sent) -> bool:
        """Return whether the send time of a request that was not sent yet is void."""
        return sent.epoch != self.limits.epoch or self.now() - sent.at > STALE

    # --- requests that come, and go

    @property
    def counts_tokens(self) -> bool:
        """True if a limit on tokens is known."""
        return self.limits.given.tokens_per_minute is not None or self.limits.facts.token_rate > 0

    def arrive(self) -> int:
        self._arrived += 1
        return self._arrived

    def send_now(self, tokens: float) -> Sent | None:
        """Return a request that may be sent at once because nothing limits the account, else None."""
        limits = self.limits
        if (
            not self.id
            or self.outage is not None
            or limits.given.parallel is not None
            or limits.token_rate() is not None
        ):
            return None
        now = self.now()
        if limits.rate(now) is not None or limits.facts.blocked_until > now or len(self.line):
            return None
        if limits.trial_at(now) > now or limits.free_at(now) > now or self._should_look(now):
            return None
        if now - self._looked_at > _LOOK:
            self._looked_at = now
            self.jobs.start(self._read())
        return limits.send(now, tokens)

    def join_line(self, waiter: Waiter) -> None:
        self.line.add(waiter)
        self.wake.set()
        if self._serving is None or self._serving.done():
            self._serving = self.jobs.start(self._serve(), "gate")

    def leave_line(self, waiter: Waiter) -> None:
        """Take a request out that does not wait any more; if it has just been admitted, its turn is lost."""
        self.line.remove(waiter)
        if waiter.turn.done() and not waiter.turn.cancelled():
            self.ended(waiter.turn.result())

    def accepted(self, sent: Sent, headers: Mapping[str, str]) -> None:
        """The provider begins to answer."""
        now = self.now()
        if not sent.was_heard:
            self.last_accepted = now
            if self.outage is not None and sent.at >= self.outage.since:
                self.outage = None
                self.limits.begin_trial(now + SETTLE)
                self._share(self.limits.facts, SETTLE)
            self.limits.heard(sent, now)
            self.wake.set()
        self._learn_told(headers, sent, now)

    def refused(self, sent: Sent, error: ModelError, headers: Mapping[str, str], pauses: Pauses) -> bool:
        """Judge a failed attempt before its first word: True if the request waits again, False if it is an attempt."""
        now, retry_after = self.now(), error.retry_after
        is_limit, is_busy = isinstance(error, ModelRateLimited), sent.was_heard or error.status in (503, 529)
        if not is_limit and (type(error) is not ModelUnavailable or error.status in (408, 409, 425)):
            return False
        self.limits.ended(sent)
        self.wake.set()
        recent = self.last_accepted > min(sent.at, now - 2.0) if is_busy else self.last_accepted > sent.at
        if not (is_limit or is_busy) and recent:
            return False  # others are answered: the fault is of this request
        self.refused_count += 1
        self.refusal = ("rate_limit" if is_limit else "overloaded", error.message)
        self._learn_told(headers, sent, now)
        if self.outage is not None:
            self._extend(self.outage, sent, now, retry_after, pauses)
            return True
        if not (is_limit or is_busy) or not self._is_alive(now, is_limit):
            pause = max(pauses.first * (2 if is_limit else 4), 0.001)
            until = now + max(pause, retry_after or 0.0)
            reason, message = self.refusal
            self.outage = _Outage(reason=reason, message=message, since=now, pause=pause, until=until)
            self._times.clear()
            return True
        facts = self.limits.refused(sent, now, retry_after, error.message)
        if facts is not None:
            self._times.clear()
            self._share(facts, facts.blocked_until - now + self.limits.slack())
        return True

    def _is_alive(self, now: float, is_limit: bool) -> bool:
        """Return whether the provider accepts requests beside the one that it has refused, or may be about to."""
        in_flight, rate = self.limits.in_flight, self.limits.rate(now)
        if in_flight and (is_limit or any(not sent.was_heard for sent in in_flight)):
            return True
        return now - self.last_accepted < (2.0 if not is_limit else max(5.0, 3 / rate if rate else 0.0))

    def _extend(self, outage: _Outage, sent: Sent, now: float, retry_after: float | None, pauses: Pauses) -> None:
        """Make the pauses of an outage longer if a request that was sent after its start failed too."""
        if sent.at >= outage.since:
            outage.pause = min(outage.pause * _GROWTH, max(pauses.longest / 3, outage.pause))
            outage.until = now + outage.pause
        outage.until = max(outage.until, now + (retry_after or 0.0))

    def ended(self, sent: Sent, tokens: float | None = None) -> None:
        """A request has ended; `tokens` are those that it used, where that is known."""
        self.limits.ended(sent)
        self._slots.freed()
        if sent.is_reserved and tokens is not None and (pace := self.limits.token_rate()) is not None:
            self.jobs.start(self._settle((tokens - sent.tokens) / pace[0]))
        self.wake.set()

    # --- what a waiting request is told

    def expected(self, before: int) -> float:
        """Return the seconds after which a request with so many before it is expected to be sent."""
        now, limits = self.now(), self.limits
        first = max(now, limits.facts.blocked_until, 0.0 if self.outage is None else self.outage.until)
        rate, pace = limits.rate(now), limits.token_rate()
        if rate is not None:
            first = max(first, self._times[0] if self._times else self._row.next_at - limits.slack()) + before / rate
        if pace is not None:
            first = max(first, self._row.token_next_at - pace[1])
        return first - now

    def wait_of(self, waiter: Waiter) -> Wait:
        before = self.line.before(waiter)
        reason, message = self.refusal
        return Wait(reason=reason, position=before, until=time.time() + self.expected(before), message=message)

    def status(self, scope: str) -> GateStatus:
        now, limits = self.now(), self.limits
        is_open = self.outage is None and limits.facts.blocked_until <= now and not self.line
        rate = limits.rate(now)
        return GateStatus(
            model=scope,
            waiting=len(self.line),
            under_way=len(limits.in_flight),
            refused=self.refused_count,
            reason=None if is_open else self.refusal[0],
            requests_per_minute=None if rate is None else rate * 60,
        )

    # --- the work of the gate

    async def _serve(self) -> None:
        while self.line:
            self.wake.clear()
            try:
                if not self.id:
                    self.id = await self.table.id_of(self.account, self._scope)
                    await self._read()
                delay = await self._delay()
            except StoreError as exc:
                _log.warning("the gate of %s cannot use the store, and tries again: %s", self.account.model, exc)
                delay = 1.0
            if not self.line:
                break
            if delay <= 0:
                self._admit(self.line.pop())
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if delay == inf else delay):
                        await self.wake.wait()

    def _admit(self, waiter: Waiter) -> None:
        now = self.now()
        if self._times:
            self._times.popleft()
        if self.outage is not None:
            self.outage.until = now + self.outage.pause
        sent = self.limits.send(now, waiter.tokens, is_reserved=self.limits.token_rate() is not None)
        if not waiter.turn.done():
            waiter.turn.set_result(sent)
        else:
            self.ended(sent, 0.0)

    async def _delay(self) -> float:
        """Return the seconds until the first request may be sent, `inf` if something must happen first."""
        now, limits = self.now(), self.limits
        if self.outage is not None and self.outage.until > now:
            return self.outage.until - now
        if limits.facts.blocked_until > now:
            return limits.facts.blocked_until - now
        if (free_at := limits.free_at(now)) > now:
            return free_at - now
        if not await self._slots.has_one():
            return 0.001  # has_one has waited: look again
        if self.outage is not None:
            self._times.clear()
            self._times.append(now)
            return 0.0
        pace, rate = limits.token_rate(), limits.rate(now)
        if rate is None and pace is None:
            if (trial_at := limits.trial_at(now)) <= now and self._should_look(now):
                await self._read()
                return 0.001
            return trial_at - now
        while self._times and self._times[0] < now - STALE:
            self._times.popleft()
        if not self._times:
            await self._reserve(rate, pace)
        return self._times[0] - self.now() if self._times else 0.001

    def _should_look(self, now: float) -> bool:
        """Return whether to look at what other processes have learned, before more requests are sent than before."""
        return self.limits.is_doubling(now) and now - self._looked_at > self.limits.quiet / 2

    async def _reserve(self, rate: float | None, pace: tuple[float, float] | None) -> None:
        """Reserve send times for the first requests in line; with a limit on tokens for one, with its tokens."""
        count = 1 if rate is None or pace is not None else max(1, min(len(self.line), int(rate * BATCH)))
        tokens = self.line.first().tokens if pace is not None else 0.0
        seconds = 0.0 if rate is None else count / rate
        token_seconds = 0.0 if pace is None else tokens / pace[0]
        row = await self.table.reserve(self.id, self._row.generation, seconds, token_seconds)
        if row is None:
            await self._read()
            return
        self._use(row)
        first = row.next_at - seconds - self.limits.slack()
        if pace is not None:
            first = max(first, row.token_next_at - token_seconds - pace[1])
        first = max(first, row.now, self.limits.facts.blocked_until)
        self._times.extend([first + place / rate if rate else first for place in range(count)])

    async def _settle(self, seconds: float) -> None:
        """Move the cursor of tokens by the difference between reserved and used tokens."""
        with suppress(StoreError):
            row = await self.table.reserve(self.id, self._row.generation, 0.0, seconds)
            if row is not None:
                self._use(row)
                self.wake.set()

    async def _read(self) -> None:
        self._use(await self.table.read(self.id))

    def _use(self, row: GateRow, own: bytes = b"") -> None:
        """Use a row as it was read; what is not our `own` was learned by another process."""
        known, self._row = self._row, row
        self._offset, self._looked_at = row.now - asyncio.get_running_loop().time(), row.now
        if row.facts in (b"", own, known.facts):
            return
        if row.generation != known.generation:
            self._times.clear()
        if self.limits.adopt(decode_facts(row.facts), row.now):
            self._share(self.limits.facts, 0.0, voids=False)
        self.wake.set()

    def _learn_told(self, headers: Mapping[str, str], sent: Sent, now: float) -> None:
        found = self.limits.learn_told(headers, sent, now) if headers else None
        if found is None:
            return
        facts, ahead, token_ahead = found
        is_news = self.limits.is_news(facts)
        if is_news:
            if facts.rate < self.limits.facts.rate:
                self._times.clear()
            self.limits.facts = facts
        lag = max(now + ahead - self._row.next_at, now + token_ahead - self._row.token_next_at)
        if is_news or (ahead and lag > 0.5):
            self._share(self.limits.facts, ahead, token_ahead, voids=False)

    def _share(self, facts: Facts, ahead: float, token_ahead: float = 0.0, *, voids: bool = True) -> None:
        """Store what was learned."""
        self.jobs.start(self._store(facts, ahead, token_ahead, voids))

    async def _store(self, facts: Facts, ahead: float, token_ahead: float, voids: bool) -> None:
        for _ in range(3):
            try:
                body = encode_facts(facts)
                row = await self.table.learn(
                    self.id, self._row.generation, body, max(ahead, 0.0), token_ahead, voids=voids
                )
                if row is not None:
                    if voids:
                        self._times.clear()
                    self._use(row, body)
                    self.wake.set()
                    return
                await self._read()  # another process has learned something: add this to it
                facts = self.limits.facts
            except StoreError as exc:
                _log.warning("what was learned of %s is not stored: %s", self.account.model, exc)
                return

    async def close(self) -> None:
        """Give the slots back, and stop."""
        await self._slots.close()
        await self.jobs.close()


class GateStatus(Struct, frozen=True, kw_only=True):
    """A gate as operators see it."""

    model: str
    waiting: int
    under_way: int
    refused: int
    reason: WaitReason | None = None
    """None if the provider accepts requests."""
    requests_per_minute: float | None = None
    """The known limit on requests, None if none is known."""


class _Slots:
    """The slots of `Rate(parallel=…)` that this process has, out of those of all processes."""

    def __init__(self, gate: Gate, most: int | None) -> None:
        self._gate, self._most = gate, most
        self._held, self._handed_on_since = 0, -inf
        self._renewing: asyncio.Task[None] | None = None

    async def has_one(self) -> bool:
        """Return True if a slot is free here; otherwise wait until one may be, and return False."""
        gate, most = self._gate, self._most
        if most is None or len(gate.limits.in_flight) < self._held:
            return True
        with gate.table.watch(gate.id) as watch:
            wanted = max(1, min(len(gate.line), _BATCH_OF_SLOTS))
            given = await gate.table.hold(gate.id, gate.owner, self._held, wanted, most)
            if given:
                self._held, self._handed_on_since = self._held + given, gate.now()
                if self._renewing is None or self._renewing.done():
                    self._renewing = gate.jobs.start(self._renew())
                return True
            await wait_for_first(watch.wait(_SLOT_LOOK), gate.wake.wait())
        return False

    def freed(self) -> None:
        """A request has ended: its slot is for the next one here, or is given back so that other processes get turns."""
        gate = self._gate
        spare = self._held - len(gate.limits.in_flight)
        if spare > 0 and (not gate.line or gate.now() - self._handed_on_since > _HAND_ON):
            self._held -= spare
            gate.jobs.start(self._report())

    async def _report(self) -> None:
        """Tell the table how many slots this process holds."""
        gate = self._gate
        with suppress(StoreError):  # the lease ends
            await gate.table.hold(gate.id, gate.owner, self._held, 0, self._most or 0)
        gate.wake.set()

    async def _renew(self) -> None:
        while self._held:
            await asyncio.sleep(SLOT_LEASE / 3)
            await self._report()

    async def close(self) -> None:
        if self._held:
            self._held = 0
            await self._report()
