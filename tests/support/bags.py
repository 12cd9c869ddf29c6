"""Bags of embeddings, some of them empty: what of their results and gradients nothing has written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

aten = torch.ops.aten

OFFSETS = {"bags": [0, 0, 3, 3, 7, 9], "one": [0]}
"""Where bags begin; empty ones are the first one, one between others, and the last one."""


def unwritten(results: Sequence[Tensor]) -> list[bool]:
    """Of each tensor, whether PyTorch's fill is left in it: NaN, or the largest integer."""
    return [
        bool((tensor.isnan() if tensor.is_floating_point() else tensor == torch.iinfo(tensor.dtype).max).any())
        for tensor in results
    ]


def calls(device: str) -> Iterator[tuple[str, list[Tensor]]]:
    """Results of the operators, by what was asked for.  Rows have a part of a warp, one, or several blocks of columns.

    Under deterministic algorithms PyTorch has no gradient of the largest elements of bags on CUDA.
    """
    torch.manual_seed(0)
    for width, dtype, integer in ((5, torch.float32, torch.int64), (64, torch.bfloat16, torch.int32)):
        weight = torch.randn(12, width, device=device).to(dtype)
        for (name, starts), count, mode, padding in itertools.product(OFFSETS.items(), (9, 0), range(3), (-1, 2)):
            if not count and len(starts) > 1:
                starts = [0] * len(starts)  # all are empty
            offsets = torch.tensor(starts, device=device, dtype=integer)
            indices = torch.tensor([1, 2, 2, 7, 2, 11, 0, 3, 1][:count], device=device, dtype=integer)
            scales = torch.rand(count, device=device).to(dtype) if mode == 0 and padding == 2 else None
            for forward in (aten._embedding_bag, aten._embedding_bag_forward_only):
                found = forward(weight, indices, offsets, False, mode, False, scales, False, padding)
                yield f"{forward} {name} {count} {mode} {padding} {width}", [*found]
            if mode == 2:
                continue
            grad = torch.ones(len(starts), width, device=device, dtype=dtype)
            for frequent in (False, True):
                args = (frequent, mode, False, scales, padding)
                gradient = aten._embedding_bag_backward(grad, indices, offsets, *found[1:], 12, *args)
                yield f"gradient {name} {count} {mode} {padding} {width} {frequent}", [gradient]
            if scales is not None and dtype == torch.float32:
                of_scales = aten._embedding_bag_per_sample_weights_backward(
                    grad, weight, indices, offsets, found[1], mode, padding
                )
                yield f"gradient of scales {name} {count}", [of_scales]
