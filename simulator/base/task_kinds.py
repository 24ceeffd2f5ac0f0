"""What a task of a timeline is: a pass, an update, communication."""

from __future__ import annotations

from enum import Enum


class TaskKind(Enum):
    """What a task does. Communication and gradient sync move data, the others compute."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    UPDATE = "update"
    COMMUNICATION = "communication"
    GRADIENT_SYNC = "gradient sync"
    OTHER = "other"

    @property
    def is_communication(self) -> bool:
        """Whether it moves data between devices."""
        return self in (TaskKind.COMMUNICATION, TaskKind.GRADIENT_SYNC)
