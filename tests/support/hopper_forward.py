"""The Hopper forward called directly, attention in double precision, and a control whose bits depend on the CTA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dash_inductor.kernels.hopper.forward import build
from dash_inductor.kernels.hopper.forward.device import consumer, entry
from dash_inductor.kernels.hopper.shared.tensors import DTYPES
from dash_inductor.kernels.reference.backward import visible
from dash_inductor.model.traits import Traits

from . import hopper_calls
from .attention import Attention
from .calls import BSHD, forward_spec

Forward = tuple[Tensor, Tensor]
PLAIN = Traits()


def forward(p: Attention, *, logsumexp: bool = False, **how: Any) -> Forward:
    """out and log-sum-exp of a problem by the kernel; the latter for a program, or for a backward alone."""
    spec = replace(forward_spec(p.mask, p.scale, how.pop("order", BSHD)), logsumexp=logsumexp)
    return hopper_calls.forward(p.q, p.k, p.v, spec, **how)


def rounding_of_sums(dtype: torch.dtype, dims: tuple[int, int], traits: Traits = PLAIN) -> float:
    """As `rounding_of`, of a call with these traits."""
    if dtype == torch.float32:
        return 0.0
    return rounding_of(build.Specialisation(DTYPES[dtype], *build.tile_dims(*dims), traits, even_kv=True))


def rounding_of(built: build.Specialisation) -> float:
    """By how much a log-sum-exp may be off because it is that of rounded probabilities, see Note [Sums]."""
    return torch.finfo(getattr(torch, built.dtype)).eps / 2 if built.sums_by_matmul else 0.0


def repeated(p: Attention, **how: Any) -> Callable[[], Sequence[Tensor]]:
    """The function that `repeats.differing_runs` wants."""
    return lambda: forward(p, **how)


def exact(p: Attention) -> Forward:
    """In double precision, 256 rows at a time; rows that see no key give 0 and -inf."""
    q_len, kv_len = p.q.shape[2], p.k.shape[2]
    k, v = (t.double().repeat_interleave(p.group, 1) for t in (p.k, p.v))
    band, keys = p.mask.resolve(q_len, kv_len), torch.arange(kv_len, device=p.q.device)
    outs, sums = [], []
    for start in range(0, q_len, 256):
        q = p.q[:, :, start : start + 256].double()
        keep = visible(band, start + torch.arange(q.shape[2], device=q.device), keys)
        s = (q @ k.mT * p.scale).masked_fill(~keep, -torch.inf)
        lse = s.logsumexp(-1)
        weights = torch.where(keep, (s - torch.where(lse.isfinite(), lse, 0.0)[..., None]).exp(), 0.0)
        outs.append(weights @ v)
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def cudnn(p: Attention) -> Tensor | None:
    """out by cuDNN, or None for fp32, a mask it is not given by PyTorch, or a scale that is not normal and positive."""
    band = p.mask.resolve(p.q.shape[2], p.k.shape[2])
    causal = (band.lo, band.hi) == (0, None)
    if (
        p.q.dtype == torch.float32
        or not (causal or band.is_full)
        or p.scale < torch.finfo(torch.float32).tiny
        or p.q.shape[3] > 128
        or p.q.shape[3] != p.v.shape[3]
    ):
        return None
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        p.q, p.k, p.v, None, True, 0.0, causal, False, scale=p.scale
    )[0]
    return out


def rounded(p: Attention) -> Tensor:
    """out with the roundings that any flash forward makes: probabilities, relative to the largest, and out itself."""
    return rounded_under(p.keep(), p.q, p.k, p.v, p.scale)


def rounded_under(keep: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """As `rounded`, for a mask of booleans that broadcasts against the scores."""
    k, v = (t.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    s = (q.float() @ k.mT * scale).masked_fill(~keep, -torch.inf)
    top = s.amax(-1, keepdim=True)
    weights = torch.where(keep, (s - torch.where(top.isfinite(), top, 0.0)).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    share = torch.where(total == 0, 0.0, 1.0 / total)
    return ((weights.to(q.dtype).float() @ v) * share).to(q.dtype)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm())


def check(p: Attention, found: Forward, *, strict: bool = False, library: bool = True, logsumexp: bool = False) -> None:
    """At most 1.2 times the error of cuDNN, or where it does not run of `rounded`; zeros and -inf in rows without keys.

    Args:
        strict: no allowance for chance, which decides in small tensors.
        logsumexp: the program reads the log-sum-exp.
        library: False compares with `rounded` even where cuDNN runs: it takes a while to prepare for every new shape.
    """
    (out, lse), (exact_out, exact_lse) = found, exact(p)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert out.dtype == p.q.dtype
    seen = p.keep().any(1)
    assert (out[:, :, ~seen] == 0).all()
    assert (lse[:, :, ~seen] == -torch.inf).all()
    theirs = cudnn(p) if library else None
    theirs = rounded(p) if theirs is None else theirs
    check_distance(out, theirs, exact_out, strict, f"{tuple(p.q.shape)}, {tuple(p.k.shape)}, {p.mask}")
    off = (lse.double() - exact_lse)[:, :, seen].abs()
    scores = abs(p.scale) * p.q.shape[3]  # of this size, and fp32 keeps 24 bits
    rounding = rounding_of_sums(p.q.dtype, (p.q.shape[3], p.v.shape[3]), replace(PLAIN, logsumexp=logsumexp))
    assert (off <= rounding + 1e-5 + 1e-5 * exact_lse[:, :, seen].abs() + 4e-6 * scores).all(), float(off.max())


def check_distance(out: Tensor, theirs: Tensor, exact_out: Tensor, strict: bool, where: str) -> None:
    """The bound of `check` for out.

    In fp32 a product is made of three in tf32, as in PyTorch's memory-efficient kernel, which leaves out 2**-22 of it:
    the bound there is 2**-21 for the 2**-24 of `theirs`, and the allowance a unit in the last place.
    """
    factor, chance = (8.0, 1.0) if out.dtype == torch.float32 else (1.2, 1 / 16)
    bound = factor * distance(theirs, exact_out)
    if not strict:
        bound += chance * torch.finfo(out.dtype).eps * float(exact_out.norm())
    error = distance(out, exact_out)
    assert error <= bound, f"error {error:.2e}, allowed {bound:.2e} at {where}"


@gluon.jit
def store_with_place(lse_ptr, rows, q_len, m, total):  # type: ignore[no-untyped-def]  # a device function
    """As `store_logsumexp`, but the number of the CTA changes the result."""
    lse = m + total + gl.program_id(0)
    gl.store(lse_ptr + rows, lse, mask=(rows >= 0) & (rows < q_len))


@contextmanager
def results_of_the_cta() -> Iterator[None]:
    """Kernels built inside write what depends on the CTA that computes a tile, which is a matter of time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consumer, "store_logsumexp", store_with_place)
        # device functions remember the functions that they call: new ones of the same source look again
        patch.setattr(entry, "consume", gluon.jit(consumer.consume.fn))
        with _built_with(hopper_forward=gluon.jit(entry.hopper_forward.fn)):
            yield


def whole_tiles() -> AbstractContextManager[None]:
    """Kernels built inside compute hidden halves of kv tiles, too (Note [Half tiles])."""
    plain = (
        {dims: replace(v, half_tiles=False) for dims, v in of.items()}
        for of in (build.FORWARD_CONFIGS, build.SHORT_CONFIGS)
    )
    return _built_with(**dict(zip(("FORWARD_CONFIGS", "SHORT_CONFIGS"), plain, strict=True)))


def no_short_configs() -> AbstractContextManager[None]:
    """Short sequences have the configs of all others inside."""
    return _built_with(SHORT_CONFIGS={})


@contextmanager
def _built_with(**names: Any) -> Iterator[None]:
    """Kernels are built with these names of `build` inside, and none of them is kept, whatever happens."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setattr(build, name, value)
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    build.kernels.cache_clear()
    hopper_calls.forget()
