"""Choices of operators by name, and those of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice

Choices = dict[str, Choice]


def choices_of(plan: Plan) -> Choices:
    """The choices of a plan by operator."""
    return {name: choice for stage in plan.stages for name, choice in stage.choices.items()}


def with_choices(plan: Plan, choices: Mapping[str, Choice]) -> Plan:
    """The plan with other choices of some operators, by name."""
    stages = tuple(
        replace(stage, choices={n: choices.get(n, own) for n, own in stage.choices.items()})
        for stage in plan.stages
    )
    return replace(plan, stages=stages)
