"""The forwards of replaced sites on a GPU: right values, and the same bits on every call and in every batch.

Among them are the cases in which forwards of PyTorch's are known to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.config import config
from dash_inductor.model import Band
from dash_inductor.planning import plan
from dash_inductor.records.records import clear_sites, sites

from ..support.attention import Attention, compiled_backward
from ..support.calls import forward_spec
from ..support.repeats import bits

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def from_nothing(deterministic: None) -> Iterator[None]:
    torch._dynamo.reset()
    clear_sites()
    yield
    torch._dynamo.reset()


def keep(q_len: int, kv_len: int, lo: int | None, hi: int | None) -> Tensor:
    """The band ``lo <= q - kv <= hi``, anchored bottom right."""
    d = torch.arange(q_len, device="cuda")[:, None] + (kv_len - q_len) - torch.arange(kv_len, device="cuda")
    visible = torch.ones_like(d, dtype=torch.bool)
    if lo is not None:
        visible = visible & (d >= lo)
    if hi is not None:
        visible = visible & (d <= hi)
    return visible


def train(attend: Callable[..., Tensor], p: Attention, seen: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients; only rows in `seen` get a gradient."""
    leaves = [t.to(dtype).clone().requires_grad_() for t in (p.q, p.k, p.v)]
    out = attend(*leaves)
    grad = torch.where(seen[:, None], p.do.to(dtype), 0.0)
    return [torch.where(seen[:, None], out.detach(), 0.0), *torch.autograd.grad(out, leaves, grad)]


def exactly(mask: Tensor, scale: float) -> Callable[..., Tensor]:
    """Attention in plain operators, of its inputs' type; a row that sees no key gives zeros."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        s = (q @ k.mT * scale).masked_fill(~mask, float("-inf"))
        return torch.softmax(s, -1).masked_fill(~mask.any(1)[:, None], 0.0) @ v

    return attend


def assert_close(found: list[Tensor], exact: list[Tensor]) -> None:
    """bf16 keeps 8 bits: relative errors of 1 % of the whole tensor are rounding, a wrong mask is far outside."""
    for a, b in zip(found, exact, strict=True):
        assert (a.double() - b).norm() <= 0.015 * b.norm() + 1e-6


LOOK_AHEAD = [
    ((-50, 37), [(799, 40), (300, 40), (799, 3), (239, 2)]),
    ((-128, 128), [(256, 128), (300, 301)]),
    ((None, 20), [(52, 50), (400, 90), (90, 400)]),
    ((-50, None), [(300, 50), (50, 300)]),
]


@pytest.mark.parametrize(("bounds", "lengths"), LOOK_AHEAD, ids=str)
def test_look_ahead_with_dynamic_lengths(bounds: tuple[int | None, int | None], lengths: list[tuple[int, int]]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep(q.shape[2], k.shape[2], *bounds))

    compiled = torch.compile(attend)

    def dynamic(*tensors: Tensor) -> Tensor:
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 2)
        return compiled(*tensors)

    with config.patch(strict=True):
        for q_len, kv_len in lengths:
            p = Attention.random(q_len, kv_len, 64, Band(*bounds, "bottom_right"))
            mask = keep(q_len, kv_len, *bounds)
            found = train(dynamic, p, mask.any(1), torch.bfloat16)
            assert_close(found, train(exactly(mask, p.scale), p, mask.any(1), torch.float64))
    assert [(record.status, record.mask) for record in sites()] == [("replaced", str(Band(*bounds, "bottom_right")))]


@pytest.mark.parametrize(("batch", "heads", "kv_heads", "kv_len"), [(60, 4, 4, 239), (32, 8, 2, 4096), (3, 4, 4, 129)])
def test_single_queries(batch: int, heads: int, kv_heads: int, kv_len: int) -> None:
    """cuDNN's log-sum-exp differs from call to call here, up to 475 times of 500."""
    p = Attention.random(1, kv_len, 64, Band(), batch=batch, kv_heads=kv_heads, group=heads // kv_heads)
    chosen = plan(p.site(), "sm_{}{}".format(*torch.cuda.get_device_capability()))
    backward, spec = compiled_backward(p.mask, p.scale, chosen), str(forward_spec(p.mask, p.scale))

    def step(p: Attention = p) -> list[Tensor]:
        out, lse = torch.ops.dash_inductor.attention_forward(p.q, p.k, p.v, [], spec, str(chosen), "test")
        return [out, lse, *backward(p.do, p.q, p.k, p.v, out, lse)]

    first = step()
    for _ in range(250):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(step(), first, strict=True))


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "length", "window"),
    [(192, 4, 4, 700, None), (128, 8, 2, 600, 100), (64, 4, 4, 300, 50), (256, 2, 1, 257, None)],
)
def test_a_batch_element_has_the_bits_that_it_has_alone(
    head_dim: int, heads: int, kv_heads: int, length: int, window: int | None
) -> None:
    """The bits are the same in batches and places of all kinds."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = keep(length, length, 0, None if window is None else window - 1)
        k, v = (t[:, :, None].expand(-1, -1, heads // kv_heads, -1, -1).flatten(1, 2) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    p = Attention.random(length, length, head_dim, Band(0), batch=9, kv_heads=kv_heads, group=heads // kv_heads)
    seen = torch.ones(length, dtype=torch.bool, device="cuda")
    compiled = torch.compile(attend, dynamic=False)
    whole = train(compiled, p, seen, torch.bfloat16)
    for start, stop in ((0, 1), (8, 9), (2, 5), (4, 8)):
        torch._dynamo.reset()
        part = Attention(*(t[start:stop] for t in (p.q, p.k, p.v, p.do)), p.mask, p.scale)
        for alone, there in zip(train(compiled, part, seen, torch.bfloat16), whole, strict=True):
            assert torch.equal(alone, there[start:stop])
    assert {record.status for record in sites()} == {"replaced"}
    assert not any(record.forward.startswith("not replaced") for record in sites())


@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.2])
@pytest.mark.parametrize("bounds", [(0, None), (0, 99), (None, None)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scales_that_are_not_positive(scale: float, bounds: tuple[int | None, int | None], dtype: torch.dtype) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep(300, 300, *bounds), scale=scale)

    p = Attention.random(300, 300, 64, Band(*bounds), dtype=dtype)
    mask = keep(300, 300, *bounds)
    found = train(torch.compile(attend), p, mask.any(1), dtype)
    assert_close(found, train(exactly(mask, scale), p, mask.any(1), torch.float64))
    (record,) = sites()
    assert (record.status, record.forward) == ("replaced", "hopper" if dtype == torch.bfloat16 else "portable")
