"""One model call: send the request, stream the chunks, and make one assistant message of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..core.content import MAX_PARSED, clean_text, parse_json, to_json_bytes
from ..core.errors import ContextOverflow, ModelRefused, ModelResponseInvalid, OutputTruncated
from ..core.events import (
    ErrorRaised,
    InferenceFinished,
    ReasoningDelta,
    TextDelta,
    ToolCallArgsDelta,
    ToolCallStarted,
)
from ..core.hooks import CompactionPolicy
from ..core.messages import Message, Part, ReasoningPart, Role, TextPart, ToolCall, Visibility, checked_record
from ..core.model import CallChunk, ModelRequest, PartChunk, ReasoningChunk, Retrying, TextChunk, TurnEnd
from ..core.plugins import (
    AddContextMessage,
    AddSystemText,
    ExcludeTools,
    IncludeTools,
    OverrideSettings,
    StepAction,
    StopRun,
)
from ..core.results import ToolCallStatus
from ..core.rows import Ending, Private
from ..core.runs import Usage
from .admission import RunCaller, admit_call
from .budget import limits_cost
from .compaction import compact_if_full, note_request, read_summary, readable
from .execution import Execution, drop_draft, drop_drafts
from .phases import run_phase
from .spending import hold_call

_ASSISTANT = Role.ASSISTANT

MAX_ANSWER = 8 * 1024 * 1024
"""Characters of one answer: its text, reasoning and calls. Images and files count a quarter."""
MAX_ARGUMENTS = MAX_PARSED
"""Characters of the arguments of all calls of one answer."""
MAX_CALLS = 10_000
"""Calls that one answer may ask for."""
_CHUNK = 32
"""The least number of characters that a chunk counts for, because each chunk is an event. So an answer has at most 262,144
chunks; the longest that models are sold with have 131,072 tokens."""
_TURN, _PARSED = 200, 30_000
"""Chunks, and characters of arguments that are parsed, after which other work has its turn."""


class _Draft(Struct, eq=False):
    """An answer while it streams in."""

    run: Execution
    message_id: str
    parts: list[Part] = []
    calls: dict[int, _CallDraft] = {}
    thought: list[str] = []
    """The reasoning text that is still streaming."""
    end: TurnEnd = TurnEnd()
    size: int = 0
    arguments_size: int = 0

    def add(self, chunk: Any) -> None:
        """Add a chunk of a rare kind. `_stream` itself adds text, calls and the end, for speed."""
        if isinstance(chunk, ReasoningChunk):
            self.add_reasoning(chunk)
        elif isinstance(chunk, PartChunk):
            self.end_reasoning()
            part = checked_record(chunk.part)
            self.measure(len(to_json_bytes(part)) // 4)
            self.parts.append(part)
        elif isinstance(chunk, Retrying):
            self.restart(chunk)
        else:
            raise TypeError(f"model {self.run.model.name!r} yielded {chunk!r}, which is not a model chunk")

    def measure(self, size: int) -> None:
        """Count the size of a chunk; raise ModelResponseInvalid if the answer gets too large for memory."""
        self.size += size if size > _CHUNK else _CHUNK
        if self.size > MAX_ANSWER:
            model = self.run.model.name
            most = f"{MAX_ANSWER:,} characters or {MAX_ANSWER // _CHUNK:,} pieces"
            raise ModelResponseInvalid(f"the answer is too long: it has more than {most}", model)

    def add_reasoning(self, chunk: ReasoningChunk) -> None:
        text, signature = clean_text(chunk.text), chunk.signature
        self.measure(len(text) + len(signature or ""))
        self.thought.append(text)
        if signature is not None:
            self.end_reasoning(clean_text(signature))
        if text:
            self.run.emit(ReasoningDelta(delta=text, message_id=self.message_id))

    def end_reasoning(self, signature: str | None = None) -> None:
        """Turn the reasoning so far into a part of the message."""
        if self.thought:
            self.parts.append(ReasoningPart("".join(self.thought), signature))
            self.thought = []

    def add_call(self, chunk: CallChunk) -> None:
        run, call = self.run, self.calls.get(chunk.index)
        arguments, name = chunk.arguments, chunk.name or ""
        self.measure(len(arguments) + len(name))
        if call is None:
            if len(self.calls) >= MAX_CALLS:
                raise ModelResponseInvalid(f"the answer asks for more than {MAX_CALLS:,} calls", run.model.name)
            call = self.calls[chunk.index] = _CallDraft(run.claim_call_id(chunk.id), clean_text(name))
            run.emit(ToolCallStarted(call_id=call.id, tool_name=call.name, message_id=self.message_id))
        elif name and not call.name:  # some servers send the name after the id
            call.name = clean_text(name)
        if arguments:
            arguments = clean_text(arguments)
            call.arguments.append(arguments)
            self.arguments_size += len(arguments)
            if self.arguments_size > MAX_ARGUMENTS:
                problem = f"the arguments of its calls have more than {MAX_ARGUMENTS:,} characters"
                raise ModelResponseInvalid(problem, run.model.name)
            run.emit(ToolCallArgsDelta(call_id=call.id, delta=arguments))

    def restart(self, chunk: Retrying) -> None:
        """Emit that the model is called again; drop a partial answer, except its calls, and use another message id."""
        run, dropped = self.run, self.message_id if chunk.restarts else None
        if dropped is not None:
            self.parts, self.calls, self.thought, self.size, self.arguments_size = [], {}, [], 0, 0
            run.partial_text.clear()
        run.emit(
            ErrorRaised(
                message=clean_text(chunk.message),
                code=chunk.code,
                retry_model=chunk.model,
                retry_delay=chunk.delay,
                dropped_message_id=dropped,
            )
        )
        self.message_id = run.answer_id()

    async def message(self) -> Message:
        """Return the whole answer."""
        self.end_reasoning()
        calls: tuple[ToolCall, ...] = ()
        if self.calls:
            if self.arguments_size > _PARSED:
                calls = tuple([call async for call in self._finished_calls()])
            else:
                calls = tuple([self.calls[index].finished() for index in sorted(self.calls)])
            if self.end.stop_reason == "length":
                last = calls[-1]
                # A last call without arguments was cut off before them: it must not run.
                calls = (*calls[:-1], last if last.args else replace(last, malformed=last.malformed or "(cut off)"))
        said = self.run.partial_text
        if said:
            self.parts.append(TextPart("".join(said)))
            self.run.partial_text = []
        return Message(role=_ASSISTANT, parts=tuple(self.parts), tool_calls=calls, id=self.message_id)

    async def _finished_calls(self) -> AsyncIterator[ToolCall]:
        """Yield the calls with their arguments parsed; after some, other work has its turn."""
        size = 0
        for index in sorted(self.calls):
            if size > _PARSED:
                size = 0
                await asyncio.sleep(0)
            call = self.calls[index]
            size += sum(map(len, call.arguments))
            yield call.finished()


class _CallDraft(Struct, gc=False):
    id: str
    name: str
    arguments: list[str] = []

    def finished(self) -> ToolCall:
        text = "".join(self.arguments).strip()
        try:
            args: Any = parse_json(text) if text else {}
        except ValueError:
            args = text
        if args is None:  # some models say null for "no arguments"
            args = {}
        if args.__class__ is dict:
            return ToolCall(self.id, self.name, args)
        return ToolCall(self.id, self.name, {}, text)


def drop_answer(x: Execution) -> None:
    """Emit that a partial answer is dropped because its process died; the loop then calls the model again."""
    drop_drafts(x.log, x.state)
    reason = "the process ended while the model answered: it is asked again"
    x.emit(ErrorRaised(message=reason, code="interrupted", retry_model=x.model.name, dropped_message_id=x.answer_id()))


async def continue_turn(x: Execution) -> None:
    """Recover a turn whose process died: drop a partial answer, or finish the work that follows a complete one."""
    if x.log.is_leaving:
        await x.log.hold(x.run_id)
    run, x.was_interrupted = x.state, False
    if not run.step_open or run.jobs or run.ending is not None:
        return
    if not run.answered:
        drop_answer(x)
        return
    if any(call.status is not ToolCallStatus.NEW for call in run.calls.values()) or "step_end" in run.marks:
        return
    if run.asked_calls and not run.calls:
        return  # its calls have ended
    if run.stop_reason in ("length", "refusal"):
        _check_ending(x, run.stop_reason, run.messages[-1], x.model.name)
    if x.has_hooks:
        await run_phase(x, "after_inference", x.own_messages(), _request(x))


async def ask_model(x: Execution) -> Ending | None:
    """Send the conversation, stream the answer into the log, and add it to the conversation.

    Return an ending if the call is not admitted, else None."""
    run = x.state
    x.stop_if_cancelled()
    if x.has_hooks:
        await run_phase(x, "step_start", x.own_messages())
    if x.has_hooks or x.hooks.policy is not None:
        request = await _hooked_request(x)
    else:
        request = _with_actions(_request(x), run.step_actions)
    request = await _admitted(x, request)
    if isinstance(request, Ending):
        return request
    if x.hooks.policy is None:
        draft, fields = await _stream(x, request), {}
    else:
        draft, request, fields = await _ask_within_window(x, x.hooks.policy, request)
    offered = None if request.tools is x.descriptors else tuple([tool.name for tool in request.tools])
    message, end, model = await draft.message(), draft.end, draft.end.model or x.model.name
    usage, stop = end.usage, None
    if not (usage.cost or end.cost_known) and (x.resolver.prices or usage.input_tokens or usage.output_tokens):
        usage, stop = _priced(x, usage, model)
    if x.spending is not None:
        await x.spending.settle(usage, is_known=_is_priced(x, usage, end, model))
    private = None
    if offered is not None or stop is not None or fields:
        private = Private(offered=offered, actions=() if stop is None else (stop,), **fields)
    x.emit(
        InferenceFinished(step=run.step, message=message, model=model, stop_reason=end.stop_reason, usage=usage),
        private,
    )
    if end.stop_reason in ("length", "refusal"):
        _check_ending(x, end.stop_reason, message, model)
    if x.has_hooks:
        await run_phase(x, "after_inference", x.own_messages(), request)
    return None


async def _hooked_request(x: Execution) -> ModelRequest:
    """Return the request after a compaction, if it needs one, and with what hooks asked for."""
    run, policy = x.state, x.hooks.policy
    request = _with_actions(_request(x), run.step_actions)
    if policy is not None and await compact_if_full(x, policy, request):
        request = _with_actions(_request(x), run.step_actions)
    whole = tuple(run.messages) if run.own_from else x.own_messages()
    window, actions = run.window, run.step_actions
    await run_phase(x, "before_inference", whole, request)
    if run.window is window and run.step_actions is actions:
        return request
    return _with_actions(_request(x), run.step_actions)


async def _ask_within_window(
    x: Execution, policy: CompactionPolicy, request: ModelRequest
) -> tuple[_Draft, ModelRequest, dict[str, Any]]:
    """Return the answer, the request that was answered, and what to note of it.

    If the model finds the request too long, it is asked once more, after a compaction."""
    fields = note_request(x, request)
    try:
        return await _stream(x, request), request, fields
    except ContextOverflow as exc:
        if not await compact_if_full(x, policy, request, is_refused=True):
            raise
        dropped = x.answer_id() if x.partial_text else None
        x.partial_text = []
        x.emit(ErrorRaised(message=str(exc), code=exc.code, retry_model=x.model.name, dropped_message_id=dropped))
        if await hold_call(x, request) is not None:
            raise
    request = _with_actions(_request(x), x.state.step_actions)
    fields = note_request(x, request)
    return await _stream(x, request), request, fields


async def _admitted(x: Execution, request: ModelRequest) -> ModelRequest | Ending:
    """Return the request that the model may get: this one, or one that says that it is the last. Return an ending if a limit
    or a budget does not allow a call."""
    if x.log.is_leaving:  # hooks took their time
        await x.log.hold(x.run_id)
    if (ending := await admit_call(x, request)) is not None:
        return ending
    is_last = x.spending is not None and x.spending.is_closing
    return _with_actions(_request(x), x.state.step_actions) if is_last else request


def _priced(x: Execution, usage: Usage, model: str) -> tuple[Usage, StopRun | None]:
    """Return the usage with its cost from the price function, and a StopRun if a cost limit has no known price."""
    cost, stop = x.resolver.price(model, usage), None
    if cost is None and x.is_limited and limits_cost(x.log.tree, x.state):
        reason = f"Limits(cost=…) cannot be kept: what a call of {model!r} costs is not known"
        stop = StopRun("cost", f"{reason}; give Runtime(price=…) its price, 0 where it is free")
    return (replace(usage, cost=cost) if cost else usage), stop


def _is_priced(x: Execution, usage: Usage, end: TurnEnd, model: str) -> bool:
    """Return whether the cost in a usage is known, also where it is 0."""
    return bool(usage.cost) or end.cost_known or (x.resolver.prices and x.resolver.price(model, usage) is not None)


def _check_ending(x: Execution, stop_reason: str, message: Message, model: str) -> None:
    """Raise if an answer was refused or cut off. If it has calls, only emit an error: a cut-off call is malformed."""
    if stop_reason == "refusal":
        said = f": {message.text[:500]}" if message.text else ""
        raise ModelRefused(f"the model declined to answer{said}", model)
    if message.tool_calls:
        x.emit_error(f"{model}: the answer was cut at its limit, within or after a tool call", OutputTruncated.code)
    else:
        raise OutputTruncated("the answer was cut at its limit: raise max_tokens in the agent's settings", model)


def _request(x: Execution) -> ModelRequest:
    """Make the request: the system message, a summary if there is one, the conversation, and the tools."""
    agent, system, messages, window = x.agent, x.agent.system, x.state.messages, x.state.window
    if x.hooks.policy is not None:
        messages = readable(x, x.hooks.policy)
    elif window.count:
        messages = [read_summary(window), *messages[window.count :]]
    said = tuple(messages) if system is None else (system, *messages)
    schema = None if agent.output_format is None else agent.output_format.schema
    return ModelRequest(messages=said, tools=x.descriptors, settings=agent.settings, output_schema=schema)


def _with_actions(request: ModelRequest, actions: tuple[StepAction, ...]) -> ModelRequest:
    """Return the request with the one-time changes that hooks asked for."""
    if not actions:
        return request
    messages, tools, settings, transient = list(request.messages), list(request.tools), dict(request.settings), 0
    only = [action.names for action in actions if isinstance(action, IncludeTools)]
    excluded = {name for action in actions if isinstance(action, ExcludeTools) for name in action.names}
    for action in actions:
        if isinstance(action, AddContextMessage):
            messages.append(Message.user(action.text, visibility=Visibility.INTERNAL))
            transient += 1
        elif isinstance(action, OverrideSettings):
            settings.update(action.settings)
    if added := [action.text for action in actions if isinstance(action, AddSystemText)]:
        said = [messages.pop(0).text] if messages and messages[0].role is Role.SYSTEM else []
        messages.insert(0, Message.system("\n\n".join([*said, *added])))
    if only:
        tools = [tool for tool in tools if any(tool.name in names for names in only)]
    tools = [tool for tool in tools if tool.name not in excluded]
    offered = request.tools if len(tools) == len(request.tools) else tuple(tools)
    return replace(request, messages=tuple(messages), tools=offered, settings=settings, transient=transient)


def _checked_end(end: TurnEnd) -> TurnEnd:
    """Return the end of a turn with clean text."""
    stop_reason, model = clean_text(end.stop_reason), end.model and clean_text(end.model)
    if stop_reason is end.stop_reason and model is end.model:
        return end
    return replace(end, stop_reason=stop_reason, model=model)


async def _stream(x: Execution, request: ModelRequest) -> _Draft:
    """Call the model and emit its answer piece by piece."""
    draft, said, count = _Draft(x, x.answer_id()), x.partial_text, 0
    stream_for = getattr(x.model, "stream_for", None)  # of a model that passes the gate of an account
    chunks: Any = x.model.stream(request) if stream_for is None else stream_for(request, RunCaller(x))
    try:
        async for chunk in chunks:
            kind = chunk.__class__
            if kind is TextChunk:
                text = chunk.text
                if text.__class__ is not str or not text.isascii():
                    text = clean_text(text)
                draft.measure(len(text))
                if text:
                    said.append(text)
                    x.emit(TextDelta(delta=text, message_id=draft.message_id))
            elif kind is CallChunk:
                draft.add_call(chunk)
            elif kind is TurnEnd:
                draft.end = _checked_end(chunk)
            else:
                if isinstance(chunk, Retrying) and chunk.restarts:
                    await _drop_calls(x)
                draft.add(chunk)
            count += 1
            if count == _TURN:
                count = 0
                await asyncio.sleep(0)
    except BaseException as exc:
        # Close a stream that is left half-way at once, so that its connection is freed.
        await _abandon(x, chunks, exc)
        raise
    return draft


async def _abandon(x: Execution, chunks: Any, exc: BaseException) -> None:
    """Close an answer that is left half-way, and end the calls that it has asked for."""
    if x.spending is not None:
        x.spending.drop(len(x.partial_text))
    if (close := getattr(chunks, "aclose", None)) is not None:
        await close()
    if isinstance(exc, Exception):
        await _drop_calls(x)
    else:
        drop_drafts(x.log, x.state)


async def _drop_calls(x: Execution) -> None:
    """End the calls of a partial answer; there may be many, so other work has its turn."""
    for count, (call_id, name) in enumerate([*x.state.drafts.items()], 1):
        drop_draft(x.log, x.state, call_id, name)
        if count % _TURN == 0:
            await asyncio.sleep(0)
