"""Scatters by permutations and of few elements: what is rewritten, and values beside PyTorch's own scatters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.config import REWRITES, config
from dash_inductor.model.reasons import Reason
from dash_inductor.passes.ops import indices, permutations, small_scatter
from dash_inductor.passes.ops.operators.distinct import put_distinct
from dash_inductor.records.records import Record, all_records, clear_sites

from ...support.graphs import JointGraphs, capture
from ...support.scatters import PERMUTATIONS, PROGRAMS, step

pytestmark = pytest.mark.usefixtures("deterministic")

aten = torch.ops.aten
STORES = ("aten::index_put", "aten::scatter_add", "aten::scatter")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(indices, "DEVICES", ("cpu",))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def left(graphs: JointGraphs) -> int:
    return sum(graphs.count(name) for name in STORES)


def records() -> list[Record]:
    return [record for record in all_records() if isinstance(record, Record)]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(d, marks=[pytest.mark.full]) for d in (torch.bfloat16, torch.float64))]
)
def test_programs(name: str, dtype: torch.dtype) -> None:
    """Results are as those of PyTorch's scatters: exactly, or where several are added, up to a rounding; near fp64."""
    program, x = PROGRAMS[name], torch.randn(40, 64).to(dtype)
    exact = step(program, x.double())
    for dynamic in (False, True):
        with capture() as graphs:
            found = step(graphs.compile(program), x, dynamic=dynamic)
            assert left(graphs) == 0, graphs.texts
        expected = "permutations" if name in PERMUTATIONS else "small_scatter"
        assert expected in {record.rewrite for record in records()}
        assert {record.status for record in records()} == {"replaced"}
        assert all(record.facts["shape"] for record in records())
        for ours, true in zip(found, exact, strict=True):
            assert (ours - true).norm() <= 4 * max(torch.finfo(dtype).eps, 2**-23) * true.norm()


@pytest.mark.parametrize(
    "name",
    ["grouped", "labelled", *(pytest.param(n, marks=[pytest.mark.full]) for n in ("truncated", "ordered", "last"))],
)
def test_generated_code(name: str) -> None:
    """Inductor's kernels, for two lengths: the same as eager PyTorch, which adds one after the other."""
    compiled = torch.compile(PROGRAMS[name])
    for count in (40, 56):
        x = torch.randn(count, 64)
        for ours, theirs in zip(step(compiled, x, dynamic=True), step(PROGRAMS[name], x), strict=True):
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
    assert records()


def results(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """What a compiled function gives, whose scatters are all rewritten."""
    clear_sites()
    with capture() as graphs:
        found = graphs.compile(function)(*tensors)
    assert left(graphs) == 0, graphs.texts
    assert {record.status for record in records()} == {"replaced"}
    return found


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatters_of_all_kinds(dtype: torch.dtype) -> None:
    """Sums of one term are exact; several terms are added in order, in fp32; views that are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    base = (torch.randn(18, 5, 3, generator=generator) * 9).to(dtype)
    values = (torch.randn(3, 36, 5, generator=generator) * 9).to(dtype).permute(1, 2, 0)  # not contiguous
    order = torch.argsort(torch.randn(36, generator=generator))

    def twice(base: Tensor, values: Tensor, order: Tensor) -> list[Tensor]:
        keys = torch.argsort(order).to(torch.int32 if dtype == torch.float32 else torch.int64)
        zeros = torch.zeros_like(base)
        return [
            zeros.index_put((keys // 2,), values, accumulate=True),
            base.index_put((keys % 18,), values, accumulate=True),
            base.index_add(0, keys // 2, values),
            aten.index_put(base.transpose(0, 1).contiguous(), [None, keys // 2], values.transpose(0, 1), True),
            torch.zeros(72, 5, 3, dtype=values.dtype).index_put((keys + 36,), values, accumulate=True),
            torch.zeros(36, 1, dtype=values.dtype).index_put((keys[:9],), values[:9, :1, 0]),
            torch.zeros(36, dtype=values.dtype).index_put((keys.view(6, 6),), values[0, 0, 0]),
            base.new_zeros(36, 5, 3).scatter(0, keys.view(-1, 1, 1).expand(-1, 5, 3), values),
        ]

    found, expected = results(twice, base, values, order), twice(base, values, order)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        if number < 4 and dtype.is_floating_point:
            wide = torch.finfo(dtype).eps * 4 * theirs.abs().max()
            assert (ours.double() - theirs.double()).abs().max() <= wide
        else:
            assert torch.equal(ours, theirs), number


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_small_scatters_of_all_kinds(dtype: torch.dtype) -> None:
    """Equal indices of a line, negative ones, one line, no line, no index; scalars; values longer than the indices."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 9, 4, generator=generator).to(dtype)
    g = torch.randn(4, 9, 8, generator=generator).to(dtype).permute(2, 1, 0)  # not contiguous, longer than x
    index = torch.randint(0, 9, (7, 3, 4), generator=generator)

    def scatters(x: Tensor, g: Tensor, index: Tensor) -> list[Tensor]:
        zeros, lines = torch.zeros_like(x), torch.arange(7)
        return [
            zeros.scatter_add(1, index, g),
            zeros.scatter_add(-1, index[:, :1].clamp(max=3).expand(-1, 9, -1), g),
            zeros.index_put((lines, index[:, 0, 0] - 9), g[:7, 0], accumulate=True),  # all are negative
            zeros.index_put((lines[:, None], index[:, :, 0]), g[:7, :3], accumulate=True),
            aten.index_put(zeros, [None, index[0, :, 0].to(torch.int32)], g[:7, :3], True),
            aten.index_put(zeros, [None, index[0, 0, 0]], g[0, 0, 0]),
            torch.full_like(x, 2.0).scatter(1, index, 3.0),
            torch.zeros(0, 9, dtype=x.dtype).scatter_add(1, index[:0, :, 0], g[:0, :3, 0]),
            zeros.scatter(1, x.argmax(1, keepdim=True), g),
        ]

    for ours, theirs in zip(results(scatters, x, g, index), scatters(x, g, index), strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        if theirs.numel():
            assert (ours - theirs).abs().max() <= 4 * torch.finfo(dtype).eps * theirs.abs().max()


@pytest.mark.parametrize("number", [9, -1])
def test_an_index_out_of_bounds_is_an_error(number: int) -> None:
    """Also in Inductor's code, where a gather of positions asks."""

    def scatter(g: Tensor, index: Tensor) -> Tensor:
        return torch.zeros(5, 9).scatter_add(1, index, g)

    compiled = torch.compile(scatter)
    g, index = torch.ones(5, 1), torch.full((5, 1), 4)
    assert torch.equal(compiled(g, index), scatter(g, index))
    assert [record.rewrite for record in records()] == ["small_scatter"]
    with pytest.raises((RuntimeError, IndexError)):
        compiled(g, index.fill_(number))


def unchanged(function: Callable[..., Any], *tensors: Tensor, **settings: Any) -> None:
    clear_sites()
    with capture(**settings) as graphs:
        graphs.compile(function)(*tensors)
    assert not records()
    assert left(graphs) == 1


def test_what_stays() -> None:
    """What is not proved, and what would take longer."""
    x, index = torch.randn(40, 8), torch.randint(0, 40, (40,))
    order = torch.argsort(index)
    unchanged(lambda x, i: torch.zeros_like(x).index_put((i,), x, accumulate=True), x, index)
    unchanged(
        lambda x, i: torch.zeros_like(x).index_put((i,), x, accumulate=True), x, order
    )  # the graph does not see it
    unchanged(
        lambda x, i: x.index_put((i.argsort()[:30],), x[:30]), x, index
    )  # a part of a tensor, in place most often
    unchanged(lambda x, i: x.index_put((i[:1],), x[:1]), x, index)
    unchanged(lambda x, i: torch.zeros_like(x).scatter(0, i[:2].expand(2, 2).t() % 8, x), x, index)  # equal ones
    unchanged(lambda x, i: torch.zeros_like(x).index_put((i.argsort() // 2,), x), x, index)  # which of two?
    unchanged(lambda x, i: torch.zeros_like(x)[:20].index_put((i.argsort() % 21 % 20,), x, accumulate=True), x, index)
    for rewrites in (set(REWRITES) - {"small_scatter"}, "attention"):
        unchanged(lambda x, i: torch.zeros_like(x).scatter_add(1, i[:, None] % 8, x), x, index, rewrites=rewrites)
    unchanged(
        lambda x, i: torch.zeros_like(x).index_put((i.argsort(),), x),
        x,
        index,
        rewrites=set(REWRITES) - {"permutations"},
    )
    assert small_scatter.pays(8, None)
    assert small_scatter.pays(16, 1 << 25)
    assert not small_scatter.pays(16, (1 << 25) + 1)
    assert not small_scatter.pays(9, None)
    assert small_scatter.pays(4, None, written=True)
    assert not small_scatter.pays(5, None, written=True)
    assert not small_scatter.pays(17, 100)


def test_the_operator_of_torchtitan() -> None:
    """An operator of its own, which graphs show whole, and whose backward is a gather."""

    @torch.library.custom_op("torchtitan::deterministic_scatter_add", mutates_args=())
    def scatter_add(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
        return out.scatter_add(0, index, src)

    scatter_add.register_fake(lambda out, index, src: torch.empty_like(out))

    def combine(x: Tensor, y: Tensor) -> Tensor:
        order = torch.argsort(x[:, :2].reshape(-1), stable=True)
        found: Tensor = scatter_add(x, (order // 2).reshape(-1, 1).expand(-1, 8), y)
        return found

    x, y = torch.randn(40, 8), torch.randn(80, 8)
    with torch.no_grad(), capture() as graphs:
        found = graphs.compile(combine)(x, y)
    torch.testing.assert_close(found, combine(x, y))
    assert [record.detail for record in records()] == ["each index occurs 2 times: a gather"]
    assert graphs.count("torchtitan::deterministic_scatter_add") == 0


def test_the_cpu_keeps_its_scatters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indices, "DEVICES", ("cuda",))
    unchanged(lambda x: torch.zeros_like(x).index_put((x[:, 0].argsort(),), x), torch.randn(40, 8))


def test_an_error_keeps_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(order: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(permutations, "inverse", fail)
    x = torch.randn(40, 8)
    with capture() as graphs:
        found = graphs.compile(lambda x: torch.zeros_like(x).index_put((x[:, 0].argsort(),), x))(x)
    (record,) = records()
    assert (record.status, record.reason) == ("fallback", Reason.INTERNAL_ERROR)
    assert record.detail.startswith("ZeroDivisionError: on purpose at ")
    assert torch.equal(found, torch.zeros_like(x).index_put((x[:, 0].argsort(),), x))


def test_operator() -> None:
    values = torch.randn(2, 3)
    order = torch.tensor([[4, 0, 2], [1, 3, 0]])
    torch.library.opcheck(put_distinct, (order, values, 5, 1, 7), test_utils=("test_schema", "test_faketensor"))
    found = put_distinct(order, values, 5, 1, 7)
    assert torch.equal(found, torch.full((2, 5), 7.0).scatter(1, order, values))


MODELS = {
    "Mixtral": {},
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 8},
    "DeepseekV3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16},
}
"""Models with experts, and settings beside those of all."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "Mixtral" else [pytest.mark.full]) for name in MODELS]
)
def test_models_with_experts(name: str) -> None:
    """No scatter by indices is left, and gradients are those of eager PyTorch."""
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2, "use_cache": False}
    more = {"first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16} if name == "DeepseekV3" else {}
    made = getattr(transformers, f"{name}Config")(**common, **heads, **MODELS[name], **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(made)
    model.set_experts_implementation("grouped_mm")
    ids = torch.arange(48).view(2, 24)
    with capture() as graphs, config.patch(strict=False):
        loss = graphs.compile(model)(input_ids=ids, labels=ids).loss
        loss.backward()
    assert sum(graphs.count_before(name) for name in STORES) >= 4
    assert left(graphs) == 0, [line for text in graphs.texts for line in text.splitlines() if "index_put" in line]
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    for gradient, p in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad, atol=1e-5, rtol=1e-4)
