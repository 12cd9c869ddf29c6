"""Bounded scores of the Hopper kernels: the assembly's own text against double precision, and its bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.common import score
from dash_inductor.model import AttentionSpec, Band, Mask

from ...support import bounded_scores
from ...support.bounded_scores import begun, far_share, powers, powers_and_slopes

LARGE = torch.logspace(-44, 37, 20_000, dtype=torch.float64).float()
NEAR_TWO = (torch.arange(-2000, 2000) + torch.tensor(7 / 16).view(torch.int32)).int().view(torch.float32)
X = torch.cat([torch.linspace(-12, 12, 400_001), LARGE, -LARGE, NEAR_TWO, -NEAR_TWO, torch.tensor([0.0, -0.0])])
"""Scaled products by their bound: the whole of fp32, and where the two forms meet."""


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def shares(x: Tensor, ways: str = "own") -> Tensor:
    v, _ = begun(x, score.ARGUMENT)
    return powers_and_slopes(v, 1.0, torch.zeros_like(v), ways)[2]


def scores(x: Tensor, hides: bool = False, ways: str = "own", factor: float = 1.0) -> Tensor:
    v, _ = begun(x, score.ARGUMENT)
    return powers(v, factor, torch.zeros_like(v), hides, ways)[1]


@pytest.mark.parametrize("found", [shares, scores])
def test_shares_against_fp64(found: Callable[[Tensor], Tensor]) -> None:
    exact = torch.tanh(X.double())
    error = (found(X).double() - exact).abs()
    assert error.max() < 2.0**-18.7
    assert (error <= 2.0**-14.7 * exact.abs() + 2.0**-149).all()
    assert (found(X).abs() <= 1.0).all()


@pytest.mark.parametrize("factor", [72.0, 0.3, 1e30, 1e-36])
def test_a_factor_adds_no_error(factor: float) -> None:
    """That is in the coefficients of near products."""
    given = X.abs() > score.LEAST_NORMAL
    error = (scores(X, factor=factor).double() / factor - torch.tanh(X.double())).abs()
    assert error[given].max() < 2.0**-18.6


def test_far_shares_against_fp64() -> None:
    exact = torch.tanh(X.double())
    assert (far_share(begun(X, score.ARGUMENT)[0]).double() - exact).abs().max() < 2.0**-22


def test_slopes_against_fp64() -> None:
    """Of shares that are nearly 1 fp32 knows what they lack to 2**-24."""
    v, _ = begun(X, score.ARGUMENT)
    slopes = powers_and_slopes(v, 1.0, torch.zeros_like(v))[1]
    assert (slopes.double() - (1.0 - torch.tanh(X.double()) ** 2)).abs().max() < 2.0**-17.4
    assert (slopes >= 0.0).all()


def test_what_is_not_finite() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    for found in (shares(x), scores(x), far_share(x)):
        assert found[:2].tolist() == [1.0, -1.0]
        assert found[2].isnan()


@pytest.mark.parametrize("hides", [False, True])
def test_bits_depend_on_the_product_alone(hides: bool) -> None:
    """Whichever way a thread goes, and whether or not something may be hidden."""
    assert torch.equal(bits(shares(X)), bits(shares(X, "far")))
    assert torch.equal(bits(scores(X)), bits(scores(X, hides, "far")))
    assert torch.equal(bits(scores(X)), bits(scores(X, hides)))


@pytest.mark.parametrize("ways", ["near", "far"])
def test_what_is_hidden_has_no_probability(ways: str) -> None:
    """On the way of near ones, too: the words of `begun` do not count what a mask hides afterwards."""
    for shift in (0.0, 3e38, -3e38):
        given = torch.tensor([-torch.inf]), 72.0, torch.tensor([shift]), True, ways
        assert powers(*given)[0].item() == 0.0


def test_the_lowest_number_has_the_share_of_minus_infinity() -> None:
    v = torch.tensor([bounded_scores.LOWEST, -torch.inf])
    with_mask, without = (powers(v, 1.0, torch.zeros_like(v), hides)[1].tolist() for hides in (True, False))
    assert with_mask == [-1.0, -torch.inf]
    assert without == far_share(v).tolist() == [-1.0, -1.0]


def spec(scale: float, softcap: float | None) -> AttentionSpec:
    return AttentionSpec(Mask(Band()), scale, softcap=softcap)


def test_numbers_of_calls() -> None:
    assert score.bound_values(spec(0.125, None)) is None
    assert score.bound_values(spec(0.125, 50.0)) == (score.ARGUMENT * 0.0025,)
    assert score.factor(spec(0.125, 50.0)) == pytest.approx(50.0 * score.LOG2E)
    assert score.factor(spec(0.125, None)) == pytest.approx(0.125 * score.LOG2E)
    assert score.bound(spec(0.125, None).traits) is None
    assert score.bound(spec(0.125, 50.0).traits) is score.BOUND


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 1e-39), (1.0, 3e38), (1e-30, 1e10), (3e38, 0.5)])
def test_numbers_that_fp32_cannot_hold(scale: float, softcap: float) -> None:
    with pytest.raises(ArgumentError, match="softcap"):
        score.bound_values(spec(scale, softcap))


@pytest.mark.parametrize("softcap", [None, 0.5, 3.0, 50.0])
def test_the_definition_and_its_derivative(softcap: float | None) -> None:
    scaled = torch.linspace(-60, 60, 241, dtype=torch.float64, requires_grad=True)
    found = score.score(scaled, spec(1.0, softcap))
    upstream = torch.linspace(-1, 1, 241, dtype=torch.float64)
    (expected,) = torch.autograd.grad(found, scaled, upstream)
    torch.testing.assert_close(score.derivative(upstream, scaled.detach(), spec(1.0, softcap)), expected)
