"""Graphs that end in a mask tensor, for tests of mask recognition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.matching.masks import MaskResult, recognise
from dash_inductor.matching.normal_form import Terms
from dash_inductor.matching.predicates import compute
from dash_inductor.model.mask import Band

MaskMaker = Callable[..., Tensor]
"""A function of query [B, H, q_len, D], key [B, H, kv_len, D] (and other inputs) that returns a mask."""


def trace_mask(
    make: MaskMaker,
    *inputs: Tensor,
    q_len: int = 20,
    kv_len: int = 20,
    batch: int = 3,
    heads: int = 2,
    dynamic: bool = False,
    decomposed: bool = True,
) -> GraphModule:
    """The graph of a mask, from query, key and more inputs; with sizes as symbols if `dynamic`, in Inductor's
    decomposition unless not `decomposed`."""
    query, key = (torch.zeros(batch, heads, length, 4) for length in (q_len, kv_len))
    mode = "symbolic" if dynamic else "fake"
    table: Any = select_decomp_table() if decomposed else {}
    return make_fx(torch.func.functionalize(make), table, mode)(query, key, *inputs)


def read_mask(make: MaskMaker, *inputs: Tensor, **options: Any) -> MaskResult:
    """What `recognise` says of the mask that `trace_mask` traces."""
    return read_graph(trace_mask(make, *inputs, **options))


def read_graph(module: GraphModule) -> MaskResult:
    """What `recognise` says of the output of a graph whose first two inputs are query and key."""
    query, key, *_ = (node for node in module.graph.nodes if node.op == "placeholder" and "val" in node.meta)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    return recognise(output.args[0], query=query, key=key)


def read_as(band: Band) -> MaskResult:
    """What `recognise` says of a mask that is this band."""
    return MaskResult(Terms(band))


def assert_terms_are_the_mask(module: GraphModule, terms: Terms, *inputs: Tensor) -> None:
    """The terms, of what the graph computes from these inputs (query and key first), show what its output shows."""
    run = Interpreter(module, garbage_collect_values=False)
    mask = run.run(*inputs)
    expected = visible_by(terms, inputs[0], inputs[1], lambda node: run.env[node])
    assert_visible(mask, expected, f"{terms} is not the mask")


def assert_visible(mask: Tensor, expected: Tensor, message: str) -> None:
    """The mask shows exactly what is expected, [B, H, q_len, kv_len], and hides the rest for certain."""
    mask = mask.expand(expected.shape)
    visible = mask if mask.dtype == torch.bool else mask == 0
    assert torch.equal(visible, expected), message
    if mask.dtype != torch.bool:
        assert (mask[~visible] <= torch.finfo(mask.dtype).min / 2).all(), f"{message}: soft values"
        assert bool(expected.any(-1).all()) or bool((mask[~visible] == -torch.inf).all()), f"{message}: empty rows"


def visible_by(terms: Terms, query: Tensor, key: Tensor, value: Callable[[Node], Tensor]) -> Tensor:
    """Who sees whom by the terms, [B, H, q_len, kv_len], for these values of the graph's nodes."""
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    distance = torch.arange(q_len)[:, None] - torch.arange(kv_len)[None, :]
    band = terms.band.resolve(q_len, kv_len)
    visible = torch.ones(batch, heads, q_len, kv_len, dtype=torch.bool)
    if band.lo is not None:
        visible &= distance >= band.lo
    if band.hi is not None:
        visible &= distance <= band.hi
    if terms.keys is not None:
        visible &= compute(terms.keys, "kv", lambda operator, args: operator(*args), value)[:, None, None]
    return visible
