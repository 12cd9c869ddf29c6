"""FlexAttention for tests: its results in double precision, and training on the CPU, which PyTorch refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention, or_masks

from dash_inductor.records.records import SiteRecord, sites

from .graphs import JointGraphs, capture

Mod = Callable[..., Tensor]


@contextmanager
def training_on_the_cpu() -> Iterator[None]:
    """Inside the block, PyTorch lets FlexAttention have a backward on the CPU: graphs are made as for a GPU."""
    with mock.patch.object(flex, "_validate_device", _any_device):  # no object of `mock`: Dynamo reads the function
        yield


def _any_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    """In the place of a check."""


@contextmanager
def training() -> Iterator[JointGraphs]:
    """`capture`, with FlexAttention's backward on the CPU."""
    with training_on_the_cpu(), capture() as graphs:
        yield graphs


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 40
    kv_len: int = 40
    dim: int = 16

    def tensors(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
        """Query, key and value, which want gradients, and the gradient of the output, reproducible."""
        generator = torch.Generator().manual_seed(0)

        def tensor(heads: int, length: int) -> Tensor:
            made = torch.randn(self.batch, length, heads, self.dim, generator=generator)
            return made.to(device, dtype).transpose(1, 2)

        query, grad = (tensor(self.heads, self.q_len) for _ in range(2))
        key, value = (tensor(self.kv_heads, self.kv_len) for _ in range(2))
        return [*(t.requires_grad_() for t in (query, key, value)), grad]


@dataclass(frozen=True)
class Data:
    """Tensors of a program that its mods read, for lengths of `Sizes`.

    Attributes:
        ids, ids_of_row: numbers of documents of [length], and of [batch, length].
        starts: where the documents of `ids_of_row` begin, [batch, documents].
        ends: the last places of their documents, [batch, length].
        lengths: of the sequences, [batch].
        valid: whether a key is valid, [batch, length].
        positions: within the documents of `ids_of_row`, [batch, length].
        pairs, of_heads: bool [length, length] and [heads, length, length].
        slopes: [heads].
        distances: [heads, 2 * length].
        plane: [heads, length, length].
        buckets: [32, heads].
    """

    ids: Tensor
    ids_of_row: Tensor
    starts: Tensor
    ends: Tensor
    lengths: Tensor
    valid: Tensor
    positions: Tensor
    pairs: Tensor
    of_heads: Tensor
    slopes: Tensor
    distances: Tensor
    plane: Tensor
    buckets: Tensor

    @staticmethod
    def of(sizes: Sizes, device: str = "cpu") -> Data:
        generator = torch.Generator().manual_seed(1)
        length = max(sizes.q_len, sizes.kv_len)
        places = torch.arange(length)
        steps = torch.arange(7, 7 + sizes.batch)[:, None]
        rows = places // steps
        numbers = torch.arange(int(rows.max()) + 1)
        valid = torch.rand(sizes.batch, length, generator=generator) < 0.7
        valid[:, 0] = True

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        found = Data(
            ids=places // 9,
            ids_of_row=rows,
            starts=(numbers * steps).clamp(max=length - 1).int(),
            ends=((rows + 1) * steps - 1).int(),
            lengths=torch.arange(length, length - sizes.batch, -1) - 3,
            valid=valid,
            positions=places % steps,
            pairs=random(length, length) < 0.3,
            of_heads=random(sizes.heads, length, length) < 0.3,
            slopes=random(sizes.heads).abs() / 4,
            distances=random(sizes.heads, 2 * length),
            plane=random(sizes.heads, length, length),
            buckets=random(32, sizes.heads),
        )
        return Data(**{name: tensor.to(device) for name, tensor in vars(found).items()})


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def mask_mods(data: Data) -> dict[str, tuple[Mod, str]]:
    """Mask mods of programs by their names, and the masks that they are read as."""
    ids, rows, starts, ends, lengths = data.ids, data.ids_of_row, data.starts, data.ends, data.lengths
    valid, positions, pairs, of_heads = data.valid, data.positions, data.pairs, data.of_heads
    images = torch.where(ids % 3 == 1, ids, -1)
    windows = torch.arange(3, 3 + len(data.slopes), device=ids.device)
    return {
        "causal": (causal, "causal"),
        "window": (lambda b, h, q, k: (q >= k) & (q - k < 7), "band(0,6)"),
        "both sides": (lambda b, h, q, k: (q - k).abs() <= 5, "band(-5,5)"),
        "constant": (lambda b, h, q, k: (q >= k) & (q - k < torch.tensor(7)), "band(0,6)"),
        "documents": (lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), "causal & segments(0,0)"),
        "documents of rows": (lambda b, h, q, k: (q >= k) & (rows[b, q] == rows[b, k]), "causal & segments(0,0)"),
        "documents both ways": (lambda b, h, q, k: rows[b, q] == rows[b, k], "segments(0,0)"),
        "chunks": (lambda b, h, q, k: (q >= k) & (q // 8 == k // 8), "causal & segments(0,0)"),
        "torchtitan": (
            lambda b, h, q, k: (q >= k) & (k >= starts[b, rows[b, q]]), "causal & interval(0,none,none)"
        ),
        "torchtitan in batches": (
            lambda b, h, q, k: (q >= k) & (q <= ends[b, k]), "causal & interval(0,none,1)"
        ),
        "transformers": (
            lambda b, h, q, k: (positions[b, k] <= positions[b, q]) & (rows[b, q] == rows[b, k]),
            "segments(0,0) & interval(none,1,1)",
        ),
        "transformers, windows": (
            lambda b, h, q, k: (positions[b, k] <= positions[b, q]) & (positions[b, k] > positions[b, q] - 9)
            & (rows[b, q] == rows[b, k]),
            "segments(0,0) & interval(1,2,3)",
        ),
        "lengths": (lambda b, h, q, k: (q >= k) & (k < lengths[b]), "causal & keys(0)"),
        "validity": (lambda b, h, q, k: (q >= k) & valid[b, k], "causal & keys(0)"),
        "prefix": (or_masks(causal, lambda b, h, q, k: k < lengths[b] // 3), "interval(none,0,none)"),
        "images": (
            lambda b, h, q, k: ((q >= k) & (q - k < 9)) | ((images[q] == images[k]) & (images[q] >= 0)), "dense(0)"
        ),
        "dilated": (lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0), "causal & dilated(0,1)"),
        "pairs": (lambda b, h, q, k: pairs[q, k], "dense(0)"),
        "heads": (lambda b, h, q, k: of_heads[h, q, k], "dense(0)"),
        "windows of heads": (lambda b, h, q, k: (q >= k) & (q - k < windows[h]), "causal & head_interval(0,none)"),
    }  # fmt: skip


def score_mods(data: Data) -> dict[str, tuple[Mod, Tensor | None]]:
    """Score mods that are read, by their names, and the tensor of each that may want a gradient."""
    slopes, distances, plane, buckets = data.slopes, data.distances, data.plane, data.buckets
    middle = distances.shape[1] // 2
    return {
        "softcap": (lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0), None),
        "softcap and factor": (lambda s, b, h, q, k: torch.tanh(s * 0.25) * 3, None),
        "factor": (lambda s, b, h, q, k: s * 1.5, None),
        "distance": (lambda s, b, h, q, k: s + (k - q) / 8, None),
        "alibi": (lambda s, b, h, q, k: s + slopes[h] * (k - q), slopes),
        "alibi of numbers": (lambda s, b, h, q, k: s - torch.exp2(-(h + 1.0)) * (q - k).abs(), None),
        "of distances": (lambda s, b, h, q, k: s + distances[h, q - k + middle], distances),
        "of places": (lambda s, b, h, q, k: plane[h, q, k] + s, plane),
        "of buckets": (lambda s, b, h, q, k: s + buckets[(q - k).clamp(0, 31), h] * 0.5, buckets),
        "softcap, then alibi": (lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0) + slopes[h] * (k - q), slopes),
        "two": (lambda s, b, h, q, k: s + slopes[h] * (k - q) + plane[h, q, k], plane),
        "factors behind sums": (
            lambda s, b, h, q, k: ((s - slopes[h] * (q - k)) * 0.5 + plane[h, q, k]) / 4.0,
            plane,
        ),
        "a factor behind a softcap": (
            lambda s, b, h, q, k: 0.3 * (2.0 * torch.tanh(s / 2.0) + buckets[(q - k).clamp(0, 31), h]),
            buckets,
        ),
        "hidden": (lambda s, b, h, q, k: torch.where(q - k < 9, s + slopes[h] * (k - q), -torch.inf), slopes),
    }


def block_mask(mask_mod: Mod | None, sizes: Sizes, device: str = "cpu", batch: int | None = None) -> Any:
    """The block mask of a mask_mod; of one batch element unless `batch` is given, and of one head."""
    if mask_mod is None:
        return None
    return flex.create_block_mask(mask_mod, batch, None, sizes.q_len, sizes.kv_len, device, BLOCK_SIZE=128)


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    scale: float | None = None,
) -> Tensor:
    """The definition of FlexAttention, in the type of its arguments; queries without keys give zeros."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    size = scores.shape
    places = (
        torch.arange(n, device=query.device).view([n if d == i else 1 for i in range(4)]) for d, n in enumerate(size)
    )
    b, h, q, k = (place.expand(size) for place in places)
    if score_mod is not None:
        scores = score_mod(scores, b, h, q, k)
    if mask_mod is not None:
        scores = torch.where(mask_mod(b, h, q, k).expand(size), scores, -torch.inf)
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.where(hidden, 0.0, torch.softmax(torch.where(hidden, 0.0, scores), -1)) @ value


@dataclass(frozen=True)
class Case:
    """A call and what it computes.

    Attributes:
        score_mod, mask_mod: the functions of the program; None for none.
        sizes: of its tensors.
        wanted: tensors of the score_mod that want a gradient.
        batch: of the block mask; None where it is of one batch element.
        options: further arguments of `flex_attention`.
    """

    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    sizes: Sizes = Sizes()
    wanted: tuple[Tensor, ...] = ()
    batch: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def function(self, device: str = "cpu") -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        mask = block_mask(self.mask_mod, self.sizes, device, self.batch)
        options: dict[str, Any] = {"enable_gqa": True, **dict(self.options)}

        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            found: Tensor = flex_attention(query, key, value, score_mod=self.score_mod, block_mask=mask, **options)
            return found

        return call

    def exact(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The output and the gradients of query, key, value and the wanted tensors, in double precision."""
        query, key, value = (t.detach().double().requires_grad_() for t in inputs[:3])
        output = exact(query, key, value, self.score_mod, self.mask_mod, dict(self.options).get("scale"))
        leaves = [query, key, value, *self.wanted]
        return [output.detach(), *torch.autograd.grad(output, leaves, inputs[3].double())]


def trained(case: Case, **options: Any) -> tuple[SiteRecord, list[Tensor]]:
    """The record of a call that is compiled on the CPU, and its output and gradients; options of `torch.compile`."""
    for tensor in case.wanted:
        tensor.requires_grad_()
    inputs = case.sizes.tensors()
    with training() as graphs:
        output = graphs.compile(case.function(), **options)(*inputs[:3])
        gradients = torch.autograd.grad(output, [*inputs[:3], *case.wanted], inputs[3])
    (record,) = sites()
    return record, [output.detach(), *gradients]


def assert_exact(results: Sequence[Tensor], case: Case, tolerance: float = 5e-6) -> None:
    """Results of `trained` are those of the definition, relative to the largest element of each, or to 1."""
    for ours, true in zip(results, case.exact(case.sizes.tensors()), strict=True):
        assert ours.shape == true.shape
        assert (ours - true).abs().max() <= tolerance * true.abs().max().clamp(min=1.0)
