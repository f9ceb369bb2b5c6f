"""Histories that earlier versions of the workflow wrote are replayed by this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from retinue.engines.temporal_workflow import LEG, RetinueRun

FOLDER = Path(__file__).parent / "histories"


def read(path: Path) -> WorkflowHistory:
    return WorkflowHistory.from_json(path.stem, path.read_text())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
async def test_an_old_history_replays(path: Path) -> None:
    await Replayer(workflows=[RetinueRun]).replay_workflow(read(path))


async def test_another_workflow_would_be_noticed() -> None:
    text = (FOLDER / "answered.json").read_text()
    assert LEG in text
    history = WorkflowHistory.from_json("answered", json.loads(text.replace(LEG, "another_activity")))
    with pytest.raises(NondeterminismError):
        await Replayer(workflows=[RetinueRun]).replay_workflow(history)
