"""What optimizers hold beside parameters, and how they step.

In:      torch's names and options of optimizers.
Out:     bytes and operations for a parameter.
Imports: base.
"""
