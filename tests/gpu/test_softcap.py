"""Bounded scores on a GPU, by the kernels of both families: values against fp64, and bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks import turns
from benchmarks.forward import compile_all
from dash_inductor.kernels.common import score
from dash_inductor.kernels.hopper.backward import build as backward
from dash_inductor.kernels.hopper.forward import build
from dash_inductor.model import AttentionSpec, Band, Mask
from dash_inductor.model.attention_spec import LOW_SOFTCAP
from dash_inductor.planning import plan

from ..support import bounded_scores
from ..support.hopper import MARKS
from ..support.processes import once_in_this_run
from ..support.repeats import bits, differing_runs, poison
from . import score_kernel
from .bounded_attention import Bounded, compile_backward

pytestmark = pytest.mark.gpu
ON_HOPPER = MARKS[1]

DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
MASKS = [
    "full", "causal:bottom_right", "band(0,99)", "band(-40,40)", "band(none,5)", "causal & keys(0)", "segments(0,1)",
    "dense(0)", "causal & interval(0,1,none)", "band(0,200) & keys(0) & segments(1,2)",
]  # fmt: skip
SOFTCAPS = itertools.cycle((50.0, 5.0, 30.0, 100.0))
"""Low ones, and one that needs the maximum of a row."""
SPREADS = itertools.cycle((1.0, 8.0, 40.0, 3.0))
"""Of scaled products: within the bounds, and far above them."""
DTYPES = itertools.cycle((torch.bfloat16, torch.float16, torch.bfloat16))
GRID = [
    (dims, mask, next(SOFTCAPS), next(SPREADS), next(DTYPES))
    for d, dims in enumerate(DIMS)
    for m, mask in enumerate(MASKS)
    if m < 2 or (d + m) % 2 == 0
]
"""Full and causal masks at all head dims, the others at every second one."""
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3}


def arch() -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def spec(mask: str, softcap: float | None, scale: float = 0.125, dropout: str = "") -> AttentionSpec:
    bound = "" if softcap is None else f"/softcap={softcap!r}"
    return AttentionSpec.parse(f"{mask}/scale={scale!r}{bound}{dropout}")


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def check(p: Bounded, found: Sequence[Tensor]) -> None:
    """Relative errors of whole tensors; gradients of q and k of saturated scores are small beside their summands."""
    for name, ours, true in zip(("out", "dq", "dk", "dv"), found, p.exact(), strict=True):
        error = float((ours.double() - true).norm() / true.norm())
        assert error <= TOLERANCE[p.q.dtype], f"{name}: {error:.2e}"


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Kernels are compiled several at a time."""
    if arch() == "sm_90":
        sites = [Bounded.random(spec(mask, c), dims, dtype=dtype).site() for dims, mask, c, _, dtype in GRID]
        forwards = [build.Specialisation.of_site(site) for site in sites]
        backwards = [backward.Specialisation.of_site(site, plan(site, arch())) for site in sites]
        once_in_this_run("softcap_forward", lambda: compile_all([*dict.fromkeys(forwards)]))
        once_in_this_run("softcap_backward", lambda: turns.in_parallel(compile_backward, [*dict.fromkeys(backwards)]))


@ON_HOPPER
@pytest.mark.parametrize(("dims", "mask", "softcap", "spread", "dtype"), GRID, ids=str)
def test_hopper(dims: tuple[int, int], mask: str, softcap: float, spread: float, dtype: torch.dtype) -> None:
    p = Bounded.random(spec(mask, softcap), dims, dtype=dtype, spread=spread)
    chosen = p.plan("hopper", arch())
    run = p.run(chosen)
    poison()
    found = run()
    check(p, found)
    assert not differing_runs(run, 50, load=True, poisoned=True)
    for b in range(2):  # a batch element alone
        assert same(p.of(b).run(chosen)(), [t[b : b + 1] for t in found])


@pytest.mark.parametrize("mask", ["causal", "band(0,99)", "segments(0,1)", "dense(0)", "interval(0,1,none)"])
@pytest.mark.parametrize(("softcap", "spread", "dtype"), [(50.0, 1.0, torch.bfloat16), (5.0, 8.0, torch.float16)])
def test_portable(mask: str, softcap: float, spread: float, dtype: torch.dtype) -> None:
    p = Bounded.random(spec(mask, softcap), (64, 64), dtype=dtype, spread=spread)
    run = p.run(p.plan("portable", arch()))
    check(p, run())
    assert not differing_runs(run, 50, load=True)


@ON_HOPPER
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (17, 300), (129, 64), (1024, 1024), (255, 1)], ids=str)
def test_lengths(dims: tuple[int, int], lengths: tuple[int, int]) -> None:
    for mask, group in (("full", 1), ("causal:bottom_right", 4)):
        p = Bounded.random(spec(mask, 5.0), dims, lengths=lengths, group=group, spread=4.0)
        chance = 1e-2 if lengths[1] == 1 else 0.0  # a single score has no gradient, but for roundings
        for ours, true in zip(p.run(p.plan("hopper", arch()))(), p.exact(), strict=True):
            assert (ours.double() - true).norm() <= 8e-3 * true.norm() + chance * true.numel() ** 0.5


@ON_HOPPER
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("spread", [1.0, 40.0])
def test_a_mask_that_hides_nothing(dims: tuple[int, int], spread: float) -> None:
    """It has the bits of no mask, in both directions, where both are scheduled in the same order."""
    full = Bounded.random(spec("full", 30.0), dims, lengths=(384, 512), spread=spread)
    chosen = replace(full.plan("hopper", arch()), schedule="ascending")
    found = full.run(chosen)()
    wide = replace(full, spec=spec("band(-4000,4000)", 30.0))
    assert same(found, wide.run(chosen)())
    ones = torch.ones(2, 512, dtype=torch.bool, device="cuda")
    assert same(found, replace(full, spec=spec("keys(0)", 30.0), extras=(ones,)).run(chosen)())


@ON_HOPPER
@pytest.mark.parametrize("dims", DIMS[:2], ids=str)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("size", [2.0**30, 2.0**-30])
def test_scores_at_a_bound(dims: tuple[int, int], sign: float, size: float) -> None:
    """All scores of a row lie at the largest low bound, or at its negative, and values are large or small.

    Without a maximum of the row, powers of scores are 2**72 or 2**-72 then.
    """
    p = Bounded.random(spec("causal", LOW_SOFTCAP), dims, lengths=(512, 512))
    p = replace(p, q=torch.full_like(p.q, 8.0), k=torch.full_like(p.k, 8.0 * sign), v=p.v * size)
    found, true = p.run(p.plan("hopper", arch()))(), p.exact()
    for place in (0, 3):  # out and dv; scores at a bound have no gradient
        error = float((found[place].double() - true[place]).norm() / true[place].norm())
        assert error <= TOLERANCE[p.q.dtype]
    assert all(tensor.isfinite().all() for tensor in found)


@ON_HOPPER
@pytest.mark.parametrize("scale", [-0.125, 0.0, 1e-3])
def test_other_scales(scale: float) -> None:
    p = Bounded.random(spec("causal", 2.0, 0.125), (128, 128), spread=4.0)
    p = replace(p, spec=spec("causal", 2.0, scale))
    found = p.run(p.plan("hopper", arch()))()
    for ours, true in zip(found, p.exact(), strict=True):
        assert (ours.double() - true).norm() <= 8e-3 * true.norm() + 1e-6


@ON_HOPPER
@pytest.mark.parametrize("mask", ["causal", "causal & segments(0,1)"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dropout(dims: tuple[int, int], mask: str) -> None:
    drops = f"/dropout=0.2,{2 if 'segments' in mask else 0}"
    p = Bounded.random(spec(mask, 30.0, dropout=drops), dims, spread=8.0)
    run = p.run(p.plan("hopper", arch()))
    check(p, run())
    assert not differing_runs(run, 50)


@ON_HOPPER
def test_a_large_bound_is_no_bound() -> None:
    bounded, plain = (Bounded.random(spec("causal", c), (128, 128)) for c in (1e4, None))
    chosen = plain.plan("hopper", arch())
    for a, b in zip(bounded.run(chosen)(), plain.run(chosen)(), strict=True):
        assert (a.double() - b.double()).norm() <= 4e-3 * b.double().norm()


@ON_HOPPER
def test_infinite_and_undefined_products() -> None:
    """Products of plus and minus infinity are scores of the bound; a query of NaN spoils its own row alone."""
    p = Bounded.random(spec("full", 2.0), (64, 64), batch=1, kv_heads=1, group=1)
    signs = torch.where(torch.arange(p.k.shape[2], device="cuda") % 3 == 0, -1.0, 1.0).bfloat16()
    q, k = p.q.clone(), p.k.abs() * signs[:, None]  # so that no product is infinity less infinity
    q[:, :, 5] = 3e38
    p = replace(p, q=q, k=k)
    chosen = replace(p.plan("hopper", arch()), schedule="ascending")
    for mask in ("full", "band(-1000,1000)"):
        out = replace(p, spec=spec(mask, 2.0)).run(chosen)()[0]
        assert (out[0, 0, 5].double() - p.exact()[0][0, 0, 5]).abs().max() < 2e-2
    plain = p.run(chosen)()[0]
    q[:, :, 9] = float("nan")
    spoilt = p.run(chosen)()[0]
    assert spoilt[:, :, 9].isnan().all()
    others = torch.arange(q.shape[2], device="cuda") != 9
    assert torch.equal(spoilt[:, :, others], plain[:, :, others])


@ON_HOPPER
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_a_graph_replays(dims: tuple[int, int]) -> None:
    p = Bounded.random(spec("causal", 30.0), dims, spread=8.0)
    run = p.run(p.plan("hopper", arch()))
    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for t in captured:
        t.zero_()
    graph.replay()
    assert same(captured, expected)


@ON_HOPPER
def test_another_bound_compiles_nothing() -> None:
    sizes = []
    for c in (11.0, 12.0):
        p = Bounded.random(spec("causal", c), (128, 128))
        p.run(p.plan("hopper", arch()))()
        sizes.append((build.kernels.cache_info().currsize, backward.kernels.cache_info().currsize))
    assert sizes[0] == sizes[1]


# Shares of the bound, number by number

COUNT = score_kernel.WARPS * score_kernel.COLUMNS


def numbers(*parts: Tensor) -> Tensor:
    """Filled up with zeros."""
    found = torch.cat(parts).float()
    return torch.nn.functional.pad(found, (0, -len(found) % COUNT)).cuda()


NEAR = torch.linspace(-7 / 16, 7 / 16, 400_001)[1:-1]
LOGARITHMIC = torch.logspace(-44, 38, 40_000, dtype=torch.float64)
FAR = torch.cat([LOGARITHMIC, -LOGARITHMIC, torch.linspace(-12, 12, 400_000)])


@ON_HOPPER
def test_shares() -> None:
    """As powers say them, within 2**-18 of tanh; slopes of near ones as in PyTorch, bit by bit."""
    x = numbers(NEAR, FAR, torch.tensor([torch.inf, -torch.inf]))
    p, slope = score_kernel.run(x, score.ARGUMENT, 1.0)
    exact = torch.tanh(x.double())
    assert (p.double().log2() - exact).abs().max() < 2.0**-18
    assert (slope.double() - (1.0 - exact**2)).abs().max() < 2.0**-17
    assert (slope >= 0.0).all()
    v, _ = bounded_scores.begun(x.cpu(), score.ARGUMENT)
    ours = bounded_scores.powers_and_slopes(v, 1.0, torch.zeros_like(v))[1]
    near = v.abs() < 2.0
    assert torch.equal(bits(slope.cpu()[near]), bits(ours[near]))
    assert (slope.cpu()[~near].double() - ours[~near].double()).abs().max() < 2.0**-20


@ON_HOPPER
def test_shares_do_not_depend_on_neighbours() -> None:
    """Near numbers beside far ones, and alone."""
    near = numbers(NEAR)
    mixed = near.clone()
    mixed[::7] = 100.0
    alone, beside = (score_kernel.run(x, score.ARGUMENT, 72.0) for x in (near, mixed))
    kept = torch.arange(len(near), device="cuda") % 7 != 0
    for a, b in zip(alone, beside, strict=True):
        assert torch.equal(bits(a[kept]), bits(b[kept]))
    assert same(alone, score_kernel.run(near, score.ARGUMENT, 72.0, hides=True))


@ON_HOPPER
@pytest.mark.parametrize("beside", [0.1, 1e30])
def test_hidden_numbers_have_no_power(beside: float) -> None:
    x = torch.full((COUNT,), beside, device="cuda")
    x[::3] = -torch.inf
    p, _ = score_kernel.run(x, score.ARGUMENT, 72.0, hides=True)
    assert (p[::3] == 0).all()
    assert (p[1::3] > 0).all()
    x[1] = torch.nan
    p, slope = score_kernel.run(x, score.ARGUMENT, 72.0, hides=True)
    assert p[1].isnan()
    assert slope[1].isnan()
    p, _ = score_kernel.run(x, score.ARGUMENT, 72.0)
    assert torch.allclose(p[::3].double().log2(), torch.tensor(-72.0, dtype=torch.float64, device="cuda"), atol=1e-4)


def test_the_bands_of_this_file_are_bands() -> None:
    """Texts of masks are read as they are meant."""
    assert spec("causal", 50.0) == AttentionSpec(Mask(Band(0)), 0.125, softcap=50.0)
