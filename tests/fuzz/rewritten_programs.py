"""A program or several for each rewrite of other operators than attention, whose results show what it has made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..support.scatters import grouped, labelled
from ..support.shown_memory import Program

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Rewritten:
    """A program that a rewrite changes.

    Attributes:
        rewrite: its name.
        program: of the tensors; gives one or several results.
        tensors: makes them; those of floating point want gradients.
    """

    rewrite: str
    program: Program
    tensors: Callable[[], list[Tensor]]


def _rows() -> list[Tensor]:
    return [torch.randn(12, 32), torch.randn(6, 8)]


def _known(x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    number = scores.topk(2, -1).indices.reshape(-1)
    return x[number], (number >= scores.shape[1]).unsqueeze(-1)


def _experts(x: Tensor, scores: Tensor) -> Tensor:
    rows, absent = _known(x, scores)
    return rows.exp().masked_fill(absent, 0.0)


def _experts_twice(x: Tensor, scores: Tensor) -> Results:
    rows, absent = _known(x, scores)
    rows = rows.tanh()
    return rows, rows.masked_fill(absent, 0.0), rows.masked_fill(absent, 0.0) * 2


def _inputs_as_they_are(x: Tensor, scores: Tensor) -> Results:
    _, absent = _known(x, scores)
    x = x.view(-1, 32)
    return x.masked_fill(absent, 0.0), x.masked_fill(absent, 0.0).square()


def _a_part(x: Tensor, scores: Tensor) -> Tensor:
    rows, absent = _known(x, scores)
    return (rows + 1)[-12:, :2].masked_fill(absent, 0.0)


def _first_rows(x: Tensor, scores: Tensor) -> Tensor:
    number = scores.topk(2, -1).indices.reshape(-1)[:3]
    return (x.exp() * 2)[:3].masked_fill((number >= scores.shape[1]).unsqueeze(-1), 0.0)


def _inverses(x: Tensor, scores: Tensor) -> Results:
    order = torch.argsort(x[:, 0], stable=True)
    inverse = torch.empty_like(order).index_put((order,), torch.arange(12))
    again = torch.zeros_like(order).scatter(0, inverse, torch.arange(12))
    return x[order], order, inverse, again, inverse.view(3, 4)


def _stored(x: Tensor, scores: Tensor) -> Tensor:
    order = torch.argsort(x[:, 0], stable=True)
    return torch.zeros(6, 32, dtype=x.dtype).index_put((order // 2,), x, accumulate=True)


def _few(x: Tensor, scores: Tensor) -> Results:
    index = x.topk(2, -1).indices
    return torch.zeros_like(x).scatter(-1, index, x[:, :2]), torch.zeros_like(x).scatter_add(-1, index, x[:, 2:4])


def _added(x: Tensor, scores: Tensor) -> Results:
    index = (scores.reshape(-1) * 5).long().abs() % 7
    added = torch.zeros(7, 32, dtype=x.dtype).index_add(0, index[:12], x)
    return added, added.view(-1), x.cos().index_put((index[:12],), x, accumulate=True)


def _short(x: Tensor, scores: Tensor) -> Results:
    rows = x.view(1, 12, 32) * 2
    return rows.sum(1), rows.sum(1, keepdim=True), rows


def _table(x: Tensor, scores: Tensor) -> Tensor:
    return F.embedding((scores.reshape(-1) * 9).long().abs() % 3, x[:3])


def _tied(weight: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, weight).tanh() @ weight.t()


def _matrices() -> list[Tensor]:
    return [torch.randn(17, 16), torch.randn(16, 27)]


def _logits(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).view(1, 17, 27)


def _logits_and_loss(x: Tensor, y: Tensor) -> Results:
    logits = x @ y
    return logits, logits[:, :3], logits.logsumexp(-1)


def _odd_rows(x: Tensor, y: Tensor) -> Tensor:
    return x.t().contiguous().t() @ y[:, :16]


def _image() -> list[Tensor]:
    return [torch.randn(1, 2, 6, 7)]


def _median(x: Tensor) -> Results:
    values, places = x.median(-1)
    return values, places, x.kthvalue(2, -1, keepdim=True)[0]


PROGRAMS: dict[str, Rewritten] = {
    "experts": Rewritten("known_masks", _experts, _rows),
    "experts twice": Rewritten("known_masks", _experts_twice, _rows),
    "inputs as they are": Rewritten("", _inputs_as_they_are, _rows),
    "a part": Rewritten("", _a_part, _rows),
    "first rows": Rewritten("", _first_rows, _rows),
    "inverses": Rewritten("permutations", _inverses, _rows),
    "stored": Rewritten("permutations", _stored, _rows),
    "grouped": Rewritten("permutations", grouped, lambda: [torch.randn(12, 16)]),
    "few": Rewritten("small_scatter", _few, _rows),
    "labelled": Rewritten("small_scatter", labelled, lambda: [torch.randn(12, 16)]),
    "added": Rewritten("index_sums", _added, _rows),
    "short": Rewritten("unrolled_reductions", _short, _rows),
    "table": Rewritten("embeddings", _table, _rows),
    "tied": Rewritten("tied_embeddings", _tied, lambda: [torch.randn(300, 32), torch.randint(0, 300, (4, 9))]),
    "logits": Rewritten("pad_mm", _logits, _matrices),
    "logits and loss": Rewritten("pad_mm", _logits_and_loss, _matrices),
    "odd rows": Rewritten("pad_mm", _odd_rows, _matrices),
    "resampled": Rewritten("index_ranges", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), _image),
    "pooled": Rewritten("index_sums", lambda x: F.adaptive_max_pool2d(x, (4, 3)), _image),
    "median": Rewritten("sorted_values", _median, lambda: [torch.randn(5, 7)]),
    "sampled": Rewritten(
        "grid_sample",
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        lambda: [*_image(), torch.rand(1, 3, 4, 2)],
    ),
}  # fmt: skip


def tensors_of(name: str) -> list[Tensor]:
    """Reproducible tensors of a program; those of floating point want gradients."""
    torch.manual_seed(0)
    return [tensor.requires_grad_(tensor.is_floating_point()) for tensor in PROGRAMS[name].tensors()]
