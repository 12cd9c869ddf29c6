"""Files of fingerprints: their format, reading files that somebody else wrote, and comparing two runs."""
