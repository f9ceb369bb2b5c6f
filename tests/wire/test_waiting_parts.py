"""The parts of sub-agents that think, ask for calls and wait for a human."""

from __future__ import annotations

import re
from typing import Any

from inline_snapshot import snapshot

from retinue import Agent, Decision, Runtime, SuspendTicket, ToolContext, ToolResult, tool
from retinue.testing import ScriptedModel, call, say, think
from retinue.wire.parts import PartsProjection


@tool
async def pay(amount: int, ctx: ToolContext) -> ToolResult:
    """Pay."""
    if ctx.resume_input is None:
        ticket = SuspendTicket("t1", "pay", "Pay?", {"amount": amount}, response_schema={"type": "object"})
        return ToolResult.suspended("Pay?", ticket=ticket)
    return ToolResult.success("paid")


def office() -> Runtime:
    clerk = Agent(
        "clerk",
        ScriptedModel([[think("Hm."), say("I pay."), call("pay", {"amount": 3}, id="c2")], say("Paid.")]),
        tools=[pay],
    )
    task = call("task", {"subagent_type": "clerk", "description": "Pay 3"}, id="c1")
    return Runtime([Agent("boss", ScriptedModel([task, say("Done.")]), subagents=[clerk])])


def plain(value: Any) -> Any:
    """A part without what differs from run to run: run ids become `<agent>`, times `<time>`."""
    if isinstance(value, dict):
        return {key: "<time>" if key == "timestamp" else plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return re.sub(r"^(run|thread)_[0-9a-f]{20}", r"<\1>", value) if isinstance(value, str) else value


async def both_legs(*modes: Any) -> tuple[list[Any], list[Any]]:
    """The parts until the clerk waits, and those after the answer."""
    runtime = office()
    run = runtime.stream("boss", "go")
    project = PartsProjection(modes)
    events = [event async for event in run]
    first = [plain(part) for event in events for part in project(event)]
    await runtime.resume(run.run_id, {"c2": Decision.resume({})})
    rest = [event async for event in runtime.events(run.run_id, after=events[-1].seq)]
    return first, [plain(part) for event in rest for part in project(event)]


async def test_updates_show_who_waits_and_for_what() -> None:
    first, rest = await both_legs("updates")
    assert first == snapshot(
        [
            {
                "type": "updates",
                "ns": (),
                "data": {
                    "model_request": {
                        "messages": [
                            {
                                "type": "ai",
                                "content": "",
                                "id": "<run>-m2",
                                "tool_calls": [
                                    {
                                        "name": "task",
                                        "args": {"subagent_type": "clerk", "description": "Pay 3"},
                                        "id": "c1",
                                    }
                                ],
                            }
                        ]
                    }
                },
            },
            {
                "type": "updates",
                "ns": ("tools:c1",),
                "data": {
                    "model_request": {
                        "messages": [
                            {
                                "type": "ai",
                                "content": "I pay.",
                                "id": "<run>-m2",
                                "tool_calls": [{"name": "pay", "args": {"amount": 3}, "id": "c2"}],
                                "additional_kwargs": {"reasoning_content": "Hm."},
                            }
                        ]
                    }
                },
            },
            {
                "type": "updates",
                "ns": ("tools:c1",),
                "data": {
                    "__interrupt__": [
                        {
                            "id": "t1",
                            "value": {
                                "action": "pay",
                                "message": "Pay?",
                                "parameters": {"amount": 3},
                                "response_schema": {"type": "object"},
                                "tool_name": "pay",
                                "tool_call_id": "c2",
                                "path": ["c1", "c2"],
                            },
                        }
                    ]
                },
            },
            {
                "type": "updates",
                "ns": (),
                "data": {
                    "__interrupt__": [
                        {
                            "id": "t1",
                            "value": {
                                "action": "pay",
                                "message": "Pay?",
                                "parameters": {"amount": 3},
                                "response_schema": {"type": "object"},
                                "tool_name": "pay",
                                "tool_call_id": "c2",
                                "path": ["c1", "c2"],
                            },
                        }
                    ]
                },
            },
        ]
    )
    assert rest == snapshot(
        [
            {
                "type": "updates",
                "ns": ("tools:c1",),
                "data": {
                    "tools": {
                        "messages": [
                            {
                                "type": "tool",
                                "content": "paid",
                                "id": "<run>-m3",
                                "name": "pay",
                                "tool_call_id": "c2",
                                "status": "success",
                            }
                        ]
                    }
                },
            },
            {
                "type": "updates",
                "ns": ("tools:c1",),
                "data": {
                    "model_request": {
                        "messages": [{"type": "ai", "content": "Paid.", "id": "<run>-m4", "tool_calls": []}]
                    }
                },
            },
            {
                "type": "updates",
                "ns": (),
                "data": {
                    "tools": {
                        "messages": [
                            {
                                "type": "tool",
                                "content": "Paid.",
                                "id": "<run>-m3",
                                "name": "task",
                                "tool_call_id": "c1",
                                "status": "success",
                            }
                        ]
                    }
                },
            },
            {
                "type": "updates",
                "ns": (),
                "data": {
                    "model_request": {
                        "messages": [{"type": "ai", "content": "Done.", "id": "<run>-m4", "tool_calls": []}]
                    }
                },
            },
        ]
    )


async def test_messages_have_reasoning_and_tool_call_chunks() -> None:
    first, _ = await both_legs("messages")
    assert first == snapshot(
        [
            {
                "type": "messages",
                "ns": (),
                "data": (
                    {
                        "type": "AIMessageChunk",
                        "content": "",
                        "id": "<run>-m2",
                        "tool_call_chunks": [
                            {"name": "task", "args": "", "id": "c1", "index": 0, "type": "tool_call_chunk"}
                        ],
                    },
                    {
                        "langgraph_node": "model_request",
                        "langgraph_step": 1,
                        "langgraph_checkpoint_ns": "",
                        "checkpoint_ns": "",
                        "lc_agent_name": "boss",
                        "run_id": "<run>",
                        "thread_id": "<thread>",
                    },
                ),
            },
            {
                "type": "messages",
                "ns": (),
                "data": (
                    {
                        "type": "AIMessageChunk",
                        "content": "",
                        "id": "<run>-m2",
                        "tool_call_chunks": [
                            {
                                "name": None,
                                "args": '{"subagent_type":"clerk","description":"Pay 3"}',
                                "id": None,
                                "index": 0,
                                "type": "tool_call_chunk",
                            }
                        ],
                    },
                    {
                        "langgraph_node": "model_request",
                        "langgraph_step": 1,
                        "langgraph_checkpoint_ns": "",
                        "checkpoint_ns": "",
                        "lc_agent_name": "boss",
                        "run_id": "<run>",
                        "thread_id": "<thread>",
                    },
                ),
            },
            {
                "type": "messages",
                "ns": ("tools:c1",),
                "data": (
                    {
                        "type": "AIMessageChunk",
                        "content": "",
                        "id": "<run>-m2",
                        "additional_kwargs": {"reasoning_content": "Hm."},
                    },
                    {
                        "langgraph_node": "model_request",
                        "langgraph_step": 1,
                        "langgraph_checkpoint_ns": "tools:c1",
                        "checkpoint_ns": "tools:c1",
                        "lc_agent_name": "clerk",
                        "run_id": "<run>",
                        "thread_id": "<thread>",
                    },
                ),
            },
            {
                "type": "messages",
                "ns": ("tools:c1",),
                "data": (
                    {"type": "AIMessageChunk", "content": "I pay.", "id": "<run>-m2"},
                    {
                        "langgraph_node": "model_request",
                        "langgraph_step": 1,
                        "langgraph_checkpoint_ns": "tools:c1",
                        "checkpoint_ns": "tools:c1",
                        "lc_agent_name": "clerk",
                        "run_id": "<run>",
                        "thread_id": "<thread>",
                    },
                ),
            },
            {
                "type": "messages",
                "ns": ("tools:c1",),
                "data": (
                    {
                        "type": "AIMessageChunk",
                        "content": "",
                        "id": "<run>-m2",
                        "tool_call_chunks": [
                            {"name": "pay", "args": "", "id": "c2", "index": 0, "type": "tool_call_chunk"}
                        ],
                    },
                    {
                        "langgraph_node": "model_request",
                        "langgraph_step": 1,
                        "langgraph_checkpoint_ns": "tools:c1",
                        "checkpoint_ns": "tools:c1",
                        "lc_agent_name": "clerk",
                        "run_id": "<run>",
                        "thread_id": "<thread>",
                    },
                ),
            },
            {
                "type": "messages",
                "ns": ("tools:c1",),
                "data": (
                    {
                        "type": "AIMessageChunk",
                        "content": "",
                        "id": "<run>-m2",
                        "tool_call_chunks": [
                            {"name": None, "args": '{"amount":3}', "id": None, "index": 0, "type": "tool_call_chunk"}
                        ],
                    },
                    {
                        "langgraph_node": "model_request",
                        "langgraph_step": 1,
                        "langgraph_checkpoint_ns": "tools:c1",
                        "checkpoint_ns": "tools:c1",
                        "lc_agent_name": "clerk",
                        "run_id": "<run>",
                        "thread_id": "<thread>",
                    },
                ),
            },
        ]
    )


async def test_values_name_what_a_step_waits_for() -> None:
    first, rest = await both_legs("values")
    shown = [(part["ns"], len(part["data"]["messages"]), part["data"].get("__interrupt__")) for part in (*first, *rest)]
    assert [(ns, count, waiting and [one["id"] for one in waiting]) for ns, count, waiting in shown] == snapshot(
        [
            ((), 1, None),
            (("tools:c1",), 1, None),
            (("tools:c1",), 2, ["t1"]),
            ((), 2, ["t1"]),
            ((), 2, ["t1"]),
            (("tools:c1",), 2, ["t1"]),
            (("tools:c1",), 3, None),
            (("tools:c1",), 4, None),
            ((), 3, None),
            ((), 4, None),
        ]
    )


async def test_tasks_begin_and_end_and_begin_again_when_answered() -> None:
    first, rest = await both_legs("tasks")
    assert [(part["ns"], part["data"]) for part in first] == snapshot(
        [
            ((), {"id": "<run>-s1", "name": "model_request", "input": None, "triggers": []}),
            (
                (),
                {
                    "id": "<run>-s1",
                    "name": "model_request",
                    "error": None,
                    "result": {
                        "messages": [
                            {
                                "type": "ai",
                                "content": "",
                                "id": "<run>-m2",
                                "tool_calls": [
                                    {
                                        "name": "task",
                                        "args": {"subagent_type": "clerk", "description": "Pay 3"},
                                        "id": "c1",
                                    }
                                ],
                            }
                        ]
                    },
                    "interrupts": [],
                },
            ),
            (
                (),
                {
                    "id": "c1",
                    "name": "tools",
                    "input": [{"name": "task", "args": {"subagent_type": "clerk", "description": "Pay 3"}, "id": "c1"}],
                    "triggers": [],
                },
            ),
            (("tools:c1",), {"id": "<run>-s1", "name": "model_request", "input": None, "triggers": []}),
            (
                ("tools:c1",),
                {
                    "id": "<run>-s1",
                    "name": "model_request",
                    "error": None,
                    "result": {
                        "messages": [
                            {
                                "type": "ai",
                                "content": "I pay.",
                                "id": "<run>-m2",
                                "tool_calls": [{"name": "pay", "args": {"amount": 3}, "id": "c2"}],
                                "additional_kwargs": {"reasoning_content": "Hm."},
                            }
                        ]
                    },
                    "interrupts": [],
                },
            ),
            (
                ("tools:c1",),
                {
                    "id": "c2",
                    "name": "tools",
                    "input": [{"name": "pay", "args": {"amount": 3}, "id": "c2"}],
                    "triggers": [],
                },
            ),
            (
                ("tools:c1",),
                {
                    "id": "c2",
                    "name": "tools",
                    "error": None,
                    "result": {},
                    "interrupts": [
                        {
                            "id": "t1",
                            "value": {
                                "action": "pay",
                                "message": "Pay?",
                                "parameters": {"amount": 3},
                                "response_schema": {"type": "object"},
                                "tool_name": "pay",
                                "tool_call_id": "c2",
                                "path": ["c1", "c2"],
                            },
                        }
                    ],
                },
            ),
            (
                (),
                {
                    "id": "c1",
                    "name": "tools",
                    "error": None,
                    "result": {},
                    "interrupts": [
                        {
                            "id": "t1",
                            "value": {
                                "action": "pay",
                                "message": "Pay?",
                                "parameters": {"amount": 3},
                                "response_schema": {"type": "object"},
                                "tool_name": "pay",
                                "tool_call_id": "c2",
                                "path": ["c1", "c2"],
                            },
                        }
                    ],
                },
            ),
        ]
    )
    assert [(part["ns"], part["data"]["id"], list(part["data"])[2]) for part in rest] == snapshot(
        [
            ((), "c1", "input"),
            (("tools:c1",), "c2", "input"),
            (("tools:c1",), "c2", "error"),
            (("tools:c1",), "<run>-s2", "input"),
            (("tools:c1",), "<run>-s2", "error"),
            ((), "c1", "error"),
            ((), "<run>-s2", "input"),
            ((), "<run>-s2", "error"),
        ]
    )


async def test_checkpoints_have_the_values_and_what_comes_next() -> None:
    first, _ = await both_legs("checkpoints")
    assert first == snapshot(
        [
            {
                "type": "checkpoints",
                "ns": (),
                "data": {
                    "config": {"configurable": {"thread_id": "<thread>", "checkpoint_ns": "", "checkpoint_id": "1"}},
                    "parent_config": None,
                    "values": {"messages": [{"type": "human", "content": "go", "id": "<run>-m1"}]},
                    "metadata": {"source": "input", "step": 0, "run_id": "<run>"},
                    "next": ["model_request"],
                    "tasks": [{"id": "<run>-s1", "name": "model_request", "interrupts": [], "state": None}],
                },
            },
            {
                "type": "checkpoints",
                "ns": ("tools:c1",),
                "data": {
                    "config": {
                        "configurable": {"thread_id": "<thread>", "checkpoint_ns": "tools:c1", "checkpoint_id": "8"}
                    },
                    "parent_config": None,
                    "values": {"messages": [{"type": "human", "content": "Pay 3", "id": "<run>-m1"}]},
                    "metadata": {"source": "input", "step": 0, "run_id": "<run>"},
                    "next": ["model_request"],
                    "tasks": [{"id": "<run>-s1", "name": "model_request", "interrupts": [], "state": None}],
                },
            },
            {
                "type": "checkpoints",
                "ns": ("tools:c1",),
                "data": {
                    "config": {
                        "configurable": {"thread_id": "<thread>", "checkpoint_ns": "tools:c1", "checkpoint_id": "17"}
                    },
                    "parent_config": {
                        "configurable": {"thread_id": "<thread>", "checkpoint_ns": "tools:c1", "checkpoint_id": "8"}
                    },
                    "values": {
                        "messages": [
                            {"type": "human", "content": "Pay 3", "id": "<run>-m1"},
                            {
                                "type": "ai",
                                "content": "I pay.",
                                "id": "<run>-m2",
                                "tool_calls": [{"name": "pay", "args": {"amount": 3}, "id": "c2"}],
                                "additional_kwargs": {"reasoning_content": "Hm."},
                            },
                        ],
                        "__interrupt__": [
                            {
                                "id": "t1",
                                "value": {
                                    "action": "pay",
                                    "message": "Pay?",
                                    "parameters": {"amount": 3},
                                    "response_schema": {"type": "object"},
                                    "tool_name": "pay",
                                    "tool_call_id": "c2",
                                    "path": ["c1", "c2"],
                                },
                            }
                        ],
                    },
                    "metadata": {"source": "loop", "step": 1, "run_id": "<run>"},
                    "next": ["tools"],
                    "tasks": [
                        {
                            "id": "c2",
                            "name": "tools",
                            "interrupts": [
                                {
                                    "id": "t1",
                                    "value": {
                                        "action": "pay",
                                        "message": "Pay?",
                                        "parameters": {"amount": 3},
                                        "response_schema": {"type": "object"},
                                        "tool_name": "pay",
                                        "tool_call_id": "c2",
                                        "path": ["c1", "c2"],
                                    },
                                }
                            ],
                            "state": None,
                        }
                    ],
                },
            },
            {
                "type": "checkpoints",
                "ns": (),
                "data": {
                    "config": {"configurable": {"thread_id": "<thread>", "checkpoint_ns": "", "checkpoint_id": "21"}},
                    "parent_config": {
                        "configurable": {"thread_id": "<thread>", "checkpoint_ns": "", "checkpoint_id": "1"}
                    },
                    "values": {
                        "messages": [
                            {"type": "human", "content": "go", "id": "<run>-m1"},
                            {
                                "type": "ai",
                                "content": "",
                                "id": "<run>-m2",
                                "tool_calls": [
                                    {
                                        "name": "task",
                                        "args": {"subagent_type": "clerk", "description": "Pay 3"},
                                        "id": "c1",
                                    }
                                ],
                            },
                        ],
                        "__interrupt__": [
                            {
                                "id": "t1",
                                "value": {
                                    "action": "pay",
                                    "message": "Pay?",
                                    "parameters": {"amount": 3},
                                    "response_schema": {"type": "object"},
                                    "tool_name": "pay",
                                    "tool_call_id": "c2",
                                    "path": ["c1", "c2"],
                                },
                            }
                        ],
                    },
                    "metadata": {"source": "loop", "step": 1, "run_id": "<run>"},
                    "next": ["tools"],
                    "tasks": [
                        {
                            "id": "c1",
                            "name": "tools",
                            "interrupts": [
                                {
                                    "id": "t1",
                                    "value": {
                                        "action": "pay",
                                        "message": "Pay?",
                                        "parameters": {"amount": 3},
                                        "response_schema": {"type": "object"},
                                        "tool_name": "pay",
                                        "tool_call_id": "c2",
                                        "path": ["c1", "c2"],
                                    },
                                }
                            ],
                            "state": None,
                        }
                    ],
                },
            },
        ]
    )


async def test_debug_is_tasks_and_checkpoints_in_order() -> None:
    first, rest = await both_legs("debug", "tasks", "checkpoints")
    debug = [part["data"] for part in (*first, *rest) if part["type"] == "debug"]
    assert [one["payload"] for one in debug] == [p["data"] for p in (*first, *rest) if p["type"] != "debug"]
    assert [(one["step"], one["type"], one["timestamp"]) for one in debug[:4]] == snapshot(
        [(0, "checkpoint", "<time>"), (1, "task", "<time>"), (1, "task_result", "<time>"), (1, "task", "<time>")]
    )


async def test_a_checkpoint_id_is_an_event_number() -> None:
    runtime = office()
    run = runtime.stream("boss", "go")
    parts = [part async for part in run.parts("checkpoints")]
    root = [part["data"]["config"]["configurable"]["checkpoint_id"] for part in parts if not part["ns"]]
    for place in map(int, root):
        assert (await runtime.state_at(run.run_id, place)).run_id == run.run_id


async def test_a_cancelled_question_is_a_failed_tool_message() -> None:
    runtime = office()
    run = runtime.stream("boss", "go")
    last = [event.seq async for event in run][-1]
    await runtime.resume(run.run_id, {"c2": Decision.cancel("no")})
    project = PartsProjection("updates")  # one that joins late, as after a restart
    rest = [part async for event in runtime.events(run.run_id, after=last) for part in project(event)]
    assert [(part["ns"], list(part["data"])) for part in rest][0] == (("tools:c1",), ["tools"])
