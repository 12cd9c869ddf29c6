"""Masks that differ between heads, read back from graphs: bounds and choices drawn at random, also beside others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.graph.nodes import bind, op_name
from dash_inductor.records.records import sites

from ..support.graphs import Shape, cuda_inputs, efficient, rewrite_on, trace
from ..support.mask_graphs import assert_components_are_the_mask, read_graph, trace_mask
from .test_drawn_masks import additive
from .test_recognition import columns, rows

aten = torch.ops.aten
BATCH, HEADS = 3, 5
Make = Callable[..., Tensor]


def drawn(rng: random.Random) -> tuple[Make, list[Tensor], str]:
    """A mask, the tensors that it reads, and the text of its components."""
    dtype = rng.choice((torch.int32, torch.int64, torch.uint8))
    numbers = torch.randint(0, 30, (HEADS,), dtype=dtype, generator=torch.Generator().manual_seed(rng.randrange(99)))
    causal, beside = rng.random() < 0.6, rng.choice(("", "", "keys", "segments"))
    kind = rng.choice(("window", "both", "lower", "slope", "flag", "rank", "prefix", "rows"))
    split, width = rng.randrange(1, HEADS), rng.randrange(1, 20)

    def of_heads(q: Tensor, k: Tensor, numbers: Tensor) -> Tensor:
        distance, number = rows(q) - columns(k), numbers[:, None, None]
        head = torch.arange(q.shape[1])[:, None, None]
        if kind == "window":
            return distance < number
        if kind == "both":
            return (distance < number) & (-distance <= width)
        if kind == "lower":
            return columns(k) >= number
        if kind == "slope":
            return distance <= width * (head + 1)
        if kind == "flag":
            return (number > 9) | (distance < width)
        if kind == "rank":
            return torch.where(head < split, distance < width, distance < 2 * width)
        if kind == "rows":
            return (head >= split) | ((rows(q) >= width) & (distance < number))
        return (distance >= 0) | ((columns(k) < number) & (head < split))

    def make(q: Tensor, k: Tensor, numbers: Tensor, data: Tensor) -> Tensor:
        shown = of_heads(q, k, numbers)
        shown = shown & (rows(q) >= columns(k)) if causal and kind != "prefix" else shown
        shown = shown & (data[:, None, None, : k.shape[2]] > 0) if beside == "keys" else shown
        if beside == "segments":
            shown = shown & (data[:, None, : q.shape[2], None] == data[:, None, None, : k.shape[2]])
        return shown

    data = torch.randint(0, 3, (BATCH, 200), generator=torch.Generator().manual_seed(0))
    sides = [*(["causal"] if causal and kind != "prefix" else []), *([beside] if beside else []), "head_interval"]
    return make, [numbers, data], " & ".join(sides)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("seed", range(30))
def test_drawn_masks(seed: int, dynamic: bool) -> None:
    make, given, text = drawn(random.Random(seed))
    inputs: list[Any] = [torch.zeros(BATCH, HEADS, 20, 4), torch.zeros(BATCH, HEADS, 27, 4), *given]
    module = trace_mask(make, *given, q_len=20, kv_len=27, dynamic=dynamic, heads=HEADS)
    found = read_graph(module)
    assert (str(found.components), found.reason) == (text, None)
    assert found.components is not None
    assert_components_are_the_mask(module, found.components, *inputs)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.usefixtures("deterministic")
def test_layers_share_tables_on_hopper(trained: bool) -> None:
    """The bounds are made of positions and data, once for all layers, and so are the tables, those of backwards only
    where there is one.
    """

    def two(q: Tensor, k: Tensor, v: Tensor, do: Tensor, width: Tensor) -> tuple[Any, ...]:
        def bias() -> Tensor:
            places = torch.arange(q.shape[2], device=q.device)
            distance = places.unsqueeze(1) - places
            shown = (distance >= 0) & (distance < width.view(-1, 1, 1))
            return additive(shown).to(q.dtype).expand(*q.shape[:3], k.shape[2])

        def layer(q: Tensor) -> tuple[Any, ...]:
            if trained:
                return efficient(q, k, v, do, bias=bias)
            return aten._scaled_dot_product_efficient_attention(q, k, v, bias(), True)[:1]  # type: ignore[no-any-return]

        out, *gradients = layer(q)
        return *gradients, *layer(out)

    def inputs() -> list[Tensor]:
        query, *others = cuda_inputs(Shape())
        return [query, *others, torch.empty(query.shape[1], dtype=torch.int64, device="cuda")]

    module = trace(two, inputs)
    rewrite_on(module.graph)
    assert [(r.status, r.forward, r.mask) for r in sites()] == [
        ("replaced", "hopper", "causal & head_interval(0,none)")
    ] * 2
    (tables,) = (node for node in module.graph.nodes if op_name(node) == "dash_inductor::mask_tables")
    assert bind(tables)["has_backward"] is trained
