"""The figures of `retinue worker --metrics`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from retinue.storage.depths import QueueDepth

from .. import inside


def test_the_lines_of_a_figure_come_together() -> None:
    depths = [QueueDepth(queue=name, ready=2, delayed=1, working=3, oldest=1.23456) for name in ("default", "gpu")]
    worker: Any = SimpleNamespace(info=SimpleNamespace(slots=SimpleNamespace(total=16, working=["run_1"])))
    assert inside.metric_lines(depths, worker) == [
        "# TYPE retinue_queue_ready gauge",
        'retinue_queue_ready{queue="default"} 2',
        'retinue_queue_ready{queue="gpu"} 2',
        "# TYPE retinue_queue_delayed gauge",
        'retinue_queue_delayed{queue="default"} 1',
        'retinue_queue_delayed{queue="gpu"} 1',
        "# TYPE retinue_queue_working gauge",
        'retinue_queue_working{queue="default"} 3',
        'retinue_queue_working{queue="gpu"} 3',
        "# TYPE retinue_queue_oldest_seconds gauge",
        'retinue_queue_oldest_seconds{queue="default"} 1.235',
        'retinue_queue_oldest_seconds{queue="gpu"} 1.235',
        "# TYPE retinue_worker_slots gauge",
        "retinue_worker_slots 16",
        "# TYPE retinue_worker_busy gauge",
        "retinue_worker_busy 1",
    ]
