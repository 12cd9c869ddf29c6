"""Head dims above 256 in compiled programs on a GPU: values, bits and records."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor import clear_sites, sites
from dash_inductor.model import Band

from ..support.paired import PairedAttention, as_pytorch
from ..support.repeats import differing_runs
from ..support.together import side_by_side

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

BF16, FP16 = torch.bfloat16, torch.float16
DEVICE = "cuda"

DIMS = [
    (264, 264, BF16),
    (320, 320, FP16),
    (512, 512, BF16),
    (512, 512, FP16),
    (512, 300, BF16),
    (64, 512, FP16),
]
"""Head dims of query and key, and of value, and the dtype."""
WINDOW = 40

MASKS: dict[str, tuple[Band, dict[str, Any]]] = {
    "full": (Band(), {}),
    "causal": (Band(0), {}),
    "window": (Band(0, WINDOW - 1), {}),
    "bias": (Band(), {"bias": "hqk:random"}),
    "dense": (Band(), {"dense": "bhqk"}),
    "padding": (Band(), {"keys": True}),
}
LENGTHS = [(150, 150), (64, 201), (201, 77), (17, 130), (128, 128)]
"""Of queries and of keys: tiles have 16 rows."""

Case = tuple[tuple[int, int, torch.dtype], str, tuple[int, int], int]


def cases() -> list[Case]:
    """Every second pair of dims and mask, so that two dims have all masks; the lengths and heads of a kv head vary."""
    draw = random.Random(0)
    return [
        (dims, mask, draw.choice(LENGTHS), draw.choice([1, 3]))
        for i, dims in enumerate(DIMS)
        for j, mask in enumerate(MASKS)
        if (i + j) % 2 == 0
    ]


def problem(case: Case) -> PairedAttention:
    (dim, value_dim, dtype), mask, lengths, group = case
    band, data = MASKS[mask]
    how = {"dim": dim, "value_dim": value_dim, "dtype": dtype, "group": group, "scale": dim**-0.5, "device": DEVICE}
    return PairedAttention.random(*lengths, band, **how, **data)


def attention(mask: str, p: PairedAttention) -> Callable[..., Tensor]:
    """The problem's attention, a function of query, key, value and the bias or the mask that is data, if any.

    Keys are repeated, because with `enable_gqa` PyTorch computes 16-bit heads above 256 in fp32.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, given: Tensor | None = None) -> Tensor:
        if mask == "window":
            distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
            given = (distance >= 0) & (distance < WINDOW)
        k, v = (t.repeat_interleave(p.group, 1) if p.group > 1 else t for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, given, is_causal=mask == "causal", scale=p.scale)

    return attend


def data_of(p: PairedAttention) -> list[Tensor]:
    """The mask as the program gives it; at most one of the problem's three kinds is there."""
    padding = None if p.keys is None else p.keys[:, None, None]
    return [t for t in (p.dense, padding) if t is not None]


@pytest.fixture(scope="module", autouse=True)
def compiled_side_by_side() -> Iterator[None]:
    with side_by_side():
        yield


@pytest.mark.parametrize("case", cases(), ids=str)
def test_values_and_bits(case: Case) -> None:
    """At most twice PyTorch's own error, the same bits in every run under load, and a record of portable kernels."""
    p = problem(case)
    torch._dynamo.reset()
    clear_sites()
    compiled = torch.compile(attention(case[1], p), dynamic=False, fullgraph=True)
    leaves = [t.detach().clone().requires_grad_() for t in (p.q, p.k, p.v, *([] if p.bias is None else [p.bias]))]

    def step() -> list[Tensor]:
        out = compiled(*leaves, *data_of(p))
        return [out.detach(), *torch.autograd.grad(out, leaves, p.do)]

    ours = step()
    (record,) = sites()
    assert record.plan is not None, (record.reason, record.detail)
    assert (record.status, record.forward, record.plan.kernel) == ("replaced", "portable", "portable")
    true_out, true, sees = p.exact()
    assert (ours[0][~sees] == 0).all()
    for got, theirs, exact in zip(ours, as_pytorch(p), (true_out, *true), strict=True):
        allowed = 2 * (theirs.double() - exact).norm() + 4 * torch.finfo(p.q.dtype).eps * exact.norm()
        assert (got.double() - exact).norm() <= allowed
    assert differing_runs(step, 10, load=True) == 0
