"""The stages, one a module; `cases` of each says what it shows."""
