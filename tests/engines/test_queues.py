"""`retinue queues` says what waits in each queue, and why."""

from __future__ import annotations

import json
from typing import Any

from ..waiting import until
from .crew import Gate
from .processes import command
from .team import Site


async def queues(site: Site) -> dict[str, Any]:
    code, said = await command("queues", "--db", site.url, "--json")
    assert code == 0, said
    return {one["queue"]: one for one in json.loads(said)["queues"]}


async def test_reasons_of_legs_that_wait(site: Site) -> None:
    gate = Gate()
    async with site.worker([gate.agent()], slots=1, lease=1.5), site.client() as client:
        first = client.stream("held", "go")
        await gate.entered.wait()
        waiting = [client.stream("held", "go"), client.stream("nobody", "go"), client.stream("held", "go", queue="gpu")]
        waiting.append(client.stream("held", "go", queue="night", delay=3600))
        for run in waiting:
            await run.stored()

        async def all_are_busy() -> bool:  # a worker reports that with its next sign of life
            return len((await queues(site))["default"]["reasons"]) == 2

        await until(all_are_busy)
        found = await queues(site)
        assert found["default"]["reasons"] == [
            "all slots of the workers with agent 'held' are busy (1 of 1)",
            "no worker of queue 'default' has agent 'nobody': start one whose TARGET has it",
        ]
        missing = "no worker serves queue 'gpu' (served: default): start one with retinue worker --queues gpu"
        assert found["gpu"]["reasons"] == [missing]
        (later,) = found["night"]["reasons"]
        assert later.startswith("not due before 20")
        _, said = await command("queues", "--db", site.url)
        assert f"queue gpu: {missing}" in said
        for run in waiting:
            await run.cancel()
        gate.go.set()
        assert (await first.result()).response == "let go"
        assert await queues(site) == {}
