"""What a rank can do, as data.

Each instruction says its name and kind in the timeline, the values that it reads and writes and
the bytes that they hold, the collectives and messages in it, and what takes its seconds (see
`instruction.Instruction`). Its `microbatch` counts passes: where tokens are sliced, the slices of
all microbatches one after the other. None of them names a rank: where they differ, each rank
works out its own part from its seat on the mesh (`part_at`, `Transfer`), so that all ranks of a
stage can share one list.

In:      a plan and its graphs.
Out:     instructions, and what each does to values, memory, links and time.
Imports: the simulator; no torch.
"""

from stratagem.executor.program.instructions.instruction import Instruction
from stratagem.executor.program.instructions.operator_instructions import (
    Backward,
    BackwardPart,
    Forward,
    Source,
)
from stratagem.executor.program.instructions.parameter_instructions import (
    Direct,
    Measure,
    MeasuredParameter,
    Norm,
    Stash,
    Update,
    Updated,
)
from stratagem.executor.program.instructions.transfer_instructions import (
    Bundle,
    Convert,
    Free,
    Join,
    Receive,
    Send,
)

__all__ = [
    "Backward",
    "BackwardPart",
    "Bundle",
    "Convert",
    "Direct",
    "Forward",
    "Free",
    "Instruction",
    "Join",
    "Measure",
    "MeasuredParameter",
    "Norm",
    "Receive",
    "Send",
    "Source",
    "Stash",
    "Update",
    "Updated",
]
