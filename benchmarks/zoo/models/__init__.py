"""The project's own models, a file a library."""
