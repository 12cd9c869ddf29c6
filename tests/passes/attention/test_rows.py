"""Rows of packed documents: which tokens they have, and the bits of a document in any company."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.graph.emit import Emitter
from dash_inductor.masks.documents import Documents
from dash_inductor.model import AttentionSpec, Band, Plan
from dash_inductor.model.mask import ALIGNMENT, ROW_BLOCK
from dash_inductor.model.site import DType, Site
from dash_inductor.planning import decide
from dash_inductor.records.records import sites

from ...frontends.test_varlen import DIM, HEADS, TOKENS, WINDOWS, attend, documents
from ...support.cases import some
from ...support.graphs import capture, rewritten, step, tensors, trace
from ...support.packed import COMPANIES, Company
from ...support.varlen_layout import Rows, mask_of, random_lengths

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("deterministic")


# ---- places ----


def computed(starts: Tensor, tokens: int) -> list[Tensor]:
    """The numbers of queries and of keys, token offsets and counts, computed by a graph."""

    def model(x: Tensor, starts: Tensor) -> Tensor:
        return x + 1

    module = trace(model, lambda: [torch.empty(tokens), torch.empty_like(starts)])
    (_, given), (add,) = module.graph.find_nodes(op="placeholder"), module.graph.find_nodes(
        op="call_function", target=aten.add.Tensor
    )  # fmt: skip
    found = Documents(given).varlen_layout(Emitter(module.graph), tokens, before=add)
    module.graph.output_node().args = (list(found),)
    module.recompile()
    results: list[Tensor] = module(torch.empty(tokens), starts)
    return results


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows(dtype: torch.dtype) -> None:
    """Against the definition: empty documents, of one token, of whole tiles, tokens behind the last, none at all."""
    cases: list[tuple[int, ...]] = [
        (), (0,), (128,), (0, 128, 0, 128), (1, 1), (127, 128, 129), (129, 0, 171), (300,), (64, 65, 63),
        *(random_lengths(6, 200, seed) for seed in range(20)),
    ]  # fmt: skip
    for lengths, behind in itertools.product(cases, (0, 1, 140)):
        rows = Rows(lengths, behind)
        if rows.tokens < 2:
            continue
        queries, keys, offset, count = computed(torch.tensor(rows.starts, dtype=dtype), rows.tokens)
        assert (queries.dtype, keys.dtype, offset.dtype, count.dtype) == (dtype, dtype, torch.int32, torch.int32)
        assert (queries.tolist(), keys.tolist()) == tuple([numbers] for numbers in rows.numbers()), rows
        places, counts = rows.blocks()
        assert count.tolist() == counts, rows
        assert all(ours == token for ours, token in zip(offset.tolist(), places, strict=True) if token is not None), (
            rows
        )
        assert (offset >= 0).all(), rows


def test_rows_are_enough_and_few() -> None:
    """As many as the lengths that need the most of them take, or less than a tile for a document more."""
    for count, tokens in itertools.product((1, 2, 5), (5, 128, 129, 1000)):
        rows = Rows((tokens - count + 1, *[1] * (count - 1))).rows
        needed = Rows((tokens - count + 1, *[1] * (count - 1))).begins[-1]
        assert needed <= rows <= tokens + (count + 1) * (ALIGNMENT - 1)
        assert rows % ALIGNMENT == 0


def test_what_the_numbers_say() -> None:
    """A query sees the keys of its own document; any other row sees nothing and is seen by nobody."""
    rows = Rows((70, 0, 1, 128), 5)
    keep = rows.keep(Band())
    of_rows = rows.tokens_of_rows()
    for document, (_, start, length) in enumerate(rows.documents()):
        for token in range(start, start + length):
            seen = [of_rows[j] for j in keep[of_rows.index(token)].nonzero().flatten().tolist()]
            assert seen == ([] if document == 4 else list(range(start, start + length)))
    nobody = torch.tensor([token is None or token >= 199 for token in of_rows])
    assert not keep[nobody].any()
    assert not keep[:, nobody].any()


# ---- bits, on the CPU ----


@some(["full", "causal", "window", "both sides"], ["causal", "both sides"], "window")
@pytest.mark.parametrize("kv_heads", [2, pytest.param(1, marks=pytest.mark.full)])
def test_a_document_has_the_same_bits_in_any_company(window: str, kv_heads: int) -> None:
    """Wherever it begins, whatever lies beside it, NaN too; by one graph."""
    # There are as many starts as heads.
    apart = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with apart, capture(strict=True) as graphs:
        compiled = graphs.compile(attend(WINDOWS[window]), dynamic=True)
        for length in (140, 64):
            own = [t.detach() for t in tensors((length, 2, 16), *[(length, kv_heads, 16)] * 2, (length, 2, 16))]
            alone = in_company(Company(), own, compiled)
            for company, factor in itertools.product(COMPANIES, (1.0, 8.0, math.nan)):
                again = in_company(company, own, compiled, factor)
                assert all(map(torch.equal, again, alone)), (length, company, factor)
    assert len(graphs.after) == 1


@pytest.mark.parametrize("length", [1, 127, 128, 129])
def test_lengths_of_tiles_and_of_one_token(length: int) -> None:
    own = [t.detach() for t in tensors(*[(length, 2, 16)] * 4)]
    with capture(strict=True) as graphs:
        compiled = graphs.compile(attend((-1, 0)), dynamic=True)
        alone = in_company(Company(), own, compiled)
        for company in (Company(before=(5, 200)), Company(before=(128,), after=(3,)), Company(after=(129,), behind=2)):
            assert all(map(torch.equal, in_company(company, own, compiled, math.nan), alone)), company


def in_company(
    company: Company, own: list[Tensor], attention: Callable[..., Tensor], factor: float = 1.0, shift: int = 0
) -> list[Tensor]:
    """The output and the gradients of a document; shift: how many tokens too early it is said to begin."""
    length = len(own[0])
    *leaves, do = (company.around(t, factor) for t in own)
    for t in leaves:
        t.requires_grad_()
    starts = company.starts(length)
    out = attention(*leaves, starts - shift * (starts == company.slice(length).start))
    found = out, *torch.autograd.grad(out, leaves, do)
    return [t.detach()[company.slice(length)] for t in found]


def test_another_beginning_gives_other_bits() -> None:
    """The negative control: documents that begin within a tile, as a mask of documents among all tokens has them."""
    own = [t.detach() for t in tensors(*[(140, 2, 16)] * 4)]

    def masked(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        ids = torch.bucketize(torch.arange(q.shape[0]), starts, right=True)
        keep = (ids == ids[:, None])[None, None]
        heads_first = (t[None].transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, attn_mask=keep).transpose(1, 2)[0]

    with capture(strict=True) as graphs:
        packed = graphs.compile(attend((-1, -1)), dynamic=True)
        alone = in_company(Company(), own, packed)
    with capture(strict=True) as graphs:
        compiled = graphs.compile(masked, dynamic=True)
        assert not all(map(torch.equal, in_company(Company(before=(27,)), own, compiled), alone))
    with capture(strict=True) as graphs:
        packed = graphs.compile(attend((-1, -1)), dynamic=True)
        company = Company(before=(27,))
        assert all(map(torch.equal, in_company(company, own, packed), alone))
        assert not all(map(torch.equal, in_company(company, own, packed, shift=1), alone))  # with a token more


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_results_have_the_strides_of_pytorch(order: tuple[int, ...]) -> None:
    """The strides of the operator's results follow query, key and value where these are dense."""
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


def test_other_attention_is_not_concerned() -> None:
    inputs = tensors(*[(1, 2, 16, 8)] * 3)
    with capture(strict=True) as graphs:
        compiled = graphs.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        step(compiled, inputs)
    (record,) = sites()
    assert record.mask == "causal"
    assert graphs.count("aten::index") == 0


def test_documents_of_whole_tiles_lie_as_they_did() -> None:
    rows = Rows((128, 256), 0)
    assert rows.tokens_of_rows()[: rows.tokens] == list(range(rows.tokens))
    assert documents(*rows.starts).tolist() == rows.begins


# ---- tiles ----


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "cpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_tile_divides_the_alignment(arch: str, dtype: DType) -> None:
    """For a forward's queries the row blocks of the Hopper kernel count, which do not depend on one another; the tiles
    of the Hopper kernels, which TMA loads from the token of their first row, are row blocks, too.
    """
    planned = 0
    for dim, band in itertools.product(range(8, 264, 8), (Band(0), Band(), Band(0, 99))):
        site = Site(
            "cpu" if arch == "cpu" else "cuda",
            dtype,
            1,
            8,
            2,
            None,
            None,
            dim,
            dim,
            AttentionSpec(mask_of(band), 0.125),
        )
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
            assert plan.kernel != "hopper" or all(size % ROW_BLOCK == 0 for size in sizes), (str(plan), dim)
    assert planned
