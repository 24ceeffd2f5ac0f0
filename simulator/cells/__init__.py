"""A stage on parts of its mesh: cells of devices that are told apart where operators are pinned.

In:      blocks of a stage, folded, and choices of its operators.
Out:     their task graphs on cells, or what they take there under any choices.
Imports: stage, pricing and below.
"""
