"""Medians, k-th values and histograms by a stable sort: values beside PyTorch's on the CPU, and what stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dash_inductor.passes.ops import sorted_values
from dash_inductor.passes.ops.sorted_values import SortedValuesRewrite
from dash_inductor.records.records import all_records, clear_sites

from ...support.graphs import capture, trace

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sorted_values, "DEVICES", ("cpu",))
    torch._dynamo.reset()
    clear_sites()
    yield
    torch._dynamo.reset()


def rewritten() -> list[str]:
    return [r.op for r in all_records() if r.rewrite == "sorted_values" and r.status == "replaced"]


def compiled(function: Callable[..., object], *inputs: Tensor) -> object:
    with capture() as graphs:
        return graphs.compile(function)(*inputs)


def several(dtype: torch.dtype) -> Tensor:
    """Lines with many equal elements, some of which have elements that are no numbers."""
    lines = torch.randint(-3, 4, (6, 5, 12), generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype.is_floating_point:
        lines[0, :2, 3], lines[1, 0], lines[2, :, 4] = float("nan"), float("nan"), float("inf")
    return lines


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["median", "nanmedian", "kthvalue"])
def test_elements(name: str, dtype: torch.dtype) -> None:
    """Values are PyTorch's, and places are those of such values, in a stable sort."""
    x = several(dtype)
    for dim, keepdim in ((-1, False), (0, True), (1, False)):
        arguments = (3, dim, keepdim) if name == "kthvalue" else (dim, keepdim)

        def function(x: Tensor, arguments: tuple[int, ...] = arguments) -> tuple[Tensor, ...]:
            return tuple(getattr(torch, name)(x, *arguments))

        values, places = compiled(function, x)  # type: ignore[misc]
        wanted = function(x)[0]
        assert torch.equal(values, wanted) or torch.equal(values.nan_to_num(7), wanted.nan_to_num(7))
        at = places if keepdim else places.unsqueeze(dim)
        there = x.gather(dim, at) if keepdim else x.gather(dim, at).squeeze(dim)
        assert torch.equal(there.nan_to_num(7), values.nan_to_num(7))
        if name == "kthvalue":
            assert torch.equal(at, x.sort(dim=dim, stable=True).indices.narrow(dim, 2, 1))
        assert rewritten() == [f"aten::{name}"]


def test_a_dead_operator_stays() -> None:
    """Nothing is replaced and recorded where nobody reads the results."""
    module = trace(lambda x: torch.median(x, 1), lambda: [torch.empty(3, 8)])
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.median.dim)
    (output,) = module.graph.find_nodes(op="output")
    output.args = ((),)
    for user in list(node.users):
        module.graph.erase_node(user)
    assert SortedValuesRewrite().apply(module.graph) == []
    assert node in module.graph.nodes


def test_gradients() -> None:
    x = several(torch.float64)[3:].requires_grad_()

    def function(x: Tensor) -> Tensor:
        return x.median(1).values + x.kthvalue(2, 1, keepdim=True).values.squeeze(1)

    out = compiled(function, x)
    (found,) = torch.autograd.grad(out.square().sum(), x)  # type: ignore[attr-defined]
    assert torch.equal(out, function(x))
    assert torch.equal(found.sum(1), 2 * 2 * function(x).detach())
    assert len(rewritten()) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_histograms(dtype: torch.dtype) -> None:
    """Borders belong to the part behind them, the last one to the last part; nothing outside counts."""
    x = torch.cat([torch.linspace(-2, 3, 1001), torch.tensor([float("nan"), float("inf"), -1.0, 1.0])]).to(dtype)
    for bins, low, high in ((8, -1, 1), (1, 0, 2), (4, -10, -5)):
        found = compiled(lambda x, of=(bins, low, high): x.histc(*of), x)
        assert torch.equal(found, x[x.isfinite()].histc(bins, low, high))  # type: ignore[arg-type]
        assert rewritten() == ["aten::histc"]
    assert torch.equal(compiled(lambda x: x.histc(3, 0, 1), x[:0]), torch.zeros(3, dtype=dtype))  # type: ignore[arg-type]


def test_what_stays() -> None:
    x = torch.randn(40)
    compiled(lambda x: (x.histc(3), x.median(), x[0].median(0).values), x)
    assert rewritten() == []
