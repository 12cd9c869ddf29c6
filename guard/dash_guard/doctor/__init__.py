"""Runs the first step of a program again for `dash-inductor doctor`, and names the first operator that differs."""
