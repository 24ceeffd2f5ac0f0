"""Properties that every prediction must have, tried on many plans drawn at random."""
