"""Public names of records and explanations, where programs import them from."""
