"""Public names of recordings, where programs import them from."""
