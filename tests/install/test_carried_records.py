"""Records of graphs that come from a cache: there, the same, and, where the entry has none, said so."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor.codecache import FxGraphCache

import dash_inductor
from dash_inductor.config import config
from dash_inductor.install import carried_records
from dash_inductor.records import publication
from dash_inductor.records.records import GraphRecord

pytestmark = pytest.mark.usefixtures("deterministic")


@contextmanager
def caches(*, autograd: bool = True, bundled: bool = False) -> Iterator[None]:
    with (
        inductor_config.patch(fx_graph_cache=True),
        functorch_config.patch(bundled_autograd_cache=bundled),
        pytest.MonkeyPatch.context() as patch,
        config.patch(cpu="reference"),
    ):
        patch.setattr(aot_autograd, "should_use_local_autograd_cache", lambda: autograd)  # the setting was forced
        AOTAutogradCache.clear()
        FxGraphCache.clear()
        yield


def graphs_of_a_step() -> tuple[GraphRecord, ...]:
    """The records of two calls in one graph, as in a fresh process but for what the caches hold."""
    torch._dynamo.reset()
    dash_inductor.clear_sites()

    @torch.compile
    def two(q: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        first = F.scaled_dot_product_attention(q, other, other, is_causal=True)
        return F.scaled_dot_product_attention(first, other, other)

    two(*(torch.ones(1, 2, 16, 8, requires_grad=True) for _ in range(2))).sum().backward()
    return dash_inductor.graphs()


def entries() -> list[Path]:
    return [path for path in Path(AOTAutogradCache._get_tmp_dir()).rglob("*") if path.is_file()]


@pytest.mark.parametrize("bundled", [False, True])
def test_a_graph_from_a_cache_has_its_records(bundled: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caches(bundled=bundled):
        (compiled,) = graphs_of_a_step()
        counters.clear()
        with caplog.at_level("INFO", logger="dash_inductor"):
            (cached,) = graphs_of_a_step()
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1  # else this test shows nothing
        assert counters["dash_inductor"] == {"replaced": 2}
    assert (compiled.origin, cached.origin) == ("compiled", "AOTAutogradCache")
    assert compiled.compile_id == cached.compile_id == "0/0"
    assert cached.sites == compiled.sites
    assert [site.mask for site in cached.sites] == ["causal", "full"]
    assert [r.getMessage() for r in caplog.records if r.name == "dash_inductor"] == list(
        map(str, [cached, *cached.sites])
    )


def test_an_entry_without_records_is_reported() -> None:
    with caches():
        graphs_of_a_step()
        (path,) = entries()
        entry = pickle.loads(path.read_bytes())
        delattr(entry, carried_records.ATTRIBUTE)
        path.write_bytes(pickle.dumps(entry))
        (graph,) = graphs_of_a_step()
        assert graph == GraphRecord("0/0", "", "AOTAutogradCache", (), missing=True)
        assert str(graph) == "graph 0/0: from a cache (AOTAutogradCache), without records"


def test_records_that_cannot_be_read_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    texts = ('{"sites": []}', "[" * 100_000, "[]", '{"sites": [{"name": 1}]}', '{"sites": [1]}', "\ud800", "1e999")
    for text in texts:
        publication.restore(text, "AOTAutogradCache")
    assert [graph.missing for graph in dash_inductor.graphs()] == [True] * len(texts)
    assert "cannot be read: KeyError: 'compile_id'" in caplog.text


def test_graphs_without_attention_have_no_record() -> None:
    """A hit of such a graph is no graph whose records are missing."""
    with caches():
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            torch.compile(torch.mm)(*(torch.ones(4, 4, requires_grad=True) for _ in range(2))).sum().backward()
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert dash_inductor.graphs() == ()


def test_a_hit_of_fx_graph_cache_alone() -> None:
    """The joint graph is made and read as without a cache; only the code is taken from it."""
    with caches(autograd=False):
        (compiled,) = graphs_of_a_step()
        counters.clear()
        (cached,) = graphs_of_a_step()
        assert counters["inductor"]["fxgraph_cache_hit"] == 2
    assert cached == compiled


@pytest.mark.parametrize("off", ["the flag", "the switch"])
def test_without_dash_inductor_nothing_is_said(off: str) -> None:
    with caches():
        torch.use_deterministic_algorithms(off != "the flag")
        with dash_inductor.disabled() if off == "the switch" else config.patch():
            for _ in range(2):
                counters.clear()
                assert graphs_of_a_step() == ()
            assert counters["aot_autograd"]["autograd_cache_hit"] == 1
