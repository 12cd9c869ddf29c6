"""Variants of attention, written as their authors write them: differential attention, forget gates, native sparse
attention, residual scores, attention over channels, softmaxes with one more in the denominator.

``python -m tests.frontends.variant_programs`` prints what becomes of every program, and its errors.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dash_inductor.records.records import SiteRecord, sites

from ..support.flex import training
from ..support.graphs import tensors

BATCH, HEADS, LENGTH, DIM = 2, 4, 40, 16
LAMBDA_INIT = 0.2
Shape = tuple[int | str, ...]
"""Of a tensor; "length" stands for the length."""

TOKENS: Shape = (BATCH, HEADS, "length", DIM)
PAIRS: Shape = (BATCH, 2 * HEADS, "length", DIM)
WIDE: Shape = (BATCH, HEADS, "length", 2 * DIM)
LAMBDAS: tuple[Shape, ...] = ((DIM,),) * 4


def visible(q: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2], device=q.device)
    return place[:, None] >= place


def causal_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


# ---- differential attention


def _lambda(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    first, second = (torch.exp((q * k).sum(-1).to(wide)).to(dtype) for q, k in ((q1, k1), (q2, k2)))
    return first - second + LAMBDA_INIT


def _normed(x: Tensor) -> Tensor:
    """The norm of heads, without its weight."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-5) * (1 - LAMBDA_INIT)


def differential_maps(q: Tensor, k: Tensor, v: Tensor, *lambdas: Tensor) -> Tensor:
    """As `multihead_diffattn` of the authors: the difference of two maps, over heads in pairs."""
    batch, _, length, _ = q.shape
    scores = torch.matmul(q * DIM**-0.5, k.transpose(-1, -2))
    mask = torch.triu(torch.zeros([length, length], device=q.device).fill_(float("-inf")).type_as(scores), 1)
    scores = scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).type_as(scores)
    weights = weights.view(batch, HEADS, 2, length, length)
    weights = weights[:, :, 0] - _lambda(*lambdas, q.dtype) * weights[:, :, 1]
    return _normed(torch.matmul(weights, v)).transpose(1, 2).flatten(2)


def differential_maps_of_numbers(q: Tensor, k: Tensor, v: Tensor, *lambdas: Tensor) -> Tensor:
    """The same with `nan_to_num`, as the authors have it."""
    batch, _, length, _ = q.shape
    scores = torch.nan_to_num(torch.matmul(q * DIM**-0.5, k.transpose(-1, -2)))
    scores = scores.masked_fill(~visible(q), -math.inf)
    weights = scores.softmax(-1).view(batch, HEADS, 2, length, length)
    weights = weights[:, :, 0] - _lambda(*lambdas, q.dtype) * weights[:, :, 1]
    return torch.matmul(weights, v)


def differential_softmaxes(q: Tensor, k: Tensor, v: Tensor, *lambdas: Tensor) -> Tensor:
    """Two softmaxes of halves of the heads, whose difference multiplies the values."""
    (q1, q2), (k1, k2) = q.chunk(2, 1), k.chunk(2, 1)
    first, second = (
        (a @ b.mT * DIM**-0.5).masked_fill(~visible(q), -math.inf).softmax(-1) for a, b in ((q1, k1), (q2, k2))
    )
    return _normed((first - _lambda(*lambdas, q.dtype) * second) @ v)


def differential_outputs(q: Tensor, k: Tensor, v: Tensor, *lambdas: Tensor) -> Tensor:
    """As `DiffLlamaAttention`: two softmaxes by hand, and the difference of what they give."""
    weights = (q @ k.mT / math.sqrt(DIM)).masked_fill(~visible(q), -math.inf).softmax(-1)
    first, second = (weights @ v.repeat(1, 2, 1, 1)).chunk(2, 1)
    return _normed(first - _lambda(*lambdas, q.dtype) * second)


def differential_sdpa(q: Tensor, k: Tensor, v: Tensor, *lambdas: Tensor) -> Tensor:
    """As `multihead_flashdiff_1`."""
    q, k = (x.unflatten(1, (HEADS, 2)) for x in (q, k))
    first, second = (F.scaled_dot_product_attention(q[:, :, i], k[:, :, i], v, is_causal=True) for i in (0, 1))
    return _normed(first - _lambda(*lambdas, q.dtype) * second)


def differential_sdpa_of_halves(q: Tensor, k: Tensor, v: Tensor, *lambdas: Tensor) -> Tensor:
    """As `multihead_flashdiff_2`: values of the head dim of query."""
    q, k = (x.unflatten(1, (HEADS, 2)) for x in (q, k))
    attend, halves = F.scaled_dot_product_attention, v.chunk(2, -1)
    first, second = (
        torch.cat([attend(q[:, :, i], k[:, :, i], x, is_causal=True) for x in halves], -1) for i in (0, 1)
    )  # fmt: skip
    return _normed(first - _lambda(*lambdas, q.dtype) * second)


def differential_flex(q: Tensor, k: Tensor, v: Tensor, *lambdas: Tensor) -> Tensor:
    length = q.shape[2]
    mask = create_block_mask(causal_mod, None, None, length, length, q.device)
    pairs = zip(q.chunk(2, 1), k.chunk(2, 1), strict=True)
    first, second = (flex_attention(a, b, v, block_mask=mask) for a, b in pairs)
    return _normed(first - _lambda(*lambdas, q.dtype) * second)


def differential_second(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """The second version: twice the query heads, and one sigmoid for each token and head in the place of a lambda."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[:, 0::2] - torch.sigmoid(gate)[..., None] * out[:, 1::2]


def differential_second_by_hand(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    out = (q @ k.mT * DIM**-0.5).masked_fill(~visible(q), -math.inf).softmax(-1) @ v
    return out[:, 0::2] - torch.sigmoid(gate)[..., None] * out[:, 1::2]


# ---- forget gates


def forgetting_flex(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    decay = F.logsigmoid(gate.float()).cumsum(-1)

    def forget(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + (decay[b, h, i] - decay[b, h, j])

    length = q.shape[2]
    mask = create_block_mask(causal_mod, None, None, length, length, q.device)
    return flex_attention(q, k, v, score_mod=forget, block_mask=mask)


def forgetting_sdpa(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    decay = F.logsigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32))).cumsum(-1)
    bias = decay[..., :, None] - decay[..., None, :]
    bias = bias.masked_fill(~visible(q), -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))


def forgetting_by_hand(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """As the reference of the authors: scores in float32, and the sums of gates subtracted."""
    wide = torch.promote_types(q.dtype, torch.float32)
    decay = F.logsigmoid(gate.to(wide)).cumsum(-1)
    scores = (q @ k.mT).to(wide) * DIM**-0.5
    scores = scores + decay[..., :, None] - decay[..., None, :]
    scores = scores.masked_fill(~visible(q), float("-inf"))
    return (torch.softmax(scores, -1).to(v.dtype) @ v).transpose(1, 2)


# ---- native sparse attention

BLOCK, STRIDE, CHOSEN = 8, 8, 2


def _compressed(x: Tensor) -> Tensor:
    return x.unflatten(2, (-1, BLOCK)).mean(3)


def _gated(branches: list[Tensor], gates: Tensor) -> Tensor:
    weights = gates.sigmoid().unbind(-1)
    return sum((w[..., None] * out for w, out in zip(weights, branches, strict=True)), torch.zeros_like(branches[0]))


def sparse_flex(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """Three branches by FlexAttention: compressed keys, chosen blocks, and a window."""
    length = q.shape[2]
    small, values = _compressed(k), _compressed(v)

    def before(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j < 1) | ((j + 1) * BLOCK - 1 <= i)

    with torch.no_grad():
        importance = (q @ small.mT).masked_fill(~_before(q, small), -math.inf).softmax(-1)
        blocks = importance.topk(CHOSEN, dim=-1).indices
        chosen = torch.zeros_like(importance, dtype=torch.bool).scatter(-1, blocks, True)

    def selected(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (chosen[b, h, i, j // BLOCK] | (i // BLOCK == j // BLOCK))

    def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < 12)

    batch, heads = q.shape[:2]
    masks = [
        create_block_mask(before, None, None, length, length // BLOCK, q.device),
        create_block_mask(selected, batch, heads, length, length, q.device),
        create_block_mask(window, None, None, length, length, q.device),
    ]
    parts = [(small, values), (k, v), (k, v)]
    branches = [flex_attention(q, a, b, block_mask=m) for (a, b), m in zip(parts, masks, strict=True)]
    return _gated(branches, gates)


def _before(q: Tensor, small: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(small.shape[2], device=q.device)
    return (j < 1) | ((j + 1) * BLOCK - 1 <= i)


def sparse_by_hand(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """The same by SDPA and by hand; the map of the compressed branch chooses the blocks, so that it is read twice."""
    small, values = _compressed(k), _compressed(v)
    weights = (q @ small.mT * DIM**-0.5).masked_fill(~_before(q, small), -math.inf).softmax(-1)
    blocks = weights.detach().topk(CHOSEN, dim=-1).indices
    chosen = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, blocks, True)
    place = torch.arange(q.shape[2], device=q.device)
    near = place[:, None] // BLOCK == place // BLOCK
    selected = (chosen.repeat_interleave(BLOCK, -1) | near) & visible(q)
    window = visible(q) & (place[:, None] - place < 12)
    branches = [weights @ values, *(F.scaled_dot_product_attention(q, k, v, attn_mask=m) for m in (selected, window))]
    return _gated(branches, gates)


# ---- scores or maps that something else reads


def residual_scores(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """As RealFormer: two layers, the second of which adds the scores of the first to its own."""
    first = q @ k.mT * DIM**-0.5
    out = first.softmax(-1) @ v
    q = q + out @ w
    second = q @ k.mT * DIM**-0.5 + first
    return out + second.softmax(-1) @ v


def residual_maps(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Maps of the layer before that are added to those of this one."""
    first = (q @ k.mT * DIM**-0.5).softmax(-1)
    q = q + first @ v @ w
    return ((q @ k.mT * DIM**-0.5).softmax(-1) + first) @ v


def talking_heads(q: Tensor, k: Tensor, v: Tensor, before: Tensor, behind: Tensor) -> Tensor:
    """Heads are mixed in front of the softmax and behind it."""
    scores = torch.einsum("bhqk,hg->bgqk", q @ k.mT * DIM**-0.5, before)
    return torch.einsum("bhqk,hg->bgqk", scores.softmax(-1), behind) @ v


# ---- cosines


def over_channels(qkv: Tensor, temperature: Tensor) -> Tensor:
    """As XCiT: a softmax over the channels of a head; the products sum over tokens."""
    batch, tokens, _, heads, _ = qkv.shape
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    q, k, v = (x.transpose(-2, -1) for x in (q, k, v))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    weights = ((q @ k.transpose(-2, -1)) * temperature).softmax(dim=-1)
    return (weights @ v).permute(0, 3, 1, 2).reshape(batch, tokens, heads * DIM)


def cosines(q: Tensor, k: Tensor, v: Tensor, logits: Tensor, bias: Tensor) -> Tensor:
    """As Swin V2."""
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    scores = scores * torch.clamp(logits, max=math.log(1.0 / 0.01)).exp()
    place = torch.arange(q.shape[2], device=q.device)
    table = 16 * torch.sigmoid(bias)[:, (place[:, None] - place).clamp(-8, 7) + 8]
    return ((scores + table.unsqueeze(0)).softmax(-1) @ v).transpose(1, 2).flatten(2)


# ---- one more in the denominator


def _softmax_one(x: Tensor) -> Tensor:
    largest = x.max(dim=-1, keepdim=True).values
    powers = torch.exp(x - largest)
    return powers / (torch.exp(-largest) + powers.sum(-1, keepdim=True))


def one_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _softmax_one((q @ k.mT * DIM**-0.5).masked_fill(~visible(q), -math.inf)) @ v


def one_more_unbounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    powers = torch.exp(q @ k.mT * DIM**-0.5)
    return (powers / (1 + powers.sum(-1, keepdim=True))) @ v


def one_more_shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `softmax_one` of the package flash-attention-softmax-n has it in its first form: 1 beside shifted powers."""
    scores = q @ k.mT * DIM**-0.5
    powers = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return (powers / (1 + powers.sum(-1, keepdim=True))) @ v


def one_more_column(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT * DIM**-0.5).masked_fill(~visible(q), -math.inf)
    return F.pad(scores, (0, 1)).softmax(-1)[..., :-1] @ v


def one_more_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT * DIM**-0.5).masked_fill(~visible(q), -math.inf)
    return torch.cat([scores, torch.zeros_like(scores[..., :1])], -1).softmax(-1)[..., :-1] @ v


def one_more_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A key and a value of zeros, as `add_zero_attn`."""
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def one_more_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = q.shape[2]
    mask = create_block_mask(causal_mod, None, None, length, length, q.device)
    out, logsumexp = flex_attention(q, k, v, block_mask=mask, return_lse=True)
    return out * torch.sigmoid(logsumexp).unsqueeze(-1).to(out.dtype)


# ---- gates


def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """As Qwen3-Next."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2) * torch.sigmoid(gate)


def gated_by_hand(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    out = (q @ k.mT * DIM**-0.5).masked_fill(~visible(q), -math.inf).softmax(-1) @ v
    return out.transpose(1, 2).flatten(2) * torch.sigmoid(gate)


@dataclass(frozen=True)
class Variant:
    """A function of tensors of these shapes, and what records of attention that is not replaced say; () if all is."""

    function: Callable[..., Tensor]
    shapes: tuple[Shape, ...]
    kept: tuple[str, ...] = ()


DIFFERENTIAL = (PAIRS, PAIRS, WIDE, *LAMBDAS)
SECOND = (PAIRS, TOKENS, TOKENS, (BATCH, HEADS, "length"))
FORGET = (*(TOKENS,) * 3, (BATCH, HEADS, "length"))
SPARSE = (*(TOKENS,) * 3, (BATCH, HEADS, "length", 3))
RESIDUAL = (*(TOKENS,) * 3, (DIM, DIM))
GATED = (*(TOKENS,) * 3, (BATCH, "length", HEADS * DIM))
VARIANTS: dict[str, Variant] = {
    "differential maps": Variant(differential_maps, DIFFERENTIAL),
    "differential maps of numbers": Variant(
        differential_maps_of_numbers, DIFFERENTIAL, ("NaN among the scores becomes a number",)
    ),
    "differential softmaxes": Variant(differential_softmaxes, DIFFERENTIAL),
    "differential outputs": Variant(differential_outputs, DIFFERENTIAL),
    "differential sdpa": Variant(differential_sdpa, DIFFERENTIAL),
    "differential sdpa of halves": Variant(differential_sdpa_of_halves, DIFFERENTIAL),
    "differential flex": Variant(differential_flex, DIFFERENTIAL),
    "differential second": Variant(differential_second, SECOND),
    "differential second by hand": Variant(differential_second_by_hand, SECOND),
    "forgetting flex": Variant(forgetting_flex, FORGET),
    "forgetting sdpa": Variant(forgetting_sdpa, FORGET),
    "forgetting by hand": Variant(forgetting_by_hand, FORGET),
    "sparse flex": Variant(sparse_flex, SPARSE),
    "sparse by hand": Variant(sparse_by_hand, SPARSE, ("is read by aten::topk",)),
    "residual scores": Variant(residual_scores, RESIDUAL, ("the matrix of scores",)),
    "residual maps": Variant(residual_maps, RESIDUAL, ("the softmax",)),
    "talking heads": Variant(talking_heads, (*(TOKENS,) * 3, (HEADS, HEADS), (HEADS, HEADS)), ("talking heads",)),
    "over channels": Variant(over_channels, ((BATCH, "length", 3, HEADS, DIM), (HEADS, 1, 1))),
    "cosines": Variant(cosines, (*(TOKENS,) * 3, (HEADS, 1, 1), (HEADS, 16))),
    "one more": Variant(one_more, (TOKENS,) * 3),
    "one more unbounded": Variant(one_more_unbounded, (TOKENS,) * 3),
    "one more shifted": Variant(one_more_shifted, (TOKENS,) * 3, ("one more in the sum",)),
    "one more column": Variant(one_more_column, (TOKENS,) * 3),
    "one more zeros": Variant(one_more_zeros, (TOKENS,) * 3),
    "one more key": Variant(one_more_key, (TOKENS,) * 3),
    "one more flex": Variant(one_more_flex, (TOKENS,) * 3),
    "gated": Variant(gated, GATED),
    "gated by hand": Variant(gated_by_hand, GATED),
}


@dataclass(frozen=True)
class Program:
    """A variant in one dtype.

    Attributes:
        name: the key of `VARIANTS`.
        dtype: of all tensors.
        dynamic: whether lengths are dynamic.
        trained: whether gradients are computed.
    """

    name: str
    dtype: str
    dynamic: bool
    trained: bool

    @staticmethod
    def all() -> Iterator[Program]:
        for name in VARIANTS:
            for dtype in ("float32", "bfloat16"):
                for dynamic in (False, True):
                    yield from (Program(name, dtype, dynamic, trained) for trained in (True, False))

    def inputs(self, length: int) -> list[Tensor]:
        shapes = [[length if n == "length" else int(n) for n in shape] for shape in VARIANTS[self.name].shapes]
        found = tensors(*shapes, dtype=getattr(torch, self.dtype))
        return found if self.trained else [x.detach() for x in found]


def results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of all inputs if they want them."""
    output = function(*inputs)
    if not inputs[0].requires_grad:
        return [output]
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def outcome(program: Program, **options: bool) -> tuple[list[SiteRecord], float]:
    """The records of a program, and its largest error as a multiple of what is allowed.

    Allowed is twice the error of the program without dash_inductor, and 16 units in the last place of the largest
    number of the result.
    """
    function, worst = VARIANTS[program.name].function, 0.0
    with training() as graphs:
        run = graphs.compile(function, dynamic=True if program.dynamic else None, **options)
        for length in (LENGTH, LENGTH + 32) if program.dynamic else (LENGTH,):
            inputs = program.inputs(length)
            ours = results(run, inputs)
            eager = results(function, inputs)
            doubles = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
            true = results(function, doubles)
            largest = max(float(x.abs().max()) for x in true)
            for found, theirs, wanted in zip(ours, eager, true, strict=True):
                allowed = 16 * torch.finfo(found.dtype).eps * max(float(wanted.abs().max()), largest / 16)
                allowed += 2 * float((theirs - wanted).abs().max())
                worst = max(worst, float((found - wanted).abs().max()) / allowed)
    return sites(), worst


def sample(count: int, seed: int) -> list[Program]:
    """So many programs, which a seed draws."""
    return random.Random(seed).sample(list(Program.all()), count)


def main() -> int:
    torch.use_deterministic_algorithms(True)
    for program in Program.all():
        if sys.argv[1:] and not any(part in str(program) for part in sys.argv[1:]):
            continue
        try:
            records, error = outcome(program)
        except Exception as problem:  # a program that breaks is what this looks for
            print(program, "BREAKS", type(problem), str(problem)[:600], flush=True)
            continue
        print(f"{program.name}, {program.dtype}, {program.dynamic=}, {program.trained=}: {error:.2f}")
        for record in records:
            print("   ", record.status, record.reason, record.mask, "|", record.detail, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
