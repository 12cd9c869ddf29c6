"""The reference executors on masks with segments and on dense ones: against fp64; what takes no part is not read."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.reference import backward as reference
from dash_inductor.kernels.reference import forward as reference_forward
from dash_inductor.model import AttentionSpec, Band, Dense, Keys, Mask, Operand, Segments, Tiles
from dash_inductor.planning import plan

from ...support.attention import Attention
from ...support.calls import BSHD

BANDS = [Band(), Band(0, None), Band(0, 40), Band(-9, 30), Band(0, None, "bottom_right")]


def documents(kind: str, q_len: int, kv_len: int) -> tuple[Tensor, Tensor]:
    """Numbers of queries and of keys, [2, length]: "sorted", "random" or "apart" (in one batch element)."""
    generator = torch.Generator().manual_seed(0)
    q, kv = (torch.randint(0, 4, (2, n), generator=generator) for n in (q_len, kv_len))
    if kind == "sorted":
        return q.sort(1).values, kv.sort(1).values
    return q, torch.where(torch.arange(2)[:, None] > 0, kv + 10, kv) if kind == "apart" else kv


def exact(p: Attention, keep: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(out, log-sum-exp, gradients) in fp64; rows that see no key give zeros and -inf."""
    leaves = [t.double().requires_grad_() for t in (p.q, p.k, p.v)]
    q, k, v = leaves[0], *(t.repeat_interleave(p.group, 1) for t in leaves[1:])
    scores = ((q @ k.mT) * p.scale).masked_fill(~keep, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    out = torch.where(keep, torch.exp(scores - torch.where(lse.isfinite(), lse, 0.0)[..., None]), 0.0) @ v
    return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, p.do.double())


@pytest.mark.parametrize("kind", ["sorted", "random", "apart"])
@pytest.mark.parametrize("with_keys", [False, True], ids=["", "keys"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(100, 100), (70, 150), (130, 65)])
def test_against_double_precision(kind: str, with_keys: bool, q_len: int, kv_len: int) -> None:
    q_of, kv_of = documents(kind, q_len, kv_len)
    valid = torch.rand(2, kv_len, generator=torch.Generator().manual_seed(1)) < 0.7
    extras = [q_of, kv_of.to(torch.int32), *([valid] if with_keys else [])]
    for band, fill in product(BANDS, (0.0, float("nan"))):
        p = Attention.random(q_len, kv_len, 16, band, group=2, dtype=torch.float32, device="cpu")
        keep = p.keep() & (q_of[:, :, None] == kv_of[:, None]) & (valid[:, None] if with_keys else True)
        rows, keys = keep.any(2)[:, None, :, None], keep.any(1)[:, None, :, None]
        out, lse, gradients = exact(p, keep[:, None])
        q, do = (torch.where(rows, t, fill) for t in (p.q, p.do))
        k, v = (torch.where(keys, t, fill) for t in (p.k, p.v))
        mask = Mask(band, Keys(Operand(2)) if with_keys else None, Segments(Operand(0), Operand(1)))
        tiles = Tiles(64, 64, 1, 1)
        found, found_lse = reference_forward.forward(q, k, v, extras, AttentionSpec(mask, p.scale, (BSHD,)), tiles)
        torch.testing.assert_close(found.double(), out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found_lse.double(), lse, atol=1e-5, rtol=1e-5)
        spec: Any = AttentionSpec(mask, p.scale, (BSHD,) * 3)
        for schedule in ("two_pass", "ascending"):
            chosen = plan(p.site(), "cpu", schedule)
            ours = reference.backward(do, q, k, v, found, found_lse, extras, spec, chosen)
            for gradient, true in zip(ours, gradients, strict=True):
                torch.testing.assert_close(gradient.double(), true, atol=2e-5, rtol=1e-5)


SHAPES = [(2, 4, 100, 150), (1, 4, 100, 150), (2, 1, 100, 150), (1, 1, 1, 150), (2, 4, 100, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_masks(shape: tuple[int, ...]) -> None:
    """Heads of a group may see different keys."""
    shown = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.3
    shown[..., :7, :] &= shape[2] == 1
    for band, fill in product(BANDS, (0.0, float("nan"))):
        p = Attention.random(100, 150, 16, band, group=2, dtype=torch.float32, device="cpu")
        keep = (p.keep() & shown).expand(2, 4, 100, 150)
        rows, keys = keep.any(3)[..., None], keep.any(2).unflatten(1, (2, 2)).any(2)[..., None]
        out, lse, gradients = exact(p, keep)
        q, do = (torch.where(rows, t, fill) for t in (p.q, p.do))
        k, v = (torch.where(keys, t, fill) for t in (p.k, p.v))
        mask, tiles = Mask(band, dense=Dense(Operand(0))), Tiles(64, 64, 1, 1)
        found, found_lse = reference_forward.forward(q, k, v, [shown], AttentionSpec(mask, p.scale, (BSHD,)), tiles)
        torch.testing.assert_close(found.double(), out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found_lse.double(), lse, atol=1e-5, rtol=1e-5)
        spec = AttentionSpec(mask, p.scale, (BSHD,) * 3)
        ours = reference.backward(do, q, k, v, found, found_lse, [shown], spec, plan(p.site(), "cpu"))
        for gradient, true in zip(ours, gradients, strict=True):
            torch.testing.assert_close(gradient.double(), true, atol=2e-5, rtol=1e-5)


def test_one_number_for_all_changes_no_bit() -> None:
    p = Attention.random(100, 100, 16, Band(0, None), dtype=torch.float32, device="cpu")
    chosen, same = plan(p.site(), "cpu"), torch.full((2, 100), 7)
    results = []
    for mask, extras in ((Mask(p.mask), []), (Mask(p.mask, None, Segments(Operand(0), Operand(0))), [same])):
        out, lse = reference_forward.forward(
            p.q, p.k, p.v, extras, AttentionSpec(mask, 0.3, (BSHD,)), Tiles(64, 64, 1, 1)
        )
        spec = AttentionSpec(mask, 0.3, (BSHD,) * 3)
        results.append((out, lse, *reference.backward(p.do, p.q, p.k, p.v, out, lse, extras, spec, chosen)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
