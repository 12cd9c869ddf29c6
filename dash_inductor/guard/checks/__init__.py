"""The checks of the guard, one file each."""
