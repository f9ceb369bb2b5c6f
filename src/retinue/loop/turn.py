"""One model call: a request goes out, chunks come in, one assistant message is made of them."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.events import (
    ErrorRaised,
    InferenceFinished,
    ReasoningDelta,
    TextDelta,
    ToolCallArgsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from ..core.failures import ModelRefused, OutputTruncated
from ..core.messages import Message, Part, ReasoningPart, Role, TextPart, ToolCall, Visibility
from ..core.model import CallChunk, ModelRequest, ReasoningChunk, Retrying, TextChunk, TurnEnd
from ..core.plugins import (
    AddContextMessage,
    AddSystemText,
    ExcludeTools,
    IncludeTools,
    OverrideSettings,
    StepAction,
    StopRun,
)
from ..core.runs import Usage
from .outcomes import cancelled
from .phases import run_phase
from .scope import RunScope

_decode = msgspec.json.decode


class Turn(Struct, frozen=True, gc=False):
    """What the model answered."""

    message: Message
    end: TurnEnd


class _Draft(Struct, eq=False):
    """A message while it streams in."""

    run: RunScope
    message_id: str
    parts: list[Part] = []
    calls: dict[int, _CallDraft] = {}
    end: TurnEnd = TurnEnd()
    first_id: str = ""
    """Its id before it was begun anew."""
    restarts: int = 0

    def take(self, chunk: Any) -> None:
        """Any chunk but text and the end, which the loop below takes itself for speed."""
        if isinstance(chunk, CallChunk):
            self.take_call(chunk)
        elif isinstance(chunk, ReasoningChunk):
            self.take_reasoning(chunk)
        elif isinstance(chunk, Retrying):
            self.take_retry(chunk)
        else:
            raise TypeError(f"model {self.run.model.name!r} yielded {chunk!r}, which is not a model chunk")

    def take_reasoning(self, chunk: ReasoningChunk) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, ReasoningPart) and last.signature is None:
            self.parts[-1] = ReasoningPart(last.text + chunk.text, chunk.signature or last.signature)
        else:
            self.parts.append(ReasoningPart(chunk.text, chunk.signature))
        if chunk.text:
            self.run.emit(ReasoningDelta(delta=chunk.text, message_id=self.message_id))

    def take_call(self, chunk: CallChunk) -> None:
        run, call = self.run, self.calls.get(chunk.index)
        if call is None:
            call = self.calls[chunk.index] = _CallDraft(run.claim_call_id(chunk.id), chunk.name or "")
            run.emit(ToolCallStarted(call_id=call.id, tool_name=call.name, message_id=self.message_id))
        elif chunk.name and not call.name:  # some servers send the name after the id
            call.name = chunk.name
        if chunk.arguments:
            call.arguments += chunk.arguments
            run.emit(ToolCallArgsDelta(call_id=call.id, delta=chunk.arguments))

    def take_retry(self, chunk: Retrying) -> None:
        """Tell that the model is asked again; where it had begun to answer, begin anew under another message id."""
        run, dropped = self.run, self.message_id if chunk.restarts else None
        if dropped is not None:
            self.drop_calls()
            self.parts, self.calls = [], {}
            run.partial_text.clear()
            self.restarts += 1
            self.first_id = self.first_id or self.message_id
            self.message_id = run.partial_id = f"{self.first_id}r{self.restarts}"
        run.emit(
            ErrorRaised(
                message=chunk.message,
                code=chunk.code,
                retry_model=chunk.model,
                retry_delay=chunk.delay,
                dropped_message_id=dropped,
            )
        )

    def drop_calls(self) -> None:
        """End the calls that had begun to come in: what is there of them cannot be made."""
        for call in self.calls.values():
            dropped = cancelled(ToolCall(call.id, call.name, {}), "the model did not finish asking for it")
            message = Message.tool(dropped.result.text, tool_call_id=call.id, name=call.name)
            self.run.emit(
                ToolCallFinished(
                    call_id=call.id,
                    tool_name=call.name,
                    status=dropped.status,
                    result=dropped.result,
                    message=message,
                )
            )

    def finished(self) -> Turn:
        calls = tuple([self.calls[index].finished() for index in sorted(self.calls)]) if self.calls else ()
        if calls and self.end.stop_reason == "length":
            calls = (*calls[:-1], _cut_off(calls[-1]))
        text = "".join(self.run.partial_text)
        self.run.partial_text = []
        if text:
            self.parts.append(TextPart(text))
        parts = tuple(self.parts)
        message = Message(role=Role.ASSISTANT, parts=parts, tool_calls=calls, id=self.message_id)
        return Turn(message, self.end)


class _CallDraft(Struct, gc=False):
    id: str
    name: str
    arguments: str = ""

    def finished(self) -> ToolCall:
        text = self.arguments.strip()
        try:
            args: Any = _decode(text) if text else {}
        except (ValueError, RecursionError):
            args = text
        if args is None:  # some models say null for "no arguments"
            args = {}
        if isinstance(args, dict):
            return ToolCall(self.id, self.name, cast("dict[str, Any]", args))
        return ToolCall(self.id, self.name, {}, text)


def _cut_off(call: ToolCall) -> ToolCall:
    """The last call of an answer that was cut: without arguments, they were not reached, so it is not made."""
    return call if call.args else replace(call, malformed=call.malformed or "(cut off)")


async def ask_model(run: RunScope) -> Message:
    """Send the conversation, stream the answer into the log, and add it to the conversation."""
    journal, request = run.journal, _request(run)
    if run.has_hooks:
        compacted = run.compacted
        whole = tuple(run.conversation) if run.history else run.own_messages()
        await run_phase(run, "before_inference", whole, request)
        if run.compacted is not compacted:
            request = _request(run)
    if run.step_actions:
        request = _with_actions(request, run.step_actions)
        run.step_actions = ()
    run.offered = None if request.tools is run.descriptors else frozenset([tool.name for tool in request.tools])
    message_id = run.next_message_id()
    asked = request.messages
    about = (len(asked), asked[0].parts, asked[-1].id, asked[-1].parts, len(request.tools)) if asked else None
    turn = await journal.record("model", f"model:{run.step}", about, _stream, run, request, message_id)
    message, usage, model = turn.message, turn.end.usage, turn.end.model or run.model.name
    told = usage.cost or turn.end.cost_known
    if not told and (run.resolver.prices or usage.input_tokens or usage.output_tokens):
        usage = _priced(run, usage, model)
    for call in message.tool_calls:
        run.used_call_ids.add(call.id)
    run.conversation.append(message)
    run.usage += usage
    if run.budget.limited:
        run.budget.spend(usage)
    run.emit(
        InferenceFinished(
            step=run.step,
            message=message,
            model=model,
            stop_reason=turn.end.stop_reason,
            usage=usage,
        )
    )
    if turn.end.stop_reason in ("length", "refusal"):
        _check_ending(run, turn.end.stop_reason, message, model)
    if run.has_hooks:
        await run_phase(run, "after_inference", run.own_messages(), request)
    return message


def _priced(run: RunScope, usage: Usage, model: str) -> Usage:
    """The usage with its cost, where the provider did not tell; a limit on cost that cannot be kept ends the run."""
    cost = run.resolver.price(model, usage)
    if cost is None and run.budget.limits_cost:
        reason = f"Limits(cost=…) cannot be kept: what a call of {model!r} costs is not known"
        run.take_action(StopRun("cost", f"{reason}; give Runtime(price=…) its price, 0 where it is free"))
    return replace(usage, cost=cost) if cost else usage


def _check_ending(run: RunScope, stop_reason: str, message: Message, model: str) -> None:
    """An answer that is not whole is no answer; a call that is not whole is given back to the model as malformed."""
    if stop_reason == "refusal":
        said = f": {message.text[:500]}" if message.text else ""
        raise ModelRefused(f"the model declined to answer{said}", model)
    if message.tool_calls:
        run.tell(f"{model}: the answer was cut at its limit, within or after a tool call", OutputTruncated.code)
    else:
        raise OutputTruncated("the answer was cut at its limit: raise max_tokens in the agent's settings", model)


def _request(run: RunScope) -> ModelRequest:
    agent = run.agent
    schema = None if agent.output_format is None else agent.output_format.schema
    return ModelRequest(
        messages=run.model_messages(), tools=run.descriptors, settings=agent.settings, output_schema=schema
    )


def _with_actions(request: ModelRequest, actions: tuple[StepAction, ...]) -> ModelRequest:
    """The request as hooks want it this once."""
    messages, tools, settings = list(request.messages), list(request.tools), dict(request.settings)
    only = [action.names for action in actions if isinstance(action, IncludeTools)]
    excluded = {name for action in actions if isinstance(action, ExcludeTools) for name in action.names}
    for action in actions:
        if isinstance(action, AddContextMessage):
            messages.append(Message.user(action.text, visibility=Visibility.INTERNAL))
        elif isinstance(action, OverrideSettings):
            settings.update(action.settings)
    if added := [action.text for action in actions if isinstance(action, AddSystemText)]:
        said = [messages.pop(0).text] if messages and messages[0].role is Role.SYSTEM else []
        messages.insert(0, Message.system("\n\n".join([*said, *added])))
    if only:
        tools = [tool for tool in tools if any(tool.name in names for names in only)]
    tools = [tool for tool in tools if tool.name not in excluded]
    return replace(request, messages=tuple(messages), tools=tuple(tools), settings=settings)


def _begin_anew(draft: _Draft) -> None:
    """Take back what was told of a message whose process ended before it did; the model is asked again."""
    run, first = draft.run, draft.message_id
    cut = run.log.told.cut_off(run.run_id, first)
    if cut is None:
        return
    draft.first_id, draft.restarts, draft.message_id = first, cut.drops, cut.message_id
    if cut.dropped:
        draft.message_id = f"{first}r{cut.drops}"
        return
    draft.calls = {place: _CallDraft(call_id, name) for place, (call_id, name) in enumerate(cut.calls.items())}
    reason = "the process ended while the model answered: it is asked again"
    draft.take_retry(Retrying(message=reason, code="interrupted", model=run.model.name, delay=0.0, restarts=True))


async def _stream(run: RunScope, request: ModelRequest, message_id: str) -> Turn:
    draft = _Draft(run, message_id)
    if run.log.told is not None:
        _begin_anew(draft)
        message_id = draft.message_id
    run.partial_id, said = message_id, run.partial_text
    chunks: Any = run.model.stream(request)
    try:
        async for chunk in chunks:
            if type(chunk) is TextChunk:
                if chunk.text:
                    said.append(chunk.text)
                    run.emit(TextDelta(delta=chunk.text, message_id=message_id))
            elif type(chunk) is TurnEnd:
                draft.end = chunk
            else:
                draft.take(chunk)
                message_id = draft.message_id
    except BaseException:
        # A stream that is left half-way is closed at once, so that its connection does not linger.
        if (close := getattr(chunks, "aclose", None)) is not None:
            await close()
        draft.drop_calls()
        raise
    return draft.finished()
