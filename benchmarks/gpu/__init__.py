"""Everything that a GPU has to show, in one command that goes on where it ended before."""
