"""Capture of torch modules; the only part of the simulator that imports torch."""
