"""Scores of query-key products: the softcap, its derivative, and the constants that kernels need for both.

A score is ``scale * product``.  With `AttentionSpec.softcap` it is ``softcap * tanh(scale * product / softcap)``, and
its derivative with respect to the scaled product is ``1 - tanh**2``.  A bias is added after that, and the mask is
applied last.

There are three implementations: PyTorch here, Triton in `device.score`, and Gluon for sm_90 in `device.score_gluon`,
which stays within ``2**-17 * softcap`` of this one.  Code that computes scores or compiles kernels calls this module
and does not handle the softcap itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...model.attention_spec import AttentionSpec
from ...model.traits import Traits
from .arguments import Group

LOG2E = math.log2(math.e)
LARGEST, LEAST_NORMAL = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny

CONSTANTS = "SCALE", "SOFTCAP"
"""The names of `constants`, in the order of the fields of `device.score.Score`."""

ARGUMENT = 32 / 7
"""Factor from an argument of tanh to an argument of `device.score_gluon`."""
BOUND = Group({"slope": "fp32"})
"""Arguments of Gluon kernels for a softcap.  slope: factor from products to arguments of `device.score_gluon`."""


def score(scaled: Tensor, spec: AttentionSpec) -> Tensor:
    """Computes scores, without a bias, from products of query and key that are already scaled: applies the softcap."""
    return scaled if spec.softcap is None else spec.softcap * torch.tanh(scaled / spec.softcap)


def derivative(gradient: Tensor, scaled: Tensor, spec: AttentionSpec) -> Tensor:
    """Computes the gradient with respect to scaled products from `gradient`, the one with respect to their scores."""
    return gradient if spec.softcap is None else gradient * (1.0 - torch.tanh(scaled / spec.softcap) ** 2)


def constants(spec: AttentionSpec) -> dict[str, float]:
    """Returns the compile-time constants of portable kernels for scores, by name: the scale, and the softcap or 0."""
    return dict(zip(CONSTANTS, (spec.scale, spec.softcap or 0.0), strict=True))


def slope_after_score(spec: AttentionSpec) -> float:
    """Returns the factor that turns what the portable forward keeps for each pair into a score in base e.

    Without a softcap the forward keeps the product of query and key, and the factor is the scale; with a softcap it
    keeps the score itself, and the factor is 1.
    """
    return spec.scale if spec.softcap is None else 1.0


def bound(traits: Traits) -> Group | None:
    """Returns the group of arguments that Gluon kernels get for a softcap, or None without a softcap."""
    return BOUND if "softcap" in traits.modifiers else None


def bound_values(spec: AttentionSpec) -> tuple[Any, ...] | None:
    """Returns the arguments of the group `bound` for a launch, or None without a softcap.

    Raises:
        ArgumentError: a number that the kernels derive from the softcap is not a normal fp32 number.
    """
    if spec.softcap is None:
        return None
    slope = ARGUMENT * spec.scale / spec.softcap
    if abs(slope) > LARGEST or 0.0 < abs(slope) < LEAST_NORMAL or not LEAST_NORMAL <= factor(spec) <= LARGEST:
        allowed = f"a number that fp32 holds, and the scale {spec.scale} divided by it, too"
        raise ArgumentError("softcap", spec.softcap, allowed)
    return BOUND.values(slope=slope)


def factor(spec: AttentionSpec) -> float:
    """Returns the factor that Gluon kernels apply to get scores in base 2.

    It multiplies the product of query and key or, with a softcap, the tanh.
    """
    return (spec.scale if spec.softcap is None else spec.softcap) * LOG2E
