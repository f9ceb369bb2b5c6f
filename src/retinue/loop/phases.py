"""Phases: when hooks run, and how what they ask for is carried out.

The hooks of one phase see one snapshot. Their commands become one commit. If two hooks write the same exclusive key, the
second runs again on fresh state. The loop's own actions take effect with the commit; plugin actions and effects are jobs
that follow it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterable
from functools import cache
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from ..core.concurrency import is_closing
from ..core.content import to_json_bytes
from ..core.errors import (
    Escape,
    HookFailed,
    OwnershipLost,
    RecordUnreadable,
    RecordUnwritable,
    RunawayActions,
    UnknownAction,
)
from ..core.events import Custom, ErrorRaised, StateDelta
from ..core.hooks import CompactionPolicy, Handler, Hook, HookReturn, Registrar, ResultKeeper
from ..core.plugins import Block, Phase, SetResult, Suspend
from ..core.rows import Job, LoopAction, Private
from ..core.rules import Rules
from ..core.schema import Codec, JsonCodec, codec_for, isolate
from ..core.state import StateCommand

if TYPE_CHECKING:
    from ..core.hooks import HookContext
    from ..core.messages import Message
    from ..core.model import ModelRequest
    from .execution import Execution

_log = logging.getLogger(__name__)

MAX_ACTION_ROUNDS = 16
LOOP_ACTIONS: tuple[type, ...] = get_args(LoopAction)

SIGNALS: tuple[type[BaseException], ...] = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)
"""Exceptions that end an asyncio task or the process. All others are errors, also those that do not derive from Exception."""

_json = msgspec.json.Decoder().decode

WorkItem = tuple[Job, Any]
"""A job, and the action or effect itself."""


class HookTable:
    """The hooks and handlers of an agent's plugins. If `has_any` is false, no hook code runs."""

    __slots__ = ("actions", "by_phase", "effects", "has_any", "ids", "inherited", "keeper", "policy")

    def __init__(self, registrars: Iterable[Registrar] = ()) -> None:
        self.by_phase: dict[Phase, list[Hook]] = {}
        self.actions: dict[type, Handler] = {}
        self.effects: dict[type, Handler] = {}
        self.keeper: ResultKeeper | None = None
        self.policy: CompactionPolicy | None = None
        for registrar in registrars:
            for hook in registrar.hooks:
                self.by_phase.setdefault(hook.phase, []).append(hook)
            self.actions.update(registrar.actions)
            self.effects.update(registrar.effects)
            self.keeper = registrar.keeper or self.keeper
            self.policy = registrar.policy or self.policy
        self._settle()

    def _settle(self) -> None:
        for hooks in self.by_phase.values():
            hooks.sort(key=lambda hook: hook.priority)
        self.ids: dict[Hook, str] = {}
        """The ids of hooks in the log: the plugin, and the number of the hook among those of its phase."""
        for hooks in self.by_phase.values():
            counts: dict[str, int] = {}
            for hook in hooks:
                counts[hook.plugin] = number = counts.get(hook.plugin, 0) + 1
                self.ids[hook] = f"{hook.plugin}#{number}"
        self.inherited = [hook for hooks in self.by_phase.values() for hook in hooks if hook.inherited]
        self.has_any = bool(self.by_phase or self.keeper)

    def below(self, parent: HookTable) -> HookTable:
        """Return these hooks and the inherited hooks of the parent, without those of plugins that are here themselves."""
        own = {hook.source for hooks in self.by_phase.values() for hook in hooks}
        above = [replace(hook, is_above=True) for hook in parent.inherited if hook.source not in own]
        if not above:
            return self
        made = HookTable()
        made.actions, made.effects, made.keeper, made.policy = self.actions, self.effects, self.keeper, self.policy
        made.by_phase = {phase: list(hooks) for phase, hooks in self.by_phase.items()}
        for hook in above:
            made.by_phase.setdefault(hook.phase, []).insert(0, hook)
        made._settle()
        return made

    def rules(self) -> tuple[Rules, ...]:
        """Return the rules by which hooks deny calls."""
        return tuple([hook.rules for hook in self.by_phase.get("before_tool", ()) if hook.rules is not None])

    def check(self, command: StateCommand) -> None:
        """Raise if a command has an action or effect without a handler, before any of it is applied."""
        for action in command.actions:
            if type(action) not in LOOP_ACTIONS and type(action) not in self.actions:
                raise UnknownAction("action", type(action).__name__)
        for effect in command.effects:
            if type(effect) not in self.effects:
                raise UnknownAction("effect", type(effect).__name__)


class HookRound:
    """One execution of a phase: merges the commands, and runs hooks again whose writes conflict."""

    __slots__ = ("_args", "_written", "command", "context", "late", "phase", "x")

    def __init__(self, x: Execution, phase: Phase, context: HookContext, args: dict[str, Any] | None = None) -> None:
        self.x, self.context, self._args = x, context, args
        """The execution, the context for hooks, and the call's arguments, of which hooks see a copy."""
        self.phase: Phase = phase
        # Most hooks return nothing: commands are made when there is something to collect.
        self.command: StateCommand | None = None
        self.late: StateCommand | None = None
        """The commands of hooks that ran again; part of the same commit."""
        self._written: frozenset[str] = frozenset()

    def merge(self, command: StateCommand) -> None:
        if self.command is None:
            self.command = StateCommand()
        self.command.extend(command)
        self._written |= _exclusive(command)

    def keep_off(self, keys: Iterable[str]) -> None:
        """Have hooks that write these keys run again on fresh state."""
        self._written |= frozenset(keys)

    async def run_hooks(self) -> list[tuple[Hook, Any]]:
        """Call the hooks of the phase in order, collect their commands, and return their intercepts."""
        others: list[tuple[Hook, Any]] = []
        again: list[Hook] = []
        args, call = self._args, self.context.call
        seen = None if call is None or args is None else call.args
        for hook in self.x.hooks.by_phase.get(self.phase, ()):
            # Most hooks return None: that must cost next to nothing.
            try:
                returned: Any = hook.function(self._context_for(hook))
                returned = None if returned is None else await self._checked(hook, returned)
                if seen != args:
                    seen = self._restore_arguments()
                    raise TypeError("changed the arguments of the call; return SetResult, Suspend or Block instead")
                if returned is None:
                    continue
            except BaseException as exc:
                self._failed(hook, exc)
                continue
            if isinstance(returned, StateCommand):
                if self._written.isdisjoint(_exclusive(returned)):
                    self.merge(returned)
                else:
                    again.append(hook)
            elif returned is not None:
                others.append((hook, returned))
        for hook in again:
            if (intercept := await self._run_again(hook)) is not None:
                others.append((hook, intercept))
        return others

    def _restore_arguments(self) -> dict[str, Any]:
        """Give the next hooks a fresh copy of the call's arguments; return it."""
        call = self.context.call
        assert call is not None
        seen: dict[str, Any] = isolate(self._args)
        self.context = replace(self.context, call=replace(call, args=seen))
        return seen

    async def _run_again(self, hook: Hook) -> Any:
        """Run a hook on the state with the commands so far applied; return its intercept, if any."""
        try:
            self.context = replace(self.context, snapshot=self.x.store.preview(self.whole() or StateCommand()))
            returned = await self._checked(hook, hook.function(self._context_for(hook)))
        except BaseException as exc:
            self._failed(hook, exc)
            return None
        if not isinstance(returned, StateCommand):
            return returned
        self.late = returned if self.late is None else StateCommand().extend(self.late).extend(returned)
        return None

    def whole(self) -> StateCommand | None:
        """Return the merged command to commit; None if there is none."""
        if self.late is None:
            return self.command
        return StateCommand().extend(self.command or StateCommand()).extend(self.late)

    def refuse(self, said: list[tuple[Hook, Any]]) -> None:
        """Raise HookFailed for an intercept in a phase where there is no call to intercept."""
        for hook, intercept in said:
            reason = f"returned {type(intercept).__name__}, which only before_tool may"
            raise HookFailed(hook.label, self.phase, reason)

    def _context_for(self, hook: Hook) -> HookContext:
        """Return the context of a hook; one from above may read keys that this agent does not have."""
        context = self.context
        return replace(context, snapshot=context.snapshot.for_hooks_above()) if hook.is_above else context

    async def _checked(self, hook: Hook, returned: Any) -> HookReturn:
        """Await what a hook returned, and check that it can be committed."""
        if inspect.isawaitable(returned):
            returned = await returned
        if isinstance(returned, StateCommand):
            if hook.is_above:
                returned = self._without_unknown(hook, returned)
            self.x.hooks.check(returned)
            self.x.store.check(returned)
        elif returned is not None and not isinstance(returned, Block | Suspend | SetResult):
            raise TypeError(f"returned {type(returned).__name__}, not None, a StateCommand or an intercept")
        return returned

    def _without_unknown(self, hook: Hook, command: StateCommand) -> StateCommand:
        """Return a command of a hook from above without what this agent does not register; report what is dropped."""
        x, table = self.x, self.x.hooks
        known, dropped = StateCommand(), dict[str, None]()
        for key, update in command.patch.updates:
            if x.store.key(key.name) is None:
                dropped[f"state key {key.name!r}"] = None
            else:
                known.update(key, update)
        for action in command.actions:
            if type(action) in LOOP_ACTIONS or type(action) in table.actions:
                known.schedule(action)
            else:
                dropped[f"action {type(action).__name__}"] = None
        for effect in command.effects:
            if type(effect) in table.effects:
                known.emit(effect)
            else:
                dropped[f"effect {type(effect).__name__}"] = None
        if not dropped:
            return command
        known.events.extend(command.events)
        problem = f"{hook.label} is inherited, and agent {x.agent.name!r} does not register {', '.join(dropped)}"
        if problem not in x.reported:
            x.reported.add(problem)
            _log.warning("%s: dropped", problem)
            x.emit_error(f"{problem}: dropped. Give the agent a plugin that registers it", "inherited_change_dropped")
        return known

    def _failed(self, hook: Hook, exc: BaseException) -> None:
        """Raise HookFailed; if the hook is optional, log and emit the error instead."""
        if isinstance(exc, (Escape, OwnershipLost, *SIGNALS)) or is_closing(exc):
            raise exc
        if not hook.optional:
            raise HookFailed(hook.label, self.phase, f"{type(exc).__name__}: {exc}") from exc
        _log.warning("optional %s failed in %s", hook.label, self.phase, exc_info=exc)
        self.x.emit_error(f"optional {hook.label} failed: {exc}", "hook_failed")


async def run_phase(
    x: Execution, phase: Phase, messages: tuple[Message, ...], request: ModelRequest | None = None
) -> None:
    """Run the hooks of a phase, commit their command and do the jobs; skip a phase that has committed in this step."""
    if phase not in x.hooks.by_phase or phase in x.state.marks:
        return
    at_work = HookRound(x, phase, x.hook_context(phase, x.store.snapshot(), messages=messages, request=request))
    if said := await at_work.run_hooks():
        at_work.refuse(said)
    command = at_work.whole()
    if command is not None:
        try:
            work = _commit(x, command, phase)
        except RecordUnwritable as exc:
            raise HookFailed(f"a hook of {x.agent.name!r}", phase, str(exc)) from exc
        await carry_out(x, work)


def _commit(x: Execution, command: StateCommand, phase: Phase, job: Job | None = None) -> list[WorkItem]:
    """Commit a command of hooks or of a job's handler in one row; return the jobs that follow."""
    fields, work = private_of(x, command, phase, 0 if job is None else job.rounds + 1)
    changed = x.store.apply(command, as_json=x.is_stored)
    if changed.writes:
        fields["writes"], fields["revision"] = changed.writes, changed.revision
    if job is None:
        fields["phase"] = phase
    else:
        fields["done"] = job.number
    if changed.changes:
        x.emit(StateDelta(revision=changed.revision, delta=changed.changes), Private(**fields))
    elif not x.is_over:
        x.log.append_private(Private(kind="commit", run_id=x.run_id, **fields))
    for data in command.events:
        x.emit(Custom(data=data))
    return work


def private_of(
    x: Execution, command: StateCommand, phase: Phase, rounds: int = 0
) -> tuple[dict[str, Any], list[WorkItem]]:
    """Return the row fields for a command's loop actions and jobs, and the jobs to do."""
    actions = tuple([action for action in command.actions if type(action) in LOOP_ACTIONS])
    asked: list[tuple[Literal["action", "effect"], Any]] = []
    asked.extend([("effect", effect) for effect in command.effects])
    if len(actions) < len(command.actions):
        asked.extend([("action", action) for action in command.actions if type(action) not in LOOP_ACTIONS])
    fields: dict[str, Any] = {"actions": actions} if actions else {}
    if not asked:
        return fields, []
    work: list[WorkItem] = []
    for number, (what, given) in enumerate(asked, x.state.job_count + 1):
        stored = encode_job(given, what) if x.is_stored else given
        work.append((Job(number, what, name_of(given.__class__), stored, phase, rounds), given))
    fields["jobs"] = tuple([job for job, _ in work])
    return fields, work


def jobs_left(x: Execution) -> list[WorkItem]:
    """Return the unfinished jobs of an earlier process or leg; raise RecordUnreadable if one has no handler now."""
    hooks = x.hooks
    return [
        (job, decode_job(job.name, job.given, job.what, hooks.effects if job.what == "effect" else hooks.actions))
        for job in x.state.jobs
    ]


async def carry_out(x: Execution, work: list[WorkItem]) -> None:
    """Do jobs and the jobs that follow from them. A job that fails becomes a dead letter; the run continues."""
    while work:
        following: list[WorkItem] = []
        for job, given in work:
            if job.rounds >= MAX_ACTION_ROUNDS:
                raise RunawayActions(job.phase, MAX_ACTION_ROUNDS)
            following += await _do(x, job, given)
        work = following


async def _do(x: Execution, job: Job, given: Any) -> list[WorkItem]:
    """Do one job, commit what its handler returns, and return the jobs that follow."""
    name = type(given).__name__
    handlers = x.hooks.effects if job.what == "effect" else x.hooks.actions
    context = x.hook_context(job.phase, x.store.snapshot())
    try:
        returned = handlers[type(given)](given, context)
        returned = await returned if inspect.isawaitable(returned) else returned
        command = returned or StateCommand()
        x.hooks.check(command)
        return _commit(x, command, job.phase, job)
    except (Escape, OwnershipLost):
        raise
    except Exception as exc:
        _log.warning("%s %s failed in %s", job.what, name, job.phase, exc_info=exc)
        x.emit(ErrorRaised(message=f"{job.what} {name} failed: {exc}", code="dead_letter"), Private(done=job.number))
        return []


def _exclusive(command: StateCommand) -> set[str]:
    return {key.name for key, _ in command.patch.updates if key.merge == "exclusive"}


# --- jobs as JSON, so that another process can carry them out


@cache
def name_of(kind: type) -> str:
    """The name by which a type is stored."""
    return f"{kind.__module__}:{kind.__qualname__}"


@cache
def _codec_of(kind: type) -> Codec:
    return codec_for(kind)


def encode_job(given: Any, what: str) -> Any:
    """Return the JSON of an action or effect; raise RecordUnwritable if it would not be read back as the same."""
    kind: type = given.__class__
    codec = _codec_of(kind)
    try:
        encoded = _json(to_json_bytes(codec.encode(given)))
        back = codec.decode(encoded)
        # Not every class defines equality: for typed codecs it is enough that the class is the same.
        loose = isinstance(codec, JsonCodec)
        if (loose or back.__class__ is not kind) and back != given:
            raise TypeError(f"{shown(given)} would be read back as {shown(back)}")
    except Exception as exc:
        raise RecordUnwritable(f"{what} {name_of(kind)!r}", reason_of(exc)) from exc
    return encoded


def decode_job(name: str, given: Any, what: str, known: Iterable[type]) -> Any:
    """Return the action or effect; raise RecordUnreadable unless exactly one registered type has that name."""
    found = [kind for kind in dict.fromkeys(known) if name_of(kind) == name]
    if len(found) != 1:
        problem = "several types have that name" if found else f"no plugin of this agent registers that {what} now"
        raise RecordUnreadable(f"{what} {name!r}", problem)
    if isinstance(given, found[0]):
        return given
    try:
        return _codec_of(found[0]).decode(given)
    except Exception as exc:
        raise RecordUnreadable(f"{what} {name!r}", reason_of(exc)) from exc


def shown(value: Any) -> str:
    """Return a short text of a value for a message."""
    text = short_repr(value)  # the full repr of a hostile value may be endless
    return f"{type(value).__name__} {text}" if len(text) <= 80 else f"{type(value).__name__} {text[:80]}…"


def reason_of(exc: Exception) -> str:
    """Return the reason of an error in one line."""
    if isinstance(exc, RecordUnreadable):
        return exc.reason
    text = " ".join(str(exc).split())
    return text if isinstance(exc, ValueError | TypeError) and text else f"{type(exc).__name__}: {text}"
