"""What the checks of bits and their detectors agree on: stages, and sizes of digests; imports no torch."""

from __future__ import annotations

from dash_inductor.observers import phases

SETTING = "optimizer setting"
"""The stage of optimizer settings, such as learning rates, and of the number of reductions before a step."""

REDUCTIONS = "reductions before its step"
"""The name of the number of reductions, after the name of the optimizer."""

FROZEN = "frozen parameter"
"""The stage of parameters that no optimizer updates."""

STAGES = (SETTING, FROZEN, phases.BUFFER, phases.GRADIENT, phases.PARAMETER, phases.OPTIMIZER_STATE)
"""All stages in the order in which a step computes them; its settings come first."""

WHICH = 6
"""The number of digits of a root that identify its tensors: roots of different tensors cannot be compared."""

VALUE = 4
"""Bytes of the digests from which classes are learned."""

OWNERS = 64
"""The largest number of ranks in a group whose segments are hashed separately; with more, only their sum is."""
