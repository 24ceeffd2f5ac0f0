"""What a run came to.

In:      clock readings.
Out:     timelines, results and their files.
Imports: basics, communication, program, program.instructions, the simulator.
"""
