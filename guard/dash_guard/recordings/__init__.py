"""Files of fingerprints: their format, reading untrusted files, and comparing two runs."""
