"""Dropout in graphs: who draws which seed and when, what reads it, and what becomes of it under checkpointing.

PyTorch decomposes attention with dropout on a CPU before any graph is seen, so these programs call the CPU's operator
themselves: it cannot run with dropout, but is traced, and the reference executor then runs in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import partitioners
from torch._inductor import inductor_prims
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dash_inductor.config import config
from dash_inductor.graph.nodes import bind, op_name
from dash_inductor.kernels.hopper.family import FAMILY as HOPPER
from dash_inductor.model import AttentionSpec, Bias, Dropout, Operand, Reason
from dash_inductor.planning import forward as planned_forward
from dash_inductor.planning import planner
from dash_inductor.records.records import sites

from ...support.dropout import dense, kept_pairs
from ...support.graphs import (
    BACKWARD,
    FORWARD,
    Shape,
    capture,
    cuda_inputs,
    cudnn,
    efficient,
    flash,
    flash_backward,
    joint_graph,
    op_counts,
    rewrite_on,
    rewritten,
    step,
    tensors,
    trace,
)

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("deterministic")

SEED = "dash_inductor::dropout_seed"
P = 0.25
QKV = (2, 3, 40, 16), (2, 3, 40, 16), (2, 3, 40, 16)
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, P, True)[0]
    return out


def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(attend(q, k, v).sin(), k, v)


def checkpointed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The first layer computes something before its attention, so that there is more to recompute."""
    q = checkpoint(lambda q, k, v: attend(q, k, v).sin(), q, k, v, use_reentrant=False, **options)
    return checkpoint(attend, q, k, v, use_reentrant=False, **options)


def selectively(policy: CheckpointPolicy) -> Function:
    def decide(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_attention = op is aten._scaled_dot_product_flash_attention_for_cpu.default
        return policy if is_attention else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, decide)
    return functools.partial(checkpointed, context_fn=contexts)


def drawn_by_inductor(count: int, device: torch.device) -> Tensor:
    """The seeds of a graph as generated code draws them; `inductor_prims.seeds` does where a graph runs as it is."""
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (count,), device=device)


def expected(inputs: list[Tensor], seed: int, draw: Callable[..., Tensor] = inductor_prims.seeds) -> list[Tensor]:
    """`step` of two layers in double precision, with seeds as a program draws them after `torch.manual_seed`."""
    torch.manual_seed(seed)
    seeds = draw(2, inputs[0].device).unsqueeze(1)
    dropout = Dropout(P, Operand(0))
    (batch, heads, q_len, dim), kv_len = inputs[0].shape, inputs[1].shape[2]
    visible = torch.ones(q_len, kv_len, dtype=torch.bool).tril()

    def layer(q: Tensor, k: Tensor, v: Tensor, seed: Tensor) -> Tensor:
        kept = kept_pairs(dropout, seed, batch, heads, q_len, kv_len)
        return dense(q, k, v, visible, kept, dropout, dim**-0.5)[0]

    exact = [t.detach().double().requires_grad_() for t in inputs]
    return step(lambda q, k, v: layer(layer(q, k, v, seeds[0]).sin(), k, v, seeds[1]), exact)


def close(results: list[Tensor], exact: list[Tensor]) -> bool:
    return all((a - b).abs().max() < 1e-4 * b.abs().max() for a, b in zip(results, exact, strict=True))


def seeded(function: Function, inputs: list[Tensor], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return step(function, inputs)


FUNCTIONS = {
    "plain": layers,
    "checkpointed": checkpointed,
    "attention_saved": selectively(CheckpointPolicy.MUST_SAVE),
    "attention_recomputed": selectively(CheckpointPolicy.MUST_RECOMPUTE),
}


@pytest.mark.parametrize(
    ("name", "budget"),
    [*((name, 1.0) for name in FUNCTIONS), ("plain", 0.5), ("plain", 0.001), ("checkpointed", 0.001)],
)
def test_training_repeats_and_follows_the_generator(name: str, budget: float) -> None:
    """Equal seeds give equal bits, and what they keep in every layer; each call draws anew.

    No seed is drawn in a backward, with memory budgets that recompute all they can either.
    """
    inputs = tensors(*QKV)
    with capture() as graphs, functorch_config.patch(activation_memory_budget=budget):
        compiled = graphs.compile(FUNCTIONS[name])
        first = seeded(compiled, inputs, 0)
        second = step(compiled, inputs)
        again = seeded(compiled, inputs, 0)
        other = seeded(compiled, inputs, 1)
    assert [(r.status, r.detail) for r in sites()] == [("replaced", "dropout with probability 0.25")] * 2
    forward, backward = graphs.partitions
    assert (forward[SEED], forward[FORWARD]) == (2, 2)
    assert (backward[SEED], backward[BACKWARD]) == (0, 2)
    recomputes = {"plain": 0, "checkpointed": 2, "attention_saved": 0, "attention_recomputed": 2}
    assert backward[FORWARD] == recomputes[name] or budget < 1
    assert all(map(torch.equal, first, again))
    assert close(first, expected(inputs, 0))
    assert close(other, expected(inputs, 1))
    assert not close(second, expected(inputs, 0))


def test_a_budget_of_nothing_is_refused() -> None:
    """PyTorch's partitioner saves nothing then, and draws again; a seed that it does not save ends the compile."""
    inputs = tensors(*QKV)
    nothing = functorch_config.patch(activation_memory_budget=0.0)
    with capture() as graphs, nothing, pytest.raises(Exception, match="ropout"):  # PyTorch's CPU kernel has none
        step(graphs.compile(layers), inputs)
    assert {(r.status, r.reason) for r in sites()} == {("fallback", Reason.DROPOUT)}
    assert "activation_memory_budget=0" in sites()[0].detail

    def save_nothing(graph: Graph, info: Any, **options: Any) -> Any:
        return info.inputs

    nothing = mock.patch.object(partitioners, "choose_saved_values_set", save_nothing)
    with capture(), nothing, pytest.raises(Exception, match="would be drawn again in the backward"):
        step(torch.compile(layers), inputs)


def test_a_second_backward_of_one_forward_keeps_the_same() -> None:
    inputs = tensors(*QKV)
    with capture() as graphs, functorch_config.patch(donated_buffer=False):
        out = graphs.compile(layers)(*inputs)
        first, second = (torch.autograd.grad(out.sum(), inputs, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("name", ["plain", "checkpointed"])
def test_compiled_by_inductor(name: str, fallback: bool) -> None:
    """The site stands beside other dropout, whose seeds Inductor draws together, or whose numbers are PyTorch's own."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(FUNCTIONS[name](q, k, v), 0.5)

    inputs = tensors(*QKV)
    with capture(), inductor_config.patch(fallback_random=fallback):
        compiled = torch.compile(function)
        first, again, other = (seeded(compiled, inputs, seed) for seed in (0, 0, 1))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    dropped = first[0] == 0
    assert 0.4 < dropped.double().mean() < 0.6


def test_inductor_draws_the_seeds_of_a_graph_at_once() -> None:
    inputs = tensors(*QKV)
    with capture():
        assert close(seeded(torch.compile(layers), inputs, 3), expected(inputs, 3, drawn_by_inductor))


def around(reentrant: bool) -> Callable[[Function], Function]:
    """A checkpoint of PyTorch's around a compiled function."""

    def wrap(compiled: Function) -> Function:
        return lambda q, k, v: checkpoint(compiled, q, k, v, use_reentrant=reentrant)

    return wrap


def without_gradients(compiled: Function) -> Function:
    return lambda q, k, v: compiled(q.detach(), k.detach(), v.detach())


WAYS: dict[str, tuple[Function, Callable[[Function], Function]]] = {
    **{name: (function, lambda compiled: compiled) for name, function in FUNCTIONS.items()},
    "around_reentrant": (layers, around(True)),
    "around": (layers, around(False)),
    "without_gradients": (layers, without_gradients),
}


def beside_others(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(layers(F.dropout(q, 0.5), k, v), 0.5)


@pytest.mark.parametrize("generated", [False, True], ids=["graphs", "generated code, beside other random operators"])
def test_draws_are_the_same_in_every_graph(generated: bool) -> None:
    """With gradients, without them, and however much is run again: equal bits, and the program's later draws stay."""
    inputs, found = tensors(*QKV), {}
    for name, (function, wrap) in WAYS.items():
        if generated and function is not layers:
            continue
        with capture(strict=True) as graphs:
            run = wrap(torch.compile(beside_others) if generated else graphs.compile(function))
            torch.manual_seed(11)
            output = run(*inputs)
            if output.requires_grad:
                output.sum().backward()
            found[name] = output.detach(), torch.rand(4)
    for name, results in found.items():
        assert all(map(torch.equal, results, found["plain"])), name


def once(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return checkpoint(attend, q, k, v, use_reentrant=False, **options)


LINEAR: dict[str, tuple[Function, Callable[[Function], Function]]] = {
    "plain": (attend, lambda compiled: compiled),
    "inside": (once, lambda compiled: compiled),
    "around_reentrant": (attend, around(True)),
    "around": (attend, around(False)),
    "around_both": (once, around(True)),
}


@pytest.mark.parametrize("way", list(LINEAR))
def test_loss_and_gradient_have_one_dropout(way: str) -> None:
    """The loss is linear in value, so that it is the product of value and its gradient, whatever was dropped."""
    function, wrap = LINEAR[way]
    q, k, v = tensors(*QKV)
    weights = torch.rand(QKV[0], generator=torch.Generator().manual_seed(2))
    with capture(strict=True) as graphs:
        loss = (wrap(graphs.compile(function))(q, k, v) * weights).sum()
        loss.backward()
    assert v.grad is not None
    assert (v.grad * v).sum().item() == pytest.approx(loss.item(), rel=1e-4)


def test_dynamic_sizes() -> None:
    """One graph serves all lengths and batch sizes, with the numbers of each."""
    with capture() as graphs:
        compiled = graphs.compile(layers)
        for batch, length in ((2, 40), (3, 57), (4, 33)):
            inputs = tensors(*[(batch, 3, length, 16)] * 3)
            for t in inputs:
                torch._dynamo.mark_dynamic(t, 0)
                torch._dynamo.mark_dynamic(t, 2)
            assert close(seeded(compiled, inputs, 5), expected(inputs, 5))
    assert len(graphs.after) == 1


def hidden(shown: Tensor, like: Tensor) -> Tensor:
    """Zero where a bool tensor is true, else minus infinity, for all pairs."""
    zero, low = (torch.full((), x, dtype=like.dtype, device=like.device) for x in (0.0, float("-inf")))
    return torch.where(shown.expand(*like.shape[:3], like.shape[2]), zero, low)


GENERATOR = torch.Generator().manual_seed(4)
VALID = torch.rand(2, 40, generator=GENERATOR) < 0.8
DOCUMENTS = torch.randint(0, 3, (2, 40), generator=GENERATOR).sort(1).values
PAIRS = torch.rand(2, 1, 40, 40, generator=GENERATOR) < 0.6
ADDED = torch.randn(1, 3, 40, 40, generator=GENERATOR)
MASKS: dict[str, tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "keys(0)": (VALID, lambda x, q: hidden(x[:, None, None], q)),
    "segments(0,0)": (DOCUMENTS, lambda x, q: hidden(x[:, None, :, None] == x[:, None, None], q)),
    "dense(0)": (PAIRS, hidden),
    "full + bias": (ADDED, lambda x, q: x.to(q.dtype).expand(2, 3, 40, 40)),
}


@pytest.mark.parametrize("name", MASKS)
def test_beside_masks_and_biases(name: str) -> None:
    """Rows that see no key among them."""
    data, make = MASKS[name]

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = make(data, q)
        out: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, P, False, attn_mask=mask)[0]
        return out

    def in_full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = kept_pairs(Dropout(P, Operand(0)), seed, *q.shape[:3], k.shape[2])
        s = q @ k.mT * q.shape[3] ** -0.5 + make(data, q)
        sees = (s != float("-inf")).any(3, keepdim=True)
        return torch.where(sees, torch.where(sees, s, 0.0).softmax(3), 0.0) * kept / (1 - P) @ v

    inputs = tensors(*QKV)
    torch.manual_seed(0)
    seed = inductor_prims.seeds(1, inputs[0].device)
    exact = step(in_full, [t.detach().double().requires_grad_() for t in inputs])
    with capture() as graphs:
        found = seeded(graphs.compile(masked), inputs, 0)
    assert [(r.status, r.mask) for r in sites()] == [("replaced", name)]
    assert close(found, exact)


# ---- the operators of CUDA, on fake tensors ----


def nodes(graph: Graph, name: str) -> list[Node]:
    return [node for node in graph.nodes if op_name(node) == name]


def dropped_efficient(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Callable[[], Tensor] | None = None, p: float = 0.1
) -> tuple[Any, ...]:
    bias = mask() if mask else None
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, p)
    backward = aten._scaled_dot_product_efficient_attention_backward
    return out, *backward(do, q, k, v, bias, out, lse, seed, offset, p, [True, True, True, False])[:3]


def dropped_cudnn(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
    out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.1, True)
    backward = aten._scaled_dot_product_cudnn_attention_backward
    return out, *backward(do, q, k, v, out, lse, seed, offset, None, cq, ck, mq, mk, 0.1, True)


def dropped_flash(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
    return flash(q, k, v, do, dropout=0.1)


@pytest.mark.parametrize("maker", [dropped_flash, dropped_efficient, dropped_cudnn])
def test_forward_and_backward_read_one_seed(maker: Callable[..., tuple[Any, ...]]) -> None:
    graph, record = rewritten(joint_graph(maker))
    assert record.status == "replaced"
    assert record.plan is not None
    assert (record.plan.kernel, record.plan.forward) == ("hopper", "hopper")
    assert "/dropout=0.1,0/" in record.plan.numerics_key
    (seed,), (forward,), (backward,) = (nodes(graph, name) for name in (SEED, FORWARD, BACKWARD))
    assert forward.args[3] == backward.args[6] == [seed]
    assert seed.meta["recompute"] is CheckpointPolicy.MUST_SAVE
    assert (
        AttentionSpec.parse(forward.args[4]).dropout
        == AttentionSpec.parse(backward.args[7]).dropout
        == Dropout(0.1, Operand(0))
    )
    assert not [name for name in op_counts(graph) if name.startswith("aten::_scaled")]


def padded(q: Tensor, k: Tensor, v: Tensor, do: Tensor, valid: Tensor) -> tuple[Any, ...]:
    return dropped_efficient(q, k, v, do, lambda: hidden(valid.unsqueeze(1).unsqueeze(1), q))


def padded_inputs() -> list[Tensor]:
    return [*cuda_inputs(Shape()), torch.empty(2, 128, dtype=torch.bool, device="cuda")]


def test_the_seed_comes_behind_what_the_mask_reads() -> None:
    graph, record = rewritten(trace(padded, padded_inputs))
    assert (record.status, record.mask) == ("replaced", "keys(0)")
    (forward,) = nodes(graph, FORWARD)
    assert AttentionSpec.parse(forward.args[4]).dropout == Dropout(0.1, Operand(1))
    assert forward.args[3][1] is nodes(graph, SEED)[0]


@pytest.mark.parametrize("gradient", [False, True])
def test_the_seed_comes_behind_a_bias(gradient: bool) -> None:
    """Both operators of the site read both, also where the backward makes the bias's gradient."""

    def biased(q: Tensor, k: Tensor, v: Tensor, do: Tensor, bias: Tensor) -> tuple[Any, ...]:
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.1)
        backward = aten._scaled_dot_product_efficient_attention_backward
        gradients = backward(do, q, k, v, bias, out, lse, seed, offset, 0.1, [True, True, True, gradient])
        return out, *gradients[: 4 if gradient else 3]

    def inputs() -> list[Tensor]:
        return [*cuda_inputs(Shape()), torch.empty(2, 8, 128, 128, dtype=torch.bfloat16, device="cuda")]

    graph, record = rewritten(trace(biased, inputs))
    assert (record.status, record.mask) == ("replaced", "full + bias")
    assert record.detail.startswith("dropout with probability 0.1; the mask is added as a bias: ")
    (seed,), (forward,), (backward,) = (nodes(graph, name) for name in (SEED, FORWARD, BACKWARD))
    for node in (forward, backward):
        arguments = bind(node)
        spec = AttentionSpec.parse(arguments["spec"])
        assert spec.bias == Bias(Operand(0), gradient)
        assert spec.dropout == Dropout(0.1, Operand(1))
        (bias, read) = arguments["extras"]
        assert (bias.op, read) == ("placeholder", seed)


@pytest.mark.parametrize("second", ["other probability", "none"])
def test_of_one_forward_those_backwards_are_not_replaced_that_need_ours(second: str) -> None:
    """Backwards that differ leave the forward as it is, and one that reads nothing of data can take it so."""
    p = {"other probability": 0.2, "none": 0.0}[second]

    def two(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.1)
        backward = aten._scaled_dot_product_efficient_attention_backward
        masks = [True, True, True, False]
        gradients = (backward(do, q, k, v, None, out, lse, seed, offset, x, masks) for x in (0.1, p))
        return out, *(gradient for of in gradients for gradient in of[:3])

    module = joint_graph(two)
    rewrite_on(module.graph)
    detail = "several backwards of one forward differ"
    first, other = sites()
    assert (first.status, first.reason, first.detail) == ("fallback", Reason.DROPOUT, detail)
    assert (other.status, other.forward) == (
        ("fallback", "not replaced") if p else ("replaced", f"not replaced: {detail}")
    )
    counts = op_counts(module.graph)
    assert (counts[SEED], counts[FORWARD], counts[BACKWARD]) == (0, 0, int(not p))


TABLES = {"keys": ([0, 1, 2, 3, 4], [0, 1, 2, 6, 7, 8]), "dense": ([2, 3, 4, 5], [2, 6, 7, 8, 9])}
"""The parts of `MaskTables` for forward and backward; of a dense mask both read bits of their own."""


@pytest.mark.parametrize("mask", TABLES)
def test_layers_share_tables_and_no_seed(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If kernels that take tables had dropout: tables are of the mask, and stand behind all that the call
    reads.
    """
    for module in (planner, planned_forward):
        monkeypatch.setattr(module, "FAMILIES", (HOPPER,))

    def two(q: Tensor, k: Tensor, v: Tensor, do: Tensor, shown: Tensor) -> tuple[Any, ...]:
        added = hidden(shown if mask == "dense" else shown.unsqueeze(1).unsqueeze(1), q)
        out, *gradients = dropped_efficient(q, k, v, do, lambda: added)
        return *gradients, *dropped_efficient(out, k, v, do, lambda: added)

    def inputs() -> list[Tensor]:
        return [*cuda_inputs(Shape()), torch.empty(2, 1, 128, 128, dtype=torch.bool, device="cuda")]

    module = trace(two, inputs if mask == "dense" else padded_inputs)
    rewrite_on(module.graph)
    assert [(r.status, r.plan.kernel, r.forward) for r in sites() if r.plan] == [("replaced", "hopper", "hopper")] * 2
    (tables,), seeds = nodes(module.graph, "dash_inductor::mask_tables"), nodes(module.graph, SEED)
    (shown,) = tables.args[0]
    assert bind(tables)["has_backward"]
    for name, made in zip((FORWARD, BACKWARD), TABLES[mask], strict=True):
        operators = nodes(module.graph, name)
        read = [bind(node)["extras"] for node in operators]
        assert {node for _, node, *_ in read} == set(seeds)
        assert all(of[0] is shown and [node.args for node in of[2:]] == [(tables, i) for i in made] for of in read)
        assert {AttentionSpec.parse(bind(node)["spec"]).dropout for node in operators} == {Dropout(0.1, Operand(1))}


def test_layers_never_share_a_seed() -> None:
    """They share none even if they are the same operation on the same tensors: PyTorch would merge equal nodes."""

    def two(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        return (*dropped_flash(q, k, v, do), *dropped_flash(q, k, v, do))

    module = joint_graph(two)
    rewrite_on(module.graph)
    seeds = nodes(module.graph, SEED)
    assert len({node.args for node in seeds}) == 2
    merged = torch._functorch.compile_utils.fx_graph_cse(module.graph)
    assert op_counts(merged)[SEED] == op_counts(merged)[FORWARD] == 2


def test_two_backwards_of_one_forward_share_its_seed() -> None:
    def two(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.1, True)
        backward = aten._scaled_dot_product_flash_attention_backward
        rest = (q, k, v, out, lse, cq, ck, mq, mk, 0.1, True, seed, offset)
        return out, *(gradient for x in (do, do * 2) for gradient in backward(x, *rest))

    module = joint_graph(two)
    rewrite_on(module.graph)
    (seed,) = nodes(module.graph, SEED)
    assert [node.args[6] for node in nodes(module.graph, BACKWARD)] == [[seed], [seed]]


def other_probability(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.2)
    backward = aten._scaled_dot_product_efficient_attention_backward
    return out, *backward(do, q, k, v, None, out, lse, seed, offset, 0.1, [True, True, True, False])[:3]


def other_random_state(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
    out, lse, _, _ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.1)
    state = torch.empty((), dtype=torch.int64, device="cuda")
    backward = aten._scaled_dot_product_efficient_attention_backward
    return out, *backward(do, q, k, v, None, out, lse, state, state, 0.1, [True, True, True, False])[:3]


def state_is_an_output(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.1)
    backward = aten._scaled_dot_product_efficient_attention_backward
    return out, seed, *backward(do, q, k, v, None, out, lse, seed, offset, 0.1, [True, True, True, False])[:3]


def without_forward(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
    lse = torch.empty(2, 8, 128, device="cuda")
    rng = torch.empty(2, dtype=torch.uint64, device="cuda")
    backward = aten._scaled_dot_product_flash_attention_backward
    return tuple(backward(do, q, k, v, torch.empty_like(do), lse, None, None, 128, 128, 0.1, True, rng, rng))


@pytest.mark.parametrize(
    ("maker", "settings", "detail"),
    [
        (dropped_flash, {"forward": "keep"}, "by the setting forward='keep'"),
        (other_probability, {}, "forward and backward have different dropout"),
        (other_random_state, {}, "forward and backward have different dropout"),
        (state_is_an_output, {}, "its random state or another result has other users"),
        (without_forward, {}, "not in this graph"),
        (lambda *inputs: dropped_efficient(*inputs, p=1.0), {}, "dropout_p=1.0"),
    ],
)
def test_what_is_not_replaced(maker: Callable[..., tuple[Any, ...]], settings: dict[str, Any], detail: str) -> None:
    module = joint_graph(maker)
    text = str(module.graph)
    with config.patch(**settings):
        graph, record = rewritten(module)
    assert (record.status, record.reason, record.detail) == ("fallback", Reason.DROPOUT, detail)
    assert str(graph) == text


@pytest.mark.parametrize(
    ("dims", "kernel"),
    [
        ((32, 32), "portable"),
        ((64, 64), "hopper"),
        ((128, 128), "hopper"),
        ((192, 128), "hopper"),
        ((256, 256), "hopper"),
    ],
)
def test_head_dims_that_have_kernels_with_dropout(dims: tuple[int, int], kernel: str) -> None:
    _, record = rewritten(joint_graph(dropped_efficient, Shape(head_dim=dims[0], value_dim=dims[1])))
    assert record.plan is not None
    assert (record.status, record.plan.kernel) == ("replaced", kernel)


@pytest.mark.parametrize("maker", [flash, efficient, cudnn, flash_backward])
def test_no_seed_without_dropout(maker: Callable[..., tuple[Any, ...]]) -> None:
    graph, record = rewritten(joint_graph(maker))
    assert record.status == "replaced"
    assert SEED not in op_counts(graph)
    assert record.plan is not None
    assert "dropout" not in record.plan.numerics_key
