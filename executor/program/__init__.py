"""Programs: what every rank does, as data.

In:      instructions.
Out:     programs, proved to end; what they hold and take.
Imports: program.instructions, the simulator; no torch.
"""
