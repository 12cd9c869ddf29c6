"""Inductor as a backend of `torch.compile`, with the program's mode and options."""

from torch import _TorchCompileInductorWrapper as InductorBackend

__all__ = ["InductorBackend"]
