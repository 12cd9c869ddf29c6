"""sha256 of the gradients of a few problems on the GPU: ``python -m tests.support.gpu_digest`` prints it."""

from __future__ import annotations

import torch

from dash_inductor.model import Band

from .attention import Attention, compiled_backward
from .repeats import digest

_CASES = [(1000, 128, Band(0), 1, None), (513, 64, Band(), 4, "ascending"), (513, 64, Band(0, 99), 1, "spt")]


def compute() -> str:
    gradients: list[torch.Tensor] = []
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    for length, head_dim, mask, group, schedule in _CASES:
        p = Attention.random(length, length, head_dim, mask, group=group)
        backward = compiled_backward(mask, p.scale, p.plan(arch, schedule))
        gradients += backward(p.do, p.q, p.k, p.v, *p.rounded_forward())
    return digest(gradients)


if __name__ == "__main__":
    print(compute())
