"""Programs with FlexAttention, for an H100 that is not there: transformers, and a layer as torchtitan writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention

import dash_inductor

from ..support.flex import Mod, causal
from ..support.hf_models import tiny_flex_llama

pytestmark = pytest.mark.usefixtures("deterministic")

LENGTH = 256


def fates(program: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
    explanation = dash_inductor.explain(program, *args, arch="sm_90", **kwargs)
    assert not explanation.unknown, explanation.unknown
    records = [site.record for site in explanation.sites]
    assert not [record for record in records if record.status != "replaced"], records
    return [(record.mask, str(record.plan).split("/")[0]) for record in records]


# ---- transformers


@pytest.mark.parametrize("packed", [False, True])
def test_transformers(packed: bool) -> None:
    """Its mask is made of `position_ids`, whether the program gives them or not."""
    model, inputs = tiny_flex_llama(packed)
    found = fates(model, **inputs)
    assert found == [("segments(0,0) & interval(none,1,1)", "hopper")] * 2


# ---- torchtitan: models/common/attention.py of 0.3.0


def packed_documents(positions: Tensor) -> Mod:
    """Documents beside a causal mask, as `get_efficient_causal_mask_mod_for_packed_document`."""
    batch, length = positions.shape
    begins = positions == 0
    ids = torch.cumsum(begins.int(), 1).to(torch.int32) - 1
    places = torch.arange(length, dtype=torch.int32)
    if batch == 1:
        number, offsets = ids[0], torch.full((length + 128,), length, dtype=torch.int32)
        last = torch.full_like(number, length)
        offsets.scatter_(0, torch.where(begins[0], number, last).long(), torch.where(begins[0], places, last))
        return lambda b, h, q, k: k >= offsets[number[q]]
    ends = torch.full((batch, length), length, dtype=torch.int32)
    later = begins & (ids > 0)
    at = torch.where(later, ids - 1, torch.full_like(ids, length - 1)).long()
    ends.scatter_(1, at, torch.where(later, places.expand_as(ids), torch.full_like(ids, length)))
    end = ends.gather(1, ids.long()) - 1
    return lambda b, h, q, k: q <= end[b, k]


class FlexAttention(nn.Module):
    """Attention of [batch, length, heads, dim]; what is compiled is an attribute of the class."""

    options: ClassVar[dict[str, bool]] = {
        "wrap_inductor_compiled_regions": True, "max_autotune": True, "coordinate_descent_tuning": True,
        "triton.cudagraphs": False,
    }  # fmt: skip
    compiled: ClassVar[Any] = torch.compile(flex_attention, options=options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        out, _ = FlexAttention.compiled(
            *heads_first, block_mask=mask, scale=None, enable_gqa=True, return_aux=AuxRequest(lse=False),
            kernel_options={},
        )  # fmt: skip
        found: Tensor = out.transpose(1, 2)
        return found


class Block(nn.Module):
    """Compiled by itself."""

    def __init__(self, dim: int = 256, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim // heads
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk, self.wv = (nn.Linear(dim, self.dim * kv_heads, bias=False) for _ in range(2))
        self.attention = FlexAttention()

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.dim)) for linear in (self.wq, self.wk, self.wv))
        return x + self.wo(self.attention(q, k, v, mask).flatten(2))


@pytest.mark.parametrize(
    ("batch", "expected"), [(1, "causal & interval(0,none,none)"), (2, "causal & interval(0,none,1)")]
)
def test_torchtitan(batch: int, expected: str) -> None:
    positions = torch.stack([torch.arange(LENGTH) % (60 + 7 * i) for i in range(batch)])
    mod = and_masks(causal, packed_documents(positions))
    mask = create_block_mask(mod, batch, None, LENGTH, LENGTH, "cpu")
    ids = torch.cumsum((positions == 0).int(), 1)
    place = torch.arange(LENGTH)
    visible = (place[:, None] >= place) & (ids[:, :, None] == ids[:, None])
    index = [torch.arange(n).view(shape) for n, shape in ((batch, (-1, 1, 1)), (LENGTH, (-1, 1)), (LENGTH, (-1,)))]
    assert torch.equal(mod(index[0], index[0], index[1], index[2]).expand(visible.shape), visible)
    layers = [Block().bfloat16(), Block().bfloat16()]

    def model(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, mask)
        return x

    x = torch.zeros(batch, LENGTH, 256, dtype=torch.bfloat16)
    assert fates(model, x) == [(expected, "hopper")] * 2
