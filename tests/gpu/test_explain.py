"""Explanations and dumps of what is compiled for a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dash_inductor
from dash_inductor.config import config

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


def causal(query: Tensor) -> Tensor:
    noise = torch.rand_like(query)
    return F.scaled_dot_product_attention(query + noise, query, query, is_causal=True)


def query(length: int = 1024, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(1, 4, length, 64, dtype=dtype, device="cuda", requires_grad=True)


def test_what_is_explained_is_what_is_compiled() -> None:
    state = torch.cuda.get_rng_state()
    (site,) = dash_inductor.explain(causal, query()).sites
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert dash_inductor.sites() == ()
    torch.compile(causal)(query()).sum().backward()
    (record,) = dash_inductor.sites()
    assert site.plan is not None
    assert record.plan is not None
    assert str(site.plan) == str(record.plan)
    assert site.plan.numerics_key == record.plan.numerics_key
    (chosen,) = (candidate for candidate in site.candidates if candidate.chosen)
    assert str(chosen.plan) == str(record.plan)


def test_nothing_runs() -> None:
    """Only the results of the graph take memory; a run takes several times as much."""
    tensor = query(length=1 << 15)
    size = tensor.nelement() * tensor.element_size()
    peaks = []
    for call in (lambda: dash_inductor.explain(causal, tensor), lambda: torch.compile(causal)(tensor)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] <= 1.5 * size < peaks[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dump(dtype: torch.dtype, tmp_path: Path) -> None:
    with config.patch(dump=str(tmp_path)):
        torch.compile(causal)(query(dtype=dtype)).sum().backward()
    (graph,) = (path.parent for path in tmp_path.glob("*/*/index.html"))
    (site,) = json.loads((graph / "sites.json").read_text())["graphs"][0]["sites"]
    assert site["decision"]["status"] == "replaced"
    page = (graph / "index.html").read_text()
    assert f"Kernels on {site['arch']}" in page
    assert {path.suffix for path in (graph / "kernels" / "site_1").iterdir()} == {".py", ".ttgir", ".ptx"}
    assert "triton" in (graph / "backward.py").read_text()
