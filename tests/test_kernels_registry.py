"""What the planner says of kernel families agrees with what their kernels are."""

from __future__ import annotations

import pytest
from dash_inductor.kernels import registry
from dash_inductor.kernels.hopper import build
from dash_inductor.kernels.hopper_forward import build as forward_build

from dash_inductor.errors import ArgumentError
from dash_inductor.model import Band, Call, Keys, Mask, Operand, Site, Tiles
from dash_inductor.planning import costs, families, forwards


def test_every_family_can_be_run() -> None:
    assert [family.name for family in families.FAMILIES] == list(registry.EXECUTIONS)


def test_dims_of_the_hopper_kernels() -> None:
    assert list(costs.HOPPER) == list(build.VARIANTS) == list(forward_build.VARIANTS) == list(costs.HOPPER_FORWARD)


def test_tiles_of_the_hopper_forward() -> None:
    assert {dims: variants[0].tiles for dims, variants in forward_build.VARIANTS.items()} == costs.HOPPER_FORWARD


def test_other_tiles_of_the_hopper_forward_are_refused() -> None:
    for dims, tiles in costs.HOPPER_FORWARD.items():
        forward_build.check_tiles(dims, tiles)
        with pytest.raises(ArgumentError, match=r"plan\.forward_tiles='32x32w4s1' is not allowed: expected "):
            forward_build.check_tiles(dims, Tiles(32, 32, 4, 1))


FULL, KEYS = Mask(), Mask(Band(0), Keys(Operand(0)))
OWN = [
    ("sm_90", "bfloat16", (64, 64), FULL, "hopper"),
    ("sm_90", "float16", (8, 8), FULL, "hopper"),
    ("sm_90", "float16", (192, 128), FULL, "hopper"),
    ("sm_90", "bfloat16", (64, 64), KEYS, "portable"),
    ("sm_90", "float32", (64, 64), FULL, "portable"),
    ("sm_80", "bfloat16", (256, 256), FULL, "portable"),
    ("cpu", "float32", (64, 64), FULL, "reference"),
    ("cpu", "float32", (64, 64), KEYS, "reference"),
]


@pytest.mark.parametrize(("arch", "dtype", "dims", "mask", "name"), OWN)
def test_forwards_of_our_own(arch: str, dtype: str, dims: tuple[int, int], mask: Mask, name: str) -> None:
    device = "cpu" if arch == "cpu" else "cuda"
    site = Site(device, dtype, 1, 2, 2, 512, 512, *dims, Call(mask, 0.125))  # type: ignore[arg-type]  # names
    own = forwards.own(site, arch)
    assert own.name == name
    assert own.tiles is not None
    if mask.keys is not None:  # nobody else's forward reads them
        assert forwards.choose(site, arch) == own
