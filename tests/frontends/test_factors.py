"""Factors of scores that are no constants: query or key is multiplied by them, with their gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import dash_inductor
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import sites

from ..support.by_hand import HEADS, QKV, causal
from ..support.flex import Case, Sizes, assert_exact, trained, training
from ..support.flex import causal as causal_mod
from ..support.graphs import FORWARD, capture, step, tensors
from .factor_programs import Program, outcome, sample

pytestmark = pytest.mark.usefixtures("deterministic")

PROGRAMS = 36
"""Programs of a seed; one seed is run always, the others when all tests are run."""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3))])
def test_programs_are_replaced_and_exact(seed: int) -> None:
    """Run all by ``python -m tests.frontends.factor_programs``."""
    for program in sample(PROGRAMS, seed):
        record, wrong = outcome(program)
        assert not wrong, f"{program}: {wrong}"
        assert record.status == "replaced", f"{program}: {record.detail}"
        side = "key" if "key" in program.depends else "query"
        assert f"{side} is multiplied by the factor of the scores" in record.detail


def test_a_factor_that_is_not_learned_has_no_gradient() -> None:
    record, wrong = outcome(Program("by hand", "head", "times", "causal", "float32", learned=False))
    assert (record.status, wrong) == ("replaced", "")


# ---- FlexAttention: several factors, and tensors that are also something else

SAME = Sizes(kv_heads=4)
HEAD, QUERY, KEY, DISTANCE = (
    torch.randn(shape, generator=torch.Generator().manual_seed(number))
    for number, shape in enumerate([(4,), (4, 40), (40,), (4, 80)])
)

SEVERAL: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "of both sides": (lambda s, b, h, q, k: s * KEY[k] * HEAD[h], (HEAD, KEY)),
    "three": (lambda s, b, h, q, k: s / (HEAD[h].abs() + 1) * KEY[k] * QUERY[h, q], (HEAD, KEY, QUERY)),
    "a square": (lambda s, b, h, q, k: s * HEAD[h] * HEAD[h], (HEAD,)),
    "one product": (lambda s, b, h, q, k: s * (HEAD[h] * QUERY[h, q]), (HEAD, QUERY)),
    "beside a bias": (lambda s, b, h, q, k: s * HEAD[h] + DISTANCE[h, q - k + 40], (HEAD, DISTANCE)),
    "of positions": (lambda s, b, h, q, k: s * (torch.log((q + 1) // 8 + 1.0) * HEAD[0] + 1), (HEAD,)),
    "hidden": (lambda s, b, h, q, k: torch.where(q - k < 9, KEY[k] * s * 0.5 + h, -torch.inf), (KEY,)),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_several(name: str) -> None:
    mod, wanted = SEVERAL[name]
    case = Case(mod, causal_mod, Sizes(), wanted)
    record, results = trained(case)
    assert record.status == "replaced", record.detail
    assert_exact(results, case)


def test_factors_of_head_and_key_where_heads_share_no_keys() -> None:
    case = Case(lambda s, b, h, q, k: s * QUERY[h, k], causal_mod, SAME, (QUERY,))
    record, results = trained(case)
    assert record.status == "replaced", record.detail
    assert_exact(results, case)


def test_a_tensor_that_is_also_added_is_not_replaced() -> None:
    case = Case(lambda s, b, h, q, k: s * HEAD[h] + HEAD[h] * (q - k), causal_mod, Sizes(), (HEAD,))
    record, _ = trained(case)
    assert record.reason == Reason.FLEX_ATTENTION
    assert "is that of a factor and of something else" in record.detail


# ---- numbers


def temperature(q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Tensor:
    return (q @ k.mT * heads[:, None, None] + causal(q)).softmax(-1) @ v


@pytest.mark.parametrize("number", [0.0, -1.5, math.inf, -math.inf, math.nan])
def test_special_numbers(number: float) -> None:
    """NaN has the same places in results and gradients as without dash_inductor; everything else is the same."""
    inputs = tensors(*QKV, (HEADS,))
    with torch.no_grad():
        inputs[3][1] = number
    with capture() as graphs:
        ours = step(graphs.compile(temperature), inputs)
    assert sites()[-1].status == "replaced"
    with dash_inductor.disabled(), capture() as plain:
        theirs = step(plain.compile(temperature), inputs)
    for found, wanted in itertools.zip_longest(ours, theirs):
        assert torch.allclose(found, wanted, atol=1e-4, equal_nan=True)


def assigned(p: Tensor, place: object) -> Tensor:
    found = torch.ones(p.shape)
    found[place] = -math.inf  # type: ignore[index]
    return found


INFINITE: dict[str, Callable[[Tensor], Tensor]] = {
    "chosen": lambda p: torch.where(p < 3, math.inf, 1.0),
    "chosen beside data": lambda p: torch.where(p < 3, p * 0.5, math.nan) * 2 + 1,
    "filled": lambda p: torch.ones_like(p, dtype=torch.float32).masked_fill(p == 2, -math.inf),
    "a quotient": lambda p: 2.0 / p,
    "a logarithm": lambda p: torch.log(p.float()),
    "a logarithm of base 2": lambda p: torch.log2(p.float()),
    "a negative power": lambda p: p.float() ** -1.5,
    "a root": lambda p: p.float().rsqrt(),
}  # fmt: skip
WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "assigned to a slice": lambda p: assigned(p, slice(3, 5)),
    "assigned to a place": lambda p: assigned(p, 3),
    "assigned where": lambda p: assigned(p, p > 20),
    "padded": lambda p: F.pad((p[:-4] * 0.5), (0, 4), value=math.inf) + 0 * p,
    "turned around": lambda p: torch.where(p < 3, math.inf, 1.0).flip(0),
}
"""Those that are written for all positions at once."""
FINITE: dict[str, Callable[[Tensor], Tensor]] = {
    "bounded": lambda p: torch.where(p < 3, math.inf, 1.0).clamp(max=2.0),
    "a power of positions": lambda p: p.float() ** 0.5,
    "a power": lambda p: torch.where(p < 3, -math.inf, 1.0).exp(),
    "a quotient": lambda p: 2.0 / (p + 1),
    "a logarithm": lambda p: torch.log(torch.floor((p + 1.0) / 8) + 1) * 0.1 + 1,  # as Llama 4
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize(
    ("frontend", "name"),
    [
        *((frontend, f"infinite {name}") for frontend in ("flex", "by hand") for name in INFINITE),
        *((frontend, f"finite {name}") for frontend in ("flex", "by hand") for name in FINITE),
        *(("by hand", f"infinite {name}") for name in WRITTEN),
    ],
)
def test_factors_that_the_graph_makes_infinite_are_not_replaced(
    name: str, frontend: str, side: str, dynamic: bool
) -> None:
    kind, _, form = name.partition(" ")
    factor = (INFINITE | WRITTEN if kind == "infinite" else FINITE)[form]

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = factor(torch.arange(q.shape[2]))
        return (q @ k.mT * (found[:, None] if side == "query" else found)).softmax(-1) @ v

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * factor(i if side == "query" else j))

    inputs = [x.abs().detach().requires_grad_() for x in tensors(*[(2, HEADS, 24, 16)] * 3)]
    results = list[Tensor]()
    with training() as graphs:
        if frontend == "by hand":
            results = step(graphs.compile(by_hand, dynamic=dynamic), inputs)
        else:
            with torch.no_grad():
                graphs.compile(flex, dynamic=dynamic)(*inputs)
    (record,) = sites()
    if kind == "finite":
        assert record.status == "replaced", record.detail
        return
    assert (record.status, record.reason) == ("fallback", Reason.UNSUPPORTED_OP)
    assert "infinite or NaN" in record.detail
    with dash_inductor.disabled(), capture() as plain:
        theirs = step(plain.compile(by_hand), inputs) if results else []
    for found, wanted in zip(results, theirs, strict=True):
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
        assert torch.equal(found.isnan(), wanted.isnan())


def test_float16_is_not_replaced() -> None:
    """Query times a factor may be too large for it where scores are not."""
    inputs = tensors(*QKV, (HEADS,), dtype=torch.float16)
    with capture() as graphs:
        step(graphs.compile(temperature), inputs)
    (record,) = sites()
    assert record.reason == Reason.DTYPE
    assert "float16" in record.detail
    assert graphs.count(FORWARD) == 0


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 4, 1, 1), (1, 4, 128, 1), (1, 4, 1, 128)], ids=str)
def test_gradients_of_factors_in_bfloat16(shape: tuple[int, ...]) -> None:
    """Their root mean square error is at most that of the program that is not compiled, also where terms cancel."""

    def program(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
        return (q @ k.mT * 0.125 * factor).softmax(-1) @ v

    squares = [0.0, 0.0]
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(size, generator=generator) for size in (*[(1, 4, 128, 64)] * 3, shape)]
        inputs = [x.bfloat16().requires_grad_() for x in inputs]
        with capture() as graphs:
            ours = step(graphs.compile(program), inputs)[-1]
        assert sites()[-1].status == "replaced"
        true = step(program, [x.detach().double().requires_grad_() for x in inputs])[-1]
        for number, found in enumerate((ours, step(program, inputs)[-1])):
            squares[number] += float((found - true).square().mean())
    assert squares[0] <= squares[1]


def test_dynamic_lengths() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, heads: Tensor, queries: Tensor) -> Tensor:
        return (q @ k.mT * (heads[:, None, None] * queries) + causal(q)).softmax(-1) @ v

    with capture() as graphs:
        run = graphs.compile(program, dynamic=True)
        for length in (24, 40):
            inputs = tensors(*(((2, HEADS, length, 16),) * 3), (HEADS,), (length, 1))
            ours = step(run, inputs)
            true = step(program, [x.detach().double().requires_grad_() for x in inputs])
            for found, wanted in itertools.zip_longest(ours, true):
                assert torch.allclose(found.double(), wanted, atol=1e-4)
    assert {record.status for record in sites()} == {"replaced"}, [record.detail for record in sites()]


def test_gradients_are_the_same_in_every_run() -> None:
    inputs = tensors(*QKV, (HEADS,), dtype=torch.bfloat16)
    with capture() as graphs:
        run = graphs.compile(temperature)
        first, second = step(run, inputs), step(run, inputs)
    assert all(map(torch.equal, first, second))


def test_an_inference_graph() -> None:
    inputs = [x.detach() for x in tensors(*QKV, (HEADS,))]
    with capture() as graphs, torch.no_grad():
        found = graphs.compile(temperature)(*inputs)
    assert sites()[-1].status == "replaced"
    assert torch.allclose(found, temperature(*inputs), atol=1e-5)
