"""Running plans: lower a plan to a program, prove it, run it, measure it.

Plan ──lower──▶ Program ──verify──▶ ──execute──▶ losses, parameters, measured timeline
"""

from stratagem.executor.grid import grid
from stratagem.executor.launch import launch
from stratagem.executor.lowering import lower
from stratagem.executor.program import Program
from stratagem.executor.report import Report
from stratagem.executor.result import ExecutionResult
from stratagem.executor.run import execute
from stratagem.executor.states import model_state
from stratagem.executor.verify import verify

__all__ = [
    "ExecutionResult",
    "Program",
    "Report",
    "execute",
    "grid",
    "launch",
    "lower",
    "model_state",
    "verify",
]
