"""Gradients against fp64: at most twice the error of PyTorch's own backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .attention import Attention, Gradients, errors


def pytorch_backward(p: Attention, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
    """FlashAttention-2 as PyTorch has it (windows aligned bottom right); in fp32 autograd of matmuls."""
    if p.q.dtype == torch.float32:
        return p.exact(torch.float32)[2]
    q_len, kv_len = p.q.shape[2], p.k.shape[2]
    band = p.mask.resolve(q_len, kv_len)
    rows = q_len if band.hi is None else min(q_len, kv_len + band.hi)  # later rows see no key
    seen = kv_len if band.lo is None else min(kv_len, rows - band.lo)  # later keys are seen by no row
    offset = seen - rows
    left, right = (-1 if band.hi is None else band.hi + offset), (-1 if band.lo is None else -band.lo - offset)
    assert band.hi is None or left >= 0, "a negative window means none to it"
    assert band.lo is None or right >= 0, "a negative window means none to it"
    narrower = p.q.shape[3] - p.v.shape[3]  # it wants one head dim
    v, do, o = (F.pad(t, (0, narrower)) if narrower else t for t in (p.v, p.do, out))
    do, q, o = (t[:, :, :rows].transpose(1, 2) for t in (do, p.q, o))
    k, v = (t[:, :, :seen].transpose(1, 2) for t in (p.k, v))
    state = torch.zeros(2, dtype=torch.uint64, device="cuda"), torch.zeros((), dtype=torch.uint64, device="cuda")
    gradients = torch.ops.aten._flash_attention_backward(
        do, q, k, v, o, lse[:, :, :rows].contiguous(), None, None, rows, seen, 0.0, False, *state, scale=p.scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    dq, dk, dv = (g.transpose(1, 2) for g in gradients)
    dv = dv[..., : p.v.shape[3]]
    if p.group > 1 and dk.shape[1] == p.q.shape[1]:
        dk, dv = (g.float().unflatten(1, (-1, p.group)).sum(2) for g in (dk, dv))
    dq = F.pad(dq, (0, 0, 0, q_len - rows))
    dk, dv = (F.pad(g, (0, 0, 0, kv_len - seen)) for g in (dk, dv))
    return dq, dk, dv


def check(p: Attention, gradients: Gradients) -> None:
    """The largest error against fp64 is at most twice PyTorch's own; rows without keys get zeros."""
    out, lse = p.rounded_forward()
    exact = p.exact()[2]
    own, theirs = errors(gradients, exact), errors(pytorch_backward(p, out, lse), exact)
    # where the exact gradient is zero (one key: the softmax is constant) both sides have only fp32 rounding left
    rounding = 16 * torch.finfo(torch.float32).eps * float(p.do.abs().max() * p.v.abs().max()) * p.q.shape[3]
    for name, a, b in zip(("dq", "dk", "dv"), own, theirs, strict=True):
        assert a <= 2 * b + rounding, (
            f"{name}: error {a:.2e}, PyTorch's {b:.2e} at {tuple(p.q.shape)}, {tuple(p.k.shape)}"
        )
    unseen = ~p.keep().any(1)
    assert not any(g.isnan().any() for g in gradients)
    assert (gradients[0][:, :, unseen] == 0).all()
