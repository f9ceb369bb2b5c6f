"""The budgets of a server's store: how they stand."""

from __future__ import annotations

from typing import Any

from ..core.budgets import BudgetLine
from ..wire.resources import iso
from ..wire.shapes import BudgetShape, Items
from .http import Call, Endpoints
from .runs import WholeList, page_of

endpoint = Endpoints()


def budget_json(line: BudgetLine) -> dict[str, Any]:
    """Return a budget as lists show it."""
    return {
        "budget": line.budget,
        "key": line.key,
        "cost": line.cost,
        "tokens": line.tokens,
        "spent": {"cost": line.spent_cost, "tokens": line.spent_tokens},
        "held": {"cost": line.held_cost, "tokens": line.held_tokens},
        "renews_at": iso(line.renews_at),
    }


@endpoint("GET", "/api/v1/budgets", query=WholeList, returns=Items[BudgetShape])
async def list_budgets(call: Call) -> Any:
    """List the budgets in their present windows: those for everybody and your own; all of them with the scope `admin`."""
    user = None if "admin" in call.user.scopes else call.user.id
    return page_of([budget_json(line) for line in await call.runtime.budgets.list(user)], call.query)
