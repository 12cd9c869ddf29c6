"""Packed operators whose documents are moved to where they begin with a tile: places, values, bits, graphs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.config import config
from dash_inductor.matching.attention_ops import op_name
from dash_inductor.matching.documents import Documents
from dash_inductor.matching.emit import Emitter
from dash_inductor.model.mask import ALIGNMENT, Mask, Operand, Segments
from dash_inductor.model.site import DType, Site
from dash_inductor.observe.records import sites
from dash_inductor.planning import decide

from .support.graphs import (
    BACKWARD,
    FORWARD,
    assert_kept_after_an_error,
    capture,
    op_counts,
    planes,
    rewrite_on,
    rewritten,
    step,
    tensors,
    trace,
)
from .support.packed import COMPANIES, Company, documents
from .test_matching_packed import DIM, HEADS, TOKENS, WINDOWS, assert_exact, attend, nested, varlen

aten = torch.ops.aten
pytestmark = [pytest.mark.usefixtures("deterministic", "aligned")]
LENGTH = 140
"""Of the document whose company changes: it ends within a tile."""


@pytest.fixture
def aligned() -> Any:
    with config.patch(documents="aligned"):
        yield


# ---- places ----


def places(starts: Tensor, tokens: int) -> list[list[int]]:
    """`row_of_token`, `token_of_row` and `numbers`, computed by a graph."""

    def model(x: Tensor, starts: Tensor) -> Tensor:
        return x + 1

    module = trace(model, lambda: [torch.empty(tokens), torch.empty_like(starts)])
    (_, given), (add,) = module.graph.find_nodes(op="placeholder"), module.graph.find_nodes(
        op="call_function", target=aten.add.Tensor
    )  # fmt: skip
    found = Documents(given, aligned=True).places(Emitter(module.graph), tokens, before=add)
    module.graph.output_node().args = ([found.row_of_token, found.token_of_row, found.numbers],)
    module.recompile()
    results = module(torch.empty(tokens), starts)
    assert all(result.dtype == starts.dtype for result in results)
    return [result.tolist() for result in results]


def defined(starts: Sequence[int], tokens: int) -> list[list[int]]:
    """The same by Note [Aligned documents]."""
    row_of_token, begin = [0] * tokens, 0
    rows = tokens + ALIGNMENT * (len(starts) - 1)
    token_of_row, numbers = [tokens - 1] * rows, list(range(rows))
    for first, end in itertools.pairwise(starts):
        upward = begin + -(-(end - first) // ALIGNMENT) * ALIGNMENT
        for row in range(begin, upward):
            token_of_row[row] = min(first + row - begin, end - 1)
        for token in range(first, end):
            row_of_token[token], numbers[begin + token - first] = begin + token - first, begin
        begin = upward
    for token in range(starts[-1], tokens):
        row_of_token[token] = begin + token - starts[-1]
        token_of_row[row_of_token[token]] = token
    return [row_of_token, token_of_row, numbers]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_places(dtype: torch.dtype) -> None:
    """Against the definition: empty documents, of one token, of whole tiles, tokens behind the last, none at all."""
    generator = torch.Generator().manual_seed(0)
    cases = [(0,), (0, 0), (0, 128), (0, 0, 128, 128, 256), (0, 1, 2), (0, 127, 255, 384), (0, 129, 129, 300), (0, 300)]
    for _ in range(20):
        lengths = torch.randint(0, 200, (6,), generator=generator) * torch.randint(0, 2, (6,), generator=generator)
        cases.append((0, *lengths.cumsum(0).tolist()))
    for starts, behind in itertools.product(cases, (0, 1, 140)):
        tokens = starts[-1] + behind
        if tokens > 1:
            assert places(torch.tensor(starts, dtype=dtype), tokens) == defined(starts, tokens), (starts, tokens)


# ---- numbers, on the CPU ----


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("window", ["full", "causal", "both sides"])
def test_values(window: str, dynamic: bool) -> None:
    """Output and gradients are those of every document alone; a token behind the last one has its value."""
    starts = documents(0, 7, 7, 8, 30, 44)
    inputs = tensors((50, 4, 16), (50, 2, 16), (50, 2, 16))
    with capture(strict=True) as graphs:
        compiled = graphs.compile(attend(WINDOWS[window]), dynamic=dynamic)
        results = step(lambda *t: compiled(*t, starts), inputs)
    (record,) = sites()
    assert record.mask.endswith("segments(0,0):aligned")
    assert record.site is not None
    rows = None if dynamic else 50 + 5 * ALIGNMENT
    assert (record.site.q_len, record.site.kv_len) == (rows, rows)
    assert_exact(results, inputs, starts, WINDOWS[window])
    assert torch.equal(results[0][44:], inputs[2].repeat_interleave(2, 1)[44:])


def test_any_documents_by_one_graph() -> None:
    """One of all tokens, of one token, empty ones; tokens behind the last, and none with a document."""
    inputs = tensors(*[(150, 2, 16)] * 3)
    with capture(strict=True) as graphs:
        compiled = graphs.compile(attend((-1, 0)))
        for ends in ((150, 150, 150), (1, 2, 150), (0, 129, 150), (20, 20, 141), (0, 0, 0)):
            starts = documents(0, *ends)
            assert_exact(step(lambda *t, starts=starts: compiled(*t, starts), inputs), inputs, starts, (-1, 0))
    assert len(graphs.after) == 1


def test_another_number_of_documents_compiles_no_other_graph_than_pytorch_would() -> None:
    """The second number makes the size dynamic, and all others run that code."""
    inputs = tensors(*[(50, 2, 16)] * 3)
    with capture(strict=True) as graphs:
        compiled = graphs.compile(attend((-1, 0)))
        for ends in ((50,), (20, 50), (7, 9, 50), (1, 2, 3, 4, 50)):
            starts = documents(0, *ends)
            assert_exact(step(lambda *t, starts=starts: compiled(*t, starts), inputs), inputs, starts, (-1, 0))
    assert len(graphs.after) == 2


@pytest.mark.parametrize("window", ["full", "causal", "window", "both sides"])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_document_has_the_same_bits_in_any_company(window: str, kv_heads: int) -> None:
    """Wherever it begins, whatever lies beside it, and those of a packed one that begins with a tile."""
    own = [t.detach() for t in tensors((LENGTH, 2, 16), *[(LENGTH, kv_heads, 16)] * 2, (LENGTH, 2, 16))]

    def run(company: Company, attention: Any, factor: float = 1.0) -> list[Tensor]:
        *leaves, do = (company.around(t, factor) for t in own)
        for t in leaves:
            t.requires_grad_()
        out = attention(*leaves, company.starts(LENGTH))
        found = out, *torch.autograd.grad(out, leaves, do)
        return [t.detach()[company.slice(LENGTH)] for t in found]

    apart = torch.fx.experimental._config.patch(use_duck_shape=False)  # there are as many starts as heads
    with apart, capture(strict=True) as graphs:
        compiled = graphs.compile(attend(WINDOWS[window]), dynamic=True)
        alone = run(Company(), compiled)
        for company, factor in itertools.product(COMPANIES, (1.0, 8.0)):
            assert all(map(torch.equal, run(company, compiled, factor), alone)), (company, factor)
    assert len(graphs.after) == 1
    with capture(strict=True, documents="packed") as graphs:
        compiled = graphs.compile(attend(WINDOWS[window]), dynamic=True)
        whole_tiles = Company(after=(-LENGTH % ALIGNMENT,))  # matmuls of parts of tiles have other bits on a CPU
        assert all(map(torch.equal, run(whole_tiles, compiled), alone))
        assert not all(map(torch.equal, run(Company(before=(27,)), compiled), alone))  # negative control


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_results_have_the_strides_of_pytorch(order: tuple[int, ...]) -> None:
    """Those of the operator's results follow query, key and value where these are dense."""
    inverse = [order.index(d) for d in range(3)]

    def model(q: Tensor, k: Tensor, v: Tensor, do: Tensor, starts: Tensor) -> tuple[Any, ...]:
        facts = (starts, starts, 64, 64)
        out, lse, rng = torch.ops.torch_attn._varlen_attn(q, k, v, *facts, True, 0.125, [-1, 0])
        return out, *torch.ops.torch_attn._varlen_attn_backward(
            do, q, k, v, out, lse, *facts, True, rng, 0.125, [-1, 0]
        )

    def inputs() -> list[Tensor]:
        shape = TOKENS, HEADS, DIM
        made = [torch.empty([shape[d] for d in order], dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        return [*(t.permute(inverse) for t in made), torch.empty(5, dtype=torch.int32, device="cuda")]

    module = trace(model, inputs)
    old = [node.meta["val"] for node in module.graph.output_node().all_input_nodes]
    graph, record = rewritten(module)
    assert record.status == "replaced"
    for before, after in zip(old, (node.meta["val"] for node in graph.output_node().all_input_nodes), strict=True):
        assert (before.shape, before.stride(), before.dtype) == (after.shape, after.stride(), after.dtype)


# ---- graphs, on a GPU that need not exist ----


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_layers_share_places(kv_heads: int, capability: tuple[int, int]) -> None:
    """A layer has four copies to rows, of q, k, v and the gradient of the output, and four back, of the results."""
    module = varlen(layers=3, kv_heads=kv_heads)
    assert rewrite_on(module.graph, capability)
    by_tables = capability == (9, 0)
    assert [(record.status, record.mask) for record in sites()] == [("replaced", "causal & segments(0,0):aligned")] * 3
    counts = op_counts(module.graph)
    assert (counts[FORWARD], counts[BACKWARD], counts["dash::mask_tables"]) == (3, 3, by_tables)
    assert (counts["aten::bucketize"], counts["prims::iota"], counts["aten::cumsum"]) == (2, 2, 1)
    assert counts["aten::index"] == 4 + 3 * 8
    assert planes(module.graph, TOKENS) == []


@pytest.mark.parametrize("graph", [lambda: varlen(window=(9, 4)), lambda: nested(), lambda: nested(causal=False)])
def test_operators(graph: Any) -> None:
    module, record = rewritten(graph())
    assert record.status == "replaced"
    assert record.plan is not None
    assert "segments(0,0):aligned" in record.plan.numerics_key
    forward, backward = (node for node in module.nodes if op_name(node) in (FORWARD, BACKWARD))
    rows = TOKENS + 4 * ALIGNMENT
    for node, count in ((forward, 3), (backward, 5)):
        for operand in node.args[:count]:
            assert operand.meta["val"].shape == (1, HEADS, rows, DIM)
            assert operand.meta["val"].stride() == (rows * HEADS * DIM, DIM, HEADS * DIM, 1)
    assert backward.args[4] in forward.users  # its output itself, and not a copy of a copy


@pytest.mark.parametrize("number", range(1, 60, 6))
def test_an_error_in_any_step_leaves_the_graph_as_it_was(number: int) -> None:
    assert_kept_after_an_error(varlen(), number)


def test_other_attention_is_not_concerned() -> None:
    inputs = tensors(*[(1, 2, 16, 8)] * 3)
    with capture(strict=True) as graphs:
        compiled = graphs.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        step(compiled, inputs)
    (record,) = sites()
    assert record.mask == "causal"
    assert graphs.count("aten::index") == 0


# ---- tiles ----


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "cpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_tile_divides_the_alignment(arch: str, dtype: DType) -> None:
    """Of a forward's queries the row blocks of the Hopper kernel, which do not depend on one another."""
    from dash_inductor.kernels.mask_tables import ROW_BLOCK

    from dash_inductor.model.call import Call
    from dash_inductor.model.mask import Band
    from dash_inductor.model.plan import Plan

    planned = 0
    for dim, band in itertools.product(range(8, 264, 8), (Band(0), Band(), Band(0, 99))):
        mask = Mask(band, segments=Segments(Operand(0), Operand(0), aligned=True))
        site = Site("cpu" if arch == "cpu" else "cuda", dtype, 1, 8, 2, None, None, dim, dim, Call(mask, 0.125))
        plan = decide(site, arch)
        if isinstance(plan, Plan):
            planned += 1
            sizes = [plan.dkdv.block_q, plan.dkdv.block_kv]
            if plan.dq is not None:
                sizes += [plan.dq.block_q, plan.dq.block_kv]
            assert plan.forward_tiles is not None
            sizes += [plan.forward_tiles.block_kv]
            sizes += [ROW_BLOCK if plan.forward == "hopper" else plan.forward_tiles.block_q]
            assert all(ALIGNMENT % size == 0 for size in sizes), (str(plan), dim)
    assert planned
