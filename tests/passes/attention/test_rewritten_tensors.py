"""Tensors that a program writes to between a forward and its backward: gradients of before, or autograd's error."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor

from dash_inductor.graph.views import viewed
from dash_inductor.records.records import FULL, sites

from ...support.attention_frontends import ENTRIES, tensors_of
from ...support.graphs import capture
from ...support.rewriting import OUTPUT, differs, gradients_after

pytestmark = pytest.mark.usefixtures("deterministic")

ENTRY = pytest.mark.parametrize("name", list(ENTRIES))


QUICK = [(name, False) for name in ENTRIES] + [("keys", True), ("packed", True)]
SLOW = [(name, True) for name in ENTRIES if (name, True) not in QUICK]


@pytest.mark.parametrize(("name", "dynamic"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in SLOW)])
def test_gradients_are_those_of_before_or_an_error(name: str, dynamic: bool) -> None:
    """Every tensor that the program can reach is written to, one at a time, by code that Inductor generates."""
    entry = ENTRIES[name]
    tensors = tensors_of(entry)
    eager = entry.exact or entry.function
    expected = gradients_after(eager, tensors, None)
    assert isinstance(expected, list)
    # PyTorch refuses a second backward where it reuses the memory of what was saved.
    with capture(strict=True), functorch_config.patch(donated_buffer=False):
        compiled = torch.compile(entry.function, dynamic=dynamic)
        assert not differs(gradients_after(compiled, tensors, None), expected)
        for written in (*tensors, OUTPUT):
            for twice in (False, True):
                found = gradients_after(compiled, tensors, written, twice=twice)
                if isinstance(found, str):
                    assert written not in entry.copied
                else:
                    assert not differs(found, expected), written
                if written in entry.copied:
                    assert isinstance(gradients_after(eager, tensors, written), list)
    assert {(record.status, record.kind) for record in sites()} == {("replaced", FULL)}


@ENTRY
def test_hooks_of_saved_tensors(name: str) -> None:
    """Hooks that keep copies of what is saved make every later write harmless, as in eager mode."""
    entry = ENTRIES[name]
    tensors = tensors_of(entry)
    expected = gradients_after(entry.exact or entry.function, tensors, None)
    assert isinstance(expected, list)
    with capture(strict=True) as graphs, torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda saved: saved):
        compiled = graphs.compile(entry.function)
        for written in tensors:
            assert not differs(gradients_after(compiled, tensors, written), expected)


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.1])
@ENTRY
def test_nothing_is_saved_that_shows_an_input(name: str, budget: float) -> None:
    """The only tensors with an input's memory that a forward hands to its backward are inputs, which are watched."""
    entry = ENTRIES[name]
    tensors = tensors_of(entry)
    with capture(strict=True) as graphs, functorch_config.patch(activation_memory_budget=budget):
        gradients_after(graphs.compile(entry.function), tensors, None)
    forward, _ = graphs.parts
    (results,) = forward.output_node().args
    shown = []
    for result in results:
        base = result
        while isinstance(base, torch.fx.Node) and (source := viewed(base)) is not None:
            base = source
        if isinstance(base, torch.fx.Node) and base.op == "placeholder" and base is not result:
            shown.append(result.name)
    assert shown == []


def test_forward_and_backward_in_one_graph() -> None:
    """If the graph itself writes in between, its order is the program's."""

    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        attend = ENTRIES["keys"].function
        output, pull = torch.func.vjp(lambda q, k, v: attend(q, k, v, keys), q, k, v)
        keys.fill_(True)
        return output, *pull(grad_out)

    tensors = [t.detach() for t in tensors_of(ENTRIES["keys"]).values()]
    grad_out = torch.linspace(0, 1, tensors[0].shape[-1]).expand_as(tensors[0].transpose(1, 2))
    expected = function(*(t.clone() for t in tensors), grad_out)
    with capture():
        found = torch.compile(function)(*(t.clone() for t in tensors), grad_out)
    assert not differs(found, list(expected))
