"""The portable kernels with dropout: in Triton's interpreter against fp64, and compiled for each architecture."""

from __future__ import annotations

import pytest

from dash_inductor.kernels.portable import standalone
from dash_inductor.kernels.portable.family import forward_tiles
from dash_inductor.model import AttentionSpec, Band, Dropout, Keys, Mask, Operand, Plan, Segments, Site
from dash_inductor.model.architectures import SHARED_BYTES
from dash_inductor.model.dropout import ROUNDS

from ...support.cases import cases_of_this_run, some
from ...support.forks import interpreted_results
from ...support.portable_plans import portable_plan
from .test_attend_budgets import arithmetic, compiled, layouts, with_runtime_lengths
from .test_interpreter import TOLERANCE

# Both kinds of backward; ragged and unequal lengths, grouped heads, bounds, data, static and dynamic lengths.
CASES = [
    "two_pass causal 40 70 2 float32 0.1 static",
    "two_pass full 33 48 1 float16 0.5 static",
    "two_pass band(0,20) 70 40 1 float32 0.3 dynamic",
    "two_pass causal 48 48 1 float32 0.2 keys",
    "two_pass causal 48 48 2 float32 0.2 segments",
    "spt causal 70 40 2 float32 0.3 static",
    "bent_fold causal 48 48 1 float32 0.9921875 dynamic",
    "spt full 20 40 1 float32 0.2 keys",
    "ascending full 20 40 1 float32 0.5 seeds",
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, str]:
    """By case, of those that are run."""
    cases = [asked.partition(",")[2] for asked in cases_of_this_run(request, {"test_against_fp64": "exact"})]
    words = [word for case in cases for word in case.split()]
    return dict(zip(cases, interpreted_results("dropout", *words), strict=True))


@some(CASES, [CASES[1], CASES[4], *CASES[7:]])
def test_against_fp64(results: dict[str, str], case: str) -> None:
    """With the very pairs that the definition of the random bits keeps: one other pair is an error of the first order.

    Gradients of what is multiplied by 128 are sums of few large numbers, relative to which these errors are.
    """
    assert max(map(float, results[case].split())) < TOLERANCE[case.split()[5]], results[case]


BUDGETS = [
    ("sm_80", "bfloat16", 64, Band(), None),
    ("sm_80", "bfloat16", 128, Band(0), None),
    ("sm_89", "float16", 64, Band(0), None),
    ("sm_90", "bfloat16", 64, Band(0), None),
    ("sm_90", "bfloat16", 128, Band(), None),
    ("sm_90", "bfloat16", 64, Band(0), "spt"),
    ("sm_90", "float32", 64, Band(), None),
    ("sm_100", "bfloat16", 128, Band(0), None),
]
"""Architecture, dtype, head dim, mask, schedule if it is not the planner's choice."""


@pytest.mark.parametrize("p", [None, 0.1])
def test_rounds_are_those_of_the_definition(p: float | None) -> None:
    facts = site("float32", 64, Mask(Band(0)), p=p)
    planned = portable_plan(facts, "sm_90")
    for kernel in (standalone.render_forward(planned, facts), *standalone.render(planned, facts)):
        assert f"ROUNDS: tl.constexpr = {0 if p is None else ROUNDS}\n" in kernel.text


def site(dtype: str, dim: int, mask: Mask, length: int = 4001, p: float | None = 0.1) -> Site:
    seed = Operand(len(mask.operands))
    spec = AttentionSpec(mask, 0.125, dropout=None if p is None else Dropout(p, seed))
    return Site("cuda", dtype, 2, 16, 4, length, length, dim, dim, spec)  # type: ignore[arg-type]  # a name


@some(BUDGETS, [BUDGETS[1], BUDGETS[5]])
def test_fits_the_architecture(case: tuple[str, str, int, Band, str | None]) -> None:
    arch, dtype, dim, band, schedule = case
    facts = site(dtype, dim, Mask(band))
    planned = portable_plan(facts, arch, schedule)
    forward, backward = standalone.render_forward(planned, facts), standalone.render(planned, facts)
    assert [kernel.names.count("SEED") for kernel in (forward, *backward)] == [1, planned.dq is not None, 1]
    without = site(dtype, dim, Mask(band), p=None)
    plain = [standalone.render_forward(planned, without), *standalone.render(planned, without)]
    spilled = 896 if arch == "sm_100" else 640  # bytes; nobody has timed a kernel on sm_100
    for kernel, other, limit in zip((forward, *backward), plain, (128, spilled, spilled), strict=True):
        _, used = compiled(kernel, arch)
        assert used.shared_memory <= SHARED_BYTES[arch], used
        assert max(used.spill_stores, used.spill_loads) <= limit, used
        if (arch, dtype) == ("sm_90", "bfloat16"):  # no thread computes bits for another one
            assert used.shared_memory == compiled(other, arch)[1].shared_memory


@pytest.mark.parametrize(
    "mask", [Mask(Band(0), Keys(Operand(0))), Mask(Band(), None, Segments(Operand(0), Operand(1)))]
)
def test_the_seed_is_the_last_tensor_that_is_read(mask: Mask) -> None:
    facts = site("bfloat16", 64, mask)
    kernels = standalone.render(portable_plan(facts, "sm_90"), facts)
    for kernel in kernels:
        assert kernel.names[-2] == "SEED"
        standalone.build(kernel, "sm_90")


@pytest.mark.parametrize("case", [("sm_80", "float16", 128), ("sm_90", "bfloat16", 64)], ids=str)
def test_masked_and_full_tiles_have_the_same_arithmetic(case: tuple[str, str, int]) -> None:
    """Note [Bits of the forward] with dropout: neither knowledge of lengths nor a vector of keys changes a bit."""
    arch, dtype, dim = case
    tiles = forward_tiles(arch, 16, dim, dim)
    planned = Plan("portable", "two_pass", "portable", tiles, tiles, head_chunk=4, forward_tiles=tiles)
    even, keyed, causal = (
        standalone.render_forward(planned, site(dtype, dim, mask, 4096))
        for mask in (Mask(), Mask(Band(), Keys(Operand(0))), Mask(Band(0)))
    )
    asm = [compiled(kernel, arch)[0] for kernel in (even, keyed, with_runtime_lengths(even), causal)]
    for other in asm[1:]:
        assert layouts(other["ttgir"]) == layouts(asm[0]["ttgir"])
    one, with_keys, dynamic, two = (arithmetic(a["ptx"]) for a in asm)
    assert with_keys == one
    assert dynamic == two, "a loop for full tiles and one for others"
    assert all(one[name] <= two[name] <= 2 * one[name] for name in one)


def test_kernels_without_dropout_have_nothing_of_it() -> None:
    facts = site("bfloat16", 64, Mask(Band(0)), p=None)
    planned = portable_plan(facts, "sm_90", "two_pass")
    tiles = forward_tiles("sm_90", 16, 64, 64)
    portable = Plan("portable", "two_pass", "portable", tiles, tiles, head_chunk=4, forward_tiles=tiles)
    for kernel in (standalone.render_forward(portable, facts), *standalone.render(planned, facts)):
        assert "SEED" not in kernel.names
        assert "philox" not in kernel.text
