"""The workflow of a run on Temporal. It schedules the legs of the run and waits between them; it carries ids, no content.

Temporal replays it, also from histories that earlier versions wrote. So it imports nothing of ours, and a change that
issues other commands than before needs `workflow.patched`.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import Any, cast

from temporalio import workflow
from temporalio.common import Priority, RetryPolicy, SearchAttributeKey
from temporalio.exceptions import ActivityError, ApplicationError

WORKFLOW = "RetinueRun"
LEG, BEGIN, DECIDE, REPLY = "retinue_leg", "retinue_begin", "retinue_decide", "retinue_reply"
LEASE = "retinue_lease"
"""The function of the worker that returns its lease in seconds."""
LONGEST = 2_000
"""Events in a history before the workflow continues as a new one."""
AGENT = SearchAttributeKey.for_keyword("RetinueAgent")
STEP = SearchAttributeKey.for_int("RetinueStep")
QUESTIONS = SearchAttributeKey.for_keyword_list("RetinueQuestions")

_FOREVER, _SHORT = timedelta(days=3650), timedelta(seconds=10)
_RETRY = RetryPolicy(initial_interval=timedelta(seconds=0.2), maximum_interval=timedelta(seconds=1))


@workflow.defn(name=WORKFLOW, sandboxed=False)
class RetinueRun:
    """A run. Its order has `run_id` (the workflow's own id if not given) and `agent`.

    With an `input` the run is stored first, and the result is returned. `indexed`: the search attributes are registered.
    """

    @workflow.init
    def __init__(self, order: dict[str, Any]) -> None:
        self._order = {"run_id": workflow.info().workflow_id, **order}
        self._wakes = self._seen = self._legs = 0
        """Three counts: wishes put into the inbox; the same when the last leg started; legs that have ended."""
        self._shown: dict[str, Any] = {}

    @workflow.run
    async def run(self, order: dict[str, Any]) -> dict[str, Any]:
        waits, cancel = bool(self._order.pop("waits", False)), False
        while True:
            try:
                if "input" in self._order:
                    await self._execute(BEGIN, self._order)
                    del self._order["input"]
                    self._order["carry"] = True
                if waits:
                    await workflow.wait_condition(lambda: self._is_woken() or self._is_long())
                if self._is_long():
                    await workflow.wait_condition(workflow.all_handlers_finished)
                    waits = waits and not self._is_woken()
                    workflow.continue_as_new({**self._order, "waits": waits}, memo=workflow.memo())
                self._seen = self._wakes
                leg = await self._execute(LEG, {**self._order, "cancel": cancel})
                was_cancelled, cancel, self._legs = cancel, False, self._legs + 1
            except (asyncio.CancelledError, ActivityError) as exc:
                if workflow.cancellation_reason() is None or getattr(exc.__cause__, "non_retryable", False):
                    raise
                waits, cancel = False, True  # the next leg ends the run
                continue
            if (end := leg.pop("end")) == "ended":
                await workflow.wait_condition(workflow.all_handlers_finished)
                if leg["status"] == "cancelled" and workflow.cancellation_reason() is not None:
                    raise asyncio.CancelledError
                return leg
            waits = end == "waits"
            self._show(leg)
            # A cancel that came while the leg ended by itself was not raised.
            if (
                workflow.cancellation_reason() is not None
                and not was_cancelled
                and workflow.patched("cancelled-at-its-end")
            ):
                waits, cancel = False, True

    @workflow.update
    async def answer(self, decisions: dict[str, Any] | None = None) -> None:
        """Answer the run: `{"call id": {"action": "approve"}}`. Without decisions, they are in its inbox already.

        The update fails if the decisions do not fit; then nothing was changed.
        """
        info = workflow.current_update_info()
        wish = {"run_id": self._order["run_id"], "id": "" if info is None else info.id}
        if decisions is not None:
            await self._execute_here(DECIDE, {**wish, "decisions": decisions})
        self._wakes += 1
        refused, pause = "" if decisions is None else None, 0.5
        while refused is None:  # until the next leg has read them, but not for long
            legs = self._legs
            with contextlib.suppress(asyncio.TimeoutError):
                await workflow.wait_condition(lambda legs=legs: self._legs != legs, timeout=pause)
            refused, pause = await self._execute_here(REPLY, wish), min(2 * pause, 8.0)
        if refused:
            raise ApplicationError(refused, type="DecisionRefused", non_retryable=True)

    @workflow.signal
    def wake(self) -> None:
        """Make a worker look at the run: its inbox has a wish, or the run may have ended."""
        self._wakes += 1

    async def _execute(self, activity: str, order: dict[str, Any]) -> Any:
        functions = cast("dict[str, Any]", workflow.extern_functions())  # pyright: ignore[reportUnknownMemberType]
        return await workflow.execute_activity(
            activity,
            order,
            start_to_close_timeout=_FOREVER,
            heartbeat_timeout=timedelta(seconds=functions[LEASE]() if LEASE in functions else 30.0),
            retry_policy=_RETRY,
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
            priority=Priority(priority_key=1) if self._shown else Priority.default,  # first what was begun before
            summary=str(order.get("agent", "")),
        )

    async def _execute_here(self, activity: str, order: dict[str, Any]) -> Any:
        """Execute something short, which needs no slot, in the worker that has the workflow."""
        return await workflow.execute_local_activity(
            activity, order, schedule_to_close_timeout=_FOREVER, start_to_close_timeout=_SHORT, retry_policy=_RETRY
        )

    def _is_woken(self) -> bool:
        return self._wakes != self._seen

    def _is_long(self) -> bool:
        info = workflow.info()
        longest = max(int(self._order.get("longest", LONGEST)), 10)
        return info.is_continue_as_new_suggested() or info.get_current_history_length() >= longest

    def _show(self, leg: dict[str, Any]) -> None:
        """Show the status of the run in Temporal's lists and pages."""
        shown = {name: leg[name] for name in ("agent", "step", "questions")}
        if shown == self._shown:
            return
        self._shown, asked = shown, ", ".join(shown["questions"])
        workflow.set_current_details(f"{leg['agent']}, step {leg['step']}" + (asked and f", waits for {asked}"))
        workflow.upsert_memo(shown)
        if self._order.get("indexed"):
            values = [AGENT.value_set(leg["agent"]), STEP.value_set(leg["step"]), QUESTIONS.value_set(leg["questions"])]
            workflow.upsert_search_attributes(values)  # pyright: ignore[reportUnknownMemberType]
