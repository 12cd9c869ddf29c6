"""The score of a pair of query and key: what becomes of their product, its derivative, and the numbers that say it.

A score is ``scale * product``.  With a bound, `Call.softcap`, it is ``softcap * tanh(scale * product / softcap)``, and
its derivative by the scaled product is ``1 - tanh**2``.  A bias is added to that, and then the mask hides pairs.

The same is written three times: here in PyTorch, in `device.score` in Triton, and in `device.score_gluon` in Gluon for
sm_90, which stays within ``2**-17 * softcap`` of it.  Whoever asks for scores or compiles kernels asks this module, and
knows nothing of bounds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...model.call import Call
from ...model.traits import Traits
from .arguments import Group

LOG2E = math.log2(math.e)
LARGEST, LEAST_NORMAL = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny

CONSTANTS = "SCALE", "SOFTCAP"
"""The names of `constants`, in the order in which Triton's `Score` has them."""

ARGUMENT = 32 / 7
"""The argument of `device.score_gluon` for an argument of tanh."""
BOUND = Group({"slope": "fp32"})
"""slope: makes products arguments."""


def score(scaled: Tensor, call: Call) -> Tensor:
    """Scores without a bias, from scaled products of any shape; as of the call."""
    return scaled if call.softcap is None else call.softcap * torch.tanh(scaled / call.softcap)


def derivative(gradient: Tensor, scaled: Tensor, call: Call) -> Tensor:
    """The gradient of scaled products, from the `gradient` of their scores."""
    return gradient if call.softcap is None else gradient * (1.0 - torch.tanh(scaled / call.softcap) ** 2)


def constants(call: Call) -> dict[str, float]:
    """The values of `CONSTANTS`: the scale, and the bound or 0."""
    return dict(zip(CONSTANTS, (call.scale, call.softcap or 0.0), strict=True))


def slope_after_score(call: Call) -> float:
    """The factor of scores in Triton for their natural values: 1 if they have these, the scale if they are products."""
    return call.scale if call.softcap is None else 1.0


def bound(traits: Traits) -> Group | None:
    """The arguments of Gluon kernels about a bound, None without one."""
    return BOUND if "softcap" in traits.modifiers else None


def bound_values(call: Call) -> tuple[Any, ...] | None:
    """The values of `bound`.

    Raises:
        ArgumentError: fp32 cannot hold what the kernels need of the bound.
    """
    if call.softcap is None:
        return None
    slope = ARGUMENT * call.scale / call.softcap
    if abs(slope) > LARGEST or 0.0 < abs(slope) < LEAST_NORMAL or not LEAST_NORMAL <= factor(call) <= LARGEST:
        allowed = f"a number that fp32 holds, and the scale {call.scale} divided by it, too"
        raise ArgumentError("softcap", call.softcap, allowed)
    return BOUND.values(slope=slope)


def factor(call: Call) -> float:
    """The factor in Gluon that makes scores in base 2 of products, or of the shares that they have of a bound."""
    return (call.scale if call.softcap is None else call.softcap) * LOG2E
