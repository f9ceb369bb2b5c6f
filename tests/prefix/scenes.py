"""Fixed programs, one for each feature."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from retinue import Limits

from .program import Act, Call, Plan


class Scene(Struct, frozen=True):
    """A program, and how it is run."""

    plan: Plan
    limits: Limits | None = None


def work(key: str, **options: Any) -> Call:
    return Call(key=key, **options)


def look(key: str, **options: Any) -> Call:
    return Call(key=key, idempotent=True, **options)


def below(label: str, *steps: tuple[Call, ...], **options: Any) -> Plan:
    return Plan(label=label, steps=steps, answers=(f"{label} is done",), **options)


def boss(*steps: tuple[Call, ...], **options: Any) -> Plan:
    return Plan(label="A", agent="boss", steps=steps, **{"answers": ("all done",), **options})


def acts(phase: str, *what: str, step: int = 1) -> tuple[Act, ...]:
    return tuple([Act(phase, step, one) for one in what])


SCENES: dict[str, Scene] = {
    "nothing": Scene(boss()),
    "parallel calls": Scene(boss((work("a1"), look("a2", claims=True), work("a3", does="raise")), (work("a4"),))),
    "conflict": Scene(boss((look("a1", claims=True), look("a2", claims=True)), (look("a3", claims=True),))),
    "errors": Scene(boss((work("a1", does="error"), look("a2", does="error"), look("a3", does="raise")))),
    "asks": Scene(boss((look("a1", asks=("mail", "bump", "event", "add")), work("a2", asks=("mail", "dead"))))),
    "stop": Scene(boss((look("a1", asks=("stop",)),), (look("a2"),))),
    "stop before calls": Scene(boss((work("a1"),), (work("a2"),), acts=acts("after_inference", "stop", step=2))),
    "failed stop": Scene(boss((look("a1"),), (look("a2"),), acts=acts("step_end", "fail"))),
    "hooks": Scene(
        boss(
            (work("a1"), look("a2")),
            (look("a3"),),
            acts=tuple(
                [
                    Act(phase, step, what)
                    for phase in ("step_start", "before_inference", "after_inference", "after_tool", "step_end")
                    for step in (1, 2)
                    for what in ("count", "mail", "bump", "event")
                ]
                + [Act("run_start", 0, what) for what in ("hidden", "mail", "add")]
                + [Act("run_end", 3, what) for what in ("count", "mail", "dead")]
                + [Act("before_tool", 1, "count")]
            ),
        )
    ),
    "hidden state": Scene(
        boss((work("a1"),), (look("a2"),), acts=(*acts("step_start", "hidden"), *acts("step_end", "hidden", "owner")))
    ),
    "messages": Scene(
        boss(
            (look("a1"),),
            (look("a2"),),
            (look("a3"),),
            acts=(
                *acts("step_start", "context", "system", "add"),
                *acts("step_end", "add", step=2),
                *acts("before_inference", "compact", step=3),
                *acts("before_inference", "exclude", step=2),
            ),
        )
    ),
    "intercepts": Scene(boss((work("a1", hook="block"), look("a2", hook="set"), work("a3")), (look("a4"),))),
    "blocked run": Scene(boss((look("a1"),), (look("a2", hook="end"),), (look("a3"),))),
    "blocked among others": Scene(boss((look("a1", hook="end"), look("a2", waits=1), look("a3")))),
    "replay": Scene(boss((work("a1", waits=2), look("a2", waits=1), work("a3")))),
    "use decision": Scene(boss((work("a1", waits=1, mode="use_decision"), look("a2", waits=1, mode="use_decision")))),
    "pass decision": Scene(boss((work("a1", waits=1, mode="pass_decision"), look("a2", waits=1)))),
    "pass decision after hooks": Scene(
        boss(
            (work("a1", waits=1, mode="pass_decision"), work("a2", waits=2, mode="pass_decision")),
            acts=acts("before_tool", "count"),
        )
    ),
    "refused": Scene(boss((work("a1", waits=1, answers=(False,)), look("a2", waits=2, answers=(True, False))))),
    "hook asks": Scene(boss((work("a1", hook="suspend"), look("a2", hook="suspend", waits=1), look("a3")))),
    "hook asks in vain": Scene(boss((work("a1", hook="suspend", answers=(False,)), look("a2")))),
    "task": Scene(boss((work("a1"), Call(key="do B", does="task", children=(below("B", (work("b1"), look("b2"))),))))),
    "tool": Scene(boss((Call(key="do B", does="tool", children=(below("B", (look("b1"),)),)),))),
    "nested": Scene(
        boss(
            (
                Call(
                    key="do B",
                    does="task",
                    children=(
                        below(
                            "B",
                            (Call(key="do C", does="task", children=(below("C", (work("c1", waits=1),)),)), look("b1")),
                            agent="middle",
                        ),
                    ),
                ),
            )
        )
    ),
    "tasks that wait": Scene(
        boss(
            (
                Call(key="do B", does="task", children=(below("B", (look("b1", waits=1),)),)),
                Call(key="do C", does="task", children=(below("C", (work("c1", hook="suspend"),)),)),
                work("a1", waits=1),
            )
        )
    ),
    "by hand": Scene(
        boss((Call(key="a1", does="hand", children=(below("B", (look("b1"),)), below("C", (work("c1"),)))),))
    ),
    "by hand together": Scene(
        boss(
            (
                Call(
                    key="a1",
                    does="lead",
                    together=True,
                    children=(below("B", (look("b1"),)), below("C", (work("c1"),))),
                ),
            )
        )
    ),
    "two children wait": Scene(
        boss(
            (
                Call(
                    key="a1",
                    does="hand",
                    together=True,
                    children=(below("B", (work("b1", waits=1),)), below("C", (look("c1", waits=2),))),
                ),
                work("a2"),
            )
        )
    ),
    "one waits after the other": Scene(
        boss(
            (
                Call(
                    key="a1",
                    does="lead",
                    children=(below("B", (work("b1", waits=1),)), below("C", (look("c1", waits=1), work("c2")))),
                ),
            )
        )
    ),
    "tries": Scene(boss((Call(key="a1", does="tries", children=(below("B", (look("b1"),)), below("C"))),))),
    "handoff": Scene(
        boss((work("a1"),), (Call(key="to second", does="handoff", of="second"), look("a2")), (work("a3"), look("a4")))
    ),
    "handoff by a hook": Scene(boss((work("a1"),), (look("a2"),), acts=acts("step_end", "handoff"))),
    "refused handoff": Scene(
        boss(
            (work("a1"),),
            (look("a2"),),
            acts=(*acts("step_end", "handoff", "count"), *acts("step_end", "handoff", step=2)),
        )
    ),
    "handoff of a child": Scene(
        boss(
            (
                Call(
                    key="do B",
                    does="task",
                    children=(
                        below(
                            "B",
                            (Call(key="to second", does="handoff", of="second"),),
                            (work("b1", waits=1), look("b2")),
                            agent="middle",
                        ),
                    ),
                ),
            )
        )
    ),
    "few steps": Scene(boss(*[(look(f"a{n}"),) for n in range(6)]), Limits(steps=3)),
    "few steps in a child": Scene(
        boss(
            (Call(key="do B", does="task", children=(below("B", *[(look(f"b{n}"),) for n in range(4)]),)),),
            (work("a1"),),
        ),
        Limits(steps=4),
    ),
    "few tokens": Scene(boss(*[(work(f"a{n}"),) for n in range(6)]), Limits(tokens=4000)),
    "no time": Scene(boss((look("a1"),)), Limits(seconds=0)),
    "no children": Scene(
        boss(
            (Call(key="do B", does="task", children=(below("B", (look("b1"),)),)),),
            (Call(key="do C", does="task", children=(below("C", (look("c1"),)),)),),
        ),
        Limits(children=1),
    ),
    "output": Scene(
        boss(
            (
                Call(
                    key="a1",
                    does="lead",
                    children=(Plan(label="B", agent="typed", steps=((look("b1"),),), answers=("three", '{"n": 3}')),),
                ),
            )
        )
    ),
    "stopped before its output": Scene(
        boss(
            (
                Call(
                    key="a1",
                    does="lead",
                    children=(
                        Plan(label="B", agent="typed", answers=("three",), acts=acts("step_end", "stop")),
                        Plan(label="C", agent="typed", answers=('{"n": 3}',), acts=acts("step_end", "stop")),
                    ),
                ),
            )
        )
    ),
    "wrong output": Scene(
        boss((Call(key="a1", does="lead", children=(Plan(label="B", agent="typed", answers=("three",)),)),))
    ),
    "retries": Scene(boss((work("a1"),), (look("a2"),), retries=frozenset({0, 1, 2}))),
    "model fails": Scene(boss((work("a1"),), (look("a2"),), fails=1)),
    "model of a child fails": Scene(
        boss((Call(key="do B", does="task", children=(below("B", (look("b1"),), fails=1),)),), (work("a1"),))
    ),
    "spawn": Scene(
        boss(
            (
                Call(key="do B", does="spawn", children=(below("B", (look("b1"), work("b2"))),)),
                Call(key="do C", does="spawn", children=(below("C", (work("c1"),)),)),
            ),
            (Call(key="do D", does="send", of="do B", children=(below("D", (look("d1"),)),)),),
        )
    ),
    "spawn and send": Scene(
        boss(
            (Call(key="do B", does="spawn", children=(below("B", (look("b1"),)),)),),
            (Call(key="do C", does="send", of="do B", children=(below("C", (work("c1"),)),)),),
        )
    ),
    "spawn that waits": Scene(
        boss(
            (Call(key="do B", does="spawn", children=(below("B", (work("b1", waits=1), look("b2"))),)), work("a1")),
            (Call(key="do D", does="send", of="do B", children=(below("D", (look("d1"),)),)),),
        )
    ),
    "background": Scene(
        boss(
            (Call(key="do B", does="background", children=(below("B", (look("b1"), work("b2"))),)), look("a1")),
            (Call(key="out", does="output", of="do B"),),
            (work("a2"),),
        )
    ),
    "background after the end": Scene(
        boss(
            (Call(key="do B", does="background", children=(below("B", (look("b1"),), (work("b2"),), (look("b3"),)),)),)
        )
    ),
    "background that waits": Scene(
        boss(
            (
                Call(key="do B", does="background", children=(below("B", (work("b1", waits=1), look("b2", waits=2))),)),
                look("a1"),
            )
        )
    ),
    "two in the background": Scene(
        boss(
            (
                Call(key="do B", does="background", children=(below("B", (look("b1"), work("b2"))),)),
                Call(key="do C", does="background", children=(below("C", (work("c1"),), (look("c2"),)),)),
                work("a1", waits=1),
            ),
            (Call(key="out", does="output", of="do B"), Call(key="out2", does="output", of="do C")),
        )
    ),
}
"""What comes to an end by itself."""

CANCELS: dict[str, Scene] = {
    "cancel": Scene(boss((work("a1"),), (Call(key="stop", does="halt"), look("a2")))),
    "cancel in a child": Scene(
        boss(
            (
                Call(key="do B", does="task", children=(below("B", (work("b1"),), (Call(key="stop", does="halt"),)),)),
                look("a1"),
            )
        )
    ),
    "cancel while waiting": Scene(boss((work("a1", waits=1), Call(key="stop", does="halt")))),
}
