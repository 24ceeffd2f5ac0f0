"""What founding papers of the field published, measured again with this library."""
