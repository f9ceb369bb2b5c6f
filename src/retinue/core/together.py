"""Work side by side that ends together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Every result in the given order. If one raises, or this is cancelled, the others are stopped and waited for."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
