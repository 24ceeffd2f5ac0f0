"""Choose one strategy per node at least cost, memory limits included, with a certificate.

A solver of its own: it knows nothing of operators, meshes or plans. `instance` states problems,
`solve` answers them, `explain` says why one has no answer, `iopddl` reads those of a contest.

In:      a problem.
Out:     its best choices, proved, or why there are none.
Imports: its own rooms, simulator.base.
"""
