"""Runs a step again in the same process, without an effect on the training, and hashes what it computes."""
