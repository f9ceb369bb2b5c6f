"""Budgets over HTTP, and in the figures."""

from __future__ import annotations

from pathlib import Path

from retinue import Budget, Runtime
from retinue.server import StoredTokens, TokenStore, create_app
from retinue.storage.sql import SqlStore

from ..runtime.test_budgets import price, worker
from .serving import asking, listening, serving


async def test_users_see_their_own_budgets_and_the_admin_all(tmp_path: Path) -> None:
    budgets = [Budget(per="user", window="month", cost=1.0), Budget(per="runtime", window="month", tokens=1_000)]
    runtime = Runtime.open(f"sqlite:///{tmp_path}/app.db", [worker()], price=price, budgets=budgets)
    async with runtime:
        assert isinstance(runtime.store, SqlStore)
        tokens = TokenStore(runtime.store)
        _, ann = await tokens.add("ann", ("read", "run"))
        _, root = await tokens.add("root", ("admin", "read"))
        for user in ("ann", "ben"):
            await runtime.run("worker", "go", user_id=user)
        async with listening(create_app(runtime, auth=StoredTokens(runtime.store))) as address:
            async with asking(address, ann) as site:
                mine = (await site.get("/api/v1/budgets")).body["items"]
            async with asking(address, root) as site:
                everything = (await site.get("/api/v1/budgets")).body["items"]
    assert [(one["budget"], one["key"]) for one in mine] == [
        ("runtime/month", ""), ("user/month", None), ("user/month", "ann")
    ]  # fmt: skip
    assert [one["key"] for one in everything if one["budget"] == "user/month"] == [None, "ann", "ben"]
    hers = mine[-1]
    assert (hers["cost"], hers["tokens"], hers["spent"]) == (1.0, None, {"cost": 0.1, "tokens": 100})
    assert hers["held"] == {"cost": 0.0, "tokens": 0}
    assert hers["renews_at"].endswith("T00:00:00.000000Z")


async def test_the_figures_name_no_user() -> None:
    budgets = [Budget(per="user", window="month", cost=0.25), Budget(per="agent", window="month", tokens=1_000)]
    runtime = Runtime([worker()], price=price, budgets=budgets)
    async with serving(runtime) as site:
        await runtime.run("worker", "go", user_id="ann")
        assert (await runtime.run("worker", "go", user_id="ann")).termination == "budget:user/month"
        figures = str((await site.get("/metrics")).body)
    lines = [line for line in figures.splitlines() if "budget" in line]
    assert 'retinue_budget_spent_tokens{budget="agent/month",agent="worker"} 100' in lines
    assert 'retinue_budget_limit_dollars{budget="user/month",agent=""} 0.25' in lines
    assert 'retinue_budget_refusals_total{budget="user/month"} 1' in lines
    assert "ann" not in figures
