"""Choices of operators by name, and those of a plan."""

from __future__ import annotations

from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice

Choices = dict[str, Choice]


def choices_of(plan: Plan) -> Choices:
    """The choices of a plan by operator."""
    return {name: choice for stage in plan.stages for name, choice in stage.choices.items()}
