"""What is done to a rank's instructions behind their first writing, one thing at a time.

In:      a draft: plain instructions, with marks where something of them may move or be joined.
Out:     the instructions that a rank runs, in their order.
Imports: program.instructions, the simulator; no torch.
"""
