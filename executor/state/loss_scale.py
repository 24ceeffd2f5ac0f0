"""The dynamic loss scale of float16 training (Micikevicius et al. 2018, arXiv 1710.03740).

Gradients in float16 lose what is below 2⁻²⁴, so backward begins with the scale instead of 1, and
what it makes is divided by the scale in float32 before anything else is done with it. Where a
gradient of any rank is not finite, no rank updates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """The scale of the next step, by the rule of ``torch.amp.GradScaler`` and with its constants.

    Example:
        >>> scale = LossScale(value=8.0, interval=2)
        >>> scale.update(overflowed=True)
        >>> scale.value
        4.0
        >>> scale.update(overflowed=False)
        >>> scale.update(overflowed=False)
        >>> scale.value
        8.0

    Attributes:
        value: what the loss is multiplied by.
        steady: steps since the scale changed.
        growth: what it is multiplied by after `interval` steps without an overflow.
        backoff: what it is multiplied by after an overflow.
    """

    value: float = 65536.0
    steady: int = 0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def update(self, *, overflowed: bool) -> None:
        """Conclude from a step in which a gradient was not finite, or all were."""
        if overflowed:
            self.value, self.steady = self.value * self.backoff, 0
            return
        self.steady += 1
        if self.steady == self.interval:
            self.value, self.steady = self.value * self.growth, 0
