"""Graphs that end in a mask tensor, for tests of mask recognition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.masks.nodes import as_expr
from dash_inductor.masks.normal_form import Components
from dash_inductor.masks.recognition import MaskResult, recognise
from dash_inductor.model.components import COMPONENTS
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
    """The answer of `recognise` for the mask that `trace_mask` traces."""
    return read_graph(trace_mask(make, *inputs, **options))


def read_graph(module: GraphModule) -> MaskResult:
    """The answer of `recognise` for the output of a graph whose first two inputs are query and key."""
    query, key, *_ = (node for node in module.graph.nodes if node.op == "placeholder" and "val" in node.meta)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    return recognise(output.args[0], query=query, key=key)


def read_as(band: Band) -> MaskResult:
    """The answer of `recognise` for a mask that is this band."""
    return MaskResult(Components(band))


def assert_components_are_the_mask(module: GraphModule, components: Components, *inputs: Tensor) -> None:
    """The components, of what the graph computes from these inputs (query and key first), show what it shows."""
    run = Interpreter(module, garbage_collect_values=False)
    mask = run.run(*inputs)
    expected = visible_by(module, components, inputs, lambda node: run.env[node])
    assert_visible(mask, expected, f"{components} is not the mask")


def assert_visible(mask: Tensor, expected: Tensor, message: str) -> None:
    """The mask shows exactly what is expected, [B, H, q_len, kv_len], and hides the rest for certain."""
    mask = mask.expand(expected.shape)
    visible = mask if mask.dtype == torch.bool else mask == 0
    assert torch.equal(visible, expected), message
    if mask.dtype != torch.bool:
        least = torch.finfo(torch.bfloat16 if mask.dtype == torch.float32 else mask.dtype).min
        assert (mask[~visible] <= least).all(), f"{message}: soft values"
        assert bool(expected.any(-1).all()) or bool((mask[~visible] == -torch.inf).all()), f"{message}: empty rows"


@dataclass(frozen=True)
class _Tensors:
    """Computes components of a mask; see `dash_inductor.masks.token_vectors.Calculator`."""

    value: Callable[[Node], Tensor]
    lengths: dict[str, int]
    sizes: dict[sympy.Expr, int]

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = operator(*args, **kwargs)
        return result

    def tensor(self, node: Node) -> Tensor:
        return self.value(node)

    def positions(self, axis: str) -> Tensor:
        return torch.arange(self.lengths[axis])[None]

    def size(self, symbol: sympy.Expr) -> int:
        return self.sizes[symbol]


def visible_by(
    module: GraphModule, components: Components, inputs: Sequence[Any], value: Callable[[Node], Tensor]
) -> Tensor:
    """Whether queries see keys by the components, [B, H, q_len, kv_len], for these inputs and values of the graph."""
    (batch, heads, q_len, _), kv_len = inputs[0].shape, inputs[1].shape[2]
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    tensors = [(p.meta["val"], x) for p, x in zip(places, inputs, strict=True) if isinstance(x, Tensor)]
    sizes = {as_expr(n): size for fake, real in tensors for n, size in zip(fake.shape, real.shape, strict=True)}
    distance = torch.arange(q_len)[:, None] - torch.arange(kv_len)[None, :]
    band = components.band.resolve(q_len, kv_len)
    visible = torch.ones(batch, heads, q_len, kv_len, dtype=torch.bool)
    if band.lo is not None:
        visible &= distance >= band.lo
    if band.hi is not None:
        visible &= distance <= band.hi
    calculator = _Tensors(value, {"h": heads, "q": q_len, "kv": kv_len}, sizes)
    for component in components.others:
        kind, given = COMPONENTS[component.NAME], component.compute(calculator)
        values = {
            name: value
            if "h" in kind.AXES[name]
            else value[:, None, :, None]
            if "q" in kind.AXES[name]
            else value[:, None, None]
            for name, value in (given | {name: given[other] for name, other in component.same.items()}).items()
        }
        visible &= kind.shows(values, torch.arange(kv_len))
    return visible
