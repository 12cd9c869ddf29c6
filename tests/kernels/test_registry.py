"""Families describe themselves as their kernels are."""

from __future__ import annotations

import pytest

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels import registry
from dash_inductor.kernels.execution import Execution
from dash_inductor.kernels.families import FAMILIES, family
from dash_inductor.kernels.hopper import kernel_configs
from dash_inductor.kernels.hopper.forward import build as forward_build
from dash_inductor.model import Tiles


def test_every_family_can_be_run() -> None:
    assert len({each.name for each in FAMILIES}) == len(FAMILIES)
    for each in FAMILIES:
        assert family(each.name) is each
        assert isinstance(registry.execution(each.name), Execution)


def test_what_is_no_family_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"plan\.kernel='fast' is not allowed: expected .*'reference'"):
        registry.execution("fast", "plan.kernel")
    assert not registry.has_templates("keep")


def test_all_hopper_configs_have_the_same_dims() -> None:
    assert (
        list(kernel_configs.CANDIDATES) == list(kernel_configs.BACKWARD_CONFIGS) == list(kernel_configs.FORWARD_CONFIGS)
    )
    assert kernel_configs.SHORT_CONFIGS.keys() <= kernel_configs.FORWARD_CONFIGS.keys()


def test_other_tiles_of_the_hopper_forward_are_refused() -> None:
    for dims, of_dims in kernel_configs.FORWARD_CONFIGS.items():
        forward_build.check_tiles(dims, of_dims.tiles)
        with pytest.raises(ArgumentError, match=r"plan\.forward_tiles='32x32w4s1' is not allowed: expected "):
            forward_build.check_tiles(dims, Tiles(32, 32, 4, 1))
