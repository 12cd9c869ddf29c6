"""Functions in front of PyTorch's fused operators: those of the CPU, which stand for those of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl

import dash_inductor
from dash_inductor.config import config
from dash_inductor.eager.flash import CUDA, Replaced, in_front, nothing
from dash_inductor.records.records import sites

from ..support.graphs import CPU_BACKWARD, CPU_FORWARD

_aten = torch.ops.aten
CPU = (
    Replaced(_aten._scaled_dot_product_flash_attention_for_cpu.default, 2, -3, nothing),
    Replaced(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default, 3, -3, nothing),
)


def step(
    length: int, *, causal: bool = True, scale: float | None = None, run: Any = F.scaled_dot_product_attention
) -> list[Tensor]:
    """The output of an attention and its gradients, of tensors that are the same for each length."""
    generator = torch.Generator().manual_seed(length)
    query, key, value, grad = (torch.randn(2, 2, length, 16, generator=generator) for _ in range(4))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = run(query, key, value, is_causal=causal, scale=scale)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


@pytest.fixture
def in_front_of_cpu() -> Iterator[None]:
    with config.patch(cpu="reference"):
        handle = in_front("CPU", CPU)
        yield
        handle.remove()


def test_the_operators_of_a_program(in_front_of_cpu: None) -> None:
    """Two shapes are compiled, the second with dynamic lengths; other settings of a call are another function."""
    counters.clear()
    with dash_inductor.disabled():
        plain = [step(length) for length in (20, 30, 33)]
    assert not sites()
    ours = [step(length) for length in (20, 30, 33)]
    assert [record.op for record in sites()] == [CPU_FORWARD, CPU_BACKWARD] * 2
    assert [record.mask for record in sites() if record.op == CPU_BACKWARD] == ["causal"] * 2
    assert counters["stats"]["unique_graphs"] == 4
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert not all(map(torch.equal, ours[0], plain[0])), "the backward is PyTorch's own"
    assert not torch.are_deterministic_algorithms_enabled()
    step(33, causal=False, scale=0.3)
    assert [record.mask for record in sites()[-1:]] == ["full"]


def test_inside_of_a_compiled_program(in_front_of_cpu: None) -> None:
    """A graph without deterministic algorithms calls the operators, in front of which ours stand."""
    with dash_inductor.disabled():
        plain = step(20)
    counters.clear()
    torch._dynamo.reset()
    ours = step(20, run=torch.compile(F.scaled_dot_product_attention))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 3
    assert [record.op for record in sites() if record.status == "replaced"] == [CPU_FORWARD, CPU_BACKWARD]


def test_a_forward_hands_its_log_sum_exp_to_autograd(in_front_of_cpu: None) -> None:
    with dash_inductor.disabled():
        plain = step(20)
    torch.testing.assert_close(step(20)[0], plain[0], rtol=1e-4, atol=1e-5)
    assert [(record.op, record.status) for record in sites()[:1]] == [(CPU_FORWARD, "replaced")]


def test_pytorchs_kernels_come_back() -> None:
    plain = step(20)
    in_front("CPU", CPU).remove()
    assert all(map(torch.equal, step(20), plain))
    assert not sites()


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a PyTorch with kernels for CUDA")
def test_activation_without_kernels() -> None:
    """A PyTorch without kernels for CUDA has nothing to stand in front of, and says so."""
    dash_inductor.register()
    with pytest.raises(RuntimeError, match="no kernel for CUDA"):
        activate_flash_attention_impl("dash_inductor")
    assert current_flash_attention_impl() is None


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a PyTorch without kernels for CUDA")
def test_activation() -> None:
    """With kernels for CUDA, also where there is no GPU."""
    dash_inductor.register()
    activate_flash_attention_impl("dash_inductor")
    assert current_flash_attention_impl() == "dash_inductor"
    restore_flash_attention_impl()
    assert current_flash_attention_impl() is None


def test_schemas() -> None:
    """The results that are computed come first; what is made is as long as the rest."""
    read = [torch.zeros(1, 2, 3, 4)] * 3
    for replaced in CUDA:
        assert replaced.results + len(replaced.others(read)) == len(replaced.op._schema.returns)
