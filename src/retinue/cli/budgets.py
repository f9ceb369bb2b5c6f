"""`retinue budgets`: what model calls may cost in a database, and what they have cost."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import msgspec

from ..core.budgets import Budget, BudgetLine, Budgets, parse_name
from ..core.errors import ConfigurationError
from ..wire.resources import iso
from .database import database_url, open_database
from .parsers import COMPLETED
from .text import clean, complain, count, print_json, table


@asynccontextmanager
async def _budgets(args: argparse.Namespace, *, create: bool = False) -> AsyncGenerator[tuple[Budgets, str]]:
    async with open_database(database_url(args), create=create) as store:
        yield Budgets((), store.budget_table()), store.place


async def list_budgets(args: argparse.Namespace) -> int:
    """List the budgets of a database in their present windows."""
    async with _budgets(args) as (budgets, place):
        found = await budgets.list()
    if args.json:
        print_json([{**msgspec.to_builtins(one), "renews_at": iso(one.renews_at)} for one in found])
    elif found:
        rows = [("BUDGET", "OF", "SPENT", "HELD", "LIMIT", "RENEWS")]
        for one in found:
            renews = datetime.fromtimestamp(one.renews_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
            of = "everybody" if one.budget.startswith("runtime/") else _whose(one)
            rows.append((one.budget, of, *_amounts(one), renews))
        print("\n".join(table(rows)))
    else:
        complain(f"{place} has no budgets yet")
    return COMPLETED


def _whose(line: BudgetLine) -> str:
    if line.key is None:
        return f"each {line.budget.partition('/')[0]}"
    return clean(line.key) or "(no user)"


def _amounts(line: BudgetLine) -> tuple[str, str, str]:
    """Return what is spent, held and allowed."""
    limits = [] if line.cost is None else [f"${line.cost:,.2f}"]
    limits += [] if line.tokens is None else [f"{line.tokens:,} tokens"]
    spent = f"${line.spent_cost:,.2f}, {count(line.spent_tokens, 'token')}"
    held = f"${line.held_cost:,.2f}, {count(line.held_tokens, 'token')}"
    return spent, held, ", ".join(limits) or "set by the program"


async def set_budget(args: argparse.Namespace) -> int:
    """Set a budget in a database, for all or for one user or agent, or take one back."""
    per, window = parse_name(args.budget)
    if args.unset and (args.cost is not None or args.tokens is not None):
        raise ConfigurationError("--unset takes a budget back: leave --cost and --tokens out")
    async with _budgets(args, create=not args.unset) as (budgets, _):
        if args.unset:
            await budgets.unset(args.budget, args.key)
        else:
            await budgets.set(Budget(per=per, window=window, cost=args.cost, tokens=args.tokens), args.key)
    of = "" if args.key is None else f" of {clean(args.key)}"
    print(f"{args.budget}{of} is {'no longer set here' if args.unset else 'set'}; processes follow within seconds")
    return COMPLETED


async def reset_budget(args: argparse.Namespace) -> int:
    """Count nothing as spent of a budget in its present window."""
    per, _ = parse_name(args.budget)
    if per == "runtime" and args.key is not None:
        raise ConfigurationError(f"{args.budget} is one budget for all: leave --of out")
    async with _budgets(args) as (budgets, _):
        changed = await budgets.reset(args.budget, args.key)
    print(f"{args.budget}: {count(changed, 'account')} reset")
    return COMPLETED
