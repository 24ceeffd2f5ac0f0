"""Days of training, not steps: failures, checkpoints, restarts, slow nodes and late data.

In:      how long a step takes, what goes wrong how often, when checkpoints are written.
Out:     how long a whole run takes, what it costs and where its time goes, with intervals.
Imports: simulation and below.
"""
