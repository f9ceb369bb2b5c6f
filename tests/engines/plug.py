"""The plug test on an engine: three workers, and whoever has the leg is killed, frozen or stopped.

The kinds of rounds: `kill` (kill -9 and restart), `humans` (the same, with two humans who both answer every question),
`freeze` (SIGSTOP for longer than the lease), `stop` (SIGTERM and restart). The client that started the run only waits.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from retinue.storage.stores import open_store

from ..databases import postgres_server
from ..durability.plug import Broken, Process, Round, need, rounds_on, tell
from .temporal import engine_named

KINDS = ("kill", "humans", "freeze", "stop")
WORKERS = 3
LEASE = 2.0


class EngineRound(Round):
    """One round. The processes are a client, humans and workers."""

    def __init__(self, folder: Path, url: str, seed: int, kind: str, engine: str) -> None:
        super().__init__(folder, url, seed, "humans" if kind == "humans" else "kill")
        self.what, self.engine, self.lease = kind, engine, LEASE
        self.stops = 0

    def play(self) -> None:
        running = [self.start("worker") for _ in range(WORKERS)]
        others = [self.start("node")]
        try:
            while not (self.folder / "run_id").exists():
                alive = others[0].process.poll() is None and self._left() > 0
                need(alive, f"the tree did not start: {self.said()}")
                time.sleep(0.005)
            if self.kind == "humans":
                others += [self.start("human-1"), self.start("human-2")]
            self._disturb(running, others[0])
            for one in others:
                need(one.process.wait(self._left()) == 0, f"a process failed: {self.said()}")
        except subprocess.TimeoutExpired:
            raise Broken(f"no end in time: {self.said()}") from None
        finally:
            for one in running + others:
                one.process.send_signal(signal.SIGCONT)
                one.process.kill()
                one.process.wait()

    def _disturb(self, running: list[Process], client: Process) -> None:
        """Disturb whoever has the run until its client has seen the end."""
        while True:
            need(self._left() > 0, f"no end in time: {self.said()}")
            try:
                client.process.wait(self.chance.uniform(0.0, 0.6) + 0.2 * self.kills)
                return
            except subprocess.TimeoutExpired:
                pid = asyncio.run(self._owner())
            victim = next((one for one in running if one.process.pid == pid), None)
            if victim is None:
                continue
            if self.what == "freeze":
                if not self.freezes:
                    self._stun(victim)
                continue
            victim.process.send_signal(signal.SIGTERM if self.what == "stop" else signal.SIGKILL)
            code = victim.process.wait()
            need(code == 0 or self.what != "stop", f"a worker that was stopped ended with {code}: {self.said()}")
            self.kills += 1
            running[running.index(victim)] = self.start("worker")

    def _stun(self, victim: Process) -> None:
        victim.process.send_signal(signal.SIGSTOP)
        self.frozen[victim.name] = time.monotonic()
        self.freezes += 1
        time.sleep(self.lease * self.chance.uniform(1.6, 2.6))
        victim.process.send_signal(signal.SIGCONT)

    async def _owner(self) -> int | None:
        store: Any = open_store(self.url)
        await store.open()
        try:
            owner = await store.owner_of((self.folder / "run_id").read_text())
        finally:
            await store.close()
        return None if owner is None else int(owner.split("/")[2])


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/plug-workers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, metavar="N", help="rounds (50)")
    parser.add_argument(
        "--engine",
        default="postgres",
        help="postgres, temporal (a server of its own), or temporal://host:port/namespace",
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="for the moments of the kills")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of rounds, in turn")
    asked = parser.parse_args()
    tell(f"seed {asked.seed}")
    kinds = tuple([kind for kind in KINDS if kind in asked.kinds.split(",")])
    with postgres_server() as server, engine_named(asked.engine) as engine:
        os.environ["PLUG_ENGINE"] = engine

        def play(folder: Path, seed: int, kind: str) -> EngineRound:
            played = EngineRound(folder, server.url(), seed, kind, engine)
            played.play()
            return played

        held = rounds_on(engine, asked.rounds, asked.seed, kinds, play)
    tell("nothing was lost, nothing happened twice" if held else "BROKEN")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
