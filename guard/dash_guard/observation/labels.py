"""What the names of tensors say besides the module; imports no torch."""

EVALUATION = " (evaluation"
"""Begins the end of the names of what is computed outside of training."""
