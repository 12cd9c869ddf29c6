"""The judges of the guard, one file each."""
