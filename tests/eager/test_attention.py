"""The attention that is compiled on its own: against double precision, and what it does to the program around it."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import dash_inductor
from dash_inductor.config import config
from dash_inductor.eager import attention as module
from dash_inductor.eager.attention import attention
from dash_inductor.errors import FallbackError
from dash_inductor.records.records import clear_sites, sites


@pytest.fixture(autouse=True)
def on_the_cpu() -> Any:
    counters.clear()
    with config.patch(cpu="reference"):
        yield


def tensors(*, batch: int = 2, queries: int = 20, keys: int = 20, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)]
    found = [torch.randn(batch, count, length, 16, generator=generator) for count, length in sizes]
    return [tensor.requires_grad_(number < 3) for number, tensor in enumerate(found)]


def exact(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None,
    softcap: float | None, sinks: Tensor | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """The definition."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen = seen.tril() if causal else seen
    scores = scores.masked_fill(~(seen if mask is None else seen & mask), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.softmax(scores, -1)[..., : key.shape[2]] @ value


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"scale": 0.3, "causal": True},
    "mask": {"mask": True},
    "softcap": {"softcap": 1.5, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "all by hand": {"softcap": 2.0, "sinks": True, "mask": True, "bias": True, "scale": 0.4},
    "bias": {"bias": True, "causal": True},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("queries", "keys"), [(20, 20), (7, 20)])
def test_against_double_precision(name: str, queries: int, keys: int) -> None:
    case = {"causal": False, "scale": None, "softcap": None, "sinks": None, "bias": None, "mask": None} | CASES[name]
    query, key, value, grad = tensors(queries=queries, keys=keys)
    generator = torch.Generator().manual_seed(1)
    made = {
        "sinks": torch.randn(4, generator=generator).requires_grad_(),
        "bias": torch.randn(2, 4, queries, keys, generator=generator).requires_grad_(),
        "mask": torch.rand(2, 1, queries, keys, generator=generator) < 0.7,
    }
    made["mask"][..., 0] = True
    case |= {operand: tensor for operand, tensor in made.items() if case[operand]}
    leaves = [query, key, value, *(case[x] for x in ("sinks", "bias") if case[x] is not None)]
    mask = case.pop("mask")
    doubled = [leaf.detach().double().requires_grad_() for leaf in leaves]
    twin = dict(zip(map(id, leaves), doubled, strict=True))
    expected = exact(*doubled[:3], mask, **{x: twin.get(id(y), y) for x, y in case.items()})
    truth = [expected, *torch.autograd.grad(expected, doubled, grad.double())]
    out = attention(query, key, value, mask, **case)
    ours = [out, *torch.autograd.grad(out, leaves, grad)]
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_that_see_no_key(dtype: torch.dtype) -> None:
    """With a softcap they have zeros, as without one, and gradients are finite; the same while we are off."""
    *leaves, grad = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in tensors()]
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    mask[1, :, :, :9] = False

    def step() -> list[Tensor]:
        out = attention(*leaves, mask, softcap=3.0)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    ours = step()
    assert not ours[0][1, :, :9].any()
    assert all(t.isfinite().all() for t in ours)
    assert [(record.status, record.mask) for record in sites()] == [("replaced", "dense(0)")]
    with dash_inductor.disabled():
        torch.testing.assert_close(ours, step(), atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps)


def test_dropout() -> None:
    """On a CPU, PyTorch decomposes attention with dropout, which is replaced as attention by hand is."""
    query, key, value, _ = tensors(queries=200, keys=200)
    values = torch.ones_like(value)
    torch.manual_seed(0)
    first, second = attention(query, key, values, dropout=0.4), attention(query, key, values, dropout=0.4)
    torch.manual_seed(0)
    assert torch.equal(attention(query, key, values, dropout=0.4), first)
    assert not torch.equal(first, second)
    assert abs(float(first.mean()) - 1) < 0.02
    assert [record.status for record in sites()] == ["replaced"]


def test_the_flag_of_the_program() -> None:
    """It is as before, after errors too; operators without a deterministic kernel only warn if it was off."""
    query, key, value, _ = tensors()
    attention(query, key, value, causal=True)
    assert not torch.are_deterministic_algorithms_enabled()
    with config.patch(strict=True), pytest.raises(FallbackError):
        attention(query.double(), key.double(), value.double(), causal=True)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError):
        attention(query, key[:, :, :, :3], value)
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    attention(query, key, value, causal=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_threads() -> None:
    """One that ends does not switch the flag off for another, which would recompile without it."""
    query, key, value, _ = tensors()
    expected = attention(query, key, value, causal=True)
    wrong: list[str] = []

    def many() -> None:
        for _ in range(20):
            if not torch.equal(attention(query, key, value, causal=True), expected):
                wrong.append("other bits")

    threads = [threading.Thread(target=many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(sites()) == 1
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_bits_of_a_compiled_program() -> None:
    """Output and gradients are those of the same attention in a compiled function, which has the same plan."""
    query, key, value, grad = tensors(kv_heads=4)
    torch.use_deterministic_algorithms(True)
    compiled = torch.compile(torch.nn.functional.scaled_dot_product_attention)
    found = []
    for out in (attention(query, key, value, causal=True), compiled(query, key, value, is_causal=True)):
        found.append([out, *torch.autograd.grad(out, (query, key, value), grad)])
    assert all(map(torch.equal, *found))
    first, second = sites()
    assert first.plan == second.plan
    assert first.line.startswith(f"{__file__}:")


def test_without_a_gradient() -> None:
    """Forwards alone are another kind, so that they do not count as recompilations of the training."""
    query, key, value, _ = tensors()
    with torch.no_grad():
        forward = attention(query, key, value, causal=True)
    assert torch.equal(forward, attention(query, key, value, causal=True))
    assert [record.kind for record in sites()] == ["forward only", "forward and backward"]


def test_a_second_derivative_is_an_error() -> None:
    query, key, value, grad = tensors()
    out = attention(query, key, value, causal=True)
    (gradient,) = torch.autograd.grad(out, query, grad.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_kinds_do_not_recompile_each_other() -> None:
    """More kinds than Dynamo recompiles a function: each is a function of its own."""
    for dim in range(8, 8 + 12 * 8, 8):
        query = torch.randn(2, 2, 6, dim)
        attention(query, query, query, causal=True)
    assert counters["stats"]["unique_graphs"] == 12
    assert len(sites()) == 12
    assert len({record.tensors.query for record in sites() if record.tensors}) == 12


def test_what_a_call_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the compiled function, a call parses and compiles nothing: it asks for the function of its kind once."""
    query, key, value, _ = tensors()
    asked: list[object] = []
    monkeypatch.setattr(module, "_compiled", lambda kind: asked.append(kind) or (lambda *args: query))
    for _ in range(3):
        attention(query, key, value, causal=True)
    assert len(asked) == 3
    assert len(set(asked)) == 1


def test_switched_off() -> None:
    query, key, value, _ = tensors()
    with dash_inductor.disabled():
        plain = attention(query, key, value, causal=True)
    repeated = [tensor.repeat_interleave(2, 1) for tensor in (key, value)]
    assert torch.equal(plain, torch.nn.functional.scaled_dot_product_attention(query, *repeated, is_causal=True))
    assert not sites()
    with config.patch(cpu="off"):
        assert torch.equal(attention(query, key, value, causal=True), plain)
    assert not sites()


@pytest.mark.parametrize(
    ("window", "mask"), [((9, 0), "band(0,9)"), ((-1, 5), "band(-5,none)"), ((3, 4), "band(-4,3)")]
)
def test_windows(window: tuple[int, int], mask: str) -> None:
    """They are counted from the ends of queries and keys, and narrow another mask."""
    left, right = window
    for queries, keys in ((40, 40), (30, 40)):
        clear_sites()
        query, key, value, _ = tensors(queries=queries, keys=keys)
        distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        seen = (distance <= left if left >= 0 else True) & (distance >= -right)
        expected = F.scaled_dot_product_attention(query, repeated(key, query), repeated(value, query), attn_mask=seen)
        torch.testing.assert_close(attention(query, key, value, window=window), expected)
        assert {record.status for record in sites()} == {"replaced"}
        if queries == keys:
            assert {record.mask for record in sites()} == {mask}
    even = torch.arange(keys) % 2 == 0
    expected = F.scaled_dot_product_attention(
        query, repeated(key, query), repeated(value, query), attn_mask=seen & even
    )
    torch.testing.assert_close(attention(query, key, value, even[None, None, None], window=window), expected)


def repeated(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def test_sinks_with_lengths_that_change() -> None:
    """The scores have a column more than there are keys, whose number is dynamic."""
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0])[:, None, None]
    for length in (40, 33, 57):
        query, key, value = (torch.randn(2, n, length, 16).requires_grad_() for n in (4, 2, 2))
        out = attention(query, key, value, sinks=sinks.flatten())
        s = query @ repeated(key, query).mT / 4
        s = torch.cat([s, sinks.expand(2, -1, length, 1)], -1).softmax(-1)[..., :-1]
        expected = s @ repeated(value, query)
        torch.testing.assert_close(out, expected)
        for ours, true in zip(
            torch.autograd.grad(out.square().sum(), [query, key, value]),
            torch.autograd.grad(expected.square().sum(), [query, key, value]),
            strict=True,
        ):
            torch.testing.assert_close(ours, true, atol=1e-4, rtol=1e-4)
    assert {record.status for record in sites()} == {"replaced"}
