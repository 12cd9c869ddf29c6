"""Our operators count as many FLOPs as the operators they replace, for PyTorch's counter and for its partitioner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch._functorch import partitioners
from torch._inductor.runtime.benchmarking import benchmarker
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from dash_inductor.config import config
from dash_inductor.records.records import sites

from ..support.graphs import Shape, cuda_inputs, cudnn, efficient, flash, partition_with, rewrite_on, tensors, trace
from ..support.packed import GROUPED, documents
from ..support.partitions import BATCH, DIM, HEADS, LENGTH, TOKENS, Case, look_at_joint, runs_forward

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("deterministic")


def counted(run: Callable[[], object]) -> dict[str, int]:
    """FLOPs by operator."""
    with FlopCounterMode(display=False) as mode:
        run()
    return {str(name): count for name, count in mode.get_flop_counts().get("Global", {}).items()}


def padded(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, dropout: float = 0.1) -> tuple[Any, ...]:
    """With valid keys, whose tables are a node of their own, and a seed."""
    valid = torch.empty(q.shape[0], k.shape[2], dtype=torch.bool, device=q.device)
    zero, low = (torch.full((), x, dtype=q.dtype, device=q.device) for x in (0.0, float("-inf")))
    mask = torch.where(valid.unsqueeze(1).unsqueeze(1), zero, low).expand(*q.shape[:3], k.shape[2])
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, dropout)
    backward = aten._scaled_dot_product_efficient_attention_backward
    return out, *backward(do, q, k, v, mask, out, lse, seed, offset, dropout, [True, True, True, False])[:3]


def added(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, gradient: bool) -> tuple[Any, ...]:
    bias = torch.empty(*q.shape[:3], k.shape[2], dtype=q.dtype, device=q.device)
    return efficient(q, k, v, do, bias=lambda: bias, bias_grad=gradient)


CALLS: dict[str, tuple[Callable[..., tuple[Any, ...]], Shape]] = {
    "flash": (flash, Shape()),
    "efficient": (efficient, Shape(q_len=128, kv_len=192)),
    "cudnn": (cudnn, Shape(head_dim=128, value_dim=128)),
    "value dim": (efficient, Shape(head_dim=192, value_dim=128)),
    "bias": (functools.partial(added, gradient=False), Shape()),
    "bias gradient": (functools.partial(added, gradient=True), Shape()),
    "keys and dropout": (padded, Shape()),
}


@pytest.mark.parametrize("name", CALLS)
def test_counted_as_what_was_replaced(name: str) -> None:
    """Eager calls of PyTorch's operators beside a run of the graph in which ours are in their place."""
    maker, shape = CALLS[name]
    module = trace(lambda *inputs: maker(*inputs), lambda: cuda_inputs(shape))
    with FakeTensorMode(allow_non_fake_inputs=True):
        theirs = counted(lambda: maker(*cuda_inputs(shape)))
    assert rewrite_on(module.graph)
    module.recompile()
    assert sites()[0].status == "replaced"
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = cuda_inputs(shape)
        ours = counted(lambda: Interpreter(module).run(*inputs))
    assert len(theirs) == len(ours) == 2  # what makes tables and seeds counts for nothing, and is in no table
    assert sorted(theirs.values()) == sorted(ours.values())
    assert all(name.startswith("dash_inductor.attention_") for name in ours)


def test_query_heads_that_share_one_of_key_count_each() -> None:
    shape = Shape(heads=8, kv_heads=2, kv_len=192)
    module = trace(lambda *inputs: flash(*inputs, causal=False), lambda: cuda_inputs(shape))
    assert rewrite_on(module.graph)
    module.recompile()
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = cuda_inputs(shape)
        ours = counted(lambda: Interpreter(module).run(*inputs))
    product = 2 * 2 * 8 * 128 * 192 * 64
    assert sorted(ours.values()) == [2 * product, 5 * product]


STARTS = {"all tokens": (0, 5, 5, 70, 300), "one": (0, 300), "tokens behind": (0, 40, 200)}


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("group", [1, 2])
def test_documents_are_added_up(name: str, group: int) -> None:
    """As PyTorch does: tokens after the last document are not computed."""
    starts = documents(*STARTS[name])
    q, k, v = tensors((300, 4, 16), *[(300, 4 // group, 16)] * 2)
    grouped = GROUPED if group > 1 else {}
    totals = []

    def count_in(graph: Graph) -> None:
        part = graph.owning_module
        assert part is not None

        def run(*args: Any) -> Any:
            found: list[Any] = []
            totals.append(counted(lambda: found.append(Interpreter(part).run(*args))))
            return found[0]

        part.forward = run  # type: ignore[method-assign]  # what `partition_with` runs

    with config.patch(cpu="reference"):
        compiled = torch.compile(
            lambda *qkv: varlen_attn(*qkv, starts, starts, 300, 300, window_size=(-1, 0), **grouped),
            backend=partition_with(count_in),
        )
        compiled(q, k, v).sum().backward()
    assert [record.status for record in sites()] == ["replaced"]
    full = torch.empty(300, 4, 16)  # torch 2.11 counts no grouped heads
    arguments = (full, full, full, starts, starts, 300, 300)
    expected = flop_registry[aten._flash_attention_forward](*arguments)
    assert [sum(total.values()) for total in totals] == [expected, expected * 5 // 2]


def estimates(case: Case, mode: str, *, active: bool, dynamic: bool = False, device: str = "cpu") -> list[float]:
    """The costs that the partitioner assumes for attention forwards of a joint graph."""
    found: list[float] = []

    def look(joint: GraphModule, *_: Any) -> None:
        with functorch_config.patch(activation_memory_budget_runtime_estimator=mode):
            found.extend(partitioners.estimate_runtime(node) for node in joint.graph.nodes if runs_forward(node))

    assert look_at_joint(case, look, device=device, active=active, dynamic=dynamic) == (2 if active else 0)
    return found


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("attention", ["causal", "grouped", "padded", "bias"])
def test_the_partitioner_weighs_a_graph_by_them(attention: str, dynamic: bool) -> None:
    """Sizes that are symbols have their hints."""
    case = Case(attention)
    product = 2 * BATCH * HEADS * LENGTH**2 * DIM
    assert estimates(case, "flops", active=True, dynamic=dynamic) == [2 * product] * 2


def test_documents_without_data_count_as_one() -> None:
    """No fewer than there can be."""
    product = 2 * HEADS * TOKENS**2 * DIM
    assert estimates(Case("varlen"), "flops", active=True) == [2 * product] * 2


@pytest.mark.parametrize("attention", ["causal", "padded"])
def test_the_other_ways_to_weigh_a_graph_run(attention: str) -> None:
    """One way takes all nodes for equal, and one measures how long a node takes, here without a clock."""
    case = Case(attention)
    assert estimates(case, "testing", active=True) == estimates(case, "testing", active=False) == [1, 1]
    calls = []

    def measure(call: Callable[[], Any]) -> float:
        calls.append([tuple(result.shape) for result in call()[:2]])
        return 1.0

    with mock.patch.object(benchmarker, "benchmark_gpu", measure):
        assert estimates(case, "profile", active=True) == [1.0, 1.0]
    assert calls == [[(BATCH, HEADS, LENGTH, DIM), (BATCH, HEADS, LENGTH)]] * 2
