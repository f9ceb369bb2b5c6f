"""The accounts of budgets (`core/budgets.py`): in memory, and in a database that processes share.

Invariant: accounts are locked in one order before they are read, and a hold is made in the transaction that found room for
it. A hold counts while the log of its run has the owner that made it, so a dead process's holds end with its lease. What a
call has cost is counted by the transaction that ends its hold, and before the log is released, so nothing is free between
the two; a transaction that is run twice counts it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ..core.budgets import (
    NOTHING,
    Account,
    Amount,
    Budget,
    Holder,
    Settled,
    Standing,
    StoredBudget,
    Window,
    parse_name,
)

if TYPE_CHECKING:
    from .database import Database, Link

BUDGET_TABLES = (
    # A budget that was set; `owner_key` is NULL where it holds for all.
    """CREATE TABLE budgets (name TEXT NOT NULL, for_all INTEGER NOT NULL, owner_key TEXT NOT NULL, cost REAL,
    tokens INTEGER, PRIMARY KEY (name, for_all, owner_key))""",
    """CREATE TABLE budget_spent (name TEXT NOT NULL, owner_key TEXT NOT NULL, start_at REAL NOT NULL,
    tokens INTEGER NOT NULL DEFAULT 0, cost REAL NOT NULL DEFAULT 0, warned INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (name, owner_key, start_at))""",
    # `number`: of the call in flight, 0 if only the closing turn is held.
    """CREATE TABLE budget_holds (run_id TEXT NOT NULL, name TEXT NOT NULL, owner_key TEXT NOT NULL, start_at REAL NOT NULL,
    held_by TEXT NOT NULL, held_epoch INTEGER NOT NULL, number INTEGER NOT NULL, held_tokens INTEGER NOT NULL,
    held_cost REAL NOT NULL, made_at REAL NOT NULL, PRIMARY KEY (run_id, name, owner_key, start_at))""",
    "CREATE INDEX budget_holds_of ON budget_holds (name, owner_key, start_at)",
)
_KEY = "~budgets"
"""The key of all writes: in a transaction with writes to logs, accounts are locked after the logs."""
_UNOWNED = 600.0
"""Seconds for which a hold counts whose log is not stored, so that nobody knows whether its process lives."""
_OLD = 40 * 86_400.0
_PLACE = "name = ? AND owner_key = ? AND start_at = ?"
_IS_HELD = f"""CASE WHEN logs.log_id IS NULL THEN made_at > wall_seconds() - {_UNOWNED}
    ELSE logs.epoch = held_epoch AND logs.ended = 0 AND logs.owner IS NOT NULL
    AND COALESCE(CASE WHEN boot = boot_id() THEN lease_until >= boot_seconds() END, TRUE) END"""
_HELD = "budget_holds LEFT JOIN logs ON logs.log_id = held_by"


class _Kept(Struct):
    """A hold in memory."""

    amount: Amount
    number: int


class LocalBudgetTable:
    """The accounts in the memory of this process. It has no `await`, so each method is atomic for one event loop.

    Runs of two event loops (`run_sync` beside `run`) share it: each step is one operation on a dict."""

    is_shared = False

    def __init__(self) -> None:
        self._spent: dict[tuple[str, str, float], Amount] = {}
        self._warned: set[tuple[str, str, float]] = set()
        self._holds: dict[str, dict[tuple[str, str, float], _Kept]] = {}
        self._limits: dict[tuple[str, str | None], Budget] = {}

    async def limits(self) -> Sequence[StoredBudget]:
        return [StoredBudget(budget=budget, key=key) for (_, key), budget in self._limits.items()]

    def _standing(self, account: Account, without: str = "") -> Standing:
        place, held = account.place, NOTHING
        for run_id, holds in list(self._holds.items()):
            if run_id != without and (kept := holds.get(place)) is not None:
                held += kept.amount
        spent = self._spent.get(place, NOTHING)
        return Standing(account=account, spent=spent, held=held, warned=place in self._warned)

    async def hold(
        self, holder: Holder, number: int, accounts: Sequence[Account], call: Amount, closing: Amount
    ) -> tuple[Sequence[Standing], Standing | None]:
        found = [self._standing(account, holder.run_id) for account in accounts]
        full = next((one for one in found if not one.has_room(call + closing)), None)
        if full is None:
            self._holds[holder.run_id] = {one.place: _Kept(call + closing, number) for one in accounts}
        return found, full

    async def keep(self, holder: Holder, number: int) -> None:
        for kept in self._holds.get(holder.run_id, {}).values():
            kept.number = number

    async def settle(self, holder: Holder, number: int, spent: Amount, closing: Amount) -> Sequence[Settled]:
        found: list[Settled] = []
        for place, kept in self._holds.get(holder.run_id, {}).items():
            if kept.number == number:
                self._spent[place] = self._spent.get(place, NOTHING) + spent
                kept.amount, kept.number = closing, 0
                found.append(Settled(place, self._spent[place], place in self._warned))
        return found

    async def release(self, holder: Holder) -> None:
        self._holds.pop(holder.run_id, None)

    async def warn(self, account: Account) -> bool:
        is_new = account.place not in self._warned
        self._warned.add(account.place)
        return is_new

    async def standings(self, starts: Mapping[Window, float]) -> Sequence[tuple[str, str, float, Amount, Amount]]:
        held: dict[tuple[str, str, float], Amount] = {}
        for holds in self._holds.values():
            for place, kept in holds.items():
                held[place] = held.get(place, NOTHING) + kept.amount
        places = {*self._spent, *held}
        return [
            (*place, self._spent.get(place, NOTHING), held.get(place, NOTHING))
            for place in sorted(places)
            if starts[parse_name(place[0])[1]] == place[2]
        ]

    async def set(self, name: str, key: str | None, budget: Budget | None) -> None:
        if budget is None:
            self._limits.pop((name, key), None)
        else:
            self._limits[name, key] = budget

    async def reset(self, name: str, key: str | None, start: float) -> int:
        found = [place for place in self._spent if place[0] == name and key in (None, place[1]) and place[2] == start]
        for place in found:
            del self._spent[place]
            self._warned.discard(place)
        return len(found)


class SqlBudgetTable:
    """A BudgetTable in a database."""

    is_shared = True

    def __init__(self, database: Database) -> None:
        self._database = database

    async def limits(self) -> Sequence[StoredBudget]:
        rows = await self._database.rows("SELECT name, for_all, owner_key, cost, tokens FROM budgets")
        return [
            StoredBudget(budget=_budget(name, cost, tokens), key=None if for_all else key)
            for name, for_all, key, cost, tokens in rows
        ]

    async def hold(
        self, holder: Holder, number: int, accounts: Sequence[Account], call: Amount, closing: Amount
    ) -> tuple[Sequence[Standing], Standing | None]:
        wanted = call + closing

        def hold(link: Link) -> tuple[list[Standing], Standing | None]:
            found = [_locked(link, account, holder.run_id) for account in accounts]
            full = next((one for one in found if not one.has_room(wanted)), None)
            if full is None:
                link.run("DELETE FROM budget_holds WHERE run_id = ?", holder.run_id)
                for account in accounts:
                    link.run(
                        "INSERT INTO budget_holds (run_id, name, owner_key, start_at, held_by, held_epoch, number, "
                        "held_tokens, held_cost, made_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, wall_seconds())",
                        *(holder.run_id, *account.place, holder.log_id, holder.epoch, number),
                        *(wanted.tokens, wanted.cost),
                    )
            return found, full

        return await self._database.write(hold, _KEY)

    async def keep(self, holder: Holder, number: int) -> None:
        query = "UPDATE budget_holds SET number = ?, made_at = wall_seconds() WHERE run_id = ? RETURNING number"
        await self._database.change(query, number, holder.run_id, key=_KEY)

    async def settle(self, holder: Holder, number: int, spent: Amount, closing: Amount) -> Sequence[Settled]:
        def settle(link: Link) -> list[Settled]:
            held = link.run(
                "SELECT name, owner_key, start_at FROM budget_holds WHERE run_id = ? AND number = ? "
                "ORDER BY name, owner_key, start_at",
                *(holder.run_id, number),
            )
            found: list[Settled] = []
            for place in held:
                rows = link.run(
                    f"UPDATE budget_spent SET tokens = tokens + ?, cost = cost + ? WHERE {_PLACE} "
                    "RETURNING tokens, cost, warned",
                    *(spent.tokens, spent.cost, *place),
                )
                link.run(
                    f"UPDATE budget_holds SET number = 0, held_tokens = ?, held_cost = ? WHERE run_id = ? AND {_PLACE}",
                    *(closing.tokens, closing.cost, holder.run_id, *place),
                )
                found += [Settled(tuple(place), Amount(tokens, cost), bool(warned)) for tokens, cost, warned in rows]
            return found

        return await self._database.write(settle, _KEY)

    async def release(self, holder: Holder) -> None:
        await self._database.write(
            lambda link: link.run("DELETE FROM budget_holds WHERE run_id = ?", holder.run_id), _KEY
        )

    async def warn(self, account: Account) -> bool:
        query = f"UPDATE budget_spent SET warned = 1 WHERE {_PLACE} AND warned = 0 RETURNING warned"
        return bool(await self._database.change(query, *account.place, key=_KEY))

    async def standings(self, starts: Mapping[Window, float]) -> Sequence[tuple[str, str, float, Amount, Amount]]:
        oldest = min(starts.values())

        def read(link: Link) -> tuple[list[Any], list[Any]]:
            spent = "SELECT name, owner_key, start_at, tokens, cost FROM budget_spent WHERE start_at >= ?"
            held = (
                "SELECT name, owner_key, start_at, SUM(held_tokens), SUM(held_cost) "
                f"FROM {_HELD} WHERE start_at >= ? AND {_IS_HELD} GROUP BY name, owner_key, start_at"
            )
            return link.run(spent, oldest), link.run(held, oldest)

        spent, held = await self._database.read(read)
        holds = {(name, key, start): Amount(int(tokens), cost) for name, key, start, tokens, cost in held}
        return [
            (name, key, start, Amount(tokens, cost), holds.get((name, key, start), Amount()))
            for name, key, start, tokens, cost in sorted(spent)
            if starts[parse_name(name)[1]] == start
        ]

    async def set(self, name: str, key: str | None, budget: Budget | None) -> None:
        place = (name, int(key is None), key or "")

        def write(link: Link) -> None:
            link.run("DELETE FROM budgets WHERE name = ? AND for_all = ? AND owner_key = ?", *place)
            if budget is not None:
                insert = "INSERT INTO budgets (name, for_all, owner_key, cost, tokens) VALUES (?, ?, ?, ?, ?)"
                link.run(insert, *place, budget.cost, budget.tokens)

        await self._database.write(write, _KEY)

    async def reset(self, name: str, key: str | None, start: float) -> int:
        query = (
            "UPDATE budget_spent SET tokens = 0, cost = 0, warned = 0 WHERE name = ? AND start_at = ? "
            "AND owner_key = COALESCE(?, owner_key) AND (tokens > 0 OR cost > 0) RETURNING owner_key"
        )
        return len(await self._database.change(query, name, start, key, key=_KEY))


def _locked(link: Link, account: Account, run_id: str) -> Standing:
    """Lock an account until the commit, and return how it stands without the holds of a run."""
    query = f"SELECT tokens, cost, warned FROM budget_spent WHERE {_PLACE}{link.locking}"
    rows = link.run(query, *account.place)
    if not rows:
        _forget_old(link, account)
        link.run(
            "INSERT INTO budget_spent (name, owner_key, start_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            *account.place,
        )
        rows = link.run(query, *account.place)
    ((tokens, cost, warned),) = rows
    held = link.run(
        f"SELECT COALESCE(SUM(held_tokens), 0), COALESCE(SUM(held_cost), 0) FROM {_HELD} "
        f"WHERE {_PLACE} AND run_id <> ? AND {_IS_HELD}",
        *(*account.place, run_id),
    )
    ((held_tokens, held_cost),) = held
    spent = Amount(tokens, cost)
    return Standing(account=account, spent=spent, held=Amount(int(held_tokens), float(held_cost)), warned=bool(warned))


def _forget_old(link: Link, account: Account) -> None:
    """With the first call of a window, delete what is left of windows long over, and of processes that died in them."""
    name, key, start = account.place
    for table in ("budget_holds", "budget_spent"):
        link.run(f"DELETE FROM {table} WHERE name = ? AND owner_key = ? AND start_at < ?", name, key, start - _OLD)


def _budget(name: str, cost: float | None, tokens: int | None) -> Budget:
    per, window = parse_name(name)
    return Budget(per=per, window=window, cost=cost, tokens=None if tokens is None else int(tokens))
