"""Planners of other projects on their own inputs."""
