"""Budgets: what the model calls of a user, an agent or everybody may cost in a calendar window, over all processes.

Invariant: what is spent and what is held never exceeds a budget when a hold is made, so a budget is overshot at most by what
the calls in flight cost beyond their holds. A run holds its next call and one closing turn together, or makes no call. A
hold belongs to the owner of its log: it is void once another process owns the log, or nobody.

The table (`BudgetTable`) owns the data. `Budgets` has what one runtime adds: its own budgets, and what calls cost so far.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import inf, isfinite
from typing import Any, Literal, Protocol, cast, get_args

from msgspec import Struct

from .concurrency import Jobs, join
from .errors import ConfigurationError
from .runs import MOST, RunIdentity, Usage

Per = Literal["user", "agent", "runtime"]
Window = Literal["minute", "hour", "day", "week", "month"]

WARN_AT = 0.8
"""The part of a budget whose use is announced."""
REFRESH = 10.0
"""Seconds for which a process uses the stored budgets that it has read."""
OUTPUT = 1_024
"""Tokens of an answer, for a model that has not answered yet and a request without `max_tokens`."""
_ROUNDING = 1e-9
_FIGURES = {
    "spent_dollars": "spent_cost",
    "spent_tokens": "spent_tokens",
    "limit_dollars": "cost",
    "limit_tokens": "tokens",
}
_WEIGHT = 0.2
"""The weight of the last call in the mean of a model's calls."""


class Budget(Struct, frozen=True, kw_only=True):
    """A limit on the cost of all model calls in each window: dollars, tokens, or both.

    `per="user"` is a budget for each user, and one for all runs without a user; `per="agent"` one for each agent;
    `per="runtime"` one for everything. Windows are calendar windows in UTC; a week begins on Monday.
    """

    per: Per
    window: Window
    cost: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for field, known in (("per", get_args(Per)), ("window", get_args(Window))):
            value: Any = getattr(self, field)
            if value not in known:
                names = ", ".join(map(repr, known))
                raise ConfigurationError(f"Budget.{field} is one of {names}, not {value!r:.40}")
        if self.cost is None and self.tokens is None:
            raise ConfigurationError(f"the budget {self.name} limits nothing: give cost=… or tokens=…")
        for field, kinds, what in (("cost", (int, float), "a number of dollars"), ("tokens", (int,), "a whole number")):
            value = getattr(self, field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds) or not isfinite(value) or not 0 <= value <= MOST:
                raise ConfigurationError(f"Budget.{field} is {what} from 0 to 2**53, not {value!r:.40}")

    @property
    def name(self) -> str:
        """`<per>/<window>`, as in the code of a refusal."""
        return f"{self.per}/{self.window}"

    def key_of(self, identity: RunIdentity) -> str:
        """Return whose budget a run uses: the user or the agent, "" for everybody and for runs without a user."""
        match self.per:
            case "user":
                return identity.user_id or ""
            case "agent":
                return identity.agent
            case "runtime":
                return ""


def parse_name(name: str) -> tuple[Per, Window]:
    """Return what a name such as "user/day" means; raise ConfigurationError if it is none."""
    per, _, window = name.partition("/")
    if per not in get_args(Per) or window not in get_args(Window):
        known = f"{{{','.join(get_args(Per))}}}/{{{','.join(get_args(Window))}}}"
        raise ConfigurationError(f"{name!r:.80} is no budget: write {known}, such as user/day")
    return cast("Per", per), cast("Window", window)


def check_budgets(given: Any) -> tuple[Budget, ...]:
    """Return budgets as a tuple; raise ConfigurationError for what is none, and for two with one name."""
    if isinstance(given, Budget | str | Mapping) or not isinstance(given, Iterable):
        raise ConfigurationError(f"budgets is a list of Budget(…), not {given!r:.80}")
    found: list[Budget] = []
    for one in given:  # pyright: ignore[reportUnknownVariableType]  # given by a caller
        if not isinstance(one, Budget):
            raise ConfigurationError(f"budgets is a list of Budget(…), and has {one!r:.80}")
        if any(other.name == one.name for other in found):
            raise ConfigurationError(f"two budgets are {one.name}: give one, with cost=… and tokens=…")
        found.append(one)
    return tuple(found)


def window_at(window: Window, now: float) -> tuple[float, float]:
    """Return when the window at a time began, and when the next one begins."""
    at = datetime.fromtimestamp(now, UTC).replace(microsecond=0)
    if window == "minute":
        start = at.replace(second=0)
        return start.timestamp(), (start + timedelta(minutes=1)).timestamp()
    hour = at.replace(minute=0, second=0)
    if window == "hour":
        return hour.timestamp(), (hour + timedelta(hours=1)).timestamp()
    day = hour.replace(hour=0)
    if window == "day":
        return day.timestamp(), (day + timedelta(days=1)).timestamp()
    if window == "week":
        monday = day - timedelta(days=day.weekday())
        return monday.timestamp(), (monday + timedelta(days=7)).timestamp()
    first = day.replace(day=1)
    return first.timestamp(), (first + timedelta(days=32)).replace(day=1).timestamp()


# --- what a table keeps


class Amount(Struct, frozen=True, gc=False):
    """Tokens and dollars."""

    tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.tokens + other.tokens, self.cost + other.cost)


NOTHING = Amount()


class Account(Struct, frozen=True, gc=False):
    """One window of one budget, of one user or agent."""

    budget: Budget
    key: str
    start: float
    renews_at: float

    @property
    def place(self) -> tuple[str, str, float]:
        """Its key in a table. Everybody locks accounts in the order of these."""
        return (self.budget.name, self.key, self.start)


class Standing(Struct, frozen=True, kw_only=True):
    """The use of a budget in its present window."""

    account: Account
    spent: Amount = NOTHING
    held: Amount = NOTHING
    """What calls in flight and closing turns hold."""
    warned: bool = False

    @property
    def left(self) -> dict[str, float]:
        """The rest of each unit that the budget limits, without what is held."""
        budget = self.account.budget
        found: dict[str, float] = {}
        if budget.cost is not None:
            found["cost"] = max(budget.cost - self.spent.cost - self.held.cost, 0.0)
        if budget.tokens is not None:
            found["tokens"] = max(budget.tokens - self.spent.tokens - self.held.tokens, 0)
        return found

    def has_room(self, wanted: Amount) -> bool:
        """Return whether an amount fits beside what is spent and held."""
        budget, taken = self.account.budget, self.spent + self.held + wanted
        if budget.cost is not None and taken.cost > budget.cost * (1 + _ROUNDING):
            return False
        return budget.tokens is None or taken.tokens <= budget.tokens

    @property
    def used(self) -> float:
        """The part of the budget that is spent, of the unit that is used the most."""
        budget, parts = self.account.budget, [0.0]
        for limit, spent in ((budget.cost, self.spent.cost), (budget.tokens, self.spent.tokens)):
            if limit is not None:
                parts.append(spent / limit if limit else inf if spent else 0.0)
        return max(parts)


class Settled(Struct, frozen=True, gc=False):
    """An account after a call was counted in it."""

    place: tuple[str, str, float]
    spent: Amount
    warned: bool


class Holder(Struct, frozen=True, gc=False):
    """The run that holds a part of budgets, and the ownership of its log that makes the hold valid."""

    run_id: str
    log_id: str
    epoch: int


class StoredBudget(Struct, frozen=True, kw_only=True):
    """A budget that was set in the store: for one user or agent, or (None) for all."""

    budget: Budget
    key: str | None = None


class BudgetTable(Protocol):
    """Contract: each method is atomic among all processes that share the table."""

    is_shared: bool
    """True if other processes may set budgets in it."""

    async def limits(self) -> Sequence[StoredBudget]:
        """Return the budgets that were set in the store."""
        ...

    async def hold(
        self, holder: Holder, number: int, accounts: Sequence[Account], call: Amount, closing: Amount
    ) -> tuple[Sequence[Standing], Standing | None]:
        """Hold a call and a closing turn in all accounts, or in none; the holds of this run in them are replaced.

        Return how the accounts stood before, and the first one without room. `number` counts the calls of the run here."""
        ...

    async def keep(self, holder: Holder, number: int) -> None:
        """Make the closing turn that a run holds its call with that number."""
        ...

    async def settle(self, holder: Holder, number: int, spent: Amount, closing: Amount) -> Sequence[Settled]:
        """Count what a call has cost, once, and keep a hold for the closing turn. Return how its accounts stand then."""
        ...

    async def release(self, holder: Holder) -> None:
        """Give back what a run holds."""
        ...

    async def warn(self, account: Account) -> bool:
        """Note that the use of an account is announced; return False if it was before."""
        ...

    async def standings(self, starts: Mapping[Window, float]) -> Sequence[tuple[str, str, float, Amount, Amount]]:
        """Return the accounts of the present windows: name, key, start, spent and held."""
        ...

    async def set(self, name: str, key: str | None, budget: Budget | None) -> None:
        """Store a budget, or with None delete a stored one."""
        ...

    async def reset(self, name: str, key: str | None, start: float) -> int:
        """Count nothing as spent in a window, of one user or agent or (None) of all; return the number of accounts."""
        ...


# --- what a runtime adds


class ModelMean(Struct):
    """The mean of the last calls of a model."""

    output: float
    cost: float | None = None


class Refusal(Struct, frozen=True, kw_only=True):
    """A model call that a budget does not allow."""

    name: str
    """`budget:<per>/<window>`."""
    text: str


class BudgetLine(Struct, frozen=True, kw_only=True):
    """A budget as lists show it, in its present window."""

    budget: str
    """`<per>/<window>`."""
    key: str | None
    """The user or the agent; None for the budget of all that have not spent anything."""
    cost: float | None
    """The limit in dollars. None with `tokens` None where the program sets the budget and this process does not know it."""
    tokens: int | None
    spent_cost: float = 0.0
    spent_tokens: int = 0
    held_cost: float = 0.0
    """What calls in flight and closing turns hold."""
    held_tokens: int = 0
    renews_at: float = 0.0


class Budgets:
    """The budgets of a runtime: those that it was given, and those that were set in its store, which win."""

    def __init__(self, given: Sequence[Budget], table: BudgetTable, clock: Callable[[], float] = time.time) -> None:
        self._given, self.table, self._clock = tuple(given), table, clock
        self._stored: Sequence[StoredBudget] = ()
        self._read_at = -inf if table.is_shared else inf
        self.jobs = Jobs("what a model call has cost could not be counted")
        """Writes that no run waits for."""
        self._means: dict[str, ModelMean] = {}
        self.refused: Counter[str] = Counter()
        """The refusals here, by name."""
        self.warned: Counter[str] = Counter()

    def use(self, budgets: Iterable[Budget]) -> None:
        """Add budgets to those of this runtime, in place of its own with the same names."""
        given = check_budgets(budgets)
        names = {one.name for one in given}
        self._given = (*[one for one in self._given if one.name not in names], *given)

    async def figures(self) -> Sequence[str]:
        """Return the budgets for Prometheus, and what was refused here. Users are many and are not named: of theirs the
        highest is shown."""
        shown: dict[tuple[str, str], BudgetLine] = {}
        for line in await self.list():
            place = (line.budget, "" if line.budget.startswith("user/") else line.key or "")
            known = shown.get(place)
            if known is None or (line.spent_cost, line.spent_tokens) > (known.spent_cost, known.spent_tokens):
                shown[place] = line
        found: list[str] = []
        for name, field in _FIGURES.items():
            values = {place: getattr(line, field) for place, line in shown.items()}
            known_values = {place: value for place, value in values.items() if value is not None}
            found += [f"# TYPE retinue_budget_{name} gauge"] if known_values else []
            for (budget, agent), value in known_values.items():
                found.append(f'retinue_budget_{name}{{budget="{budget}",agent="{agent}"}} {round(value, 6)}')
        for name, counts in (("refusals", self.refused), ("warnings", self.warned)):
            found += [f"# TYPE retinue_budget_{name}_total counter"] if counts else []
            for budget, number in sorted(counts.items()):
                found.append(f'retinue_budget_{name}_total{{budget="{budget.removeprefix("budget:")}"}} {number}')
        return found

    def may_apply(self) -> bool:
        """Return whether there may be budgets; have those of the store read again, in the background, from time to time."""
        if self._read_at == -inf:
            return True
        if time.monotonic() - self._read_at >= REFRESH and not (self._given or self._stored):
            self.jobs.start(self.refresh())
        return bool(self._given or self._stored)

    async def accounts_of(self, identity: RunIdentity, now: float) -> list[Account]:
        """Return the accounts that a model call of a run is charged to, in the order in which they are locked."""
        await self.refresh()
        if not (self._given or self._stored):
            return []
        found: dict[str, Account] = {}
        for name, budget in self._named().items():
            key = budget.key_of(identity)
            found[name] = Account(self.limit_of(name, key, budget), key, *window_at(budget.window, now))
        for one in self._stored:  # those of one user or agent only
            name, key = one.budget.name, one.budget.key_of(identity)
            if name not in found and one.key == key:
                found[name] = Account(one.budget, key, *window_at(one.budget.window, now))
        return sorted(found.values(), key=lambda one: one.place)

    def _named(self) -> dict[str, Budget]:
        """Return the budgets that hold for everybody, by name."""
        named = {one.name: one for one in self._given}
        return named | {one.budget.name: one.budget for one in self._stored if one.key is None}

    def limit_of(self, name: str, key: str, budget: Budget) -> Budget:
        """Return the budget of one user or agent: its own if one was set."""
        own = [one.budget for one in self._stored if one.budget.name == name and one.key == key]
        return own[0] if own else budget

    async def refresh(self, *, at_once: bool = False) -> None:
        """Read the stored budgets, if that was some time ago."""
        now = time.monotonic()
        if at_once or now - self._read_at >= REFRESH:
            self._read_at = now
            self._stored = await self.table.limits()

    async def list(self, user_id: str | None = None) -> list[BudgetLine]:
        """Return all budgets and what is spent of them in the present windows; with a user, only the budgets for everybody
        and those of that user."""
        now = self._clock()
        await self.counted()
        await self.refresh(at_once=True)
        spans = {window: window_at(window, now) for window in get_args(Window)}
        starts: dict[Any, float] = {window: span[0] for window, span in spans.items()}
        named, found = self._named(), dict[tuple[str, str | None], BudgetLine]()
        for name, key, _, spent, held in await self.table.standings(starts):
            budget = self.limit_of(name, key, named[name]) if name in named else self._own(name, key)
            found[name, key] = _line(name, budget, key, spent, held, spans[parse_name(name)[1]][1])
        for one in self._stored:
            if one.key is not None:
                unused = _line(one.budget.name, one.budget, one.key, NOTHING, NOTHING, spans[one.budget.window][1])
                found.setdefault((one.budget.name, one.key), unused)
        for name, budget in named.items():
            unused = _line(
                name, budget, "" if budget.per == "runtime" else None, NOTHING, NOTHING, spans[budget.window][1]
            )
            found.setdefault((name, unused.key), unused)
        shown = [
            line
            for line in found.values()
            if user_id is None or line.key in (user_id, None) or not line.budget.startswith("user/")
        ]
        return sorted(shown, key=lambda line: (line.budget, line.key is not None, line.key or ""))

    def _own(self, name: str, key: str) -> Budget | None:
        return next((one.budget for one in self._stored if (one.budget.name, one.key) == (name, key)), None)

    async def counted(self) -> None:
        """Wait until the calls that have ended are counted."""
        if len(self.jobs):
            await join(self.jobs)

    async def set(self, budget: Budget, key: str | None = None) -> None:
        """Store a budget for one user or agent, or (None) for all; it wins over what runtimes were given."""
        if budget.per == "runtime" and key is not None:
            raise ConfigurationError("the budget of a runtime is one for all: leave the user or agent out")
        await self.table.set(budget.name, key, budget)
        await self.refresh(at_once=True)

    async def unset(self, name: str, key: str | None = None) -> None:
        """Delete a stored budget: what runtimes were given holds again."""
        parse_name(name)
        await self.table.set(name, key, None)
        await self.refresh(at_once=True)

    async def reset(self, name: str, key: str | None = None) -> int:
        """Count nothing as spent of a budget, such as "user/day", in its present window: for one user or agent, or for all.
        Return for how many that changed something."""
        _, window = parse_name(name)
        await self.counted()
        return await self.table.reset(name, key, window_at(window, self._clock())[0])

    # --- what a call costs

    def note_call(self, model: str, usage: Usage, cost: float | None) -> None:
        """Note what a call of a model took, for the calls whose size or price is not known."""
        mean, output = self._means.get(model), float(usage.output_tokens)
        if mean is None:
            self._means[model] = ModelMean(output, cost)
            return
        mean.output += (output - mean.output) * _WEIGHT
        if cost is not None:
            mean.cost = cost if mean.cost is None else mean.cost + (cost - mean.cost) * _WEIGHT

    def output_of(self, model: str, settings: Mapping[str, Any]) -> int:
        """Estimate the tokens of an answer: as many as the request allows, else the mean of the model's last answers."""
        allowed = next((settings[name] for name in ("max_tokens", "max_output_tokens") if settings.get(name)), None)
        if isinstance(allowed, int) and not isinstance(allowed, bool) and allowed > 0:
            return min(allowed, MOST)
        mean = self._means.get(model)
        return OUTPUT if mean is None else max(round(mean.output), 1)

    def mean_cost(self, model: str) -> float | None:
        """Return the mean cost of the model's last calls; None if none is known."""
        mean = self._means.get(model)
        return None if mean is None else mean.cost


def _line(
    name: str, budget: Budget | None, key: str | None, spent: Amount, held: Amount, renews_at: float
) -> BudgetLine:
    return BudgetLine(
        budget=name,
        key=key,
        cost=None if budget is None else budget.cost,
        tokens=None if budget is None else budget.tokens,
        spent_cost=spent.cost,
        spent_tokens=spent.tokens,
        held_cost=held.cost,
        held_tokens=held.tokens,
        renews_at=renews_at,
    )


def refusal_of(standing: Standing, wanted: Amount) -> Refusal:
    """Return the refusal of an account without room: what is left, and when it renews."""
    account, left = standing.account, standing.left
    parts: list[str] = []
    if (cost := left.get("cost")) is not None:
        parts.append(f"${cost:,.4g} of ${account.budget.cost or 0.0:,.4g} left, ${wanted.cost:,.4g} needed")
    if (tokens := left.get("tokens")) is not None:
        parts.append(f"{tokens:,} of {account.budget.tokens or 0:,} tokens left, {wanted.tokens:,} needed")
    renews = datetime.fromtimestamp(account.renews_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    whose = {"user": "of this user", "agent": f"of the agent {account.key}", "runtime": "of this runtime"}
    budget = account.budget
    too_large = wanted.cost > (budget.cost or inf) or wanted.tokens > (budget.tokens or inf)
    state = "is too small for this call and a closing turn" if too_large else "is used up"
    end = "Raise it, or ask for less" if too_large else f"It renews at {renews}"
    text = f"the {_EACH[budget.window]} budget {whose[budget.per]} {state}: {'; '.join(parts)}. {end}"
    return Refusal(name=f"budget:{budget.name}", text=text)


_EACH = {"minute": "minute's", "hour": "hourly", "day": "daily", "week": "weekly", "month": "monthly"}


def unpriced(account: Account, model: str) -> Refusal:
    """Return the refusal of a call whose cost is not known."""
    advice = "give Runtime(price=…) its price, 0 where it is free"
    text = f"the budget {account.budget.name} limits cost, and what a call of {model!r} costs is not known: {advice}"
    return Refusal(name=f"budget:{account.budget.name}", text=text)
