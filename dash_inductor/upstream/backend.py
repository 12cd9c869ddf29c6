"""The class of `torch.compile`'s Inductor backend, whose objects hold the mode and the options of a program."""

from torch import _TorchCompileInductorWrapper as InductorBackend

__all__ = ["InductorBackend"]
