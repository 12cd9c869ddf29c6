"""Functions in front of PyTorch's FlashAttention: those of the CPU, which stand for those of a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl

import dash_inductor
from dash_inductor.config import config
from dash_inductor.eager import flash
from dash_inductor.eager.flash import CUDA, Pair, in_front
from dash_inductor.eager.packed import OPERATORS
from dash_inductor.errors import FallbackError
from dash_inductor.records.records import FORWARD_ONLY, FULL, Reason, graphs, sites

_aten = torch.ops.aten
CPU = Pair(
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


def step(length: int, *, run: Any = F.scaled_dot_product_attention, heads: int = 2, **more: Any) -> list[Tensor]:
    """The output of an attention and its gradients, of tensors that are the same for each length."""
    generator = torch.Generator().manual_seed(length)
    query, key, value, grad = (torch.randn(2, count, length, 16, generator=generator) for count in (4, heads, heads, 4))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = run(query, key, value, **{"is_causal": True, "enable_gqa": heads != 4} | more)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


@pytest.fixture
def active() -> Iterator[None]:
    with config.patch(cpu="reference"):
        handle = in_front("CPU", CPU)
        yield
        handle.remove()


def test_the_operators_of_a_program(active: None) -> None:
    """Each shape has one record, with the line of the program, and more calls have none; the flag stays as it is."""
    with dash_inductor.disabled():
        plain = [step(length, heads=4) for length in (20, 33)]
    assert not sites()
    for _ in range(3):
        ours = [step(length, heads=4) for length in (20, 33)]
    assert [(r.shape, r.mask, r.status, r.kind) for r in sites()] == [
        (f"2x4x{length}x16 float32", "causal", "replaced", FULL) for length in (20, 33)
    ]
    assert all(r.op.endswith("_backward") and __file__ in r.line for r in sites())
    assert [str(graph) for graph in graphs()] == ["graph (joint, eager): 1 site, 1 replaced"] * 2
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert not all(map(torch.equal, ours[0], plain[0])), "PyTorch's own kernels ran"
    step(33, heads=4, is_causal=False, scale=0.3)
    assert [record.mask for record in sites()[2:]] == ["full"]
    with torch.no_grad():
        F.scaled_dot_product_attention(*(torch.ones(1, 2, 5, 16) for _ in range(3)))
    assert [record.kind for record in sites()[3:]] == [FORWARD_ONLY]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("layout", ["plain", "heads inside", "a repeated gradient", "broadcast heads"])
def test_the_bits_of_a_compiled_program(active: None, layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 4, 20, 16, generator=generator) for _ in range(4)]
    if layout == "heads inside":
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    elif layout == "a repeated gradient":
        tensors[3] = torch.ones(()).expand(2, 4, 20, 16)
    elif layout == "broadcast heads":
        tensors[1] = tensors[1][:, :1].expand(2, 4, 20, 16)
    *leaves, grad = [tensor.requires_grad_(number < 3) for number, tensor in enumerate(tensors)]

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    ours = attention(*leaves)
    gradients = torch.autograd.grad(ours, leaves, grad)
    torch.use_deterministic_algorithms(True)
    compiled = torch.compile(attention)(*leaves)
    expected = torch.autograd.grad(compiled, leaves, grad)
    torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, (ours, *gradients), (compiled, *expected)))
    for found, like in zip((ours, *gradients), (leaves[0], *leaves), strict=True):
        assert found.stride() == torch.empty_like(like).stride(), "the layout of PyTorch's kernels for CUDA"
    assert {record.status for record in sites()} == {"replaced"}
    assert len({str(record.plan) for record in sites()}) == 1


def test_threads_share_what_is_planned(active: None) -> None:
    expected, found = step(20, heads=4), [[] for _ in range(4)]
    threads = [threading.Thread(target=lambda each=each: each.extend(step(20, heads=4))) for each in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(all(map(torch.equal, expected, each)) for each in found)
    assert len(sites()) == 1


def test_fallback(active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own kernels run, under deterministic algorithms, and a record says why; an error under `strict`."""
    query = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    assert F.scaled_dot_product_attention(query, query, query).dtype == torch.float64
    assert [record.reason for record in sites()] == [Reason.DTYPE]
    F.scaled_dot_product_attention(query, query, query)
    assert len(sites()) == 1
    with config.patch(strict=True), pytest.raises(FallbackError, match="float64"):
        F.scaled_dot_product_attention(query[:, :, :7], query, query)
    assert not torch.are_deterministic_algorithms_enabled()
    with config.patch(forward="keep"):
        ours = step(20, heads=4)
    assert sites()[-1].forward == "not replaced: by the setting forward='keep'"
    with dash_inductor.disabled():
        plain = step(20, heads=4)
    assert torch.equal(ours[0], plain[0])
    assert not all(map(torch.equal, ours, plain))


def test_kernels_that_do_not_compile_are_not_called(active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("no compiler")

    with dash_inductor.disabled():
        plain = step(20, heads=4)
    monkeypatch.setattr(flash, "forward_of", fails)
    monkeypatch.setattr(flash, "backward_of", fails)
    assert all(map(torch.equal, step(20, heads=4), plain))
    assert [(record.reason, record.detail) for record in sites()] == [
        (Reason.COMPILE_FAILED, "RuntimeError: no compiler")
    ]


def test_pytorchs_kernels_come_back() -> None:
    plain = step(20, heads=4)
    in_front("CPU", CPU).remove()
    assert all(map(torch.equal, step(20, heads=4), plain))
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
    for pair, tensor in ((CUDA, torch.zeros(1, 2, 3, 4)), (CPU, torch.zeros(1, 2, 3, 4))):
        assert 2 + len(pair.more(tensor, tensor)) == len(pair.forward._schema.returns)
        names = [argument.name for argument in pair.forward._schema.arguments]
        assert names[:5] == ["query", "key", "value", "dropout_p", "is_causal"]
        names = [argument.name for argument in pair.backward._schema.arguments]
        assert names[:6] == ["grad_out", "query", "key", "value", "out", "logsumexp"]


class _Kernel:
    """In the place of PyTorch's kernels of packed attention, of which the CPU has none."""

    def __init__(self, is_forward: bool, flags: list[bool]) -> None:
        self.is_forward, self.flags = is_forward, flags

    def call_boxed(self, keys: Any, *args: Tensor, **more: Any) -> tuple[Tensor, ...]:
        self.flags.append(torch.are_deterministic_algorithms_enabled())
        if not self.is_forward:
            return args[1].clone(), args[2].clone(), args[3].clone()
        states = [torch.zeros(2, dtype=torch.uint64) for _ in range(2)]
        return args[0].clone(), torch.zeros(args[0].shape[1], args[0].shape[0]), *states, torch.zeros(0)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Our functions in front of kernels for the CPU; whether each of these ran under the flag."""
    flags: list[bool] = []
    get_kernel = flash.get_kernel
    kernels = {op: _Kernel(op is OPERATORS[0], flags) for op in OPERATORS}
    monkeypatch.setattr(flash, "get_kernel", lambda op, device: kernels.get(op) or get_kernel(op, device))
    handle = in_front("CPU", CPU, packed=True)
    yield flags
    handle.remove()


def test_packed_calls_have_records(packed: list[bool]) -> None:
    """One for each class, whatever the numbers of tokens and documents are; dense calls of the operator have none."""

    def attend(*ends: int, heads: int = 4, **more: Any) -> None:
        leaf = torch.randn(ends[-1], heads, 16, requires_grad=True)
        starts = torch.tensor(ends, dtype=torch.int32)
        found = _aten._flash_attention_forward(leaf, leaf, leaf, starts, starts, 9, 9, 0.0, True, False, **more)
        torch.autograd.grad(found[0].sum(), leaf)

    for ends in ((0, 5, 8), (0, 3, 9, 17), (0, 5, 8)):
        attend(*ends)
    assert [(r.status, r.reason, r.kind, r.mask, str(r.tensors)) for r in sites()] == [
        ("fallback", Reason.VARLEN, FULL, "causal", "q, k and v ?x4x16, float32")
    ]
    assert __file__ in sites()[0].line
    assert packed == [True] * 6
    attend(0, 5, window_size_left=3, window_size_right=0)
    assert "its window is (3, 0)" in sites()[-1].detail
    with torch.no_grad():
        dense = torch.randn(1, 5, 4, 16)
        _aten._flash_attention_forward(dense, dense, dense, None, None, 5, 5, 0.0, True, False)
    with dash_inductor.disabled():
        attend(0, 5, heads=2)
    assert len(sites()) == 2
    assert packed[-3:] == [False] * 3
    with config.patch(strict=True), pytest.raises(FallbackError, match="compiled functions alone"):
        attend(0, 5, heads=2)
