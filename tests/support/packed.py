"""Attention of packed documents by its definition: every document alone."""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Arguments of `varlen_attn` where several query heads share one of key; shapes alone say so in torch 2.11."""


def documents(*starts: int, device: str = "cpu") -> Tensor:
    """The places where documents begin, and where the last one ends."""
    return torch.tensor(starts, dtype=torch.int32, device=device)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: tuple[int, int]) -> Tensor:
    """The output, [tokens, heads, dim] as `q`; tokens after the last document have zeros.

    Args:
        k, v: [tokens, kv heads, dim].
        window: how many tokens a query sees to the left and to the right; all if that is negative.
    """
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    places = starts.tolist()
    parts = []
    for start, end in itertools.pairwise(places):
        parts.append(_document(*(t[start:end].transpose(0, 1) for t in (q, k, v)), window).transpose(0, 1))
    return torch.cat([*parts, torch.zeros_like(v[places[-1] :])])


def _document(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int]) -> Tensor:
    """[heads, tokens, dim] of one document, which may be empty."""
    left, right = (length if length >= 0 else q.shape[1] for length in window)
    place = torch.arange(q.shape[1], device=q.device)
    distance = place[:, None] - place
    hidden = (distance > left) | (-distance > right)
    scores = (q @ k.mT / math.sqrt(q.shape[2])).masked_fill(hidden, -math.inf)
    return torch.softmax(scores, 2) @ v


@dataclass(frozen=True)
class Company:
    """The tokens that lie beside a document.

    Args:
        before, after: lengths of the documents before and behind it.
        behind: tokens after the last document.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    behind: int = 0

    def slice(self, length: int) -> slice:
        """The tokens of the document itself."""
        return slice(sum(self.before), sum(self.before) + length)

    def starts(self, length: int, device: str = "cpu") -> Tensor:
        """The places where all documents begin, and where the last one ends."""
        return documents(*itertools.accumulate((0, *self.before, length, *self.after)), device=device)

    def around(self, own: Tensor, factor: float = 1.0) -> Tensor:
        """A tensor of all tokens: the document's are `own`, and the others random, times `factor`."""
        others = sum(self.before) + sum(self.after) + self.behind
        generator = torch.Generator().manual_seed(others)
        found = (torch.randn(others + len(own), *own.shape[1:], generator=generator) * factor).to(own)
        found[self.slice(len(own))] = own
        return found


COMPANIES = [
    Company(after=(70,)),
    Company(before=(1,)),
    Company(before=(127,), after=(1,)),
    Company(before=(300,), after=(40,), behind=9),
    Company(before=(0, 1, 0, 126), after=(0, 1)),
    Company(before=(1, 1, 1, 1, 1), after=(1, 1, 0)),
    Company(before=(128, 3), behind=140),
    Company(behind=1),
]
"""A document first, last and between others, at odd places, beside empty documents and some of one token."""
