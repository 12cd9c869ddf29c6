"""Compiled graphs of operators that write all of their results run without the fill of uninitialized memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import dash_inductor
from dash_inductor.config import config
from dash_inductor.graph.fully_written import all_written
from dash_inductor.upstream import fill_uninitialized_memory as fill

from ..support import bags
from ..support.processes import run_python

FLAG: Any = torch.utils.deterministic


@pytest.fixture(autouse=True)
def filled(deterministic: None) -> Iterator[None]:
    torch._dynamo.reset()
    assert FLAG.fill_uninitialized_memory
    yield
    FLAG.fill_uninitialized_memory = True


@torch.library.custom_op("dash_inductor_tests::flag", mutates_args=())
def flag(x: Tensor) -> Tensor:
    return torch.full_like(x, float(FLAG.fill_uninitialized_memory))


@flag.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The values to which compiled graphs set the flag."""
    found: list[bool] = []
    set_filled = fill.set_filled

    def noted(value: bool) -> None:
        found.append(value)
        set_filled(value)

    monkeypatch.setattr(fill, "set_filled", noted)
    return found


def product(x: Tensor) -> Tensor:
    return (x @ x).relu()


def step(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    torch.compile(function)(x).sum().backward()


def test_a_step(switched: list[bool]) -> None:
    step(product)
    assert switched == [False, True] * 2  # forward and backward
    assert FLAG.fill_uninitialized_memory


@pytest.mark.parametrize("off", ["switch", "fill", "rewrites", "flag", "algorithms"])
def test_who_keeps_the_fill(off: str, switched: list[bool]) -> None:
    if off == "flag":
        FLAG.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(off != "algorithms")
    settings = {"fill": {"fill_uninitialized_memory": True}, "rewrites": {"rewrites": "attention"}}.get(off, {})
    with config.patch(**settings):
        if off == "switch":
            with dash_inductor.disabled():
                step(product)
        else:
            step(product)
    assert switched == []
    assert FLAG.fill_uninitialized_memory is (off != "flag")


def test_operators_of_the_program_keep_it(switched: list[bool]) -> None:
    found = torch.compile(lambda x: flag(x @ x))(torch.ones(4, 4))
    assert switched == []
    assert torch.equal(found, torch.ones(4, 4))


@pytest.mark.parametrize("times", [False, True])
def test_products_of_groups(times: bool, switched: list[bool]) -> None:
    """What they leave unwritten is NaN, as PyTorch's fill has it; products that may be timed keep that."""
    offsets = torch.tensor([3, 3, 9], dtype=torch.int32)
    x, weight = torch.randn(12, 16).bfloat16(), torch.randn(3, 8, 16).bfloat16()

    def step(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out[:9].float().square().sum(), leaves)]

    def grouped(x: Tensor, weight: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight.mT, offsets)

    plain = step(grouped)
    assert plain[0][9:].isnan().all()
    assert plain[1][9:].isnan().all()
    with inductor_config.patch(max_autotune=times):
        found = step(torch.compile(grouped))
    for ours, theirs in zip(found, plain, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        torch.testing.assert_close(ours.nan_to_num(), theirs.nan_to_num())
    assert switched == ([] if times else [False, True] * 2)


def test_columns_behind_the_last_offset() -> None:
    x, wide = torch.randn(2, 8, 16).bfloat16(), torch.randn(24, 16).bfloat16().t()
    offsets = torch.tensor([8, 16], dtype=torch.int32)
    found = torch.compile(lambda x, wide: torch._grouped_mm(x, wide, offsets))(x, wide)
    assert found.isnan().all(0).tolist() == [False] * 16 + [True] * 8


def graph(function: Callable[..., Tensor], *args: Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def test_which_operators_write_all() -> None:
    x, index = torch.randn(4, 4), torch.tensor([0, 1, 1, 3])
    written = [
        lambda x, i: x.exp().permute(1, 0) @ x,
        lambda x, i: x.index_put((i,), x, accumulate=True).sort(0).values.cumsum(0),
        lambda x, i: torch.cat([x, x])[2:].contiguous().view(-1).topk(3).values,
    ]
    assert [all_written(graph(function, x, index)) for function in written] == [True] * 3
    offsets = torch.tensor([4], dtype=torch.int32)
    grouped = graph(
        lambda x, o: torch.ops.aten._grouped_mm(x, x[None], o),
        torch.ones(16, 16, dtype=torch.bfloat16),
        offsets,
    )
    unwritten = [grouped, graph(lambda x, i: flag(x), x, index), graph(lambda x, i: torch.linalg.svd(x)[0], x, index)]
    assert not any(map(all_written, unwritten))
    grouped.graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default)[0].target = (
        torch.ops.aten._scaled_grouped_mm.default  # which has a lowering that may leave it to PyTorch
    )
    assert not all_written(grouped)


def test_bags_of_embeddings() -> None:
    """Whose operators write all, but for the size of a last bag that is none, and for what no bag or column is for."""
    assert not any(any(bags.unwritten(results)) for _, results in bags.calls("cpu"))

    def step(width: int, starts: int, **options: bool) -> torch.fx.GraphModule:
        def run(weight: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
            out, *others = torch.ops.aten._embedding_bag(weight, indices, offsets, mode=1, **options)
            rows = torch.ops.aten._embedding_bag_backward(out, indices, offsets, *others, 6, False, 1, False, None)
            return rows + out.sum()

        return graph(run, torch.randn(6, width), torch.tensor([1, 2, 2]), torch.zeros(starts, dtype=torch.int64))

    assert all_written(step(4, 2))
    kept = [step(4, 2, include_last_offset=True), step(4, 0), step(0, 2), step(4, 2)]
    (gradient,) = kept[-1].graph.find_nodes(op="call_function", target=torch.ops.aten._embedding_bag_backward.default)
    gradient.args = tuple(True if place == 9 else arg for place, arg in enumerate(gradient.args))  # sparse
    assert not any(map(all_written, kept))


def test_errors_restore_it() -> None:
    def fail(inputs: object) -> None:
        assert not FLAG.fill_uninitialized_memory
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fill.without_fill(fail)([])
    assert FLAG.fill_uninitialized_memory


def test_calls_that_overlap() -> None:
    """The last call to end restores the flag; a call inside of another one is no end."""
    entered, leave = threading.Event(), threading.Event()

    def long(inputs: object) -> None:
        entered.set()
        assert leave.wait(30)

    thread = threading.Thread(target=fill.without_fill(long), args=([],))
    thread.start()
    assert entered.wait(30)
    assert fill.without_fill(lambda inputs: FLAG.fill_uninitialized_memory)([]) is False
    assert not FLAG.fill_uninitialized_memory
    child = os.fork()
    if not child:  # it has no thread that could end
        os._exit(0 if FLAG.fill_uninitialized_memory else 1)
    assert os.waitpid(child, 0)[1] == 0
    leave.set()
    thread.join()
    assert FLAG.fill_uninitialized_memory


CACHED = """
    import torch
    from dash_inductor.upstream import fill_uninitialized_memory as fill
    import torch._inductor.config, torch._inductor.compile_fx
    from torch._dynamo.utils import counters

    torch.use_deterministic_algorithms(True)
    found = []
    fill.set_filled = found.append
    x = torch.ones(4, 4, requires_grad=True)
    torch.compile(lambda x: (x @ x).relu())(x).sum().backward()
    hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    print(len(found), hits > 0)
"""


def test_graphs_from_a_cache(tmp_path: object) -> None:
    for hit in (False, True):
        output = run_python(CACHED, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).stdout
        assert output.split()[-2:] == ["4", str(hit)]
