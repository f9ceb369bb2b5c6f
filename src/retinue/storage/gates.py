"""The rows of gates in a database: one for each account at a provider, shared by all processes (`core/gate.py`).

Invariant: a cursor moves by one UPDATE, and slots are counted while the row of their gate is locked. So two processes never
get the same send time or slot, and what a dead process had passes by itself.
"""

from __future__ import annotations

import hmac
import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ..core.gate import SLOT_LEASE, Account, GateRow, SlotLook
from ..core.stores import Watch

if TYPE_CHECKING:
    from .database import Database, Link

GATE_TABLES = (
    # The row of the gate '' has the salt of the ids in its facts.
    """CREATE TABLE gates (gate TEXT PRIMARY KEY, next_at REAL NOT NULL, token_next_at REAL NOT NULL,
    generation INTEGER NOT NULL, facts BLOB NOT NULL)""",
    """CREATE TABLE gate_slots (gate TEXT NOT NULL, owner TEXT NOT NULL, held INTEGER NOT NULL, waits INTEGER NOT NULL,
    seen_until REAL NOT NULL, PRIMARY KEY (gate, owner))""",
)
_ROW = "next_at, token_next_at, generation, facts, wall_seconds()"
_NEW = (
    "INSERT INTO gates (gate, next_at, token_next_at, generation, facts) VALUES (?, 0, 0, 0, ?) ON CONFLICT DO NOTHING"
)
_FREED = "slots of "


def _from_now(column: str) -> str:
    return f"CASE WHEN {column} > wall_seconds() THEN {column} ELSE wall_seconds() END"


def _at_least(column: str) -> str:
    return f"CASE WHEN {column} > wall_seconds() + ? THEN {column} ELSE wall_seconds() + ? END"


class SqlGateTable:
    """A GateTable in a database."""

    def __init__(self, database: Database, *, notifies: bool) -> None:
        self._database, self._notifies = database, notifies
        self._salt: bytes | None = None

    async def id_of(self, account: Account, scope: str) -> str:
        if self._salt is None:
            self._salt = (await self._read("", os.urandom(32))).facts
        text = f"{account.origin}\0{account.key}\0{scope}"
        return f"{scope} {hmac.digest(self._salt, text.encode(errors='replace'), 'sha256').hex()[:32]}"

    async def read(self, gate: str) -> GateRow:
        return await self._read(gate, b"")

    async def _read(self, gate: str, facts: bytes) -> GateRow:
        def read(link: Link) -> Any:
            link.run(_NEW, gate, facts)
            return link.ask(f"SELECT {_ROW} FROM gates WHERE gate = ?", gate)

        found: Any = await self._database.rows(f"SELECT {_ROW} FROM gates WHERE gate = ?", gate)
        return _row(found or await self._database.write(read, gate))

    async def reserve(self, gate: str, generation: int, seconds: float, token_seconds: float) -> GateRow | None:
        moved = f"next_at = {_from_now('next_at')} + ?, token_next_at = {_from_now('token_next_at')} + ?"
        return await self._change(moved, (seconds, token_seconds), gate, generation)

    async def learn(
        self, gate: str, generation: int, facts: bytes, ahead: float, token_ahead: float, *, voids: bool
    ) -> GateRow | None:
        moved = f"facts = ?, token_next_at = {_at_least('token_next_at')}, next_at = "
        if voids:  # the send times that were handed out and not used are void
            moved += "wall_seconds() + ?, generation = generation + 1"
            values = (facts, token_ahead, token_ahead, ahead)
        else:
            moved += _at_least("next_at")
            values = (facts, token_ahead, token_ahead, ahead, ahead)
        return await self._change(moved, values, gate, generation)

    async def _change(self, moved: str, values: tuple[Any, ...], gate: str, generation: int) -> GateRow | None:
        statement = f"UPDATE gates SET {moved} WHERE gate = ? AND generation = ? RETURNING {_ROW}"
        found = await self._database.change(statement, *values, gate, generation, key=gate)
        return _row(found) if found else None

    async def hold(self, gate: str, owner: str, held: int, wanted: int, most: int) -> int:
        def hold(link: Link) -> int:
            link.run(f"SELECT 1 FROM gates WHERE gate = ?{link.locking}", gate)
            link.run("DELETE FROM gate_slots WHERE gate = ? AND seen_until < wall_seconds()", gate)
            others = link.run("SELECT held, waits FROM gate_slots WHERE gate = ? AND owner <> ?", gate, owner)
            given = max(0, min(wanted, most - held - sum([count for count, _ in others])))
            link.run(
                "INSERT INTO gate_slots (gate, owner, held, waits, seen_until) VALUES (?, ?, ?, ?, wall_seconds() + ?) "
                "ON CONFLICT (gate, owner) DO UPDATE SET held = excluded.held, waits = excluded.waits, "
                "seen_until = excluded.seen_until",
                *(gate, owner, held + given, int(given < wanted), SLOT_LEASE),
            )
            if not wanted and any(waits for _, waits in others):
                link.notify(_FREED + gate)
            return given

        return await self._database.write(hold, gate)

    def watch(self, gate: str) -> AbstractContextManager[Watch]:
        return self._database.watch(_FREED + gate) if self._notifies else nullcontext(SlotLook())


def _row(found: Any) -> GateRow:
    next_at, token_next_at, generation, facts, now = found[0]
    return GateRow(next_at=next_at, token_next_at=token_next_at, generation=generation, facts=bytes(facts), now=now)
