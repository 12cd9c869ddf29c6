"""Graph, preference and recommendation models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .made import Made, numbers, pictures


class Graph(nn.Module):
    """Two GraphSAGE layers, which compute means of neighbours with scatter_add."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.own, self.other = (nn.ModuleList(nn.Linear(width, width) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        count = torch.zeros(x.shape[0], device=x.device).index_add(
            0, target, torch.ones_like(target, dtype=torch.float32)
        )
        for own, other in zip(self.own, self.other, strict=True):
            sums = torch.zeros_like(x).index_add(0, target, x[source])
            x = F.relu(own(x) + other(sums / count.clamp(min=1).to(x.dtype)[:, None]))
        return x.float().square().mean()


def graph() -> Made:
    nodes, edges = 100_000, 1_000_000
    return Graph(), {
        "x": pictures(nodes, 128).requires_grad_(),
        "source": numbers(nodes, edges),
        "target": (torch.rand(edges) ** 2 * nodes).long(),
    }


class Preferences(nn.Module):
    """The DPO loss (direct preference optimisation) on projected logits, which gathers log-probabilities."""

    def __init__(self, width: int = 1024, vocabulary: int = 64_000) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        log_p = self.head(hidden + self.mlp(hidden)).float().log_softmax(-1)
        chosen, rejected = log_p.gather(-1, labels[..., None]).squeeze(-1).sum(1).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def preferences() -> Made:
    return Preferences(), {
        "hidden": pictures(4, 1024, 1024),
        "labels": numbers(64_000, 4, 1024),
    }


class Recommender(nn.Module):
    """A DLRM click model: embedding bags, and dot products of each pair of them."""

    def __init__(self, rows: int = 100_000, tables: int = 8, width: int = 64) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, numbers: Tensor, indices: Tensor, starts: Tensor, clicked: Tensor) -> Tensor:
        own = self.bottom(numbers)
        all_ = torch.stack([own, *(bag(i, starts) for bag, i in zip(self.bags, indices, strict=True))], 1)
        one, other = torch.tril_indices(all_.shape[1], all_.shape[1], -1, device=all_.device)
        pairs = (all_ @ all_.mT)[:, one, other]
        logits = self.top(torch.cat([own, pairs], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits.float(), clicked)


def recommender() -> Made:
    batch, size, tables, rows = 65_536, 16, 8, 100_000
    return Recommender(rows, tables), {
        "numbers": pictures(batch, 16),
        "indices": (torch.rand(tables, batch * size) ** 3 * rows).long(),
        "starts": torch.arange(batch) * size,
        "clicked": torch.rand(batch).round(),
    }
