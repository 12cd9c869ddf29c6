"""Files of fingerprints: their format, readers that trust no file, and the comparison of two runs."""
