"""Runs a step again in the process that has run it, without a trace, and digests what it computes."""
