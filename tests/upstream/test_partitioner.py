"""PyTorch's partitioner on models with our operators: no attention runs again, and nothing is saved, where plain
PyTorch does neither, whatever memory budget a program sets.

The models are compiled up to the two graphs that the partitioner makes, on fake tensors.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch._functorch import partitioners
from torch.fx import Graph, Node

from dash_inductor.graph.nodes import op_name

from ..support.cases import some
from ..support.fakecuda import compiler
from ..support.forks import FAKE_GPU, run_forked
from ..support.graphs import FORWARD, cudnn, efficient, flash, joint_graph, rewritten
from ..support.partitions import CHECKPOINTS, Case, Comparison, Parts, compare, partitions

pytestmark = pytest.mark.usefixtures("deterministic")

BUDGETS = 1.0, 0.9, 0.7, 0.5, 0.3, 0.1
OTHERS: dict[str, dict[str, Any]] = {
    "aggressive": {"aggressive_recomputation": True},
    "views": {"recompute_views": True},
    "materialized": {"ban_recompute_materialized_backward": False},
    "far apart": {"ban_recompute_used_far_apart": False, "ban_recompute_long_fusible_chains": False},
    "allowed": {"ban_recompute_not_in_allowlist": False, "ban_recompute_reductions": False},
    "greedy": {"activation_memory_budget_solver": "greedy"},
    "unweighed": {"activation_memory_budget_runtime_estimator": "testing"},
}
PACKED = "varlen", "grouped varlen", "packed"

Setting = dict[str, Any]
Question = tuple[Case, list[Setting]]


def budgets(**others: Any) -> list[Setting]:
    return [{"activation_memory_budget": budget, **others} for budget in BUDGETS]


GROUPS: dict[str, list[Question]] = {
    "bands": [(Case("causal", 3), budgets()), (Case("grouped"), budgets())],
    "repeats": [(Case("repeated"), budgets())],
    "dropout": [(Case("dropout"), budgets()), (Case("dropout", 2, "whole layers"), budgets())],
    "masks": [(Case("padded"), budgets()), (Case("documents"), budgets())],
    "biases": [(Case("bias"), budgets()), (Case("trained bias"), budgets()), (Case("value dim"), budgets())],
    "packed": [(Case(name), budgets()) for name in PACKED],
    "checkpoints": [(Case("padded", 2, way), budgets()[::2]) for way in CHECKPOINTS],
    "settings": [(Case("causal"), [s for other in OTHERS.values() for s in budgets(**other)[3::2]])],
    "cudnn": [(Case("causal", 3), budgets())],
    "efficient": [(Case("causal"), budgets())],
}
"""Questions, by the process that answers them."""

PROGRAM = """
    import dataclasses, json

    from tests.support import fakecuda
    import torch
    import torch._inductor.compile_fx
    from tests.support.partitions import Case, compare

    torch.use_deterministic_algorithms(True)
    fakecuda.choose(fakecuda.Backend[BACKEND])
    found = [compare(case, settings, "cuda") for case, settings in QUESTIONS]
    print(json.dumps([dataclasses.asdict(comparison) for comparison in found]))
"""


@functools.cache
def on_h100(group: str) -> dict[Case, Comparison]:
    """The answers to a group of questions, for an H100."""
    if compiler() is None:
        pytest.skip("the fake CUDA device needs a C++ compiler")
    backend = group.upper() if group in ("cudnn", "efficient") else "FLASH"
    program = PROGRAM.replace("QUESTIONS", repr(GROUPS[group])).replace("BACKEND", repr(backend))
    answers = json.loads(run_forked(FAKE_GPU, program).stdout.splitlines()[-1])
    found = {}
    for (case, _), answer in zip(GROUPS[group], answers, strict=True):
        parts = {name: [Parts(**part) for part in answer.pop(name)] for name in ("plain", "ours")}
        found[case] = Comparison(**answer, **parts)
    return found


def check(case: Case, found: Comparison) -> None:
    assert found.worse == []
    assert found.replaced == case.layers
    assert found.plain[-1].activations < found.plain[0].activations or case.checkpoints  # the budget did something


SOON = "bands", "cudnn", "repeats"
"""The groups that are asked in every run of the tests."""
ASKED = [
    pytest.param(group, case, marks=[] if group in SOON else pytest.mark.full, id=f"{group}-{case}")
    for group, questions in GROUPS.items()
    for case, _ in questions
]


@pytest.mark.parametrize(("group", "case"), ASKED)
def test_no_budget_is_worse_on_an_h100(group: str, case: Case) -> None:
    check(case, on_h100(group)[case])


@some(["causal", "grouped", "repeated", "padded", "documents", "bias"], ["causal", "documents"], "name")
def test_no_budget_is_worse_on_a_cpu(name: str) -> None:
    case = Case(name)
    check(case, compare(case, budgets(), "cpu"))


def test_attentions_run_again_as_often_as_plain_pytorchs() -> None:
    """Flash attention hardly does, which saves memory elsewhere; cuDNN's, which PyTorch does not hold dear, does."""
    for found in (on_h100("bands")[Case("causal", 3)], on_h100("cudnn")[Case("causal", 3)]):
        assert [part.again for part in found.ours] == [part.again for part in found.plain]
        assert [part.activations for part in found.ours] == [part.activations for part in found.plain]
    assert [part.again for part in on_h100("cudnn")[Case("causal", 3)].ours][-1] == 3
    assert [part.again for part in on_h100("bands")[Case("causal", 3)].ours][:5] == [0] * 5


def unchanged() -> Any:
    """The partitioner without what dash_inductor puts into it."""
    names = ("get_aten_target", "_size_of")
    return mock.patch.multiple(partitioners, **{name: getattr(partitioners, name).__wrapped__ for name in names})


@pytest.mark.parametrize("deterministic", [True, False], ids=["switched off", "no deterministic algorithms"])
def test_graphs_without_our_operators_are_cut_as_ever(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    case, settings = Case("padded"), budgets()
    active = not deterministic
    found, replaced = partitions(case, settings, device="cpu", active=active)
    assert replaced == 0
    with unchanged():
        assert partitions(case, settings, device="cpu", active=active) == (found, 0)


def test_what_is_worse_without_it() -> None:
    """The case where PyTorch holds its attention dear, as it would be if the CPU's were in its list."""
    listed = partitioners.get_default_op_list

    def with_attention_of_cpu() -> partitioners.OpTypes:
        ops = listed()
        ops.compute_intensive_ops.add(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
        return ops

    def run_again() -> list[int]:
        return [part.again for part in partitions(Case("causal"), budgets()[3:5], device="cpu", active=True)[0]]

    with mock.patch.object(partitioners, "get_default_op_list", with_attention_of_cpu):
        assert run_again() == [0, 0]
        with unchanged():
            assert run_again() == [2, 2]


@pytest.mark.parametrize(("maker", "known"), [(flash, True), (efficient, True), (cudnn, False)])
def test_a_forward_is_what_it_stands_for(maker: Callable[..., Any], known: bool) -> None:
    joint = joint_graph(maker)
    (before,) = (node for node in joint.graph.nodes if op_name(node).endswith("attention"))
    packet, size = partitioners.get_aten_target(before), partitioners._size_of(before)
    graph, _ = rewritten(joint)
    (after,) = forwards(graph)
    assert after.target.overloadpacket is torch.ops.dash_inductor.attention_forward
    copied = Graph().node_copy(after, lambda node: node)
    for node in (after, copied):
        assert partitioners.get_aten_target(node) is packet
        assert partitioners._size_of(node) == size
        assert partitioners.get_default_op_list().is_compute_intensive(node) == known


def forwards(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if op_name(node) == FORWARD]
