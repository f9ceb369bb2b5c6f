"""Programs: small random trees of agents that a model, tools and hooks follow, whatever process they are in.

A program is data. What a model says is a function of its conversation alone, what a tool or hook does a function of its
arguments, so a run that is cut anywhere and continued elsewhere must come to the same end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from retinue import (
    Agent,
    CallChunk,
    Child,
    HarnessAgent,
    Message,
    ModelRequest,
    RunResult,
    RunStatus,
    SuspendTicket,
    TextChunk,
    ToolContext,
    ToolOutput,
    ToolResult,
    TurnEnd,
    Usage,
    tool,
)
from retinue.models import ModelChunk, ReasoningChunk, Retrying

from .hooks import COUNT, HIDDEN, OWNER, THREAD, Bump, Follows, Mail

USED = Usage(requests=1, input_tokens=1000, output_tokens=300)


class Call(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call: what it does, what is done to it, and what humans answer."""

    key: str
    does: str = "work"
    """work, error, raise, halt (it asks for the run to be cancelled), handoff, or a way to delegate: task, tool, hand
    (a tool written by hand), lead (the same, idempotent), tries (fails once after its first child), spawn, send,
    background, promoted (as spawn, with a second to wait), output."""
    idempotent: bool = False
    hook: str = ""
    """What a hook does before it: block, end (block and end the run), set, suspend."""
    waits: int = 0
    """How often the tool itself asks a human."""
    mode: str = "replay"
    answers: tuple[bool, ...] = (True, True, True)
    """Resume or cancel, in the order in which it waits."""
    children: tuple[Plan, ...] = ()
    together: bool = False
    """Whether the children of a hand-written tool run side by side."""
    claims: bool = False
    """Whether it writes the exclusive key."""
    asks: tuple[str, ...] = ()
    """What its command asks for beside state: mail, dead (mail that fails), bump, stop, add, event."""
    of: str = ""
    """The call that spawned what `send` and `output` are about; the agent of `handoff`."""

    @property
    def runs_again(self) -> bool:
        """Whether the tool is idempotent, so that a call in progress is made again."""
        return self.idempotent or self.does not in ("work", "error", "raise", "hand")


class Act(Struct, frozen=True, omit_defaults=True):
    """What the hook of a phase does at a step: count, hidden, owner, mail, dead, bump, add, context, system, exclude,
    compact, stop, handoff."""

    phase: str
    step: int
    what: str


class Plan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run: its steps, its answers (the last one is the end) and what its hooks do."""

    label: str
    steps: tuple[tuple[Call, ...], ...] = ()
    answers: tuple[str, ...] = ("done",)
    acts: tuple[Act, ...] = ()
    retries: frozenset[int] = frozenset()
    """Steps in which the model begins anew."""
    fails: int = -1
    """The step in which the model fails for good."""
    agent: str = "helper"


def plans_of(plan: Plan) -> Iterator[Plan]:
    """A plan and all below it."""
    yield plan
    for call in calls_of(plan):
        for child in call.children:
            yield from plans_of(child)


def calls_of(plan: Plan) -> Iterator[Call]:
    """The calls of one run."""
    return (call for step in plan.steps for call in step)


class World:
    """One process: what it knows of the program, and what its tools, hooks and effects did."""

    def __init__(self, plan: Plan, repository: Any = None) -> None:
        self.root, self.repository = plan, repository
        self.plans = {one.label: one for one in plans_of(plan)}
        assert len(self.plans) == len(list(plans_of(plan))), "labels must be unique"
        self.calls = {call.key: call for one in self.plans.values() for call in calls_of(one)}
        self.label_of = {call.key: one.label for one in self.plans.values() for call in calls_of(one)}
        self.ran: Counter[str] = Counter()
        """How often each tool body ran, as key#number of answers before."""
        self.did: Counter[str] = Counter()
        """What effects and handlers did."""
        self.attempts: Counter[str] = Counter()
        self.cancel: Callable[[], Awaitable[object]] | None = None
        self.jobs: set[asyncio.Task[Any]] = set()
        self.on_run: Callable[[str], Awaitable[None]] | None = None
        """Called when a tool body begins."""

    # --- agents

    def agents(self) -> list[Agent]:
        """The agents of the program; the first one is the root's."""
        model, tools = ProgramModel(self), self.tools()
        plugins = [Follows(self)]
        common: dict[str, Any] = {"max_steps": 40}
        helper = Agent("helper", model, "You help.", tools, plugins, **common)
        low: dict[str, Any] = {"subagents": [helper], "handoffs": ["second"], **common}
        middle = Agent("middle", model, "You help.", [*tools, helper.as_tool()], plugins, **low)
        second = Agent("second", model, "You take over.", tools, plugins, subagents=[middle, helper], **common)
        typed = Agent("typed", model, "You count.", tools, plugins, output=dict[str, int], **common)
        top: dict[str, Any] = {"subagents": [middle, helper], **common}
        if self.repository is None:
            tools = [*tools, helper.as_tool()]
            boss = Agent("boss", model, "You lead.", tools, plugins, handoffs=[second], **top)
        else:
            boss = HarnessAgent(
                "boss",
                model,
                "You lead.",
                tools,
                plugins,
                handoffs=[second],
                task_repository=self.repository,
                general_purpose=False,
                disable_filesystem=True,
                disable_workspace_context=True,
                **top,
            )
        return [boss, middle, helper, second, typed]

    def tools(self) -> list[Any]:
        """A tool that may run twice, one that may not, and those that delegate."""

        @tool
        async def work(key: str, ctx: ToolContext, n: int = 0) -> Any:
            """Work."""
            return await self.act(key, ctx)

        @tool(idempotent=True)
        async def look(key: str, ctx: ToolContext, n: int = 0) -> Any:
            """Look."""
            return await self.act(key, ctx)

        @tool
        async def hand(key: str, ctx: ToolContext) -> Any:
            """Delegate."""
            return await self.lead(key, ctx)

        @tool(idempotent=True)
        async def lead(key: str, ctx: ToolContext) -> Any:
            """Delegate."""
            return await self.lead(key, ctx)

        @tool(idempotent=True, retries=1)
        async def tries(key: str, ctx: ToolContext) -> Any:
            """Delegate, and fail once."""
            self.attempts[key] += 1
            if self.attempts[key] == 1:
                await ctx.run_child(self.calls[key].children[0].agent, f"do {self.calls[key].children[0].label}")
                raise RuntimeError("the first attempt fails")
            return await self.lead(key, ctx)

        @tool(idempotent=True)
        async def halt(key: str, ctx: ToolContext) -> str:
            """Have the run cancelled."""
            self.ran[f"{key}#0"] += 1
            assert self.cancel is not None
            job = asyncio.create_task(_ignore(self.cancel()))
            self.jobs.add(job)
            await asyncio.Event().wait()
            return "never"

        return [work, look, hand, lead, tries, halt]

    # --- what tools do

    async def act(self, key: str, ctx: ToolContext) -> Any:
        """Ask as often as planned, then end as planned."""
        call, number = self.calls[key], self._answers(ctx)
        self.ran[f"{key}#{number}"] += 1
        if self.on_run is not None:
            await self.on_run(key)
        await asyncio.sleep(0)
        if number < call.waits:
            mode: Any = call.mode
            ticket = SuspendTicket(f"t-{key}-{number}", "ask", f"{key}?", {"key": key, "n": number}, resume_mode=mode)
            return ToolResult.suspended(f"{key}?", ticket=ticket)
        if call.does == "raise":
            raise RuntimeError(f"{key} raises")
        failed = call.does == "error"
        result = ToolResult.error(f"{key} error") if failed else ToolResult.success(f"{key} done {number}")
        return ToolOutput.with_command(result, self.command(call))

    def command(self, call: Call) -> Any:
        """The state that a call writes, and what else it asks for."""
        command = ToolOutput("", {COUNT: 1, HIDDEN: 1, THREAD: call.key}).command
        assert command is not None
        if call.claims:
            command.update(OWNER, call.key)
        for what in call.asks:
            ask(command, what, call.key)
        return command

    async def lead(self, key: str, ctx: ToolContext) -> Any:
        """Run the children, one after the other or together; wait where one waits."""
        call = self.calls[key]
        self.ran[f"{key}#0"] += 1
        if self.on_run is not None:
            await self.on_run(key)
        if call.together:
            ends = await ctx.run_children([Child(child.agent, f"do {child.label}") for child in call.children])
        else:
            ends: list[RunResult] = []
            for child in call.children:
                ends.append(await ctx.run_child(child.agent, f"do {child.label}"))
                if ends[-1].status is RunStatus.SUSPENDED:
                    break
        if any(end.status is RunStatus.SUSPENDED for end in ends):
            return ToolResult.suspended(f"{key} waits for a child")
        said = ", ".join([f"{end.status}: {end.response}" for end in ends])
        return ToolOutput.with_command(ToolResult.success(f"{key}: {said}"), self.command(call))

    @staticmethod
    def _answers(ctx: ToolContext) -> int:
        given = ctx.resume_input
        return int(given.get("n", 0)) if isinstance(given, dict) else 0

    # --- what the model says

    def decide(self, messages: tuple[Message, ...]) -> tuple[Plan, int, list[str]]:
        """The plan, the step, and what was said since its prompt."""
        plan, step, since = self.root, 0, list[Message]()
        for message in messages:
            text = message.text
            if message.role == "user" and text.startswith("do "):
                label, _, done = text[3:].partition(" +")
                plan, step, since = self.plans[label], int(done or 0), []
            elif message.role == "assistant":
                step += 1
            since.append(message)
        return plan, step, [message.text for message in since if message.role != "assistant"]


async def _ignore(work: Awaitable[object]) -> None:
    try:
        await work
    except Exception:
        return


def ask(command: Any, what: str, key: str) -> None:
    """Add what a call or a hook asks for to its command."""
    from .hooks import ACTIONS

    match what:
        case "mail":
            command.emit(Mail(key))
        case "dead":
            command.emit(Mail(f"dead {key}"))
        case "bump":
            command.schedule(Bump(key))
        case "event":
            command.event({"from": key})
        case _:
            command.schedule(ACTIONS[what](key))


class ProgramModel:
    """Says what the program says next."""

    name = "testing:program"

    def __init__(self, world: World) -> None:
        self._world = world

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        plan, step, since = self._world.decide(request.messages)
        if plan.fails == step:
            yield TextChunk("I f")
            raise RuntimeError(f"the model fails in step {step} of {plan.label}")
        if step in plan.retries:
            yield TextChunk("Let me")
            yield CallChunk(0, f"{plan.label}x{step}", "work", '{"key":')
            yield Retrying(code="overloaded", message="again", model=self.name, restarts=True)
        if any("the limit on" in text for text in since):
            yield TextChunk(f"{plan.label} has enough")
        elif step < len(plan.steps):
            yield ReasoningChunk("hm")
            yield TextChunk(f"{plan.label} {step}")
            await asyncio.sleep(0)
            for number, call in enumerate(plan.steps[step]):
                name, args = self._call(plan, call, request)
                yield CallChunk(number, f"c-{call.key}", name, msgspec.json.encode(args).decode())
                await asyncio.sleep(0)
            yield TurnEnd("tool_calls", USED)
            return
        else:
            answer = plan.answers[min(step - len(plan.steps), len(plan.answers) - 1)]
            yield TextChunk(answer[:3])
            await asyncio.sleep(0)
            yield TextChunk(answer[3:])
        yield TurnEnd("stop", USED)

    def _call(self, plan: Plan, call: Call, request: ModelRequest) -> tuple[str, dict[str, Any]]:
        child = call.children[0] if call.children else None
        match call.does:
            case "task":
                assert child is not None
                return "task", {"subagent_type": child.agent, "description": f"do {child.label}"}
            case "tool":
                assert child is not None
                return "agent_run_helper", {"prompt": f"do {child.label}"}
            case "spawn" | "background" | "promoted":
                assert child is not None
                seconds = {"spawn": 60, "background": 0, "promoted": 1}[call.does]
                task = f"do {child.label}"
                return "agent_spawn", {"agent_id": child.agent, "task": task, "timeout_seconds": seconds}
            case "send":
                assert child is not None
                key = _line(request, call.of, "agent_key:")
                return "agent_send", {"agent_key": key, "message": f"do {child.label}", "timeout_seconds": 60}
            case "output":
                return "task_output", {"task_id": _line(request, call.of, "task_id:"), "timeout": 60_000}
            case "handoff":
                return f"transfer_to_{call.of}", {"reason": call.key}
            case "hand" | "lead" | "tries" | "halt":
                return call.does, {"key": call.key}
            case _:
                return "look" if call.idempotent else "work", {"key": call.key}


def key_of(args: dict[str, Any], name: str) -> str:
    """Which call it is, from its arguments: its key, or the prompt of its child, or what it is about."""
    if "key" in args:
        return args["key"]
    for field in ("description", "prompt", "task", "message"):
        if field in args:
            return args[field]
    return args.get("reason") or name


def _line(request: ModelRequest, key: str, field: str) -> str:
    """A value that the result of an earlier call has in a line of its own."""
    asked = {made.id: key_of(made.args, made.name) for message in request.messages for made in message.tool_calls}
    for message in request.messages:
        if message.role == "tool" and asked.get(message.tool_call_id or "") == key:
            for line in message.text.splitlines():
                if line.startswith(field):
                    return line.removeprefix(field).strip()
    return "unknown"
