"""Models to try, and the demonstration that ``make demo`` runs."""
