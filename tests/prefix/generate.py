"""Random programs. The same chance makes the same program, so a seed is enough to see one again."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

from retinue import Limits

from .program import Act, Call, Plan, calls_of, plans_of
from .scenes import Scene

MODES = ("replay", "replay", "use_decision", "pass_decision")
PHASES = ("run_start", "step_start", "before_inference", "after_inference", "after_tool", "step_end", "run_end")
QUIET = ("mail", "dead", "event")
"""What a call may ask for that need not be the only one of its step, and may be lost with it."""


class Maker:
    """Makes one program."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self._numbers = itertools.count(1)
        self.has_tasks = chance.random() < 0.25

    def one_in(self, number: int) -> bool:
        return self.chance.randrange(number) == 0

    def some(self, options: Any, most: int) -> tuple[Any, ...]:
        return tuple(self.chance.sample(options, self.chance.randint(0, min(most, len(options)))))

    def scene(self) -> Scene:
        plan = self.plan("boss", 0)
        return Scene(plan, self._limits(plan))

    def _limits(self, plan: Plan) -> Limits | None:
        """Limits, where who meets one first is no matter of chance, nor of where the cut is.

        So nothing runs side by side, and no call may be given up or tried again with children that spend the budget.
        """
        for one in plans_of(plan):
            if any(len(step) > 1 for step in one.steps) or any(call.together for call in calls_of(one)):
                return None
            if any(call.children and (call.does == "tries" or not call.runs_again) for call in calls_of(one)):
                return None
        if self.has_tasks or not self.one_in(2):
            return None
        return self.chance.choice(
            [
                Limits(steps=self.chance.randint(1, 6)),
                Limits(tokens=1300 * self.chance.randint(1, 6)),
                Limits(children=1),
            ]
        )

    def plan(self, agent: str, depth: int) -> Plan:
        label = f"R{next(self._numbers)}"
        most = (3, 2, 1, 1)[depth]
        steps = [self.step(agent, depth) for _ in range(self.chance.randint(0 if depth else 1, most))]
        if agent in ("boss", "middle") and self.one_in(5):
            handoff = Call(key=f"h{next(self._numbers)}", does="handoff", of="second")
            steps.insert(self.chance.randint(0, len(steps)), (handoff,))
        if depth == 0 and self.has_tasks:
            steps = self._with_tasks(steps)
        answers = (f"{label} is done",)
        if agent == "typed":
            answers = self.chance.choice([("three", '{"n": 3}'), ('{"n": 3}',), ("three",)])
        count = len(steps) + len(answers)
        return Plan(
            label=label,
            agent=agent,
            steps=tuple(steps),
            answers=answers,
            acts=self.acts(len(steps)) if self.one_in(2) else (),
            retries=frozenset({self.chance.randrange(count)}) if self.one_in(5) else frozenset(),
            fails=self.chance.randrange(count) if self.one_in(12) else -1,
        )

    def _with_tasks(self, steps: list[tuple[Call, ...]]) -> list[tuple[Call, ...]]:
        """Steps that also start work in the background, and some that wait for it."""
        child = self.plan("helper", 2)
        does = self.chance.choice(["background", "background", "spawn"])
        start = Call(key=f"do {child.label}", does=does, children=(child,))
        place = self.chance.randint(0, len(steps))
        steps.insert(place, (start, *self.step("boss", 2)) if self.one_in(2) else (start,))
        if does == "background" and not self.one_in(3):
            steps.insert(self.chance.randint(place + 1, len(steps)), (Call(key="out", does="output", of=start.key),))
        if does == "spawn" and self.one_in(2):
            again = self.plan("helper", 3)
            send = Call(key=f"do {again.label}", does="send", of=start.key, children=(again,))
            steps.insert(self.chance.randint(place + 1, len(steps)), (send,))
        return steps

    def step(self, agent: str, depth: int) -> tuple[Call, ...]:
        count = self.chance.choice([1, 1, 2, 3])
        calls = [self.call(agent, depth, alone=count == 1) for _ in range(count)]
        claimers = [call for call in calls if call.claims]
        if len(claimers) > 1:  # who comes first is a matter of chance
            return (claimers[0], *[call for call in calls if not call.claims])
        return tuple(calls)

    def call(self, agent: str, depth: int, *, alone: bool) -> Call:
        ways = ["work", "look", "look", "work"]
        if depth < 3:
            ways += ["hand", "lead"]
            ways += {"boss": ["task", "task"], "middle": ["task", "tool"]}.get(agent, [])
            ways += ["tries"] if self.one_in(12) else []
        match self.chance.choice(ways):
            case "task":
                child = self.plan(self.chance.choice(["middle", "helper"]) if agent == "boss" else "helper", depth + 1)
                return Call(key=f"do {child.label}", does="task", children=(child,))
            case "tool":
                child = self.plan("helper", depth + 1)
                return Call(key=f"do {child.label}", does="tool", children=(child,))
            case "hand" | "lead" | "tries" as does:
                agents = [self.chance.choice(["helper", "middle", "typed"]) for _ in range(self.chance.randint(1, 2))]
                children = tuple([self.plan(one, depth + 1) for one in agents])
                return Call(key=self._key(), does=does, children=children, together=self.one_in(2))
            case way:
                return self._plain(way == "look", alone)

    def _key(self) -> str:
        return f"k{next(self._numbers)}"

    def _plain(self, idempotent: bool, alone: bool) -> Call:
        chance = self.chance
        does = chance.choice(["work", "work", "work", "error", "raise"])
        asks = QUIET if not idempotent else (*QUIET, "bump", *(("add", "stop") if alone else ()))
        return Call(
            key=self._key(),
            idempotent=idempotent,
            does=does,
            hook=chance.choice(["", "", "", "", "block", "set", "suspend", "end" if self.one_in(4) else ""]),
            waits=chance.choice([0, 0, 0, 1, 2]),
            mode=chance.choice(MODES),
            answers=tuple([not self.one_in(4) for _ in range(3)]),
            claims=idempotent and does == "work" and self.one_in(3),
            asks=self.some(asks, 2),
        )

    def acts(self, steps: int) -> tuple[Act, ...]:
        found: list[Act] = []
        for _ in range(self.chance.randint(1, 4)):
            phase = self.chance.choice(PHASES)
            step = 0 if phase == "run_start" else self.chance.randint(1, steps + 1)
            quiet = ["count", "hidden", "mail", "dead", "bump", "event"]
            loud = {
                "after_tool": [],
                "run_start": ["add", "owner"],
                "run_end": ["add", "owner"],
                "before_inference": ["add", "context", "system", "exclude", "compact", "stop", "owner"],
            }.get(phase, ["add", "context", "system", "exclude", "stop", "fail", "handoff", "owner"])
            what = self.chance.choice(quiet + loud)
            if not any((act.phase, act.step, act.what) == (phase, step, what) for act in found):
                found.append(Act(phase, step, what))
        return tuple(found)


def make(chance: Random) -> Scene:
    return Maker(chance).scene()
