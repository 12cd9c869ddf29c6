"""What the planner says of kernel families agrees with what their kernels are."""

from __future__ import annotations

import pytest

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels import registry
from dash_inductor.kernels.hopper.backward import build
from dash_inductor.kernels.hopper.forward import build as forward_build
from dash_inductor.model import Tiles
from dash_inductor.planning import costs, families


def test_every_family_can_be_run() -> None:
    assert [family.name for family in families.FAMILIES] == list(registry.EXECUTIONS)


def test_dims_of_the_hopper_kernels() -> None:
    assert list(costs.HOPPER) == list(build.VARIANTS) == list(forward_build.SETTINGS) == list(costs.HOPPER_FORWARD)


def test_tiles_of_the_hopper_forward() -> None:
    assert {dims: settings.tiles for dims, settings in forward_build.SETTINGS.items()} == costs.HOPPER_FORWARD


def test_other_tiles_of_the_hopper_forward_are_refused() -> None:
    for dims, tiles in costs.HOPPER_FORWARD.items():
        forward_build.check_tiles(dims, tiles)
        with pytest.raises(ArgumentError, match=r"plan\.forward_tiles='32x32w4s1' is not allowed: expected "):
            forward_build.check_tiles(dims, Tiles(32, 32, 4, 1))
