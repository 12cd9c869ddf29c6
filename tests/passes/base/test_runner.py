"""The list of rewrites: what the runner does for each of them, so that none has to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from dash_inductor.config import Config, config
from dash_inductor.errors import FallbackError
from dash_inductor.explanations.dump import writer
from dash_inductor.model.reasons import Reason
from dash_inductor.passes.all import REWRITES, record_unseen, rewrite_graph
from dash_inductor.passes.base.rewrite import Result
from dash_inductor.records import records
from dash_inductor.records.records import Record, all_records, graphs, sites

from ...support.graphs import WITHOUT_KERNELS, flash, joint_graph, op_counts, rewrite_on, trace

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("deterministic")


@dataclass(frozen=True)
class Sines:
    """Sines become cosines; tangents are not replaced."""

    name = "sines"
    on: bool = True
    asked_for: bool = False

    def is_on(self, config: Config) -> bool:
        return self.on

    def apply(self, graph: Graph) -> Sequence[Result]:
        found = []
        for node in graph.find_nodes(op="call_function", target=aten.sin.default):
            with graph.inserting_after(node):
                new = graph.call_function(aten.cos.default, node.args)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            found.append(Result(Record("sines", new.name, "aten::sin", "replaced", None, "by a cosine")))
        for node in graph.find_nodes(op="call_function", target=aten.tan.default):
            record = Record("sines", node.name, "aten::tan", "fallback", Reason.UNSUPPORTED_OP, "a tangent")
            found.append(Result(record, self.asked_for))
        return found

    def leave(self, graph: Graph, cause: str) -> Sequence[Result]:
        found = graph.find_nodes(op="call_function", target=aten.sin.default)
        return [Result(Record("sines", n.name, "aten::sin", "fallback", Reason.PASSES_OFF, cause)) for n in found]


def wave(tangent: bool = False) -> GraphModule:
    def function(x: Tensor) -> Tensor:
        return x.sin().tan() if tangent else x.sin()

    return trace(function, lambda: [torch.empty(3)])


def test_the_list_has_attention_first() -> None:
    names = "attention known_masks sorted_values permutations small_scatter grid_sample index_ranges tied_embeddings"
    names += " index_sums embeddings unrolled_reductions pad_mm grouped_mm user_kernels"
    assert [rewrite.name for rewrite in REWRITES] == names.split()


def test_records_of_a_rewrite_are_published_beside_those_of_attention() -> None:
    module = wave()
    assert rewrite_graph(module.graph, [*WITHOUT_KERNELS, Sines()])
    assert op_counts(module.graph) == {"aten::cos": 1}
    assert [(record.rewrite, record.status) for record in all_records()] == [("sines", "replaced")]
    assert graphs() == sites() == ()
    assert not rewrite_graph(module.graph, [Sines()])
    rewrite_on(joint_graph(flash).graph)
    assert [record.rewrite for record in all_records()] == ["sines", "attention"]
    assert (len(graphs()), len(sites())) == (1, 1)


def test_a_rewrite_that_is_off_is_left_out() -> None:
    module = wave()
    assert not rewrite_graph(module.graph, [Sines(on=False)])
    assert all_records() == ()


@pytest.mark.parametrize("asked_for", [False, True])
def test_strict(asked_for: bool) -> None:
    """It raises behind the publication of the records, and accepts what the program has asked for."""
    config.strict, graph = True, wave(tangent=True).graph
    if asked_for:
        assert rewrite_graph(graph, [Sines(asked_for=True)])
    else:
        with pytest.raises(
            FallbackError, match="these sites cannot be replaced:\ntan: sines, fallback, unsupported_op"
        ):
            rewrite_graph(graph, [Sines()])
    assert [record.status for record in all_records()] == ["replaced", "fallback"]


def test_graphs_that_no_pass_sees() -> None:
    graph = wave().graph
    assert record_unseen([graph], "pattern_matcher=False", [Sines()])
    (record,) = all_records()
    assert (record.reason, record.detail) == (Reason.PASSES_OFF, "pattern_matcher=False")
    assert not record_unseen([wave(tangent=True).graph], "", WITHOUT_KERNELS)


def test_a_dump_shows_what_a_rewrite_did(tmp_path: Path) -> None:
    module = wave()
    with config.patch(dump=str(tmp_path)), writer.joint_graph(module.graph):
        rewrite_graph(module.graph, [Sines()])
    (page,) = tmp_path.glob("*/*/index.html")
    assert "cos_default replaced: by a cosine" in page.read_text()
    assert "aten.cos" in (page.parent / "joint.diff").read_text()
    (graph,) = json.loads((page.parent / "sites.json").read_text())["graphs"]
    assert [record["rewrite"] for record in graph["others"]] == ["sines"]


def test_records_of_before_have_no_others() -> None:
    rewrite_on(joint_graph(flash).graph)
    (graph,) = graphs()
    given = graph.as_dict()
    del given["others"]
    assert records.GraphRecord.from_dict(given) == graph


def test_a_nested_graph_puts_its_records_in_front() -> None:
    one, two = (Record("sines", name, "aten::sin", "replaced", None, "") for name in "ab")
    inner, outer = (records.GraphRecord("0/0", "joint", "compiled", (), others=(each,)) for each in (one, two))
    assert inner.joined(outer).records == (one, two)
