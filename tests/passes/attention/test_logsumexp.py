"""A log-sum-exp that the program reads: ours, in the layout and with the conventions of the operator that it had."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from dash_inductor.frontends.logsumexp import LogSumExp
from dash_inductor.graph.emit import Emitter
from dash_inductor.masks.documents import Documents
from dash_inductor.model.attention_spec import AttentionSpec
from dash_inductor.model.components import Dense, Operand
from dash_inductor.model.mask import Band, Mask
from dash_inductor.model.operands import Bias
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import sites

from ...support.graphs import CPU_FORWARD, FORWARD, Shape, capture, joint_graph, op_counts, rewritten, tensors, trace
from ...support.packed import GROUPED, documents

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("deterministic")


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in fp64; mask: added, or booleans."""
    q, k, v = (t.detach().double() for t in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.detach().double()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v, torch.logsumexp(scores, -1)


def both(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask
    )
    return found


def with_mask(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.where(seen, 0.0, -math.inf)[:, None, None, :].to(q.dtype)
    return both(q, k, v, mask.expand(-1, 1, q.shape[2], -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", ["causal", "keys", "bias"])
def test_training_with_its_log_sum_exp(kind: str, dynamic: bool, dtype: torch.dtype) -> None:
    """The forward is ours, and what the program gets has the operator's value in rows that see no key."""
    q, k, v = tensors(*[(2, 4, 33, 16)] * 3, dtype=dtype)
    seen = torch.arange(33) >= torch.tensor([[5], [33]])  # the second element has no key
    added = torch.randn(2, 4, 33, 33, generator=torch.Generator().manual_seed(3)).to(dtype)
    with capture(strict=True) as graphs:
        if kind == "causal":
            out, lse = graphs.compile(lambda q, k, v: both(q, k, v, None, True), dynamic=dynamic)(q, k, v)
            true_out, true = exact(q, k, v, causal=True)
        elif kind == "keys":
            out, lse = graphs.compile(with_mask, dynamic=dynamic)(q, k, v, seen)
            true_out, true = exact(q, k, v, seen[:, None, None, :])
        else:
            out, lse = graphs.compile(lambda q, k, v, b: both(q, k, v, b), dynamic=dynamic)(q, k, v, added)
            true_out, true = exact(q, k, v, added)
        out.float().square().sum().backward()
    (record,) = sites()
    assert (record.status, record.forward) == ("replaced", "reference")
    assert record.plan is not None
    assert "logsumexp" in record.plan.numerics_key
    assert (graphs.count(FORWARD), graphs.count(CPU_FORWARD)) == (1, 0)
    assert (lse.dtype, lse.shape, lse.stride()) == (torch.float32, (2, 4, 33), (132, 33, 1))
    true = true.masked_fill(true == -math.inf, 0.0)  # the operator's value
    assert (lse - true).abs().max() < 1e-4
    assert (out - true_out).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
    assert not lse.requires_grad
    assert q.grad is not None


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_a_forward_knows_whether_the_program_reads_it(reads: bool, grad: bool) -> None:
    """With and without a backward, which reads it too."""
    inputs = tensors(*[(2, 4, 33, 16)] * 3)

    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return both(q, k, v, None, True)[: 1 + reads]

    with capture(strict=True) as graphs, torch.set_grad_enabled(grad):
        out = graphs.compile(program)(*inputs)[0]
        if grad:
            out.sum().backward()
    (record,) = sites()
    assert record.plan is not None
    assert ("logsumexp" in record.plan.numerics_key) is reads
    assert ["/logsumexp" in text for text in graphs.texts] == [reads]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_code_and_no_grad(dynamic: bool) -> None:
    """Bits of the log-sum-exp are those of training, and something is computed of it."""
    inputs = tensors(*[(2, 4, 33, 16)] * 3)

    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = both(q, k, v, None, True)
        return out * torch.sigmoid(lse - 1.0)[..., None], lse[:, :, 3:]

    with capture(strict=True):
        compiled = torch.compile(program, dynamic=dynamic)
        out, lse = compiled(*inputs)
        gradients = torch.autograd.grad(out.sum(), inputs)
        with torch.no_grad():
            alone = compiled(*inputs)
    assert torch.equal(out, alone[0])
    assert torch.equal(lse, alone[1])
    assert {record.status for record in sites()} == {"replaced"}
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    scores = (doubles[0] @ doubles[1].mT / 4).masked_fill(torch.ones(33, 33, dtype=torch.bool).triu(1), -math.inf)
    true = torch.softmax(scores, -1) @ doubles[2] * torch.sigmoid(scores.logsumexp(-1).detach() - 1.0)[..., None]
    expected = torch.autograd.grad(true.sum(), doubles)
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("view", [False, True])
def test_written_to_between_forward_and_backward(view: bool) -> None:
    """The gradients of before, or autograd's error."""
    inputs = tensors(*[(2, 4, 33, 16)] * 3)

    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = both(q, k, v, None, True)
        return out, lse.unsqueeze(-1) if view else lse

    with capture(strict=True):
        compiled = torch.compile(program)
        out, _ = compiled(*inputs)
        expected = torch.autograd.grad(out.sum(), inputs)
        out, lse = compiled(*inputs)
        lse.detach().fill_(100.0)
        if view:
            found = torch.autograd.grad(out.sum(), inputs)
            assert all(map(torch.equal, found, expected))
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(out.sum(), inputs)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_packed_tokens(dynamic: bool) -> None:
    """[heads, tokens] of the operator, from rows of documents."""
    from torch.nn.attention.varlen import AuxRequest

    q, k, v = tensors((170, 4, 16), (170, 2, 16), (170, 2, 16))

    def program(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        aux = AuxRequest(lse=True)
        out, lse = varlen_attn(q, k, v, starts, starts, 130, 130, return_aux=aux, window_size=(-1, 0), **GROUPED)
        return out, lse * 2.0

    with capture(strict=True) as graphs:
        compiled = graphs.compile(program, dynamic=dynamic)
        for places in ((0, 7, 7, 137, 168), (0, 128, 129, 129, 170)):
            starts = documents(*places)
            out, lse = compiled(q, k, v, starts)
            out.sum().backward()
            assert lse.shape == (4, 170)
            for begin, end in itertools.pairwise(places):
                part = [t[begin:end].transpose(0, 1) for t in (q, *(t.repeat_interleave(2, 1) for t in (k, v)))]
                _, true = exact(*part, causal=True)
                assert end == begin or (lse[:, begin:end] / 2 - true).abs().max() < 1e-5
    assert {(record.status, record.forward) for record in sites()} == {("replaced", "reference")}


# ---- CUDA operators on fake tensors ----


def efficient(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
    backward = aten._scaled_dot_product_efficient_attention_backward
    grads = backward(do, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], True)
    return out, lse, *grads[:3]


def flash(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
    out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    backward = aten._scaled_dot_product_flash_attention_backward
    return out, lse, *backward(do, q, k, v, out, lse, cq, ck, mq, mk, 0.0, True, seed, offset)


def cudnn(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
    out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    backward = aten._scaled_dot_product_cudnn_attention_backward
    return out, lse, *backward(do, q, k, v, out, lse, seed, offset, None, cq, ck, mq, mk, 0.0, True)


@pytest.mark.parametrize(("maker", "size"), [(flash, (2, 8, 101)), (efficient, (2, 8, 128)), (cudnn, (2, 8, 101, 1))])
def test_layouts_of_cuda_operators(maker: Callable[..., Any], size: tuple[int, ...]) -> None:
    module = joint_graph(maker, Shape(q_len=101, kv_len=101))
    (old,) = (n for n in module.graph.output_node().args[0][1:2])
    before = old.meta["val"]
    graph, record = rewritten(module)
    assert (record.status, record.forward) == ("replaced", "hopper")
    new = graph.output_node().args[0][1].meta["val"]
    assert (new.shape, new.dtype, new.stride()) == (size, torch.float32, before.stride())
    assert op_counts(graph)[FORWARD] == 1


def test_random_state_is_not_given() -> None:
    def alone(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
        out, lse, *_, seed, _, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        return out, lse, seed

    _, record = rewritten(joint_graph(alone))
    assert (record.reason, record.detail) == (
        Reason.FORWARD_RESULTS,
        "its random state or another result has other users",
    )


def test_a_convention_that_is_not_known_keeps_the_forward() -> None:
    """What cuDNN's log-sum-exp is where a query sees no key."""

    def masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Any, ...]:
        plane = seen.unsqueeze(1).unsqueeze(1).expand(-1, 8, 128, -1)
        found = aten._scaled_dot_product_cudnn_attention(q, k, v, plane, True)
        return found[0], found[1]

    def inputs() -> list[Tensor]:
        plane = [torch.empty(2, 8, 128, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        return [*plane, torch.empty(2, 128, dtype=torch.bool, device="cuda")]

    _, record = rewritten(trace(masked, inputs))
    assert record.reason is Reason.FORWARD_RESULTS
    assert record.detail == "a query may see no key, and what its log-sum-exp is then is not known"


# ---- values of the layouts, of a graph that reads ours ----


def made(
    sink: dict[str, Any], size: tuple[int, ...], ours: Tensor, spec: AttentionSpec, starts: Tensor | None = None
) -> Tensor:
    """What `LogSumExp.made_of` gives for these log-sum-exps of ours, of an operator whose own have this size."""
    tokens = ours.shape[2] // (1 if spec.bias is None else 2)
    query = torch.empty((170, 2, 16) if starts is not None else (2, 2, tokens, 16))
    start = torch.zeros(1, dtype=torch.int32) if starts is None else starts

    def function(ours: Tensor, query: Tensor, start: Tensor) -> Any:
        return ours.sin(), query.sin(), start + 0, aten.new_empty(ours, size)

    module = trace(function, lambda: [torch.empty(t.shape, dtype=t.dtype) for t in (ours, query, start)])
    graph = module.graph
    own, query_node, start_node = graph.find_nodes(op="placeholder")
    output = graph.output_node()
    old = output.args[0][3]
    with graph.inserting_after(old):
        results = graph.call_function(aten.split.Tensor, (old, size[0]))
    results.meta = {**old.meta, "val": [None, old.meta["val"]]}
    emitter = Emitter(graph)
    documents_of = None if starts is None else Documents(start_node)
    found = LogSumExp(results, 1, **sink).made_of(emitter, own, spec, query_node, documents_of, output)
    output.args = (found,)
    graph.erase_node(results)
    module.recompile()
    value: Tensor = module(ours, query, start)
    return value


CAUSAL, WINDOW = (AttentionSpec(Mask(Band(0, reach)), 0.25) for reach in (None, 9))
"""Under a window, more queries than keys leave some without any."""


def test_values_of_layouts() -> None:
    ours = torch.randn(2, 2, 33, generator=torch.Generator().manual_seed(0))
    ours[0, 1, 3] = -math.inf
    plain = made({}, (2, 2, 33), ours, WINDOW)
    assert torch.equal(plain, ours)
    assert torch.equal(made({}, (2, 2, 33, 1), ours, WINDOW), ours[..., None])
    padded = made({"multiple": 32, "without_keys": 0.0}, (2, 2, 64), ours, WINDOW)
    assert torch.equal(padded[..., :33], ours.masked_fill(ours == -math.inf, 0.0))
    assert padded.shape == (2, 2, 64)
    assert (padded[..., 33:] == math.inf).all()
    base_2 = made({"base": 2.0}, (2, 2, 33), ours, WINDOW)
    assert (base_2 * math.log(2) - ours).nan_to_num().abs().max() < 1e-6
    assert base_2[0, 1, 3] == -math.inf
    assert made({"base": 2.0, "without_keys": 7.0}, (2, 2, 33), ours, WINDOW)[0, 1, 3] == pytest.approx(7.0)
    assert made({"without_keys": math.inf}, (2, 2, 33), ours, WINDOW)[0, 1, 3] == math.inf


def test_values_of_two_parts() -> None:
    parts = torch.randn(2, 2, 66, generator=torch.Generator().manual_seed(0))
    parts[1, 0, 5], parts[1, 0, 38] = -math.inf, 0.0
    found = made({}, (2, 2, 33), parts, AttentionSpec(Mask(Band()), 0.25, bias=Bias(Operand(0))))
    assert torch.equal(found, parts[..., :33] + parts[..., 33:] * math.log(2))
    assert found[1, 0, 5] == -math.inf


def test_values_of_documents() -> None:
    starts = documents(0, 7, 7, 140, 160)  # and ten tokens behind the last
    rows = [*range(7), *range(128, 128 + 133), *range(384, 404), *range(512, 522)]
    ours = torch.arange(6 * 128.0).repeat(1, 2, 1)
    assert made({}, (2, 170), ours, CAUSAL, starts).tolist() == [rows, rows]


def test_sizes_that_are_not_read() -> None:
    query = torch.empty(2, 2, 33, 16)
    with FakeTensorMode():
        module = trace(lambda x: aten.split.Tensor(x, 2), lambda: [torch.empty(4, 2, 40)])
    (node,) = (n for n in module.graph.nodes if n.target is aten.split.Tensor)
    assert "(2, 2, 40), which is not read" in LogSumExp(node, 1).cause(query, CAUSAL)
    assert LogSumExp(node, 1, multiple=8).cause(query, CAUSAL) == ""
    unknown = LogSumExp(node, 1, multiple=8, without_keys=None)
    assert unknown.cause(query, CAUSAL) == ""
    assert unknown.cause(query, AttentionSpec(Mask(Band(), dense=Dense(Operand(0))), 0.25))
    assert unknown.cause(query, AttentionSpec(Mask(Band(0, 3)), 0.25))
