"""What graphs are said to prove about integers, held against their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.passes.ops.uniqueness import distinct_along, inverted, lists_of, values_of


def traced(function: Callable[[Tensor], Tensor], x: Tensor) -> GraphModule:
    """The graph of a function of a tensor."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return make_fx(function)(mode.from_tensor(x))


def check(node: Node, values: Mapping[Node, Tensor]) -> tuple[bool, bool]:
    """Hold what is said of a node against its value; whether its integers were said to differ, and to be lists."""
    value = values[node]
    flat = value.reshape(-1).tolist()
    known = values_of(node)
    if known is not None:
        counts = Counter(flat)
        assert all(known.low <= number < known.high for number in flat), known
        if known.times is not None:
            assert max(counts.values(), default=0) <= known.times, (known, flat)
        if known.exact:
            assert counts == Counter({n: known.times for n in range(int(known.low), int(known.high)) if known.times})
    for dim in range(value.dim()):
        if distinct_along(node, dim):
            lines = value.movedim(dim, -1).reshape(-1, value.shape[dim]).tolist() if value.numel() else []
            assert all(len(set(line)) == len(line) for line in lines)
    order = inverted(node)
    if order is not None:
        of = values[order].reshape(-1)
        row = value.reshape(-1)
        assert of[row].tolist() == row[of].tolist() == list(range(len(flat)))
    found = False
    for rows in {len(flat) // times for times in (1, 2, 3, 4, 6)}:
        lists = lists_of(node, rows)
        found |= lists is not None
        if lists is not None:
            numbers = torch.arange(len(flat)) if lists.order is None else values[lists.order].reshape(-1)
            assert sorted(numbers.tolist()) == list(range(len(flat)))
            assert flat == (numbers % rows if lists.strided else numbers // lists.times).tolist()
            assert rows * lists.times == len(flat)
    return known is not None and known.differ, found


class _Watched(torch.fx.Interpreter):
    """Runs a graph and keeps the value of each node."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.values: dict[Node, Tensor] = {}

    def run_node(self, n: Node) -> object:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.values[n] = result
        return result


def values_in(module: GraphModule, x: Tensor) -> dict[Node, Tensor]:
    """The value of each node of a graph that has one tensor as its input."""
    watched = _Watched(module)
    watched.run(x)
    return watched.values
