"""Combinations of probabilities that multiply value: each softmax is replaced, or the graph is what it was."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.frontends.unread.words import COMBINED
from dash_inductor.model.reasons import Reason
from dash_inductor.passes.attention import combinations, rewrite
from dash_inductor.passes.attention.combinations import SPLIT
from dash_inductor.records.records import sites

from ..support.graphs import BACKWARD, FORWARD, capture, step, tensors
from .combination_programs import COMBINED as WAYS
from .combination_programs import DTYPES, FORMS, MASKS, TRAINED, Program, outcome, sample

pytestmark = pytest.mark.usefixtures("deterministic")

PROGRAMS = 12
"""Programs of a seed; one seed is run always, the others when all tests are run."""


def check(program: Program) -> None:
    """Every softmax is replaced, values and gradients are right, and no product of maps is left."""
    found = outcome(program)
    assert not found.wrong, f"{program}: {found.wrong}"
    assert len(found.records) == (program.maps if program.form == "softmaxes" else 1), program
    for record in found.records:
        assert record.status == "replaced", f"{program}: {record.detail}"
        assert SPLIT in record.detail, program
    assert found.graphs.count("aten::bmm") == 0, program


@pytest.mark.parametrize(
    "program",
    [
        *(Program(form) for form in FORMS),
        *(Program(form, combined) for form in ("selected", "pairs") for combined in WAYS),
        *(Program("softmaxes", mask=mask) for mask in MASKS),
        *(Program("selected", dtype=dtype) for dtype in DTYPES),
        *(Program("softmaxes", trained=trained) for trained in TRAINED),
        *(Program(form, factor="number") for form in FORMS),
        *(Program(form, product="einsum") for form in FORMS),
    ],
    ids=str,
)  # fmt: skip
def test_one_thing_at_a_time(program: Program) -> None:
    check(program)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3, 4))])
def test_programs(seed: int) -> None:
    """Run all by ``python -m tests.frontends.combination_programs``."""
    for program in sample(PROGRAMS, seed):
        check(program)


def test_an_infinite_factor_gives_nan() -> None:
    """As in the program, where it meets probabilities that are 0, and values of both signs."""
    program = Program()
    inputs = [x if x.dim() else torch.full_like(x, torch.inf).requires_grad_() for x in program.inputs()]
    with capture() as graphs:
        ours = step(graphs.compile(program.run), inputs)
    assert [record.status for record in sites()] == ["replaced"] * 2
    for found, wanted in zip(ours, step(program.run, inputs), strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())


# ---- what is kept: the graph is then what it is without the split

SHAPE = (2, 4, 24, 16)
SHAPES = ((2, 8, 24, 16), (2, 8, 24, 16), (2, 4, 24, 32), ())
Results = tuple[Tensor, ...]


def maps(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    first, second = ((a @ b.mT * 0.25).softmax(-1) for a, b in zip(q.chunk(2, 1), k.chunk(2, 1), strict=True))
    return first, second


def returned(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Results:
    first, second = maps(q, k)
    return (first - c * second) @ v, first


def difference_returned(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Results:
    first, second = maps(q, k)
    return (first - c * second) @ v, first - c * second


def detached_half(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Results:
    first, second = (q @ k.mT * 0.25).softmax(-1).unflatten(1, (4, 2)).unbind(2)
    return ((first - c * second.detach()) @ v,)


def read_by_a_mean(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Results:
    first, second = maps(q, k)
    return (first - c * first.mean() * second) @ v, v


def other_key_factor(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Results:
    first, second = maps(q, k)
    return ((first - c * torch.arange(24) * second) @ v,)


def dropped_difference(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Results:
    first, second = maps(q, k)
    return (F.dropout(first - c * second, 0.5) @ v,)


def bounded_difference(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Results:
    first, second = maps(q, k)
    return ((first - c * second).relu() @ v,)


def quarter(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Results:
    weights = (q @ k.mT * 0.25).softmax(-1)
    return ((weights[:, :4] - c * weights[:, 2:6]) @ v,)


def overlapping(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Results:
    """Both slices are the first half: one begins before the first element."""
    weights = (q @ k.mT * 0.25).softmax(-1)
    return ((weights[:, -99:4] - c * weights[:, :4]) @ v,)


def infinite_number(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Results:
    first, second = maps(q, k)
    return ((c * first - torch.inf * second) @ v,)


def without_nan(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Results:
    first, second = ((a @ b.mT).nan_to_num().softmax(-1) for a, b in zip(q.chunk(2, 1), k.chunk(2, 1), strict=True))
    return ((first - c * second) @ v,)


class _Rounded(torch.autograd.Function):
    """The identity, whose gradient is rounded to 8 bits."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0].to(torch.float8_e4m3fn).to(gradients[0].dtype)


def rounded_gradient(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Results:
    first, second = maps(q, k)
    found: Tensor = _Rounded.apply(first - c * second)
    return (found @ v,)


KEPT: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor], Results], str]] = {
    "a map returned": (returned, f"{SPLIT} is kept, too: the softmax"),
    "the difference returned": (difference_returned, f"{SPLIT} is kept, too: the softmax"),
    "a map that is not trained": (detached_half, f"{SPLIT} is kept, too: in the backward"),
    "a map read": (read_by_a_mean, f"{SPLIT} is kept, too: the softmax"),
    "a factor of keys": (other_key_factor, f"{SPLIT} is kept, too: aten::div (div_1): its probabilities are read by"),
    "dropout": (dropped_difference, COMBINED),
    "relu": (bounded_difference, COMBINED),
    "parts that overlap": (quarter, COMBINED),
    "parts that are the same": (overlapping, COMBINED),
    "an infinite number": (infinite_number, COMBINED),
    "a gradient in 8 bits": (rounded_gradient, "rounds to float8_e4m3fn"),
    "nan_to_num": (without_nan, "NaN among the scores becomes a number"),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    function, words = KEPT[name]
    inputs, texts = tensors(*SHAPES), []

    def total(*inputs: Tensor) -> Tensor:
        results = function(*inputs)
        return torch.cat([result.flatten() for result in results])

    for split in (combinations.split, lambda graph: []):
        with mock.patch.object(rewrite, "split", split), capture() as graphs:
            step(graphs.compile(total), inputs)
        assert graphs.count(FORWARD) == graphs.count(BACKWARD) == 0
        texts.append(graphs.texts)
        if split is combinations.split:
            details = [record.detail for record in sites()]
            assert details
            assert all(words in detail for detail in details), details
    assert texts[0] == texts[1]


def test_some_are_kept() -> None:
    """Of two products in a graph, one is split although the other is not."""

    def two(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
        out, weights = returned(q, k, v, c)
        first, second = maps(q * 2, k)
        return out + (first - c * second) @ (v * 2) + weights.mean()

    inputs = tensors(*SHAPES)
    with capture() as graphs:
        ours = step(graphs.compile(two), inputs)
    assert [record.status for record in sites()] == ["fallback", "fallback", "replaced", "replaced"]
    true = step(two, [x.detach().double().requires_grad_() for x in inputs])
    for found, wanted in zip(ours, true, strict=True):
        assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_nothing_is_split_without_determinism() -> None:
    torch.use_deterministic_algorithms(False)
    with mock.patch.object(rewrite, "split", side_effect=AssertionError), capture() as graphs:
        step(graphs.compile(Program().run), Program().inputs())
    assert not sites()


def test_an_error_of_the_split_keeps_the_products() -> None:
    with mock.patch.object(combinations._Splitting, "_forms", side_effect=ZeroDivisionError("on purpose")):
        found = outcome(Program())
    assert not found.wrong
    assert found.records
    assert all(COMBINED in record.detail for record in found.records)


def test_passes_that_are_off_are_the_reason() -> None:
    with torch._inductor.config.patch(pattern_matcher=False):
        found = outcome(Program())
    assert not found.wrong
    assert {record.reason for record in found.records} == {Reason.PASSES_OFF}
