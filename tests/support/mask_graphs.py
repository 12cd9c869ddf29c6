"""Graphs that end in a mask tensor, for tests of mask recognition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.matching.masks import MaskResult, recognise

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
