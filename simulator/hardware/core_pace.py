"""The pace of a machine's cores, and what it does to the time of a kernel.

Cores that are shared with others, or get hot, are faster now and slower then: on a server's two
virtual cores a small product took between 28 and 66 µs within a hundred seconds, each core at its
own pace for seconds at a time. What was timed at one pace says what the same takes at another:

    seconds at pace b = seconds at pace a · (b / a) ** elasticity

where a pace is what a reference kernel takes, a small product in a core's own caches. Measured in
windows of 0.3 to 5 s on two such cores, both busy, with a kernel that is looked at on a core that
is awake: matrix products whose operands come from memory go with an elasticity of 0.75 to 1.1,
attention, softmax and GELU with 0.9 to 1.2, layer norms with 0.8 to 1.0, Adam, sums and ReLU of
cold tensors with 0.7 to 0.8, cross entropy with 0.6; a copy of 32 MiB and collectives of gloo with
none. What is left after that is 3 to 6 % of products whose times varied by 9 to 13 %, and 4 to
17 % of what waits for memory. Looks at a core that just slept, whose first millisecond is slow
for a reason of its own, had said 0.7 of products and 0.3 of all else: errors of what is looked at
make a slope too small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STEP_ERROR = 0.1
"""What steps on processes of one machine are off beside the errors of kernels and links and the
pace of the cores: one standard deviation, see `benchmarks.local_fidelity`."""
OVER_A_RUN = 0.7
"""What is left of the spread between looks in means over the seconds of a short run: of windows of
0.3 s a deviation of 0.16 to 0.19 was measured, of 5 s 0.11 to 0.15, of 20 s 0.09 to 0.12."""
OF_PRODUCTS, OF_OTHERS, OF_MOVING = 0.95, 0.75, 0.1
"""Elasticities: of matrix products and attention, of other kernels, of moving bytes to a rank."""


@dataclass(frozen=True)
class Pace:
    """What the reference kernel takes on a machine: seconds on average, and their spread.

    The spread is the relative standard deviation between looks that are seconds apart.
    """

    reference_s: float
    spread: float


@dataclass(frozen=True)
class StepPace:
    """At which pace of the cores a step is predicted, and the elasticity of its computing."""

    reference_s: float
    elasticity: float

    def slower(self, reference_s: float, *, communicating: float) -> float:
        """How many times as long a step takes at another pace.

        Example:
            >>> round(StepPace(4e-5, 0.7).slower(8e-5, communicating=0.25), 3)
            1.486

        Args:
            reference_s: seconds that the reference kernel takes then.
            communicating: the share of the step that is communication, which moves bytes.
        """
        computing = at_pace(1.0, self.reference_s, reference_s, self.elasticity)
        moving = at_pace(1.0, self.reference_s, reference_s, OF_MOVING)
        return computing + communicating * (moving - computing)


def at_pace(seconds: float, before: float, after: float, elasticity: float) -> float:
    """Seconds of a kernel at a pace of `after`, from those at a pace of `before`.

    Example:
        >>> at_pace(1.0, 1e-5, 2e-5, 1.0)
        2.0
    """
    return seconds * math.pow(after / before, elasticity)
