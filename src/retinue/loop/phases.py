"""Phases: when hooks run, and how what they ask for is carried out.

The hooks of one phase see one snapshot. Their commands become one commit; a hook that wrote an exclusive key another
had written already is run again on the state as it is then. Actions are carried out at the end of the phase that
scheduled them, effects after the commit.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ..core.errors import Escape, HookFailed, RecordUnwritable, RunawayActions, UnknownAction
from ..core.events import Custom, ErrorRaised, StateDelta
from ..core.plugins import (
    AddContextMessage,
    AddMessage,
    AddSystemText,
    Block,
    Compact,
    ExcludeTools,
    Handler,
    HandOff,
    Hook,
    HookReturn,
    IncludeTools,
    OverrideSettings,
    Phase,
    Registrar,
    ResultKeeper,
    SetResult,
    StopRun,
    Suspend,
)
from ..core.state import StateCommand
from .commands import decode_said, encode_said

if TYPE_CHECKING:
    from ..core.messages import Message
    from ..core.model import ModelRequest
    from ..core.plugins import HookContext
    from .scope import RunScope

_log = logging.getLogger(__name__)

MAX_ACTION_ROUNDS = 16

_STEP_ACTIONS = (AddContextMessage, AddSystemText, ExcludeTools, IncludeTools, OverrideSettings)
_RUN_ACTIONS = (HandOff, StopRun, Compact, AddMessage)
_BUILT_IN = (*_STEP_ACTIONS, *_RUN_ACTIONS)
_FAILED = b"failed: "
"""How the record of an action or effect begins that failed."""
_BEFORE_THE_MODEL = ("run_start", "step_start", "before_inference")
"""Phases whose records are kept with the model's answer: what was for that request alone has done its work."""


class HookTable:
    """The hooks and handlers of an agent's plugins. Where `has_any` is false, it costs nothing."""

    __slots__ = ("actions", "by_phase", "effects", "has_any", "inherited", "keeper")

    def __init__(self, registrars: Iterable[Registrar] = ()) -> None:
        self.by_phase: dict[Phase, list[Hook]] = {}
        self.actions: dict[type, Handler] = {}
        self.effects: dict[type, Handler] = {}
        self.keeper: ResultKeeper | None = None
        for registrar in registrars:
            for hook in registrar.hooks:
                self.by_phase.setdefault(hook.phase, []).append(hook)
            self.actions.update(registrar.actions)
            self.effects.update(registrar.effects)
            self.keeper = registrar.keeper or self.keeper
        self._settle()

    def _settle(self) -> None:
        for hooks in self.by_phase.values():
            hooks.sort(key=lambda hook: hook.priority)
        self.inherited = [hook for hooks in self.by_phase.values() for hook in hooks if hook.inherited]
        self.has_any = bool(self.by_phase or self.keeper)

    def below(self, parent: HookTable) -> HookTable:
        """These hooks, and those of the parent that hold for its children."""
        if not parent.inherited:
            return self
        made = HookTable()
        made.actions, made.effects, made.keeper = self.actions, self.effects, self.keeper
        made.by_phase = {phase: list(hooks) for phase, hooks in self.by_phase.items()}
        for hook in parent.inherited:
            made.by_phase.setdefault(hook.phase, []).insert(0, hook)
        made._settle()
        return made

    def check(self, command: StateCommand) -> None:
        """Refuse a command that asks for something nobody carries out, before anything of it is applied."""
        for action in command.actions:
            if not isinstance(action, _BUILT_IN) and type(action) not in self.actions:
                raise UnknownAction("action", type(action).__name__)
        for effect in command.effects:
            if type(effect) not in self.effects:
                raise UnknownAction("effect", type(effect).__name__)


class HookRound:
    """One phase at work: it merges commands and sets aside the hooks whose writes clash."""

    __slots__ = ("_written", "command", "context", "deferred", "phase", "run", "turn")

    def __init__(self, run: RunScope, phase: Phase, context: HookContext, turn: str = "") -> None:
        self.run, self.context = run, context
        self.turn = turn
        """Which of the call's turns it is, where a phase is about a call."""
        self.phase: Phase = phase
        # Most phases pass without a word: what is collected is made when there is something to collect.
        self.command: StateCommand | None = None
        self.deferred: tuple[Hook, ...] = ()
        self._written: frozenset[str] = frozenset()

    def merge(self, command: StateCommand) -> None:
        if self.command is None:
            self.command = StateCommand()
        self.command.extend(command)
        self._written |= _exclusive(command)

    async def run_hooks(self) -> list[tuple[Hook, Any]]:
        """Call the hooks of the phase in order; returns what is not a command: the intercepts."""
        others: list[tuple[Hook, Any]] = []
        context, hooks = self.context, self.run.hooks.by_phase.get(self.phase, ())
        keeps = self.run.journal.keeps
        recalled = self._recalled("hooks") if keeps else None
        late = self._set_aside() if recalled is not None else None
        said: list[tuple[int, Any]] = []
        aside: list[int] = []
        for place, hook in enumerate(hooks):
            # Most hooks have nothing to say: that must cost next to nothing.
            try:
                returned = hook.function(context) if recalled is None else recalled.get(place)
                if returned is None:
                    continue
                returned = await self._checked(returned)
            except Exception as exc:
                self._failed(hook, exc)
                continue
            if keeps and returned is not None:
                said.append((place, returned))
            if isinstance(returned, StateCommand):
                clashes = place in late if late is not None else not self._written.isdisjoint(_exclusive(returned))
                if clashes:
                    self.deferred += (hook,)
                    aside.append(place)
                else:
                    self.merge(returned)
            elif returned is not None:
                others.append((hook, returned))
        if keeps and recalled is None:
            self._note("hooks", said)
            if aside:  # whose turn it is among calls decides this: it is not found out again
                self.run.journal.note(self._key("aside"), msgspec.json.encode(aside), with_next=self._may_wait)
        return others

    @property
    def _may_wait(self) -> bool:
        """Whether what hooks said is kept with the next thing recorded: not where a call ends by it, which is told."""
        return self.phase != "after_tool"

    def _set_aside(self) -> list[int]:
        """The places of the hooks that were set aside before the process ended."""
        noted = self.run.journal.recall(self._key("aside"))
        return [] if noted is None else msgspec.json.decode(noted, type=list[int])

    def _recalled(self, what: str) -> dict[int, Any] | None:
        """What the hooks of this phase returned before the process ended; None where they had not run."""
        noted = self.run.journal.recall(self._key(what))
        return None if noted is None else decode_said(noted, self.run.state, self.run.hooks)

    def _note(self, what: str, said: list[tuple[int, Any]]) -> None:
        hooks = self.run.hooks
        # Where something may be recorded before the model's answer, the request is still to come, and needs it all.
        asked = self.phase in _BEFORE_THE_MODEL and not (hooks.effects or hooks.actions)
        try:
            body = encode_said(said, asked=asked)
        except RecordUnwritable as exc:  # they are called again, where it comes to that
            _log.warning("what hooks returned in %s cannot be recorded: %s", self.phase, exc)
            return
        self.run.journal.note(self._key(what), body, with_next=self._may_wait)

    def _key(self, what: str) -> str:
        call = self.context.call
        return f"{what}:{self.phase}:{self.run.step}" if call is None else f"{what}:{self.phase}:{call.id}{self.turn}"

    def keep_off(self, keys: Iterable[str]) -> None:
        """Hooks that write these keys are to run on fresh state."""
        self._written |= frozenset(keys)

    def refuse(self, said: list[tuple[Hook, Any]]) -> None:
        """End the run where a hook intercepts and there is nothing to intercept."""
        for hook, intercept in said:
            reason = f"returned {type(intercept).__name__}, which only before_tool may"
            raise HookFailed(hook.label, self.phase, reason)

    async def finish(self, call_id: str | None = None) -> list[tuple[Hook, Any]]:
        """Run the hooks that were set aside, each on fresh state with a commit of its own; returns the intercepts."""
        others: list[tuple[Hook, Any]] = []
        keeps = self.run.journal.keeps
        recalled = self._recalled("deferred") if keeps else None
        said: list[tuple[int, Any]] = []
        for place, hook in enumerate(self.deferred):
            try:
                context = replace(self.context, snapshot=self.run.state.snapshot())
                given = hook.function(context) if recalled is None else recalled.get(place)
                returned = await self._checked(given)
            except Exception as exc:
                self._failed(hook, exc)
                continue
            if keeps and returned is not None:
                said.append((place, returned))
            if isinstance(returned, StateCommand):
                await commit(self.run, returned, self.phase, call_id)
            elif returned is not None:
                others.append((hook, returned))
        if keeps and recalled is None:
            self._note("deferred", said)
        self.deferred = ()
        return others

    async def _checked(self, returned: Any) -> HookReturn:
        """What a hook returned, awaited, and known to be something that can be committed."""
        if inspect.isawaitable(returned):
            returned = await returned
        if isinstance(returned, StateCommand):
            self.run.hooks.check(returned)
            self.run.state.check(returned)
        elif returned is not None and not isinstance(returned, Block | Suspend | SetResult):
            raise TypeError(f"returned {type(returned).__name__}, not None, a StateCommand or an intercept")
        return returned

    def _failed(self, hook: Hook, exc: Exception) -> None:
        """The end of the run, or of an optional hook."""
        if isinstance(exc, Escape):
            raise exc
        if not hook.optional:
            raise HookFailed(hook.label, self.phase, f"{type(exc).__name__}: {exc}") from exc
        _log.warning("optional %s failed in %s", hook.label, self.phase, exc_info=exc)
        self.run.tell(f"optional {hook.label} failed: {exc}", "hook_failed")


async def run_phase(
    run: RunScope, phase: Phase, messages: tuple[Message, ...], request: ModelRequest | None = None
) -> None:
    """Run the hooks of a phase and commit what they ask for. Nothing happens where there are none."""
    if phase not in run.hooks.by_phase:
        return
    at_work = HookRound(run, phase, run.hook_context(phase, run.state.snapshot(), messages, request))
    if said := await at_work.run_hooks():
        at_work.refuse(said)
    if at_work.command is not None:
        await commit(run, at_work.command, phase)
    if at_work.deferred:
        await at_work.finish()


async def commit(run: RunScope, command: StateCommand, phase: Phase, call_id: str | None = None) -> None:
    """Commit a command, tell the log, and carry out what it asked for."""
    apply(run, command, call_id)
    if command.effects or command.actions:
        await carry_out(run, command, phase)


def apply(run: RunScope, command: StateCommand, call_id: str | None = None) -> None:
    """The commit itself: state, and the events that come with it."""
    changed = run.state.apply(command)
    if changed.changes:
        run.emit(StateDelta(revision=changed.revision, delta=changed.changes, call_id=call_id))
    for data in command.events:
        run.emit(Custom(data=data, call_id=call_id))


async def carry_out(run: RunScope, command: StateCommand, phase: Phase) -> None:
    """Effects once, actions until no new ones come. One that fails is a dead letter; the run goes on."""
    pending = [command]
    for _ in range(MAX_ACTION_ROUNDS):
        asked: list[StateCommand] = []
        for current in pending:
            for effect in current.effects:
                await _handle(run, run.hooks.effects[type(effect)], effect, phase, "effect")
            for action in current.actions:
                if isinstance(action, _STEP_ACTIONS):
                    run.step_actions = (*run.step_actions, action)
                    continue
                if isinstance(action, _RUN_ACTIONS):
                    run.take_action(action)
                    continue
                returned = await _handle(run, run.hooks.actions[type(action)], action, phase, "action")
                if returned:
                    asked.append(returned)
        if not asked:
            return
        pending = asked
    raise RunawayActions(phase, MAX_ACTION_ROUNDS)


async def _handle(run: RunScope, handler: Handler, given: Any, phase: Phase, what: str) -> StateCommand | None:
    """Carry out one action or effect and commit what it returns."""
    name = type(given).__name__
    context = run.hook_context(phase, run.state.snapshot())
    try:
        if run.journal.keeps:
            returned = await _once(run, handler, given, context, what)
        else:
            returned = handler(given, context)
            returned = await returned if inspect.isawaitable(returned) else returned
        if returned is not None:
            run.hooks.check(returned)
            apply(run, returned)
        return returned
    except Escape:
        raise
    except Exception as exc:
        _log.warning("%s %s failed in %s", what, name, phase, exc_info=exc)
        run.dead_letters = (*run.dead_letters, given)
        run.emit(ErrorRaised(message=f"{what} {name} failed: {exc}", code="dead_letter"))
        return None


async def _once(run: RunScope, handler: Handler, given: Any, context: HookContext, what: str) -> StateCommand | None:
    """As the handler says, or as it said before the process ended: what it did then, or failed to, is not done again."""
    failure: Exception | None = None

    async def work() -> bytes:
        nonlocal failure
        try:
            returned = handler(given, context)
            returned = await returned if inspect.isawaitable(returned) else returned
            return encode_said([] if returned is None else [(0, returned)])
        except Escape:
            raise
        except Exception as exc:
            failure = exc
            return _FAILED + str(exc).encode()

    body = await run.journal.record("effect", run.next_effect(what, given), None, work)
    if body.startswith(_FAILED):
        raise failure or RuntimeError(body.removeprefix(_FAILED).decode())
    command = decode_said(body, run.state, run.hooks).get(0)
    return command if isinstance(command, StateCommand) else None


def _exclusive(command: StateCommand) -> set[str]:
    return {key.name for key, _ in command.patch.updates if key.merge == "exclusive"}
