"""Timing attention on the user's machine: PyTorch's default, deterministic PyTorch, and dash_inductor.

    backward        one call of the attention backward, shape by shape
    step            a whole training step of a small decoder

The variants take turns, and what is shown is the median with its spread (`timing`).
"""
