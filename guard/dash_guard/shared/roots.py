"""What checks of bits and their judges agree on: stages, and sizes of digests in messages; knows nothing of torch."""

from __future__ import annotations

from dash_inductor.observers import phases

SETTING = "optimizer setting"
"""The stage of what optimizers are told, such as learning rates, and of how many reductions come before a step."""

REDUCTIONS = "reductions before its step"
"""The name of their count, behind that of the optimizer."""

STAGES = (SETTING, phases.BUFFER, phases.GRADIENT, phases.PARAMETER, phases.OPTIMIZER_STATE)
"""In the order in which a step makes them; what it is told comes first."""

WHICH = 6
"""Digits of a root that say what its leaves are of: roots of different tensors cannot be compared."""

VALUE = 4
"""Bytes of a digest from which classes are learned."""

OWNERS = 64
"""Ranks of a group whose segments are told apart at most; with more, only their sum is known."""
