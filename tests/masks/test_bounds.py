"""Bounds of tensors that are computed from numbers and positions: no element of a random program lies beyond them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.masks.bounds import bounds

Program = Callable[[Tensor], Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ONE: list[Program] = [
    lambda x: -x, lambda x: x.abs(), torch.exp, torch.exp2, torch.reciprocal, lambda x: 2.0**x, lambda x: x**1.5,
    lambda x: x[..., 1:], lambda x: x.unsqueeze(0), lambda x: x.expand(3, *x.shape), lambda x: x.flip(-1),
    lambda x: x.clone(), lambda x: x.mT if x.dim() > 1 else x, lambda x: x.to(torch.int32), lambda x: x * 3,
    lambda x: x / 7,    lambda x: x - 2, lambda x: 1 - x, lambda x: x.round(), lambda x: x.flatten(),
]  # fmt: skip
TWO: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.pow,
    lambda x, y: torch.cat([x.flatten(), y.flatten()]),
]  # fmt: skip


def values(seed: int) -> tuple[list[Tensor], list[Node]]:
    """The tensors of a random program, and their nodes."""
    draw, kept = random.Random(seed), list[Tensor]()

    def program() -> tuple[Tensor, ...]:
        made = [torch.arange(draw.randint(-9, 3), draw.randint(5, 40), draw.choice([1, 2, 7]))]
        made.append(made[0].to(draw.choice(FLOATS)))
        for _ in range(8):
            one, other = draw.choice(made), draw.choice(made)
            try:
                found = draw.choice(ONE)(one) if draw.random() < 0.6 else draw.choice(TWO)(one, other)
            except RuntimeError:  # shapes that do not go together, or a power of integers
                continue
            if 0 < found.numel() < 5000:
                made.append(found)
        kept[:] = made
        return tuple(made)

    graph = make_fx(program, decomposition_table=torch._decomp.get_decompositions([torch.ops.aten.arange]))().graph
    return kept, list(graph.output_node().args[0])  # type: ignore[arg-type]  # the results


def test_no_element_lies_beyond() -> None:
    known = rounds = 0
    for seed in range(300):
        tensors, nodes = values(seed)
        for tensor, node in zip(tensors, nodes, strict=True):
            found = bounds(node)
            if found is None:
                continue
            known += 1
            rounds += tensor.dtype in (torch.bfloat16, torch.float16)
            assert not tensor.isnan().any()
            assert found[0] <= float(tensor.min()), (seed, node)
            assert float(tensor.max()) <= found[1], (seed, node)
    assert known > 500, "programs are read"
    assert rounds > 50


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x, lambda x: torch.arange(5) * x, lambda x: torch.rand(5), lambda x: 1 / torch.arange(5.0),
        lambda x: torch.arange(5.0) ** -1.0, lambda x: torch.exp(1e3 * torch.arange(5.0)),
        lambda x: torch.arange(5, dtype=torch.float32).view(torch.int32), lambda x: torch.arange(5.0).sin(),
        lambda x: torch.div(torch.arange(1.0, 5.0), 2.0, rounding_mode="floor"),
        lambda x: torch.arange(200).to(torch.int8), lambda x: torch.arange(5) * 2**55,
    ],
)  # fmt: skip
def test_what_is_not_known_has_none(program: Program) -> None:
    """Inputs, random numbers, quotients by zero, infinities, bits, and operators without a rule."""
    graph = make_fx(program, decomposition_table=torch._decomp.get_decompositions([torch.ops.aten.arange]))(
        torch.ones(5)
    ).graph
    assert bounds(graph.output_node().args[0]) is None  # type: ignore[arg-type]  # a node
