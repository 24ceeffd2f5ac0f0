"""What `Training` and `execute` may be given of an optimizer beside its name.

biases = sg.optimizers.ParameterGroup(("*.bias",), weight_decay=0.0)
sg.Training(optimizer="adam", weight_decay=0.1, groups=(biases,))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.basics.names_on_demand import names_on_demand

if TYPE_CHECKING:
    from stratagem.executor.training.learning_rates import RateSchedule as RateSchedule
    from stratagem.executor.training.learning_rates import TorchRate as TorchRate
    from stratagem.simulator.optimizers.factored_squares import (
        FactoredSquares as FactoredSquares,
    )
    from stratagem.simulator.optimizers.newton_schulz import NewtonSchulz as NewtonSchulz
    from stratagem.simulator.optimizers.parameter_groups import ParameterGroup as ParameterGroup
    from stratagem.simulator.optimizers.quantised_states import Blocks as Blocks
else:
    __all__, __getattr__, __dir__ = names_on_demand(__name__)
