"""What graphs prove about indices: random programs of indices, of which none is said to be what it is not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from dash_inductor.passes.ops.uniqueness import RULES, Lists, lists_of

from ...fuzz.integer_claims import check, traced, values_in

Step = Callable[[Tensor, random.Random], Tensor]

STEPS: dict[str, Step] = {
    "argsort": lambda t, r: torch.argsort(t.reshape(-1)),
    "argsort of lines": lambda t, r: torch.argsort(t.reshape(2, -1), dim=r.choice([0, 1])) if t.numel() % 2 == 0 else t,
    "sorted": lambda t, r: t.reshape(-1).sort(stable=True).values,
    "sorted lines": lambda t, r: t.reshape(2, -1).sort(dim=r.choice([0, 1])).values if t.numel() % 2 == 0 else t,
    "topk": lambda t, r: t.reshape(-1).topk(r.randrange(t.numel() + 1)).indices,
    "divide": lambda t, r: t // r.choice([1, 2, 3, 4]),
    "remainder": lambda t, r: t % r.choice([1, 2, 3, 4, 6]),
    "add": lambda t, r: t + r.choice([-2, -1, 1, 5]),
    "subtract": lambda t, r: t - 1,
    "slice": lambda t, r: t[r.randrange(3) :],
    "flip": lambda t, r: t.flip(0),
    "roll": lambda t, r: t.roll(1),
    "int32": lambda t, r: t.to(torch.int32),
    "int16": lambda t, r: t.to(torch.int16),
    "float": lambda t, r: (t.float() * 0.5).to(torch.int64),
    "bits": lambda t, r: (
        t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.int32).to(torch.int64)
        if t.dtype == torch.int64
        else t
    ),
    "reshape": lambda t, r: t.reshape(-1, 1),
    "flatten": lambda t, r: t.reshape(-1),
    "transpose": lambda t, r: t.reshape(2, -1).t() if t.numel() % 2 == 0 else t,
    "expand": lambda t, r: t.reshape(-1, 1).expand(-1, r.choice([1, 2, 3])),
    "repeat": lambda t, r: t.reshape(-1).repeat(2),
    "cat": lambda t, r: torch.cat([t.reshape(-1), t.reshape(-1) + r.choice([0, 1, t.numel()])]),
    "cat behind": lambda t, r: torch.cat([t.reshape(-1), torch.arange(4, dtype=t.dtype) + r.choice([0, 12])]),
    "pick": lambda t, r: t.reshape(-1)[torch.argsort(t.reshape(-1) % 3)],
    "pick some": lambda t, r: t.reshape(-1)[torch.arange(t.numel()) // 2],
    "gather": lambda t, r: t.reshape(-1).gather(0, torch.argsort(t.reshape(-1))),
    "clamp": lambda t, r: t.clamp(0, r.choice([3, 11, 100])),
    "inverse": lambda t, r: torch.empty(t.numel(), dtype=torch.int64).index_put(
        (torch.argsort(t.reshape(-1)),), torch.arange(t.numel())
    ),
    "scatter": lambda t, r: torch.zeros(t.numel(), dtype=torch.int64).scatter(
        0, torch.argsort(t.reshape(-1)), torch.arange(t.numel())
    ),
    "counts": lambda t, r: torch.arange(t.numel()),
    "even": lambda t, r: torch.arange(0, 2 * t.numel(), 2),
    "largest": lambda t, r: t.reshape(1, -1).max(1).indices,
    "split": lambda t, r: t.reshape(-1).split(5)[-1],
    "select": lambda t, r: t.reshape(-1, 2)[:, 0] if t.numel() % 2 == 0 else t,
    "where": lambda t, r: torch.where(t > 1, t, 0),
    "product": lambda t, r: t * 2,
}


def program(seed: int) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        r, t = random.Random(seed), x
        for _ in range(r.randrange(1, 6)):
            if 0 < t.numel() < 200:
                t = STEPS[r.choice(list(STEPS))](t, r)
        return t + 0 if t is x else t

    return run


def test_nothing_is_said_that_is_not_so() -> None:
    """Every node of random programs, on inputs with equal numbers, negative ones and numbers beyond all bounds."""
    torch.manual_seed(0)
    differ = lists = 0
    for seed in range(200):
        r = random.Random(seed)
        x = torch.randint(-3, 9, (r.choice([1, 2, 12, 13]),))
        module = traced(program(seed), x)
        values = values_in(module, x)
        for node, value in values.items():
            if node.op == "call_function" and value.dtype in (torch.int64, torch.int32, torch.int16):
                a, b = check(node, values)
                differ, lists = differ + a, lists + b
    assert differ > 150, "the rules say too little for this test to mean anything"
    assert lists > 60


def node_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Node:
    (node,) = traced(function, x).graph.output_node().all_input_nodes
    return node


X = torch.randint(0, 4, (6, 2))
KNOWN: list[tuple[Callable[[Tensor], Tensor], int, tuple[int, bool] | None]] = [
    (lambda x: x.view(-1).argsort() // 2, 6, (2, False)),
    (lambda x: x.view(-1).argsort(stable=True) % 6, 6, (2, True)),
    (lambda x: x.view(-1).argsort().to(torch.int32).view(3, 4), 12, (1, False)),
    (lambda x: torch.arange(6).unsqueeze(1).expand(-1, 2).reshape(-1)[x.view(-1).argsort()], 6, (2, False)),
    (lambda x: torch.arange(6).unsqueeze(1).expand(-1, 2).reshape(-1), 6, (2, False)),
    (lambda x: x.view(-1).argsort().argsort(), 12, (1, False)),
    (lambda x: x.view(-1).argsort()[:6], 6, None),  # six of twelve numbers
    (lambda x: x.view(-1).argsort() // 5, 3, None),  # the last row has two
    (lambda x: x.argsort(0).view(-1), 12, None),  # columns of their own
    (lambda x: x.view(-1), 12, None),
    (lambda x: x.view(-1).argsort() + 1, 12, None),
]


@pytest.mark.parametrize(("function", "rows", "expected"), KNOWN)
def test_lists(function: Callable[[Tensor], Tensor], rows: int, expected: tuple[int, bool] | None) -> None:
    found = lists_of(node_of(function, X), rows)
    assert (None if found is None else (found.times, found.strided)) == expected
    assert found is None or isinstance(found, Lists)


def test_rules_are_of_operators_that_exist() -> None:
    for name in RULES:
        space, op = name.split("::")
        assert space == "dash_inductor" or hasattr(getattr(torch.ops, space), op), name
