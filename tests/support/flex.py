"""FlexAttention for tests: its results in double precision, and training on the CPU, which PyTorch refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor

Mod = Callable[..., Tensor]


@contextmanager
def training_on_the_cpu() -> Iterator[None]:
    """Inside the block, PyTorch lets FlexAttention have a backward on the CPU: graphs are made as for a GPU."""
    with mock.patch.object(flex, "_validate_device", lambda query, key, value: None):
        yield


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 40
    kv_len: int = 40
    dim: int = 16

    def tensors(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
        """Query, key and value, which want gradients, and the gradient of the output, reproducible."""
        generator = torch.Generator().manual_seed(0)

        def tensor(heads: int, length: int) -> Tensor:
            made = torch.randn(self.batch, length, heads, self.dim, generator=generator)
            return made.to(device, dtype).transpose(1, 2)

        query, grad = (tensor(self.heads, self.q_len) for _ in range(2))
        key, value = (tensor(self.kv_heads, self.kv_len) for _ in range(2))
        return [*(t.requires_grad_() for t in (query, key, value)), grad]


def block_mask(mask_mod: Mod | None, sizes: Sizes, device: str = "cpu", batch: int | None = None) -> Any:
    """The block mask of a mask_mod, of one batch element and head unless it depends on these."""
    if mask_mod is None:
        return None
    return flex.create_block_mask(mask_mod, batch, None, sizes.q_len, sizes.kv_len, device, BLOCK_SIZE=32)


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    scale: float | None = None,
) -> Tensor:
    """The definition of FlexAttention, in the type of its arguments; queries without keys give zeros."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    size = scores.shape
    index = [
        torch.arange(n, device=query.device).view([n if d == i else 1 for i in range(4)]) for d, n in enumerate(size)
    ]
    b, h, q, k = (i.expand(size) for i in index)
    if score_mod is not None:
        scores = score_mod(scores, b, h, q, k)
    if mask_mod is not None:
        scores = torch.where(mask_mod(b, h, q, k).expand(size), scores, -torch.inf)
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.where(hidden, 0.0, torch.softmax(torch.where(hidden, 0.0, scores), -1)) @ value
