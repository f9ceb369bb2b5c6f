"""Start a run that workers do, from a process that has no agents.

pip install ".[postgres]"
export RETINUE_DB=postgresql://localhost/app
retinue worker examples/workspace &
python examples/workers.py "Where is the key kept?"
"""

from __future__ import annotations

import asyncio
import os
import sys

from retinue import Runtime


async def main(question: str) -> None:
    async with Runtime.open(os.environ["RETINUE_DB"], engine="postgres") as client:
        run = client.stream("assistant", question, user_id="ann", queue="default")
        async for event in run:  # live, from whichever worker has it
            print(event.kind)
        print((await run.result()).response)
        made = await client.schedule("assistant", question, cron="0 3 * * *")  # in UTC; or at=datetime
        print([schedule.cron for schedule in await client.schedules()])
        await client.unschedule(made)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
