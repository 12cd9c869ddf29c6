"""Programs that compute attention by hand: a softmax between two products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BATCH, HEADS, LENGTH, DIM = 2, 4, 33, 16
Shape = tuple[int, ...]
QKV: tuple[Shape, ...] = ((BATCH, HEADS, LENGTH, DIM),) * 3
SPLIT: Shape = (BATCH, LENGTH, HEADS // 2, 2, DIM)
GROUPED: tuple[Shape, ...] = (QKV[0], *((BATCH, HEADS // 2, LENGTH, DIM),) * 2)


@dataclass(frozen=True)
class Program:
    """A function of tensors of these shapes, and the mask that its record shows."""

    function: Callable[..., Tensor]
    mask: str
    shapes: tuple[Shape, ...] = QKV


def order(q: Tensor) -> Tensor:
    """Who sees whom in causal attention."""
    place = torch.arange(q.shape[-2], device=q.device)
    return place[:, None] >= place


def causal(q: Tensor) -> Tensor:
    """A causal mask of floats, as transformers has it."""
    lowest = torch.finfo(torch.float32 if q.dtype == torch.float64 else q.dtype).min
    return torch.where(order(q), 0.0, lowest).to(q.dtype)


def repeated(x: Tensor) -> Tensor:
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, 2, length, dim).reshape(batch, 2 * heads, length, dim)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(
        q @ k.transpose(-1, -2) * 0.2 + causal(q), -1, dtype=torch.promote_types(q.dtype, torch.float32)
    )
    return (weights.to(q.dtype) @ v).transpose(1, 2).contiguous()


def hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / math.sqrt(DIM)).masked_fill(~order(q), -math.inf)
    return scores.softmax(-1) @ v


def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q / 4) @ k.mT
    return torch.where(order(q), scores, torch.finfo(scores.dtype).min).softmax(-1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As MPT: distances times slopes that are reciprocals of powers, and a finite number where nobody sees."""
    heads, length = q.shape[1], k.shape[2]
    powers = torch.arange(1, heads + 1, device=q.device).float() * (8 / heads)
    slopes = (1.0 / torch.pow(2, powers)).view(heads, 1, 1)
    bias = torch.arange(1 - length, 1, dtype=torch.int32, device=q.device).view(1, 1, length) * slopes
    scores = q @ k.mT * 0.25 + bias.to(q.dtype)
    return scores.masked_fill(~order(q), torch.finfo(scores.dtype).min).softmax(-1) @ v


def twice_hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    near = order(q) & ~order(q).tril(-9)
    scores = (q @ k.mT).masked_fill(~order(q), -math.inf).masked_fill(~near, -math.inf)
    return scores.softmax(-1) @ v


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.2 + causal(q)
    scores = scores - scores.amax(-1, keepdim=True).detach()
    return scores.softmax(-1) @ v


def flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With the heads in the batch dimension, as BART and Bloom were."""
    batch, heads, length, dim = q.shape
    q, k, v = (t.reshape(batch * heads, length, dim) for t in (q * 0.25, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(batch, heads, length, length) + causal(q)
    weights = scores.view(batch * heads, length, length).softmax(-1)
    return torch.bmm(weights, v).view(batch, heads, length, dim).transpose(1, 2).reshape(batch, length, heads * dim)


def three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    nothing = torch.zeros(1, 1, 1, dtype=q.dtype, device=q.device)
    return torch.baddbmm(nothing, q, k.mT, alpha=0.25).softmax(-1).bmm(v)


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys are [batch, heads, head dim, length], and the result comes transposed."""
    k = k.transpose(1, 2).permute(0, 2, 3, 1)
    weights = (torch.matmul(q, k) * 0.25).softmax(-1)
    return torch.einsum("bhqk,bhkd->bqhd", weights, v)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Gemma 2."""
    k, v = repeated(k), repeated(v)
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5
    scores = torch.tanh(scores / 5.0) * 5.0 + causal(q)
    weights = F.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def sinks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """As gpt-oss."""
    k, v = repeated(k), repeated(v)
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 + causal(q)
    column = sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    both = torch.cat([scores, column], dim=-1)
    both = both - both.max(dim=-1, keepdim=True).values
    weights = F.softmax(both, dim=-1, dtype=both.dtype)[..., :-1]
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def one_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax1, which is a softmax beside a score of 0."""
    scores = (q @ k.mT * 0.25).masked_fill(~order(q), -math.inf)
    largest = scores.max(-1, keepdim=True).values
    powers = torch.exp(scores - largest)
    return (powers / (torch.exp(-largest) + powers.sum(-1, keepdim=True))) @ v


def three_more(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25 + bias
    largest = scores.detach().amax(-1, keepdim=True)
    powers = torch.exp(scores - largest)
    return (powers / (powers.sum(-1, keepdim=True) + 3 * torch.exp(-largest))) @ v


def one_more_bounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The maximum is that of the score of 0, too."""
    k, v = repeated(k), repeated(v)
    scores = q @ k.mT * 0.25
    largest = scores.amax(-1, keepdim=True).clamp(min=0)
    powers = torch.exp(scores - largest)
    return F.dropout(powers / ((-largest).exp() + powers.sum(-1, keepdim=True)), 0.0) @ v


def one_more_unbounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    powers = (q @ k.mT * 0.25 + causal(q)).exp()
    return (powers / (1 + powers.sum(-1, keepdim=True))) @ v


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.25).masked_fill(~order(q), -math.inf)
    return F.pad(scores, (0, 1), value=-0.5).softmax(-1)[..., :-1] @ v


def biased_sinks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, bias: Tensor) -> Tensor:
    column = sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    scores = torch.cat([q @ k.mT * 0.25 + bias + causal(q), column], -1)
    return scores.softmax(-1)[..., :-1] @ v


def pair(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    """As OpenFold: dimensions in front, a bias for all rows, and a gate."""
    q, k, v = (t[None] for t in (q, k, v))
    scores = torch.einsum("...qd,...kd->...qk", q * DIM**-0.5, k) + bias
    found = torch.einsum("...qk,...kd->...qd", scores.softmax(-1), v).transpose(-2, -3)
    return (found * gate.sigmoid().transpose(-2, -3)).flatten(-2)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query heads that share a head of key and value, by einsum: nothing is repeated."""
    scores = torch.einsum("bqhgd,bkhd->bhgqk", q, k) * 0.25
    return torch.einsum("bhgqk,bkhd->bqhgd", scores.softmax(-1), v)


def grouped_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqhgd,bkhd->bhgqk", q, k) * 0.25
    place = torch.arange(q.shape[1], device=q.device)
    scores = scores.masked_fill(place[:, None] < place, -math.inf)
    return torch.einsum("bhgqk,bkhd->bqhgd", scores.softmax(-1), v).flatten(2)


def grouped_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
    """With a bias for all heads, and a sink for each."""
    scores = torch.einsum("bhgqd,bhkd->bhgqk", q, k) * 0.25 + bias
    column = sink[None, :, :, None, None].expand(*scores.shape[:4], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.einsum("bhgqk,bhkd->bhgqd", weights, v)


def windows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """As Swin: [pictures * windows, heads, length, dim], with a bias of heads, and a mask for each of two windows."""
    place = torch.arange(q.shape[2], device=q.device)
    numbers = place[:, None] + place + torch.arange(2, device=q.device)[:, None, None]
    mask = torch.where(numbers % 3 == 0, -100.0, 0.0).to(q.dtype)
    scores = q @ k.mT * 0.25 + bias
    return (scores.unflatten(0, (-1, 2)) + mask[:, None]).flatten(0, 1).softmax(-1) @ v


def blocks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """As LongT5: [batch, blocks, length, heads, dim], a block of queries with the keys of three, and a learned bias."""
    scores = torch.einsum("...qhd,...khd->...hqk", q, k)
    scores += bias  # in place
    return torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v)


def two_biases(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, more: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + bias + more).softmax(-1) @ v


def scaled_biases(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, more: Tensor) -> Tensor:
    return (((q @ k.mT + bias) * 0.5 + more) * 0.25 + causal(q)).softmax(-1) @ v


def forgetting(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """As the Forgetting Transformer: the sums of gates of queries are added, and those of keys are subtracted."""
    decay = F.logsigmoid(gate).cumsum(-1)
    scores = q @ k.mT * 0.25 + decay[..., :, None] - decay[..., None, :]
    return scores.masked_fill(~order(q), -math.inf).softmax(-1) @ v


def subtracted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A bias that is subtracted, and a factor behind it."""
    return ((q @ k.mT - bias) * 0.25 + causal(q)).softmax(-1) @ v


def scaled_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).masked_fill(~order(q), torch.finfo(q.dtype).min) / 8).softmax(-1) @ v


def temperature(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    """A learned factor of each head, as Swin V2."""
    norms = (F.normalize(q.float(), dim=-1).to(q.dtype), F.normalize(k.float(), dim=-1).to(q.dtype))
    scores = norms[0] @ norms[1].mT * heads.clamp(max=math.log(100)).exp()[:, None, None]
    return (scores + causal(q)).softmax(-1) @ v


def divided(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    return (q @ k.mT * 0.2 / heads.exp()).softmax(-1) @ v


def of_keys(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
    k, v = repeated(k), repeated(v)
    return (q @ k.mT * keys * 0.25 + causal(q)).softmax(-1) @ v


def of_groups(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    scores = torch.einsum("bqhgd,bkhd->bhgqk", q, k) * heads[:, :, None, None]
    return torch.einsum("bhgqk,bkhd->bqhgd", scores.softmax(-1), v)


def tied(x: Tensor) -> Tensor:
    """Query, key and value are one tensor."""
    return (x @ x.mT * 0.25 + causal(x)).softmax(-1) @ x


def by_math(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's math implementation."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, bias)


PLANE = (BATCH, HEADS, LENGTH, LENGTH)
PROGRAMS = {
    "plain": Program(plain, "causal"),
    "hidden": Program(hidden, "causal"),
    "chosen": Program(chosen, "causal"),
    "alibi": Program(alibi, "causal + bias"),
    "twice hidden": Program(twice_hidden, "band(0,8)"),
    "shifted": Program(shifted, "causal"),
    "flat": Program(flat, "causal"),
    "three dimensions": Program(three, "full"),
    "keys first": Program(keys_first, "full"),
    "one query": Program(three, "full", ((BATCH, HEADS, 1, DIM), *QKV[1:])),
    "softcap": Program(capped, "causal", GROUPED),
    "sinks": Program(sinks, "causal", (*GROUPED, (HEADS,))),
    "sinks beside a bias": Program(biased_sinks, "full + bias", (*QKV, (HEADS,), (HEADS, LENGTH, LENGTH))),
    "one more": Program(one_more, "causal"),
    "three more beside a bias": Program(three_more, "full + bias", (*QKV, (HEADS, LENGTH, LENGTH))),
    "one more, bounded": Program(one_more_bounded, "full", GROUPED),
    "one more, unbounded": Program(one_more_unbounded, "causal"),
    "one more in a column": Program(padded, "causal"),
    "pair bias": Program(pair, "full + bias", (*QKV, (1, 1, *PLANE[1:]), QKV[0])),
    "blocks": Program(
        blocks, "full + bias", ((2, 3, 8, HEADS, DIM), *[(2, 3, 24, HEADS, DIM)] * 2, (1, 1, HEADS, 8, 24))
    ),
    "two biases": Program(two_biases, "full + bias", (*QKV, (HEADS, 1, LENGTH), PLANE)),
    "grouped": Program(grouped, "full", (SPLIT, *(SPLIT[:3] + SPLIT[4:],) * 2)),
    "grouped causal": Program(grouped_causal, "causal", (SPLIT, *(SPLIT[:3] + SPLIT[4:],) * 2)),
    "grouped beside a bias and sinks": Program(
        grouped_biased, "full + bias", ((BATCH, 2, 2, LENGTH, DIM), *GROUPED[1:], (LENGTH, LENGTH), (2, 2))
    ),
    "windows": Program(windows, "full + bias", (*((2 * BATCH, *QKV[0][1:]),) * 3, PLANE[1:])),
    "one query beside biases": Program(
        two_biases,
        "full + bias",
        ((BATCH, HEADS, 1, DIM), *QKV[1:], (HEADS, 1, LENGTH), (BATCH, HEADS, 1, LENGTH)),
    ),
    "scaled biases": Program(scaled_biases, "full + bias", (*QKV, (HEADS, 1, LENGTH), PLANE)),
    "forget gates": Program(forgetting, "full + bias", (*QKV, (BATCH, HEADS, LENGTH))),
    "subtracted bias": Program(subtracted, "full + bias", (*QKV, (HEADS, LENGTH, LENGTH))),
    "scaled mask": Program(scaled_mask, "causal"),
    "temperature": Program(temperature, "causal", (*QKV, (HEADS,))),
    "divided by a temperature": Program(divided, "full", (*QKV, (HEADS, LENGTH, 1))),
    "factor of keys": Program(of_keys, "causal", (*GROUPED, (BATCH, 1, 1, LENGTH))),
    "grouped with a temperature": Program(of_groups, "full", (SPLIT, *(SPLIT[:3] + SPLIT[4:],) * 2, (2, 2))),
    "tied": Program(tied, "causal", QKV[:1]),
    "math": Program(by_math, "full + bias", (*QKV, (1, *PLANE[1:]))),
}
