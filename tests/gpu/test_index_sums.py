"""Sums by index on a GPU: values, bits under load, peak memory, and what is out of bounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.config import REWRITES, config
from dash_inductor.passes.ops.kernels.sums import launch
from dash_inductor.records.records import all_records, clear_sites

from ..support.distribution import ROOT
from ..support.index_sums import POOLS, PROGRAMS, Program, results, worst
from ..support.processes import run_python_unchecked
from ..support.repeats import differing_runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

EPS = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def hot_index(count: int, rows: int) -> Tensor:
    """Indices of which half are the same one."""
    generator = torch.Generator("cuda").manual_seed(0)
    index = torch.randint(0, rows, (count,), device="cuda", generator=generator)
    return torch.where(torch.rand(count, device="cuda", generator=generator) < 0.5, rows // 3, index)


def exact_results(program: Program, x: Tensor, index: Tensor) -> list[Tensor]:
    """In double precision, by PyTorch's kernels, of which some raise under deterministic algorithms."""
    torch.use_deterministic_algorithms(False)
    found = results(program, x.double(), index)
    torch.use_deterministic_algorithms(True)
    return found


@pytest.mark.parametrize("dtype", list(EPS), ids=str)
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_values(name: str, dtype: torch.dtype) -> None:
    rows = 200 if name == "embedding" else 1000
    x, index = torch.randn(rows, 40, device="cuda", dtype=torch.float64), hot_index(5000, rows)
    exact = exact_results(PROGRAMS[name], x.to(dtype), index)
    clear_sites()
    torch._dynamo.reset()
    found = results(torch.compile(PROGRAMS[name], dynamic=False), x.to(dtype), index)
    assert worst(found, exact) < EPS[dtype]
    assert {record.status for record in all_records() if record.rewrite == "index_sums"} == {"replaced"}
    if name == "elements":
        found = results(torch.compile(PROGRAMS[name], dynamic=True), x.to(dtype), index)
        assert worst(found, exact) < EPS[dtype]


@pytest.mark.parametrize(("count", "rows", "columns"), [(300000, 50000, 64), (100000, 3, 128), (1 << 20, 32, 8)])
def test_bits_under_load(count: int, rows: int, columns: int) -> None:
    """Sums with atomics differ, which is what the comparison has to see."""
    index = hot_index(count, rows)
    values = torch.randn(count, columns, device="cuda", dtype=torch.bfloat16)
    zeros = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(lambda zeros, values: zeros.index_add(0, index, values))

    def run() -> list[Tensor]:
        return [compiled(zeros, values)]

    assert differing_runs(run, 1000 if columns == 128 else 50, load=True, poisoned=True) == 0
    exact = zeros.double().index_add(0, index, values.double())
    assert (run()[0].double() - exact).norm() <= 3e-3 * exact.norm()
    torch.use_deterministic_algorithms(False)
    assert differing_runs(lambda: [zeros.float().index_add(0, index, values.float())], 50, load=True) > 0


@pytest.mark.parametrize("rows", [30, 300, 40000])
def test_few_indices(rows: int) -> None:
    """Which Inductor sorts itself, by keys of 8, 16 and 32 bits."""
    index = hot_index(100, rows)
    x = torch.randn(rows, 64, device="cuda")
    compiled = torch.compile(PROGRAMS["rows"], dynamic=False)
    assert worst(results(compiled, x, index), exact_results(PROGRAMS["rows"], x, index)) < 1e-6
    assert [record.status for record in all_records()] == ["replaced"]


def test_bits_depend_on_no_other_batch_element() -> None:
    """More programs of a launch change no bit of those that were there."""
    keys, order = hot_index(20000, 100).int().sort(stable=True)
    values = torch.randn(3, 20000, 48, device="cuda")
    together = launch.add_segments(None, values, keys, order, 100)
    for b in range(3):
        assert torch.equal(together[b : b + 1], launch.add_segments(None, values[b : b + 1], keys, order, 100))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_edges_of_a_graph(dtype: torch.dtype) -> None:
    """Sums read the rows that edges name, which nobody writes for each edge: values, bits, and memory."""
    count = 300000
    source, target = hot_index(count, 5000), torch.randint(0, 5000, (count,), device="cuda")
    x = torch.randn(5000, 128, device="cuda")

    def layer(x: Tensor, index: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, target, x[index])

    exact = exact_results(layer, x.to(dtype), source)
    torch._dynamo.reset()
    clear_sites()
    compiled = torch.compile(layer, dynamic=False)
    assert worst(results(compiled, x.to(dtype), source), exact) < EPS[dtype]
    assert [(record.rewrite, record.status) for record in all_records()] == [("index_sums", "replaced")] * 2
    assert differing_runs(lambda: results(compiled, x.to(dtype), source), 100, load=True, poisoned=True) == 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results(compiled, x.to(dtype), source)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < count * 128 * dtype.itemsize


def test_a_replay_has_the_same_bits() -> None:
    index = hot_index(50000, 100)
    x = torch.randn(100, 64, device="cuda")
    plain = results(torch.compile(PROGRAMS["rows"]), x, index)
    replayed = torch.compile(PROGRAMS["rows"], mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert all(map(torch.equal, plain, results(replayed, x, index)))


@pytest.mark.parametrize("name", list(POOLS))
def test_pooling_by_the_largest_element(name: str) -> None:
    x = torch.randn(2, 3, 8, 7, 9, device="cuda")

    def pool(x: Tensor, index: Tensor) -> Tensor:
        return POOLS[name](x)

    exact = exact_results(pool, x, x)
    torch._dynamo.reset()
    clear_sites()
    compiled = torch.compile(pool, dynamic=False)
    assert worst(results(compiled, x, x), exact) < 1e-6
    assert {(record.rewrite, record.status) for record in all_records()} == {("index_sums", "replaced")}
    assert differing_runs(lambda: results(compiled, x, x), 20, load=True) == 0


@pytest.mark.parametrize("padding", [None, 3], ids=str)
def test_bags_of_the_largest_rows(padding: int | None) -> None:
    """Empty bags, and bags of the padding alone, have no part in the gradient."""
    index = hot_index(5000, 300)
    index[100:110] = 3
    offsets = torch.tensor([0, 0, 100, 110, 110, *range(111, 5000, 50), 5000], device="cuda")

    def largest(x: Tensor, index: Tensor) -> Tensor:
        return F.embedding_bag(index, x, offsets, mode="max", padding_idx=padding)

    x = torch.randn(300, 40, device="cuda")
    exact = exact_results(largest, x, index)
    torch._dynamo.reset()
    clear_sites()
    compiled = torch.compile(largest, dynamic=False)
    assert worst(results(compiled, x, index), exact) < 1e-6
    assert {(record.rewrite, record.status) for record in all_records()} == {("index_sums", "replaced")}
    assert differing_runs(lambda: results(compiled, x, index), 50, load=True) == 0


@pytest.mark.parametrize(
    ("mode", "size", "padding"),
    [
        ("bilinear", (30, 31), "zeros"), ("nearest", (30, 31), "border"), ("bicubic", (30, 31), "border"),
        ("bicubic", (30, 31), "zeros"), ("bilinear", (9, 10, 11), "border"),
    ],
)  # fmt: skip
def test_grid_sample(mode: str, size: tuple[int, ...], padding: str) -> None:
    image = torch.randn(2, 16, *size, device="cuda")
    grid = torch.randn(2, *(n + 3 for n in size), len(size), device="cuda")

    def sample(image: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(image, grid, mode=mode, padding_mode=padding, align_corners=False)

    def gradients(function: Program, *tensors: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = function(*leaves)
        return list(torch.autograd.grad(out, leaves, torch.ones_like(out)))

    torch.use_deterministic_algorithms(False)
    exact = gradients(sample, image.double(), grid.double())
    torch.use_deterministic_algorithms(True)
    torch._dynamo.reset()
    clear_sites()
    compiled = torch.compile(sample, dynamic=False)
    for a, b in zip(gradients(compiled, image, grid), exact, strict=True):
        assert (a.double() - b).norm() <= 1e-4 * b.norm() + 1e-30
    assert {record.status for record in all_records()} == {"replaced"}
    assert differing_runs(lambda: gradients(compiled, image, grid), 50, load=True) == 0


def test_peak_memory() -> None:
    """No more than under PyTorch's deterministic kernels, but for keys, which the forward keeps for the backward."""
    index = torch.randint(0, 100000, (500000,), device="cuda")
    x = torch.randn(100000, 64, device="cuda")

    def peak() -> int:
        torch._dynamo.reset()
        compiled = torch.compile(PROGRAMS["rows"])
        results(compiled, x, index)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        results(compiled, x, index)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    with config.patch(rewrites=set(REWRITES) - {"grid_sample", "index_ranges", "index_sums"}):
        most = peak()
    assert peak() <= most + 4 * index.numel() + 512


OUTSIDE = """
    import torch
    torch.use_deterministic_algorithms(True)
    index = torch.arange(5000, device="cuda") % 100
    index[77] = {bad}
    zeros, values = torch.zeros(100, 8, device="cuda"), torch.ones(5000, 8, device="cuda")
    torch.compile(lambda: zeros.index_add(0, index, values))()
    torch.cuda.synchronize()
    print("unharmed")
"""


NAMED = """
    import torch
    torch.use_deterministic_algorithms(True)
    index = torch.arange(5000, device="cuda") % 100
    named = index.clone()
    named[77] = {bad}
    zeros, rows = torch.zeros(100, 32, device="cuda"), torch.ones(50, 32, device="cuda")
    torch.compile(lambda: zeros.index_add(0, index, rows[torch.where(named == index, index % 50, named)]))()
    torch.cuda.synchronize()
    print("unharmed")
"""


@pytest.mark.parametrize(("bad", "raises"), [("100", True), ("-101", True), ("3", False)])
@pytest.mark.parametrize("program", ["added", "named"])
def test_an_index_out_of_bounds_stops_the_device(program: str, bad: str, raises: bool) -> None:
    result = run_python_unchecked((OUTSIDE if program == "added" else NAMED).format(bad=bad), path=ROOT)
    assert ("device-side assert" in result.stderr) is raises, result.stderr
    assert ("unharmed" in result.stdout) is not raises


@pytest.mark.parametrize(("rows", "columns", "dtype"), [
    (4, 1024, torch.bfloat16), (32, 2880, torch.bfloat16), (64, 320, torch.bfloat16), (128, 2880, torch.bfloat16),
    (64, 12, torch.float16), (16, 100, torch.float32),
])  # fmt: skip
def test_few_rows(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Values, what is not finite or left out, and the same bits by the list of launches."""
    x, index = torch.randn(rows, columns, device="cuda", dtype=torch.float64), hot_index(70001, rows)
    exact = exact_results(PROGRAMS["rows"], x.to(dtype), index)
    clear_sites()
    torch._dynamo.reset()
    compiled = torch.compile(PROGRAMS["rows"], dynamic=False)
    found = results(compiled, x.to(dtype), index)
    assert worst(found, exact) < EPS[dtype]
    assert "products with a matrix of ones and zeros" in [record.detail for record in all_records()]
    for _ in range(20):
        assert all(map(torch.equal, found, results(compiled, x.to(dtype), index)))
    values = torch.randn(2, 70001, columns, device="cuda", dtype=dtype)
    keys = index.to(torch.uint8)
    plain = torch.ops.dash_inductor.few_sums(None, values, keys, rows)
    values[0, 7, 3] = float("inf")
    keys_out = torch.where(torch.arange(70001, device="cuda") == 9, rows, keys.int())
    values[:, 9] = float("nan")
    hot = torch.ops.dash_inductor.few_sums(plain, values, keys_out, rows)
    assert not hot.isnan().any()
    assert hot.isinf().sum() == 1
    assert hot[0, index[7], 3].isinf()
    zeroed = torch.where((values == float("inf")) | values.isnan(), 0, values).double()
    exact = plain.double() + torch.zeros_like(plain, dtype=torch.float64).index_add(1, index, zeroed)
    finite = hot.isfinite()
    assert (hot.double() - exact)[finite].norm() <= EPS[dtype] * exact.norm()
