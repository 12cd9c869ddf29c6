"""Attention that a program computes by hand is replaced, forward and backward; what is read otherwise is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dash_inductor
from dash_inductor.frontends import math_backend
from dash_inductor.frontends.decomposed.frontend import ONLY_READ, OP
from dash_inductor.frontends.decomposed.values import Values
from dash_inductor.graph.emit import Emitter
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import FORWARD_ONLY, SiteRecord, sites
from dash_inductor.upstream import compat

from ..support.by_hand import GROUPED, HEADS, LENGTH, PROGRAMS, QKV, Program, causal, order, plain, sinks
from ..support.graphs import BACKWARD, FORWARD, JointGraphs, assert_as_exact, capture, step, tensors
from .decomposed_programs import run

pytestmark = pytest.mark.usefixtures("deterministic")
Function = Callable[..., Tensor]
NAMES = pytest.mark.parametrize("name", PROGRAMS)
OP_OF = {"math": math_backend.OP}
"""Attention that is PyTorch's own.  In "flat", Inductor of torch 2.11 finds one of its patterns before us."""


def compiled(function: Function, inputs: Sequence[Tensor], **settings: Any) -> tuple[JointGraphs, list[Tensor]]:
    with capture(LENGTH, **settings) as graphs:
        results = step(graphs.compile(function), inputs)
    return graphs, results


def only_record() -> SiteRecord:
    (record,) = sites()
    return record


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training(name: str, dtype: torch.dtype) -> None:
    program = PROGRAMS[name]
    inputs = tensors(*program.shapes, dtype=dtype)
    graphs, results = compiled(program.function, inputs)
    record = only_record()
    assert (record.status, record.mask, record.forward) == ("replaced", program.mask, "reference"), record.detail
    assert record.op == OP_OF.get(name, OP) or (name == "flat" and compat.TORCH == (2, 11))
    ours = record.op in (OP, math_backend.OP)
    if ours:
        assert "computed by hand" in record.detail
        assert "more precise" in record.detail or (name, dtype) == ("math", torch.bfloat16)
        assert record.source.startswith(str(program.function.__code__.co_filename))
    assert graphs.count(FORWARD) == 1
    assert not graphs.count("aten::bmm")
    assert ("repeat each head 2 times: the tensors before that are read" in record.detail) == (
        program.shapes[:3] == GROUPED
    )
    assert_as_exact(program.function, inputs, results, strides=ours)


@NAMES
def test_inference(name: str) -> None:
    program = PROGRAMS[name]
    inputs = [t.detach() for t in tensors(*program.shapes)]
    with capture(LENGTH) as graphs, torch.no_grad():
        found = graphs.compile(program.function)(*inputs)
    record = only_record()
    assert (record.status, record.kind, record.mask) == ("replaced", FORWARD_ONLY, program.mask), record.detail
    exact = program.function(*(t.double() for t in inputs))
    assert (found - exact).abs().max() < 1e-5
    assert found.stride() == program.function(*inputs).stride()


def merged_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    return (weights @ v).permute(0, 2, 1, 3).contiguous().flatten(2)


@pytest.mark.parametrize("value_dim", [12, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layers", [1, 2])
def test_what_inductor_replaces_before_us(value_dim: int, dtype: torch.dtype, layers: int) -> None:
    """Perceiver: until Inductor sorts the graph, nodes that its pattern puts into it read others that come later."""
    inputs = tensors(*[(2, HEADS, LENGTH, 16)] * (2 * layers), *[(2, HEADS, LENGTH, value_dim)] * layers, dtype=dtype)

    def run_layers(*tensors: Tensor) -> Tensor:
        parts = [merged_heads(*tensors[n::layers]) for n in range(layers)]
        return torch.stack(parts).sum(0)

    graphs, results = compiled(run_layers, inputs)
    assert [record.status for record in sites()] == ["replaced"] * layers, [record.detail for record in sites()]
    assert graphs.count(BACKWARD) == layers
    assert_as_exact(run_layers, inputs, results, strides=False)


def test_what_reads_only_sizes_and_is_not_read_is_erased() -> None:
    """Autograd leaves an empty tensor behind where a bias was added to scores in place."""
    program = PROGRAMS["blocks"]
    graphs, _ = compiled(program.function, tensors(*program.shapes))
    assert graphs.count_before("aten::new_empty_strided") == 1
    assert only_record().status == "replaced"
    assert not graphs.count("aten::new_empty_strided")
    assert not graphs.count("aten::exp")


@pytest.mark.parametrize("name", ["plain", "softcap", "sinks", "flat"])
def test_no_plane_is_saved(name: str) -> None:
    """The backward reads the output and the log-sum-exp, not the probabilities."""
    program = PROGRAMS[name]
    with capture(LENGTH) as graphs:
        step(graphs.compile(program.function), tensors(*program.shapes))
    saved = [
        node.meta["val"].shape
        for part in graphs.parts
        for node in part.output_node().all_input_nodes
        if isinstance(node.meta.get("val"), Tensor)
    ]
    assert saved
    assert not [size for size in saved if list(size[-2:]) in ([LENGTH, LENGTH], [LENGTH, LENGTH + 1])]


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "sinks", "sinks beside a bias", "flat", "softcap", "three dimensions", "math"),
        *("one query", "grouped causal"),
    ],
)
def test_dynamic_lengths(name: str) -> None:
    program = PROGRAMS[name]
    with capture() as graphs:
        run = graphs.compile(program.function, dynamic=True)
        for length in (24, 40):
            shapes = [tuple(length if n == LENGTH else n for n in shape) for shape in program.shapes]
            inputs = tensors(*shapes)
            results = step(run, inputs)
            # A fused operator that a pattern of Inductor's has put there has strides of its own.
            assert_as_exact(program.function, inputs, results, strides=sites()[-1].op in (OP, math_backend.OP))
    assert {record.status for record in sites()} == {"replaced"}, [record.detail for record in sites()]


def two_products(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
    """As Transformer-XL and the Conformer: the sum of two products is scaled."""
    scores = (q @ k.mT + q @ places.mT) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~order(q), -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_factor_of_a_sum_of_products(dtype: torch.dtype) -> None:
    inputs = tensors(*QKV, QKV[0], dtype=dtype)
    _, results = compiled(two_products, inputs)
    record = only_record()
    assert (record.status, record.mask) == ("replaced", "full + bias"), record.detail
    assert_as_exact(two_products, inputs, results)


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT * 0.2 + causal(q)).softmax(-1)
    return weights @ v, weights


def with_scores(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT * 0.2
    return (scores + causal(q)).softmax(-1) @ v, scores.mean()


def with_entropy(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT * 0.2 + causal(q)).softmax(-1)
    return weights @ v, weights.square().sum()


@pytest.mark.parametrize("function", [with_weights, with_scores, with_entropy])
@pytest.mark.parametrize("trains", [True, False])
def test_used_probabilities_are_not_replaced(function: Callable[..., tuple[Tensor, Tensor]], trains: bool) -> None:
    inputs = tensors(*QKV)
    with capture() as graphs, torch.set_grad_enabled(trains):
        results = graphs.compile(function)(*inputs)
        if trains:
            sum(result.sum() for result in results).backward()
    record = only_record()
    assert (record.reason, record.op) == (Reason.PROBABILITIES_USED, OP)
    assert "is read by" in record.detail
    with dash_inductor.disabled(), capture() as before, torch.set_grad_enabled(trains):
        results = before.compile(function)(*tensors(*QKV))
        if trains:
            sum(result.sum() for result in results).backward()
    assert graphs.texts == before.texts


def head_mask(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    return ((q @ k.mT * 0.2).softmax(-1) * heads[:, None, None]) @ v


def biased_temperature(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    return ((q @ k.mT + order(q).to(q.dtype)) * heads.exp()[:, None, None]).softmax(-1) @ v


def masked_temperature(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    """Hidden scores become plus infinity, or NaN, if the factor is not positive."""
    factor = heads.detach().exp()[:, None, None]
    return ((q @ k.mT).masked_fill(~order(q), -math.inf) * factor).softmax(-1) @ v * heads[:, None, None]


def two_temperatures(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    return (q @ k.mT * heads[:, None, None] * heads[0]).softmax(-1) @ v


def capped_temperature(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    return (heads[:, None, None] * (q @ k.mT).tanh()).softmax(-1) @ v


def of_pairs(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    return (q @ k.mT * (heads[:, None, None] + order(q))).softmax(-1) @ v


def of_scores(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    scores = q @ k.mT * 0.2
    return (scores * scores.amax(-1, keepdim=True).detach()).softmax(-1) @ v * heads[:, None, None]


def relu_scores(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    return (q @ k.mT).relu().softmax(-1) @ v * heads[:, None, None]


def soft_fill(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~order(q), -100.0).softmax(-1) @ v * heads[:, None, None]


def mixed_heads(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    return torch.einsum("hg,bhqk->bgqk", torch.diag(heads), q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(
    "function",
    [
        *(head_mask, relu_scores, soft_fill, mixed_heads),
        *(biased_temperature, masked_temperature, two_temperatures, capped_temperature, of_pairs, of_scores),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_what_stands_in_the_way_is_named(function: Function, trains: bool) -> None:
    inputs = tensors(*QKV, (HEADS,))
    with capture(), torch.set_grad_enabled(trains):
        run = torch.compile(function, backend=JointGraphs(LENGTH)._backend)
        if trains:
            assert_as_exact(function, inputs, step(run, inputs))
        else:
            run(*inputs)
    record = only_record()
    assert (record.reason, record.op) == (Reason.UNSUPPORTED_OP, OP)
    assert "aten::" in record.detail


def router(x: Tensor, weight: Tensor) -> Tensor:
    weights, places = (x @ weight).softmax(-1).topk(2)
    return (weights / weights.sum(-1, keepdim=True)) @ torch.ones(2, 3) + places.sum()


def experts(x: Tensor, weight: Tensor) -> Tensor:
    """All experts, each with its probability."""
    probabilities = (x @ weight).softmax(-1)
    return torch.einsum("te,tef->tf", probabilities, x[:, None, :] * torch.ones(8, 1))


def classes(x: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight, torch.arange(16) % 8) + (x @ weight).softmax(-1)[:, 0].mean()


@pytest.mark.parametrize("function", [router, experts, classes])
def test_what_is_no_attention_has_no_record(function: Function) -> None:
    compiled(function, tensors((16, 24), (24, 8)))
    assert sites() == ()


def test_the_forward_does_not_fall_back_alone() -> None:
    graphs, results = compiled(plain, tensors(*QKV), forward="keep")
    assert only_record().reason is Reason.FORWARD_OFF
    assert graphs.count(FORWARD) == graphs.count(BACKWARD) == 0
    assert_as_exact(plain, tensors(*QKV), results)


def test_a_cpu_that_is_left_alone() -> None:
    graphs, _ = compiled(plain, tensors(*QKV), cpu="off")
    assert only_record().reason is Reason.CPU_OFF
    with dash_inductor.disabled():
        before, _ = compiled(plain, tensors(*QKV))
    assert graphs.texts == before.texts


@pytest.mark.parametrize("number", [1, 3, 5, 8])
def test_an_error_leaves_the_graph_as_it_was(number: int) -> None:
    with dash_inductor.disabled():
        before, _ = compiled(sinks, tensors(*GROUPED, (HEADS,)))
    original, nodes = Emitter.call, []

    def fail(self: Emitter, target: Any, *args: Any, **kwargs: Any) -> Any:
        node = original(self, target, *args, **kwargs)
        if "dash_inductor" in str(target) or nodes:
            nodes.append(node)
        if len(nodes) == number:
            raise ZeroDivisionError("on purpose")
        return node

    with mock.patch.object(Emitter, "call", fail):
        graphs, _ = compiled(sinks, tensors(*GROUPED, (HEADS,)))
    assert only_record().reason is Reason.INTERNAL_ERROR
    assert graphs.texts == before.texts


def in_doubles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(*(t.double() for t in (q, k, v))).to(q.dtype)


def double_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1, dtype=torch.float64).to(q.dtype) @ v


@pytest.mark.parametrize("function", [in_doubles, double_softmax])
def test_what_is_computed_in_float64_stays(function: Function) -> None:
    _, results = compiled(function, tensors(*QKV))
    assert (only_record().status, only_record().reason) == ("fallback", Reason.DTYPE), only_record().detail
    assert_as_exact(function, tensors(*QKV), results)


def test_an_error_of_a_reader_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Values, node: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(Values, "_value", fail)
    _, results = compiled(plain, tensors(*QKV))
    assert only_record().reason is Reason.INTERNAL_ERROR
    assert "on purpose" in only_record().detail
    assert_as_exact(plain, tensors(*QKV), results)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.dropout((q @ k.mT * 0.2 + causal(q)).softmax(-1), 0.25)
    return weights @ v


def test_dropout() -> None:
    """A value that is the unit matrix shows the probabilities that are left, and its gradient has the same."""
    q, k = tensors(*QKV[:2])
    v = torch.eye(LENGTH).expand(2, HEADS, LENGTH, LENGTH).clone().requires_grad_()
    with capture() as graphs:
        run = graphs.compile(dropped)
        torch.manual_seed(3)
        out = run(q, k, v)
        torch.manual_seed(3)
        assert torch.equal(run(q, k, v), out)
        (dv,) = torch.autograd.grad(out, v, torch.eye(LENGTH).expand_as(out))
    assert "dropout=0.25" in str(only_record().site and only_record().site.spec)  # type: ignore[union-attr]
    weights = (q @ k.mT * 0.2 + causal(q)).softmax(-1)
    there = out != 0
    assert 0.7 < there[weights > 0].float().mean() < 0.8
    assert (out - weights / 0.75 * there).abs().max() < 1e-5
    assert (dv - out.mT).abs().max() < 1e-5


def test_dropped_flags_of_two_users_are_not_replaced() -> None:
    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flags = (torch.rand(2, HEADS, LENGTH, LENGTH) > 0.5) * 2.0
        return ((q @ k.mT).softmax(-1) * flags) @ v + flags.mean()

    compiled(shared, tensors(*QKV))
    assert only_record().status == "fallback"


def test_layers_and_checkpoints() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = plain(q, k, v).transpose(1, 2)
        q = checkpoint(plain, q, k, v, use_reentrant=False).transpose(1, 2)
        return plain(q + k, k, q)

    inputs = tensors(*QKV)
    _, results = compiled(model, inputs)
    assert [record.status for record in sites()] == ["replaced"] * 3
    assert len({record.name for record in sites()}) == 3
    assert_as_exact(model, inputs, results)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("name", ["plain", "grouped", "grouped causal"])
def test_gradients_of_some(name: str, wanted: tuple[int, ...]) -> None:
    function = PROGRAMS[name].function
    inputs = tensors(*PROGRAMS[name].shapes)
    exact = [t.detach().double() for t in inputs]
    for place, t in enumerate(inputs):
        t.requires_grad_(place in wanted)
        exact[place].requires_grad_(place in wanted)
    with capture(LENGTH) as graphs:
        graphs.compile(function)(*inputs).square().sum().backward()
    function(*exact).square().sum().backward()
    assert only_record().status == "replaced"
    assert graphs.count(BACKWARD) == 1
    for place in wanted:
        assert (inputs[place].grad - exact[place].grad).abs().max() < 1e-5  # type: ignore[operator]


def test_queries_that_see_no_key() -> None:
    """With sinks, they give zeros; a sink takes all of the softmax."""

    def function(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        scores = (q @ k.mT * 0.25).masked_fill(torch.arange(LENGTH)[:, None] < 5, -math.inf)
        both = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(2, -1, LENGTH, -1)], -1)
        return both.softmax(-1)[..., :-1] @ v

    inputs = tensors(*QKV, (HEADS,))
    _, results = compiled(function, inputs)
    assert only_record().status == "replaced", only_record().detail
    assert not results[0][:, :, :5].any()
    assert_as_exact(function, inputs, results)


def test_sinks_of_all_sizes_beside_a_bias() -> None:
    """Scores and sinks that outweigh each other, and queries whose scores all are minus infinity."""

    def function(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, bias: Tensor) -> Tensor:
        column = sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        return torch.cat([q @ k.mT * 0.25 + bias, column], -1).softmax(-1)[..., :-1] @ v

    inputs = tensors(*QKV, (HEADS,), (HEADS, LENGTH, LENGTH))
    with torch.no_grad():
        inputs[3].copy_(torch.tensor([0.0, 300.0, -300.0, -math.inf]))
        inputs[4][1] += 300.0
        inputs[4][0, :5] = -math.inf
        inputs[4][2, 3] = -1e30
    _, results = compiled(function, inputs)
    assert (only_record().status, only_record().mask) == ("replaced", "full + bias"), only_record().detail
    assert "with sinks" in only_record().detail
    assert not results[0][:, 0, :5].any()
    assert_as_exact(function, inputs, results)


def test_the_same_bits_again() -> None:
    program: Program = PROGRAMS["sinks"]
    inputs = tensors(*program.shapes)
    _, first = compiled(program.function, inputs)
    _, again = compiled(program.function, inputs)
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(24, 424), marks=pytest.mark.full)], ids=["few", "many"]
)
def test_random_programs(seeds: range) -> None:
    """Masks, biases, sinks, softcaps, scales and grouped heads, put together at random, against double precision.

    All are replaced but those with a finite number in the place of hidden scores, beside a bias that has a gradient or
    under a mask of no closed form.
    """
    outcomes, wrong = run(seeds)
    assert not wrong, "\n".join(wrong)
    assert all(name == "replaced" or name.endswith(ONLY_READ) for name in outcomes), outcomes
    assert outcomes["replaced"] >= 0.6 * len(seeds), outcomes
