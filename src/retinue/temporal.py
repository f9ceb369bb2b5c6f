"""Temporal: the engine, its workflow, and agents as steps of your own workflows. Needs `retinue[temporal]`."""

# fmt: off
try:
    from .engines.temporal import TemporalEngine
    from .engines.temporal_steps import AgentActivities, AgentStep, AnswerStep, agent_activities
    from .engines.temporal_workflow import RetinueRun
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError('retinue.temporal needs: pip install "retinue[temporal]"', name=exc.name) from exc

__all__ = ["AgentActivities", "AgentStep", "AnswerStep", "RetinueRun", "TemporalEngine", "agent_activities"]
