"""Our functions in front of PyTorch's FlashAttention operators, on a GPU: values, bits, and records.

`test_calls_with_the_same_tensors` calls them many times under conditions that could make a difference, and prints which
results differ from call to call, and where:

    pytest -q -s -m gpu tests/gpu/test_eager_flash.py
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

import dash_inductor
from dash_inductor.config import config
from dash_inductor.records.records import clear_sites, sites

from .test_eager import NAME, causal, error, exact, results, tensors

pytestmark = pytest.mark.gpu

CALLS = 20
FLASH = "aten::_scaled_dot_product_flash_attention"
RESULTS = ("out", "lse", "dq", "dk", "dv")
_aten = torch.ops.aten


@pytest.fixture
def active() -> Iterator[None]:
    dash_inductor.register()
    activate_flash_attention_impl(NAME)
    yield
    restore_flash_attention_impl()


def sdpa(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **more)


def by_operators(given: list[Tensor]) -> list[Tensor]:
    """Output, log-sum-exp and gradients by the two operators, on this thread."""
    query, key, value, grad = given
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, True
    )
    gradients = _aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
    )
    return [out, lse, *gradients]


def by_autograd(given: list[Tensor]) -> list[Tensor]:
    """The same on autograd's thread, without the log-sum-exp, in whose place the output stands."""
    leaves = [tensor.detach().requires_grad_() for tensor in given[:3]]
    out, *gradients = results(sdpa, [*leaves, given[3]])
    return [out, out, *gradients]


def on_a_new_thread(given: list[Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(1) as pool:  # which raises what the thread raises
        return pool.submit(by_operators, given).result()


def on_a_side_stream(given: list[Tensor]) -> list[Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = by_operators(given)
    torch.cuda.current_stream().wait_stream(stream)
    for tensor in (*found, *given):
        tensor.record_stream(stream)
    return found


def compiled_call() -> Callable[[list[Tensor]], list[Tensor]]:
    """The operators in two graphs, one for each, which are compiled under deterministic algorithms."""
    torch._dynamo.reset()

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)

    def backward(*given: Any) -> Any:
        return _aten._scaled_dot_product_flash_attention_backward(*given)

    compiled = [torch.compile(each, fullgraph=True) for each in (forward, backward)]

    def run(given: list[Tensor]) -> list[Tensor]:
        query, key, value, grad = given
        torch.use_deterministic_algorithms(True, warn_only=True)
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = compiled[0](query, key, value)
        gradients = compiled[1](grad, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset)
        torch.use_deterministic_algorithms(False)
        return [out, lse, *gradients]

    return run


def poisoned(run: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Memory that the call may be given holds other numbers each time: NaN, large ones, small ones."""
    fills = [float("nan"), 3e38, -1.0, 0.0]

    def with_poison(given: list[Tensor]) -> list[Tensor]:
        fill = fills[0]
        fills.append(fills.pop(0))
        blocks = [torch.full((n,), fill, device="cuda") for n in (1 << 8, 1 << 12, 1 << 16, 1 << 18, 1 << 20) * 4]
        del blocks
        return run(given)

    return with_poison


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def where(first: Tensor, other: Tensor) -> str:
    """How many numbers differ, the largest difference, and the rows and heads in which they lie."""
    bits = {2: torch.int16, 4: torch.int32}[first.element_size()]
    places = (first.contiguous().view(bits) != other.contiguous().view(bits)).nonzero()
    rows, heads = places[:, 2].unique().tolist(), places[:, :2].unique(dim=0).tolist()
    largest = float((first.float() - other.float()).abs().nan_to_num(float("inf")).max())
    return f"{len(places)} numbers, up to {largest:.3g}, rows {rows[0]} to {rows[-1]}, heads {heads[:8]}"


def report(name: str, run: Callable[[list[Tensor]], list[Tensor]], given: list[Tensor], *, waits: bool) -> str:
    """A line for each result that differs between calls, or the digests of all if none does."""
    calls = []
    for _ in range(CALLS):
        calls.append([tensor.detach().clone() for tensor in run(given)])
        if waits:
            torch.cuda.synchronize()
    lines = []
    for place, result in enumerate(RESULTS):
        digests = [digest(call[place]) for call in calls]
        if len({*digests}) > 1:
            other = next(i for i, text in enumerate(digests) if text != digests[0])
            counts = sorted(map(digests.count, {*digests}), reverse=True)
            found = where(calls[0][place], calls[other][place])
            lines.append(f"{name}: {result} DIFFERS {counts}: {found} in call {other}")
    return "\n".join(lines) or f"{name}: equal, {' '.join(map(digest, calls[0]))}"


LAYOUTS = ("as the output", "contiguous", "heads inside", "one number", "rows repeated")


def with_gradient(given: list[Tensor], layout: str) -> list[Tensor]:
    grad = given[3]
    made = {
        "as the output": grad,
        "contiguous": grad.contiguous(),
        "heads inside": grad.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "one number": torch.ones((), device="cuda", dtype=grad.dtype).expand(grad.shape),
        "rows repeated": grad[:, :, :1].expand(grad.shape),
    }
    return [*(tensor.detach() for tensor in given[:3]), made[layout].detach()]


@pytest.mark.parametrize(("dim", "length", "batch"), [(64, 300, 2), (128, 1024, 4)])
def test_calls_with_the_same_tensors(active: None, dim: int, length: int, batch: int) -> None:
    given = tensors(length, dim=dim, batch=batch)
    lines: list[str] = []

    def look(name: str, run: Callable[[list[Tensor]], list[Tensor]], given: list[Tensor], waits: bool = False) -> None:
        lines.append(report(f"{dim} {length} {name}", run, given, waits=waits))
        print(lines[-1], flush=True)

    print()
    for layout in LAYOUTS:
        for waits in (False, True):
            look(f"gradient {layout}{', waits' * waits}", by_operators, with_gradient(given, layout), waits)
    own = with_gradient(given, LAYOUTS[0])
    runs: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
        "autograd's thread": by_autograd,
        "a new thread": on_a_new_thread,
        "a side stream": on_a_side_stream,
        "memory poisoned": poisoned(by_operators),
        "memory poisoned, autograd's thread": poisoned(by_autograd),
    }
    for name, run in runs.items():
        look(name, run, own)
    torch.use_deterministic_algorithms(True, warn_only=True)
    look("the flag is on", by_autograd, own)
    torch.use_deterministic_algorithms(False)
    with config.patch(forward="keep"):  # PyTorch's forward, our backward
        look("PyTorch's forward", by_operators, own)
        look("PyTorch's forward, autograd", by_autograd, own)
    if dim == 64:
        restore_flash_attention_impl()
        look("two graphs", compiled_call(), own)
    activate_flash_attention_impl(NAME)
    text = "\n".join(lines)
    print(f"\n{text}")
    assert "DIFFERS" not in text, text
    same = {
        line.split("equal, ")[1] for line in lines if "gradient as" in line or "side" in line or "poisoned:" in line
    }
    assert len(same) == 1, text


@pytest.mark.parametrize("dim", [64, 128])
def test_values_and_the_bits_of_a_compiled_program(active: None, dim: int) -> None:
    """A record for each shape; the flag of the program stays off."""
    for length, batch, kv_heads in ((77, 1, 1), (333, 3, 2)):
        given = tensors(length, dim=dim, batch=batch, kv_heads=kv_heads)
        clear_sites()
        run = lambda q, k, v: sdpa(q, k, v, enable_gqa=q.shape[1] != k.shape[1])  # noqa: E731
        ours = results(run, given)
        own = sites()
        assert all(error(a, b) < 0.01 for a, b in zip(ours, exact(given, causal(length)), strict=True))
        assert all(map(torch.equal, results(run, given), ours))
        assert [(r.status, r.mask, r.op) for r in own] == [("replaced", "causal", f"{FLASH}_backward")]
        clear_sites()
        torch._dynamo.reset()
        torch.use_deterministic_algorithms(True)
        compiled = results(torch.compile(run), given)
        torch.use_deterministic_algorithms(False)
        plans = [str(record.plan) for record in (*own, *sites())]
        different = [
            n for n, a, b in zip(("out", "dq", "dk", "dv"), ours, compiled, strict=True) if not torch.equal(a, b)
        ]
        assert not different, f"{different} differ; plans: {plans}; {[str(r) for r in sites()]}"
    assert not torch.are_deterministic_algorithms_enabled()


def test_dropout_is_pytorchs(active: None) -> None:
    """The same random numbers, and a backward of PyTorch's that adds in order."""
    given = tensors(200)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch.manual_seed(0)
        return sdpa(query, key, value, dropout_p=0.3)

    ours = results(run, given)
    assert all(map(torch.equal, results(run, given), ours))
    assert {(record.status, record.reason.value if record.reason else "") for record in sites()} == {
        ("fallback", "dropout")
    }
    restore_flash_attention_impl()
    assert torch.equal(results(run, given)[0], ours[0])
    activate_flash_attention_impl(NAME)


def test_head_dims(active: None) -> None:
    """60 becomes 64 in front of the operator."""
    for dim in (60, 256):
        given = tensors(200, dim=dim)
        ours = results(sdpa, given)
        assert all(error(a, b) < 0.01 for a, b in zip(ours, exact(given, causal(200)), strict=True))
        assert all(map(torch.equal, results(sdpa, given), ours))
    assert {record.status for record in sites()} == {"replaced"}


def test_in_a_compiled_program(active: None) -> None:
    """A graph without deterministic algorithms calls PyTorch's operators, in front of which our functions stand."""
    given = tensors(200)
    ours = results(sdpa, given)
    assert all(map(torch.equal, results(torch.compile(sdpa), given), ours))


@pytest.mark.parametrize("poison", [False, True])
def test_a_graph_that_is_captured(active: None, poison: bool) -> None:
    given = [tensor.detach() for tensor in tensors(200)]
    expected = by_operators(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = by_operators(given)
    for _ in range(3):
        if poison:
            blocks = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(4)]
            del blocks
        graph.replay()
        assert all(map(torch.equal, found, expected))


def test_restored(active: None) -> None:
    restore_flash_attention_impl()
    results(sdpa, tensors(200))
    assert not sites()
    activate_flash_attention_impl(NAME)


def test_packed_calls(active: None) -> None:
    """They are PyTorch's, with the same bits from call to call, and with one record for calls of several sizes."""
    clear_sites()

    def run(*ends: int) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(0)
        leaf = torch.randn(ends[-1], 4, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
        starts = torch.tensor(ends, device="cuda", dtype=torch.int32)
        longest = max(b - a for a, b in itertools.pairwise(ends))
        out = _aten._flash_attention_forward(leaf, leaf, leaf, starts, starts, longest, longest, 0.0, True, False)[0]
        return [out.detach(), *torch.autograd.grad(out, leaf, torch.ones_like(out))]

    first = run(0, 700, 1500, 4096)
    assert all(all(map(torch.equal, first, run(0, 700, 1500, 4096))) for _ in range(CALLS))
    run(0, 300, 900)
    assert [(record.status, record.mask) for record in sites()] == [("fallback", "causal")]
    assert not torch.are_deterministic_algorithms_enabled()
