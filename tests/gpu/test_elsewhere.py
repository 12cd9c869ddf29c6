"""`explain` on the GPU that is there, from tensors on the CPU: PyTorch's own choices, and the same sites."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dash_inductor
from dash_inductor import sites
from dash_inductor.explanations.elsewhere import Untraceable, sdpa
from dash_inductor.upstream import compat
from dash_inductor.upstream.arch import arch_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

BACKENDS = {0: sdpa.MATH, 1: sdpa.FLASH, 2: sdpa.EFFICIENT}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DIMS = ((64, 64), (20, 20), (12, 12), (192, 128), (128, 192), (256, 256), (264, 264), (8, 8), (1, 1))
LENGTHS = ((64, 64), (64, 48), (1, 64), (33, 33), (0, 64), (64, 0))
MASKS = ("none", "bool", "added", "expanded", "transposed")


def mask_of(kind: str, q_len: int, kv_len: int, dtype: torch.dtype) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "bool":
        return torch.ones(q_len, kv_len, dtype=torch.bool, device="cuda")
    if kind == "expanded":
        return torch.zeros(q_len, 1, dtype=dtype, device="cuda").expand(q_len, kv_len)
    added = torch.zeros(q_len, kv_len, dtype=dtype, device="cuda")
    return added if kind == "added" else added.t().contiguous().t()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
def test_choices_of_pytorch(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """Every combination; where the rules are not certain they say so, as for grouped heads from torch 2.14 on."""
    arch, compared, uncertain = arch_of(torch.device("cuda")), 0, 0
    for (dim, value_dim), (q_len, kv_len), kind, dropout, is_causal, gqa, gradient, offset in itertools.product(
        DIMS, LENGTHS, MASKS, (0.0, 0.1), (False, True), (False, True), (False, True), (0, 1)
    ):
        mask = mask_of(kind, q_len, kv_len, dtype)
        if is_causal and mask is not None:
            continue

        def tensor(heads: int, length: int, dim: int, offset: int = offset, gradient: bool = gradient) -> Tensor:
            flat = torch.empty(2 * heads * length * dim + offset, dtype=dtype, device="cuda")[offset:]
            return flat.view(2, heads, length, dim).requires_grad_(gradient)

        q, k, v = (
            tensor(heads[0], q_len, dim), tensor(heads[1], kv_len, dim), tensor(heads[1], kv_len, value_dim),
        )  # fmt: skip
        theirs = BACKENDS[torch._fused_sdp_choice(q, k, v, mask, dropout, is_causal, enable_gqa=gqa)]
        try:
            ours = sdpa.choose(sdpa.Call(q, k, v, mask, dropout, is_causal, gqa), arch)
        except Untraceable:
            uncertain += 1
            continue
        compared += 1
        assert ours == theirs, (dim, value_dim, q_len, kv_len, kind, dropout, is_causal, gqa, gradient, offset)
    assert compared > uncertain or (heads[0] != heads[1] and compat.TORCH >= (2, 14))


def programs() -> dict[str, tuple[Any, tuple[int | None, ...]]]:
    """By name a function of query, key, value and bias, and the head dimensions; None where there is no bias."""
    attend = F.scaled_dot_product_attention
    return {
        "dropout": (lambda q, k, v, b: attend(q, k, v, dropout_p=0.1), (64, 64, None)),
        "bias with a gradient": (lambda q, k, v, b: attend(q, k, v, attn_mask=b), (64, 64, 1)),
        "value": (lambda q, k, v, b: attend(q, k, v, is_causal=True), (192, 128, None)),
        "by hand": (lambda q, k, v, b: torch.softmax(q @ k.mT / 8.0, -1) @ v, (64, 64, None)),
        "grouped heads with a mask": (
            lambda q, k, v, b: attend(q, k[:, :2], v[:, :2], attn_mask=b, enable_gqa=True), (64, 64, 1),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", programs())
def test_what_is_explained_from_the_cpu_is_what_is_compiled(name: str) -> None:
    fn, (dim, value_dim, bias) = programs()[name]

    def arguments(device: str) -> list[Tensor | None]:
        shapes = [(2, 4, 256, dim), (2, 4, 256, dim), (2, 4, 256, value_dim), (2, 4, 256, 256) if bias else None]
        return [
            None if shape is None else torch.zeros(shape, dtype=torch.bfloat16, device=device, requires_grad=True)  # type: ignore[arg-type]  # no None
            for shape in shapes
        ]

    explanation = dash_inductor.explain(fn, *arguments("cpu"), arch=arch_of(torch.device("cuda")))
    assert sites() == ()
    torch.compile(fn)(*arguments("cuda"))
    if explanation.unknown:
        assert dash_inductor.upstream.compat.TORCH >= (2, 14), explanation.unknown
        return
    found, expected = [site.record for site in explanation.sites], list(sites())
    assert len(found) == len(expected) == 1
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.op, ours.status, ours.reason, ours.mask, ours.plan, ours.site) == (
            theirs.op, theirs.status, theirs.reason, theirs.mask, theirs.plan, theirs.site,
        )  # fmt: skip
