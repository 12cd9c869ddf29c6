"""Problems whose tensors hold something else wherever nobody looks, and what their gradients must be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from dash_inductor.model import Band
from dash_inductor.schedule import supports

from .attention import Attention, Gradients

Backward = Callable[[Attention, Tensor, Tensor], Gradients]
"""The gradients of a problem, given the forward's out and log-sum-exp."""

MASKS = [
    (Band(), 33, 70),
    (Band(0), 33, 70),  # the last keys are seen by no row
    (Band(0, None, "bottom_right"), 70, 33),  # the first rows see no key
    (Band(0, 9), 70, 33),  # the last rows see no key
    (Band(None, -5), 33, 70),  # the first keys are seen by no row
    (Band(10, 25), 70, 33),  # rows at both ends
    (Band(-30, -20), 33, 70),  # keys at both ends
    (Band(500, 600), 33, 70),  # nobody sees anything
]
"""Bands and lengths (tokens) at which some rows see no key, or some keys are seen by no row."""


def single_pass(mask: Band) -> str:
    """The schedule of one pass that causal masks run under, or windows."""
    return "bent_fold" if supports("bent_fold", mask) is None else "spt"


def seen(p: Attention) -> tuple[Tensor, Tensor]:
    """Whether rows see a key, and whether keys are seen by a row: booleans [q_len], [kv_len]."""
    keep = p.keep()
    return keep.any(1), keep.any(0)


def surrounded(p: Attention, out: Tensor, lse: Tensor, fill: float) -> tuple[Attention, Tensor, Tensor]:
    """The same problem and forward cut out of larger tensors of `fill`, with `fill` where nobody looks."""
    rows, keys = seen(p)

    def cut(tensor: Tensor, looked_at: Tensor) -> Tensor:
        b, h, length, dim = tensor.shape
        around = tensor.new_full((b, length + 16, h + 1, dim + 8), fill)
        inside = around[:, 8 : 8 + length, :h, :dim].transpose(1, 2)
        inside[:, :, looked_at] = tensor[:, :, looked_at]
        return inside

    q, do, o = (cut(t, rows) for t in (p.q, p.do, out))
    k, v = (cut(t, keys) for t in (p.k, p.v))
    longer = lse.new_full((*lse.shape[:2], lse.shape[2] + 5), fill)
    longer[:, :, : lse.shape[2]][:, :, rows] = lse[:, :, rows]
    return Attention(q, k, v, do, p.mask, p.scale), o, longer


def check_poison(p: Attention, backward: Backward) -> None:
    """Rows and keys that nobody sees have gradients of zero, and what they hold changes no bit of the others."""
    forward = p.rounded_forward()
    expected = backward(*surrounded(p, *forward, 0.0))
    rows, keys = seen(p)
    for gradient, looked_at in zip(expected, (rows, keys, keys), strict=True):
        assert gradient.isfinite().all()
        assert (gradient[:, :, ~looked_at] == 0).all()
    for fill in (float("nan"), float("inf"), float("-inf")):
        poisoned = backward(*surrounded(p, *forward, fill))
        assert [torch.equal(a, b) for a, b in zip(expected, poisoned, strict=True)] == [True] * 3, fill


def check_overflow(p: Attention, backward: Backward) -> None:
    """A dP that overflows in pairs that a causal mask keeps apart, in tiles that it cuts, does no harm."""
    assert p.mask == Band(0)
    half = p.q.shape[2] // 2
    do, v = p.do.clone(), p.v.clone()
    do[:, :, :half] *= 1e25
    v[:, :, half:] *= 1e25
    large = dataclasses.replace(p, do=do, v=v)
    exact = large.exact()[2]
    assert not (do.float() @ v.repeat_interleave(p.group, 1).float().mT).isfinite().all()
    for gradient, wanted in zip(backward(large, *large.rounded_forward()), exact, strict=True):
        assert gradient.isfinite().all()
        assert (gradient.double() - wanted).abs().max() <= 2e-2 * wanted.abs().max()
