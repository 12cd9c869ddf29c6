"""Attention that no entry reads, and programs that look like attention and are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.frontends.unread.words import COMBINED

Function = Callable[..., Tensor]
LENGTH, HEADS, BATCH, DIM = 24, 4, 2, 16
QKV: tuple[tuple[int, ...], ...] = ((BATCH, HEADS, LENGTH, DIM),) * 3
MATRIX = ((LENGTH, DIM), (DIM, 7))


@dataclass(frozen=True)
class Unread:
    """An attention.

    Attributes:
        function: the program.
        words: what its record says of it, or a part of that.
        shapes: of its tensors.
    """

    function: Function
    words: str
    shapes: Sequence[Sequence[int]] = QKV


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / 4


def _causal(q: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], device=q.device).tril()


def _column(sink: Tensor, q: Tensor) -> Tensor:
    return sink[None, :, None, :].expand(q.shape[0], -1, q.shape[2], -1)


def _sink_in_front(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return torch.cat([_column(sink, q), _scores(q, k)], -1).softmax(-1)[..., 1:] @ v


def _two_sinks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return torch.cat([_scores(q, k), _column(sink, q)], -1).softmax(-1)[..., :-2] @ v


def _scaled_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return (torch.cat([q @ k.mT, _column(sink, q)], -1) / 4).softmax(-1)[..., :-1] @ v


def _padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.pad(_scores(q, k), (1, 0)).softmax(-1)[..., 1:] @ v


def _plus_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the 1 counts for depends on the maximum."""
    scores = _scores(q, k)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights / (1 + weights.sum(-1, keepdim=True))) @ v


def _learned_plus(q: Tensor, k: Tensor, v: Tensor, more: Tensor) -> Tensor:
    weights = _scores(q, k).exp()
    return (weights / (more[:, None] + weights.sum(-1, keepdim=True))) @ v


def _log_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _scores(q, k).log_softmax(-1).exp() @ v


def _logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _scores(q, k).exp() * _causal(q)
    return (weights / weights.sum(-1, keepdim=True)) @ v


def _masked_by_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    weights = torch.where(_causal(q).bool(), (scores - scores.amax(-1, keepdim=True)).exp(), 0.0)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-6)) @ v


def _mixed_before(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    return F.linear(_scores(q, k).permute(0, 2, 3, 1), mix).permute(0, 3, 1, 2).softmax(-1) @ v


def _mixed_after(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    return torch.einsum("bhij,hg->bgij", _scores(q, k).softmax(-1), mix) @ v


def _mixed_twice(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    weights = torch.einsum("bhij,hg->bgij", _scores(q, k), mix).softmax(-1)
    return torch.einsum("bhij,hg->bgij", weights, mix) @ v


def _relu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _scores(q, k).relu()
    return (weights / (weights.sum(-1, keepdim=True) + 1e-6)) @ v


def _after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _scores(q, k).exp()
    return (weights @ v) / weights.sum(-1, keepdim=True)


def _by_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    both = _scores(q, k).exp() @ torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)
    return both[..., :-1] / both[..., -1:]


def _in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    largest = q.new_full((*q.shape[:-1], 1), -math.inf)
    total, out = torch.zeros_like(largest), torch.zeros_like(q)
    for keys, values in zip(k.chunk(2, -2), v.chunk(2, -2), strict=True):
        scores = _scores(q, keys)
        now = torch.maximum(largest, scores.amax(-1, keepdim=True))
        factor, weights = (largest - now).exp(), (scores - now).exp()
        total, out = total * factor + weights.sum(-1, keepdim=True), out * factor + weights @ values
        largest = now
    return out / total


def _reciprocal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _scores(q, k).exp()
    return (weights * weights.sum(-1, keepdim=True).reciprocal()) @ v


def _one_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q[:, :, :1] * k).sum(-1).exp()
    weights = weights / (1 + weights.sum(-1, keepdim=True))
    return (weights[..., None] * v).sum(-2)


def _additive(q: Tensor, k: Tensor, of_query: Tensor, of_key: Tensor, column: Tensor) -> Tensor:
    return (torch.tanh((q @ of_query)[:, :, None] + (k @ of_key)[:, None]) @ column).softmax(-1) @ k


def _of_graphs(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = x @ weight
    return F.leaky_relu(h @ a + (h @ b).mT).softmax(-1) @ h


def _without_nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nan_to_num(_scores(q, k)).softmax(-1) @ v


def _difference(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    first, second = _scores(q, k).softmax(-1).unflatten(1, (2, 2)).unbind(2)
    return (first - factor * second).square() @ v[:, :2]


def _mean_of_maps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([_scores(q, k).softmax(-1), _scores(q.cos(), k).softmax(-1)]).mean(0) @ v


def _mean_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _scores(q, k).softmax(-1).mean(1) @ v[:, 0]


def _chosen_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _scores(q, k).softmax(-1)
    return (weights[:, [0, 1]] - weights[:, [3, 2]]) @ v[:, :2]


def _squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _scores(q, k).softmax(-1) ** 2
    return (weights / weights.sum(-1, keepdim=True)) @ v


def _slots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _scores(q, k).softmax(-1) + 1e-8
    return (weights / weights.sum(-2, keepdim=True)) @ v


MIX, ONE_MORE = (HEADS, HEADS), "softmax with one more in the sum"
ATTENTION: dict[str, Unread] = {
    "sink in front": Unread(_sink_in_front, "a sink before the keys", (*QKV, (HEADS, 1))),
    "two sinks": Unread(_two_sinks, "two sinks", (*QKV, (HEADS, 2))),
    "scaled sink": Unread(_scaled_sink, "a sink scaled with the scores", (*QKV, (HEADS, 1))),
    "padded": Unread(_padded, ONE_MORE),
    "plus one": Unread(_plus_one, ONE_MORE),
    "plus a learned number": Unread(_learned_plus, ONE_MORE, (*QKV, (HEADS, 1))),
    "nan_to_num": Unread(_without_nan, "NaN among the scores becomes a number"),
    "difference": Unread(_difference, COMBINED, (*QKV, ())),
    "mean of maps": Unread(_mean_of_maps, "aten::cat"),
    "mean of heads": Unread(_mean_of_heads, "aten::mean"),
    "chosen heads": Unread(_chosen_heads, COMBINED),
    "squared": Unread(_squared, "its probabilities are read by"),
    "slots": Unread(_slots, "its probabilities are read by aten::add"),
    "log_softmax": Unread(_log_softmax, "log_softmax and exp"),
    "logsumexp": Unread(_logsumexp, "log_softmax and exp"),
    "masked": Unread(_masked, "masked exponentials divided by their sum"),
    "masked by where": Unread(_masked_by_where, "masked exponentials divided by their sum"),
    "mixed before": Unread(_mixed_before, "heads", (*QKV, MIX)),
    "mixed after": Unread(_mixed_after, "heads are mixed after the softmax (talking heads)", (*QKV, MIX)),
    "mixed twice": Unread(_mixed_twice, "heads are mixed before the softmax (talking heads)", (*QKV, MIX)),
    "relu": Unread(_relu, "aten::relu"),
    "divided after": Unread(_after, "divided after the second product"),
    "divided by ones": Unread(_by_ones, "divided after the second product"),
    "in blocks": Unread(_in_blocks, "divided after the second product"),
    "reciprocal": Unread(_reciprocal, "aten::reciprocal"),
    "one query": Unread(_one_query, ONE_MORE),
    "additive": Unread(_additive, "", ((2, 5, DIM), (2, 7, DIM), (DIM, 8), (DIM, 8), (8,))),
    "of graphs": Unread(_of_graphs, "aten::gt", ((LENGTH, DIM), (DIM, 8), (8, 1), (8, 1))),
}


def _labels(count: int) -> Tensor:
    return torch.arange(count) % 7


def _experts(x: Tensor, weight: Tensor) -> Tensor:
    """What each of seven experts gives for each row."""
    return x[:, None] * weight.mT.sin()


def _router(x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ weight).softmax(-1)[..., None] * _experts(x, weight)).sum(1)


def _router_of_products(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm((x @ weight).softmax(-1)[:, None], _experts(x, weight))[:, 0]


def _router_of_two(x: Tensor, weight: Tensor) -> Tensor:
    weights, chosen = (x @ weight).softmax(-1).topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    found = _experts(x, weight).gather(1, chosen[..., None].expand(-1, -1, x.shape[1]))
    return (weights[..., None] * found).sum(1)


def _graph_norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x @ weight
    h = h - h.mean(0)
    return (h / (h.square().mean(0) + 1e-5).sqrt()) @ weight.mT


def _distillation(x: Tensor, weight: Tensor) -> Tensor:
    return F.kl_div((x @ weight).log_softmax(-1), (x.cos() @ weight).softmax(-1), reduction="batchmean")


def _load_balance(x: Tensor, weight: Tensor) -> Tensor:
    p = (x @ weight).softmax(-1)
    return (F.one_hot(p.argmax(-1), 7).float().mean(0) * p.mean(0)).sum() + p.mean(0) @ _labels(7).float()


def _entropy(x: Tensor, weight: Tensor) -> Tensor:
    p = (x @ weight).softmax(-1)
    return (p * p.log()).sum(-1)


def _linear_attention(x: Tensor, weight: Tensor) -> Tensor:
    q, k = x.relu(), x.cos().relu()
    return (q @ (k.mT @ x)) / (q @ k.sum(0)[:, None] + 1e-6)


OTHERS: dict[str, Function] = {
    "loss": lambda x, w: F.cross_entropy(x @ w, _labels(LENGTH)),
    "smoothed loss": lambda x, w: F.cross_entropy(x @ w, _labels(LENGTH), label_smoothing=0.1),
    "distillation": _distillation,
    "load balance": _load_balance,
    "entropy": _entropy,
    "router": _router,
    "router of products": _router_of_products,
    "router of two": _router_of_two,
    "gumbel": lambda x, w: F.gumbel_softmax(x @ w),
    "layer norm": lambda x, w: F.layer_norm(x @ w, (7,)) @ w.mT,
    "rms norm": lambda x, w: F.rms_norm(x @ w, (7,)) @ w.mT,
    "unit rows": lambda x, w: F.normalize(x @ w, dim=-1) @ w.mT,
    "unit rows of sums": lambda x, w: F.normalize(x @ w, p=1, dim=-1) @ w.mT,
    "batch norm": lambda x, w: F.batch_norm(x @ w, None, None, training=True) @ w.mT,
    "graph norm": _graph_norm,
    "soft argmax": lambda x, w: (x @ w).softmax(-1) @ torch.arange(7.0),
    "gate": lambda x, w: (x @ w) * (x @ w).softmax(-1),
    "two layers": lambda x, w: F.gelu(x @ w) @ w.mT,
    "gated layers": lambda x, w: (F.silu(x @ w) * (x.cos() @ w)) @ w.mT,
    "contrast": lambda x, w: F.cross_entropy(x @ w @ (x @ w).mT, torch.arange(LENGTH)),
    "linear attention": lambda x, w: x.relu() @ (x.cos().relu().mT @ x),
    "normalised linear attention": _linear_attention,
    "homogeneous coordinates": lambda x, w: ((x @ w) @ w.mT)[:, :-1] / ((x @ w) @ w.mT)[:, -1:],
}
"""Functions of x [length, dim] and weight [dim, 7]."""
