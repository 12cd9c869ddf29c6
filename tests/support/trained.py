"""A small model that callbacks of training tools train on the CPU, and what they log about its attention."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dash_inductor import config

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
WIDTH = 16
VARIABLES = (
    CUBLAS, "CUDA_LAUNCH_BLOCKING", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC", "FLASH_ATTENTION_DETERMINISTIC",
    "ACCELERATE_DYNAMO_BACKEND", "PL_GLOBAL_SEED", "PL_SEED_WORKERS",
)  # fmt: skip
"""Variables that the tools and their callbacks set, which the next test must not find."""


class Model(nn.Module):
    """Dropout, and a layer of attention for each dtype; from [batch, heads, length, `WIDTH`] to the same."""

    def __init__(self, *dtypes: torch.dtype, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.dropout = nn.Dropout(dropout)
        self.dtypes = dtypes

    def forward(self, x: Tensor) -> Tensor:
        for dtype in self.dtypes:
            y = self.dropout(x * self.weight).to(dtype)
            x = F.scaled_dot_product_attention(y, y, y, is_causal=True).float()
        return x


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention is replaced on the CPU; no variable is set."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is removed in the end
        monkeypatch.delenv(name)
    with config.patch(cpu="reference"):
        yield


def told(caplog: pytest.LogCaptureFixture, log: logging.Logger) -> list[tuple[int, str]]:
    """The messages of a logger about attention, with their levels."""
    found = [(record.levelno, record.getMessage()) for record in caplog.records if record.name == log.name]
    return [(level, text) for level, text in found if "attention" in text]
