"""Running plans: lower a plan to a program, prove it, run it, measure it.

Plan ──lower──▶ Program ──verify──▶ ──execute──▶ losses, parameters, measured timeline

In:      a plan, a model, data.
Out:     losses, parameters, a measured timeline.
Imports: running and below, the simulator.
"""

from stratagem.executor.lowering.lower import lower
from stratagem.executor.program.grid import grid
from stratagem.executor.program.programs import Program
from stratagem.executor.program.verify import verify
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.running.execute import execute
from stratagem.executor.running.launch import launch
from stratagem.executor.running.run_request import RunRequest
from stratagem.executor.state.parameter_parts import model_state

__all__ = [
    "ExecutionResult",
    "Program",
    "RunRequest",
    "execute",
    "grid",
    "launch",
    "lower",
    "model_state",
    "verify",
]
