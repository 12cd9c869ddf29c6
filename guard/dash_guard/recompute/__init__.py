"""Runs a step again in the same process, without a trace, and hashes what it computes."""
