"""Products of matrices are padded where that pays: the decision, the graphs, and values beside unpadded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from dash_inductor.config import REWRITES, config
from dash_inductor.passes.ops import pad_mm
from dash_inductor.passes.ops.pad_mm import Matrix, decide
from dash_inductor.records.records import Record, all_records, clear_sites
from dash_inductor.upstream import compat

pytestmark = pytest.mark.usefixtures("deterministic")


def by_row(rows: int, columns: int) -> Matrix:
    return Matrix(rows, columns, True, columns)


def by_column(rows: int, columns: int) -> Matrix:
    return Matrix(rows, columns, False, rows)


TOKENS, WIDTH, VOCABULARY = 8192, 768, 50257
DECISIONS = [
    (by_row(TOKENS, WIDTH), by_column(WIDTH, VOCABULARY), {"n": 50304}),  # logits
    (by_row(TOKENS, VOCABULARY), by_row(VOCABULARY, WIDTH), {"k": 50304}),  # the gradient of the hidden state
    (by_column(VOCABULARY, TOKENS), by_row(TOKENS, WIDTH), {"m": 50304}),  # the gradient of the weight
    (by_row(TOKENS, WIDTH), by_column(WIDTH, 50304), {}),  # aligned
    (by_row(TOKENS, WIDTH), by_column(WIDTH, 50264), {}),  # a multiple of 8 is enough
    (by_row(TOKENS, 50257), by_row(50257, 64), {}),  # copying the larger operand takes longer than the product
    (by_row(32, WIDTH), by_column(WIDTH, VOCABULARY), {}),  # few logits
    (by_row(128, 64), by_column(64, 63), {}),  # small
    (by_row(TOKENS, 770), by_column(770, 3072), {"k": 776}),  # both operands are copied
    (Matrix(TOKENS, 770, True, 776), by_column(770, 3073), {"k": 776, "n": 3136}),  # aligned rows of an odd width
    (Matrix(TOKENS, 770, True, 776), by_row(770, 3072), {}),
    (by_column(8190, WIDTH), by_column(WIDTH, 4096), {"m": 8192}),
    (Matrix(None, WIDTH, True, WIDTH), by_column(WIDTH, VOCABULARY), {"n": 50304}),  # dynamic lengths
    (Matrix(VOCABULARY, None, False, VOCABULARY), Matrix(None, WIDTH, True, WIDTH), {"m": 50304}),
    (Matrix(None, None, False, None), Matrix(None, WIDTH, True, WIDTH), {}),
]


@pytest.mark.parametrize(("left", "right", "expected"), DECISIONS)
def test_decision(left: Matrix, right: Matrix, expected: dict[str, int]) -> None:
    assert decide(left, right, 2) == expected


Shape = tuple[int, int, int]
SOME = 1.2
"""Products that the log names together gain at least this."""
MEASURED: dict[str, dict[Shape, float]] = {
    "logits": {(64, 768, 50257): 1.6, **{(m, 768, 50257): SOME for m in (192, 256, 1024, 8192)}},
    "dgrad": {
        (128, 50257, 768): 0.80,
        (8192, 50257, 192): 1.56,
        **{(m, 50257, 768): SOME for m in (192, 256, 512, 8192)},
    },
    "wgrad": {(50257, 8192, 128): 0.89, (50257, 8192, 160): 2.1, **{(50257, k, 768): SOME for k in (128, 1024, 8192)}},
    "mlp": {
        **{(8192, width, width): SOME for width in (257, 385, 513, 1025, 3073)},
        **{(m, 1025, 1025): 1.3 for m in (256, 512, 1024)},
    },
}
"""Time of a product [m, k] @ [k, n] as it is, divided by its time with padding: `benchmarks.pad_mm` at 8557c3b on an
H100 with torch 2.11, bf16; 160 columns at 92a82157 on an H200, which loses at none of them (log of 2026-11-26)."""
LAYOUTS = {"logits": (by_row, by_column), "dgrad": (by_row, by_row), "wgrad": (by_column, by_row)}
LAYOUTS["mlp"] = LAYOUTS["logits"]


@pytest.mark.parametrize("kind", MEASURED)
def test_what_gains_is_padded_and_what_loses_is_not(kind: str) -> None:
    left, right = LAYOUTS[kind]
    for (m, k, n), gain in MEASURED[kind].items():
        assert bool(decide(left(m, k), right(k, n), 2)) is (gain > 1), (m, k, n)


def test_the_benchmark_has_what_was_measured() -> None:
    from benchmarks.pad_mm import PRODUCTS

    shapes = {(product.name, (product.m, product.k, product.n)) for product in PRODUCTS}
    assert {(kind, shape) for kind, gains in MEASURED.items() for shape in gains} <= shapes


def test_the_border_is_where_copies_take_as_long_as_they_save() -> None:
    """2 * n operations for each element of the left operand, which has 2 bytes."""
    n = pad_mm.OPERATIONS_PER_BYTE
    assert decide(by_row(1 << 15, 1025), by_row(1025, n), 2, 1) == {}  # the right operand is copied too
    assert decide(by_row(1 << 15, 1025), by_row(1025, n + 64), 2, 1) == {"k": 1088}
    rows = pad_mm.OF_AN_ODD_RESULT
    assert decide(by_row(rows - 1, WIDTH), by_column(WIDTH, VOCABULARY), 2, 1) == {}
    assert decide(by_row(rows, WIDTH), by_column(WIDTH, VOCABULARY), 2, 1) == {"n": 50304}
    assert decide(by_row(rows, 770), by_column(770, VOCABULARY), 2, 1) == {}  # operands have odd rows, too


def test_words_of_four_bytes_are_aligned_sooner() -> None:
    assert decide(by_row(TOKENS, WIDTH), by_column(WIDTH, 3076), 4) == {}
    assert decide(by_row(TOKENS, WIDTH), by_column(WIDTH, 3078), 4) == {"n": 3136}


@pytest.fixture
def small_ones_pay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pad_mm, "LEAST_OPERATIONS", 0)
    monkeypatch.setattr(pad_mm, "OPERATIONS_PER_BYTE", 0)
    monkeypatch.setattr(pad_mm, "OF_AN_ODD_RESULT", 0)
    monkeypatch.setattr(pad_mm, "DEVICES", ("cpu",))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Language(nn.Module):
    """A vocabulary of odd size, whose weight embeds tokens and makes logits."""

    def __init__(self, tied: bool, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(35, 16)
        self.head = nn.Linear(16, 35, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def products(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(x, y)


def added(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
    return torch.baddbmm(c, x, y, alpha=0.5, beta=2.0)


def gradients(
    function: Callable[..., Tensor], tensors: list[Tensor], parameters: list[Tensor], on_another_thread: bool = False
) -> list[Tensor]:
    out = function(*tensors)
    leaves = [t for t in (*tensors, *parameters) if t.requires_grad]
    loss = out.float().square().mean()
    if not on_another_thread:
        return [out.detach(), *torch.autograd.grad(loss, leaves)]
    with ThreadPoolExecutor(1) as pool:
        return [out.detach(), *pool.submit(torch.autograd.grad, loss, leaves).result()]


def both(
    function: Callable[..., Tensor],
    tensors: list[Tensor],
    parameters: list[Tensor],
    on_another_thread: bool = False,
    **how: bool,
) -> list[Record]:
    """The records of a padded program, whose results are those of an unpadded one but for rounding."""
    clear_sites()
    with config.patch(rewrites=set(REWRITES) - {"pad_mm"}):
        torch._dynamo.reset()
        plain = gradients(torch.compile(function, **how), tensors, parameters)
        assert not all_records()
    torch._dynamo.reset()
    compiled = torch.compile(function, **how)
    padded = gradients(compiled, tensors, parameters, on_another_thread)
    again = gradients(compiled, tensors, parameters)
    for a, b, c in zip(plain, padded, again, strict=True):
        assert a.shape == b.shape
        assert a.stride() == b.stride()
        assert torch.equal(b, c)
        assert (b.double() - a.double()).norm() <= 1e-2 * a.double().norm()
    found = all_records()
    assert all(isinstance(record, Record) and record.rewrite == "pad_mm" for record in found)
    return [record for record in found if isinstance(record, Record)]


@pytest.mark.usefixtures("small_ones_pay")
@pytest.mark.parametrize(
    ("tied", "bias", "dynamic", "dtype", "budget", "on_another_thread"),
    [
        (False, False, True, torch.bfloat16, 1.0, True),
        (True, True, False, torch.float16, 0.5, False),
        pytest.param(True, False, True, torch.bfloat16, 0.5, True, marks=pytest.mark.full),
        pytest.param(False, True, False, torch.float16, 1.0, False, marks=pytest.mark.full),
    ],
)
def test_language_model(
    tied: bool, bias: bool, dynamic: bool, dtype: torch.dtype, budget: float, on_another_thread: bool
) -> None:
    """Also with the partitioner's memory budget, which computes much again, and a backward on a worker thread."""
    torch.manual_seed(0)
    model = Language(tied, bias).to(dtype)
    tokens = torch.randint(0, 35, (2, 24))
    with functorch_config.patch(activation_memory_budget=budget):
        found = both(model, [tokens], list(model.parameters()), on_another_thread, dynamic=dynamic)
    words = {record.detail for record in found}
    assert words == {"padded: n from 35 to 40", "padded: k from 35 to 40", "padded: m from 35 to 40"}
    assert {record.status for record in found} == {"replaced"}
    assert all(record.facts["rule"] for record in found)


@pytest.mark.usefixtures("small_ones_pay")
@pytest.mark.parametrize("swapped", [False, True])
def test_batches(swapped: bool) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(3, 13, 11).bfloat16().requires_grad_() for _ in range(2))
    c = torch.randn(1, 13).bfloat16().requires_grad_()

    def function(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
        return products(x, y.mT).sum(0) + added(x, y.mT, c).sum(0) if not swapped else products(x.mT, y)

    tensors = [x, y, c] if not swapped else [x, y, c.detach()]
    assert len(both(function, tensors, [])) >= 3


@pytest.mark.usefixtures("small_ones_pay")
def test_a_result_of_the_program_has_its_own_layout() -> None:
    x, y = torch.randn(6, 16).bfloat16().requires_grad_(), torch.randn(16, 7).bfloat16().requires_grad_()

    def function(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    found = torch.compile(function)(x, y)
    assert found.is_contiguous()
    assert found.view(-1).shape == (42,)
    both(function, [x, y], [])


@pytest.mark.usefixtures("small_ones_pay")
def test_views_of_products_are_results() -> None:
    x, y = torch.randn(6, 16).bfloat16(), torch.randn(16, 7).bfloat16()

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        product = x @ y
        flat = product.view(-1).tanh()  # of elements that do not follow one another if the product is padded
        return [
            product.t(),
            product.view(2, 3, 7),
            product[1:4],
            product.tanh(),
            product,
            product,
            flat,
            product.view(-1),
        ]

    with config.patch(rewrites=set(REWRITES) - {"pad_mm"}):
        expected = torch.compile(function)(x, y)
    torch._dynamo.reset()
    found = torch.compile(function)(x, y)
    for a, b in zip(expected, found, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)
    assert len(all_records()) == 1


@contextmanager
def graphs_after() -> Iterator[list[list[Node]]]:
    """The nodes of the graphs that are compiled in the block, when all rewrites have been applied."""
    seen: list[list[Node]] = []

    class Look:
        def apply(self, graph: Graph) -> int:
            seen.append([*graph.nodes])
            return 0

    compat.load_inductor()
    compat.joint_passes().append(look := Look())
    try:
        yield seen
    finally:
        compat.joint_passes().remove(look)


def readers_of(target: Any, nodes: list[Node]) -> list[set[str]]:
    """The operators that read the results of this one, of each node, views of them included."""

    def readers(node: Node) -> set[str]:
        found = set()
        for user in node.users:
            name = user.target._schema.name if hasattr(user.target, "_schema") else str(user.target)
            found |= readers(user) if name in ("aten::permute", "aten::slice") else {name.removeprefix("aten::")}
        return found

    return [readers(node) for node in nodes if node.target is target]


@pytest.mark.usefixtures("small_ones_pay")
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_padded(dynamic: bool) -> None:
    """Products share a padded weight.  The gradient of logits is not copied but computed with padded columns, and the
    gradient of the bias adds those that are not.
    """
    aten = torch.ops.aten
    model = Language(tied=True, bias=True).bfloat16()
    with graphs_after() as seen:
        torch.compile(model, dynamic=dynamic)(torch.zeros(2, 8, dtype=torch.int64)).backward()
    assert readers_of(aten.constant_pad_nd.default, seen[0]) == [{"addmm"}, {"addmm", "mm"}]  # the bias, the weight
    copy = [node for node in seen[0] if node.target is aten.constant_pad_nd.default][1]
    assert copy.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE  # which is not kept for the backward
    assert [found for found in readers_of(aten.where.self, seen[0]) if "mm" in found] == [{"mm", "sum"}]


@pytest.mark.full
@pytest.mark.usefixtures("small_ones_pay")
def test_a_weight_that_is_rewritten_before_its_backward_is_pytorchs_error() -> None:
    model = Language(tied=False).bfloat16()
    loss = torch.compile(model)(torch.zeros(2, 8, dtype=torch.int64))
    assert all_records()
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("small_ones_pay")
def test_activations_of_an_odd_width() -> None:
    """Each is computed with padded columns where the product in front of it is padded, in forward and backward."""
    aten = torch.ops.aten
    torch.manual_seed(0)
    first, second = nn.Linear(16, 27, bias=False).bfloat16(), nn.Linear(27, 16).bfloat16()

    def function(x: Tensor) -> Tensor:
        hidden: Tensor = F.gelu(first(x)) * torch.arange(27).to(x.dtype).div(27)
        return second(hidden + 1) + hidden.sum()

    x = torch.randn(24, 16).bfloat16().requires_grad_()
    with graphs_after() as seen:
        both(function, [x], [*first.parameters(), *second.parameters()])
    wide = readers_of(aten.where.self, seen[-1])
    assert len([found for found in wide if "mm" in found or "addmm" in found]) == 2
    padded = [node.args[0] for node in seen[-1] if node.target is aten.constant_pad_nd.default]
    assert {node.op for node in padded} == {"placeholder"}, "only weights are copied"


@pytest.mark.usefixtures("small_ones_pay")
def test_logits_that_are_capped_scaled_and_cut() -> None:
    """Their gradient is computed with padded columns through views, cut rows, and tensors that are only read."""
    aten = torch.ops.aten
    torch.manual_seed(0)
    model, tokens = Language(tied=False, bias=True).bfloat16(), torch.randint(0, 35, (2, 24))
    scale = torch.rand(2, 24, 35).bfloat16().requires_grad_()

    def function(tokens: Tensor, scale: Tensor) -> Tensor:
        logits = model.head(torch.tanh(model.embed(tokens)))
        flat = (5 * torch.tanh(logits / 5) * scale).float()[:, :-1].reshape(-1, 35)
        return F.cross_entropy(flat, tokens[:, 1:].flatten()) + 1e-2 * flat.logsumexp(-1).square().mean()

    with graphs_after() as seen:
        both(function, [tokens, scale], [*model.parameters()])
    nodes = seen[-1]
    assert [found for found in readers_of(aten.where.self, nodes) if "mm" in found] == [{"mm", "sum"}]
    copied = [node.args[0] for node in nodes if node.target is aten.constant_pad_nd.default and _feeds_product(node)]
    assert {node.op for node in copied if isinstance(node, Node)} == {"placeholder"}, "only weights are copied"


def _feeds_product(node: Node) -> bool:
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.permute.default}
    return any(user.target in products for user in node.users)


@pytest.mark.usefixtures("small_ones_pay")
def test_numbers_behind_the_columns_are_zero_whatever_they_come_from() -> None:
    """Infinity and NaN among what is computed in padded columns, where the product has zeros."""
    torch.manual_seed(0)
    x, y, z = (torch.rand(*size).bfloat16().requires_grad_() for size in ((24, 16), (16, 27), (27, 16)))

    def function(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        hidden = x @ y
        return (hidden.log() / hidden) @ z

    both(function, [x, y, z], [])


@pytest.mark.usefixtures("small_ones_pay")
@pytest.mark.parametrize(
    "rewrites", [set(REWRITES) - {"pad_mm"}, "attention", {"index_sums"}], ids=["others", "attention", "sums"]
)
def test_settings(rewrites: set[str] | str) -> None:
    with config.patch(rewrites=rewrites):
        torch.compile(lambda x, y: x @ y)(torch.ones(6, 16).bfloat16(), torch.ones(16, 7).bfloat16())
    assert not all_records()


def test_nothing_is_padded_on_the_cpu() -> None:
    torch.compile(lambda x, y: x @ y)(torch.ones(600, 1025).bfloat16(), torch.ones(1025, 1025).bfloat16())
    assert not all_records()
