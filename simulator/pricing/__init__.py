"""What the choices of operators cost.

In:      operators, their choices, a mesh.
Out:     tables of nanoseconds and bytes by choice and by pair of choices.
Imports: kernel_times, sharding and below.
"""
