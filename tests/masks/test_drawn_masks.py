"""Masks drawn inside the graph: random numbers, and results of operators without a rule, are data like any input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dash_inductor.config import config
from dash_inductor.graph.nodes import bind, op_name
from dash_inductor.records.records import sites

from ..support.graphs import (
    BACKWARD,
    FORWARD,
    Shape,
    assert_as_exact,
    capture,
    cuda_inputs,
    efficient,
    rewritten,
    step,
    tensors,
    trace,
)
from ..support.mask_graphs import assert_components_are_the_mask, read_graph, trace_mask

Make = Callable[[Tensor, Tensor], Tensor]


def causal(q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(k.shape[2], device=k.device) <= torch.arange(q.shape[2], device=q.device).unsqueeze(1)


def additive(visible: Tensor) -> Tensor:
    return torch.where(visible, 0.0, -torch.inf)


def same(number: Tensor) -> Tensor:
    return number.view(-1, 1, number.shape[1], 1) == per_key(number)


def per_key(numbers: Tensor) -> Tensor:
    return numbers.view(-1, 1, 1, numbers.shape[1])


def drawn(q: Tensor, *size: int) -> Tensor:
    return torch.rand(size, device=q.device)


def random_keys(q: Tensor, k: Tensor) -> Tensor:
    return causal(q, k) & (drawn(q, q.shape[0], 1, 1, k.shape[2]) < 0.7)


def bernoulli_keys(q: Tensor, k: Tensor) -> Tensor:
    kept = torch.bernoulli(torch.full((q.shape[0], k.shape[2]), 0.7, device=q.device))
    return additive(causal(q, k) & per_key(kept.bool()))


def sorted_keys(q: Tensor, k: Tensor) -> Tensor:
    """Half of the keys, chosen by a permutation."""
    return causal(q, k) & per_key(drawn(q, q.shape[0], k.shape[2]).argsort(-1) < k.shape[2] // 2)


def best_keys(q: Tensor, k: Tensor) -> Tensor:
    """The keys that activations choose, written into a mask of zeros."""
    chosen = k.detach().mean((1, 3)).topk(5).indices
    return per_key(torch.zeros(k.shape[0], k.shape[2], device=k.device).scatter(1, chosen, 1.0).bool())


def keys_of_a_product(q: Tensor, k: Tensor) -> Tensor:
    """No input reaches it, and no operator with a rule makes it."""
    ones = torch.ones(q.shape[0], 3, device=q.device) @ torch.ones(3, k.shape[2], device=q.device)
    return causal(q, k) & per_key(ones.cumsum(1) < 30)


def random_documents(q: Tensor, k: Tensor) -> Tensor:
    return causal(q, k) & same(torch.randint(0, 3, (q.shape[0], q.shape[2]), device=q.device))


def counted_documents(q: Tensor, k: Tensor) -> Tensor:
    return additive(causal(q, k) & same((drawn(q, q.shape[0], q.shape[2]) < 0.2).cumsum(-1)))


def random_pairs(q: Tensor, k: Tensor) -> Tensor:
    return drawn(q, q.shape[2], k.shape[2]) < 0.7


def random_pairs_beside_a_band(q: Tensor, k: Tensor) -> Tensor:
    return additive(causal(q, k) & (drawn(q, q.shape[0], 1, q.shape[2], k.shape[2]) < 0.7))


def random_heads(q: Tensor, k: Tensor) -> Tensor:
    return additive(causal(q, k)) + additive(drawn(q, 1, q.shape[1], 1, 1) < 0.5)


def activations(q: Tensor, k: Tensor) -> Tensor:
    return q.detach() @ k.detach().mT > -1


DRAWN: list[tuple[Make, str]] = [
    (random_keys, "causal & keys"),
    (bernoulli_keys, "causal & keys"),
    (sorted_keys, "causal & keys"),
    (best_keys, "keys"),
    (keys_of_a_product, "causal & keys"),
    (random_documents, "causal & segments"),
    (counted_documents, "causal & segments"),
    (random_pairs, "dense"),
    (random_pairs_beside_a_band, "causal & dense"),
    (random_heads, "causal & head_interval"),
    (activations, "dense"),
]
parametrize = pytest.mark.parametrize(("make", "mask"), DRAWN, ids=lambda x: getattr(x, "__name__", ""))


@parametrize
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_what_is_drawn_is_data(make: Make, mask: str, dynamic: bool) -> None:
    module = trace_mask(make, dynamic=dynamic)
    found = read_graph(module)
    assert (str(found.components), found.reason) == (mask, None)
    assert found.components is not None
    for length in (20, 33) if dynamic else (20,):
        q, k = (torch.randn(3, 2, length, 4) for _ in range(2))
        assert_components_are_the_mask(module, found.components, q, k)


@parametrize
def test_reading_draws_nothing(make: Make, mask: str) -> None:
    """The reader compares random values of its own: the program's generator stays where it is."""
    module = trace_mask(make)
    before = torch.get_rng_state()
    read_graph(module)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def runs() -> Iterator[list[int]]:
    """How many elements a user's operator was run on, which gives them numbers."""
    found: list[int] = []
    with torch.library._scoped_library("dash_test", "FRAGMENT") as library:
        library.define("numbers(Tensor x) -> Tensor")

        def numbers(x: Tensor) -> Tensor:
            found.append(x.numel())
            return (x > 0).long()

        library.impl("numbers", numbers, "CPU")
        torch.library.register_fake("dash_test::numbers", lambda x: torch.empty_like(x, dtype=torch.int64), lib=library)
        yield found


def test_an_operator_of_the_user_is_not_run(runs: list[int]) -> None:
    def make(q: Tensor, k: Tensor) -> Tensor:
        number = torch.ops.dash_test.numbers(torch.ones(q.shape[0], q.shape[2]))
        flag = torch.ops.dash_test.numbers(number).bool().any()
        return causal(q, k) & same(number) & per_key(number > 0) & flag

    found = read_graph(trace_mask(make))
    assert str(found.components) == "causal & segments & keys"
    assert not runs


def drawn_nodes(extras: list[Node]) -> set[Node]:
    """The random nodes from which these are computed."""
    found, stack = set(), list(extras)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return {node for node in found if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("make", "mask"),
    [case for case in DRAWN if case[0] is not activations],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_hopper_kernels_run_it(make: Make, mask: str) -> None:
    """As they run the same mask where it is an input; forward and backward read what is drawn once."""

    def function(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        def bias() -> Tensor:
            found = make(q, k)
            found = found if found.dtype != torch.bool else additive(found)
            return found.to(q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

        return efficient(q, k, v, do, bias=bias)

    graph, record = rewritten(trace(function, lambda: cuda_inputs(Shape())))
    assert (record.reason, record.plan.kernel, record.forward) == (None, "hopper", "hopper")
    read = []
    for name in (FORWARD, BACKWARD):
        (node,) = (node for node in graph.nodes if op_name(node) == name)
        read.append(drawn_nodes(bind(node)["extras"]))
    assert read[0] == read[1]
    assert len(read[0]) == (0 if make in (best_keys, keys_of_a_product) else 1)


@pytest.mark.usefixtures("deterministic")
@parametrize
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_gradients(make: Make, mask: str, dynamic: bool) -> None:
    """Gradients are correct for the mask that the graph drew, which it returns beside its output."""
    used: list[Tensor] = []

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = make(q, k)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=found), found

    inputs = tensors(*[(3, 2, 70, 16)] * 3)
    for tensor in inputs if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 2)
    with capture() as graphs, config.patch(strict=True):
        compiled = graphs.compile(function)

        def output(*qkv: Tensor) -> Tensor:
            out, found = compiled(*qkv)
            used.append(found)
            return out

        results = step(output, inputs)
    assert [record.reason for record in sites()] == [None]
    assert "bias" not in sites()[0].mask
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (1, 1)

    def given(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = used[0] if used[0].dtype == torch.bool else used[0].to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    assert_as_exact(given, inputs, results, strides=False)
