"""What tests of sums by index share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dash_inductor.passes.ops import index_sums


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, deterministic: None) -> Iterator[None]:
    """Sums of any size are rewritten there."""
    monkeypatch.setattr(index_sums, "LEAST", 0)
    monkeypatch.setattr(index_sums, "DEVICES", ("cpu",))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
