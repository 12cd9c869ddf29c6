"""Which forward runs at a site: always one of our own, of the fastest kernel family that covers it.

None is borrowed, because what a library's forward promises is not what the product promises: cuDNN's log-sum-exp can
differ from call to call, FlashAttention-2 splits the kv range by batch size and number of SMs, and both are wrong for
some masks, lengths or scales (docs/what-we-know.md has the cases).  Bits of our own forwards are a function of the
(batch element, head) and its mask.

With ``config.forward = "keep"`` the graph's own forward stays (`planner.keeping`), and its promises with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..model.plan import Tiles
from ..model.site import Site
from . import costs
from .families import BITS, HOPPER, PORTABLE, REFERENCE, hopper_dims


@dataclass(frozen=True)
class Forward:
    """The forward of a site.

    Args:
        name: the kernel family, as in `Plan.forward`.
        tiles: as in `Plan.forward_tiles`.
    """

    name: str
    tiles: Tiles


def choose(site: Site, arch: str, kernel: str) -> Forward:
    """The forward of a site on an architecture with tables of its own.

    Args:
        kernel: the family of the backward.  A mask that is data has the forward of the same family, because the tables
            of the Hopper kernels are made for both.
    """
    dims = hopper_dims(site.head_dim, site.value_dim)
    able = site.call.data <= HOPPER.reads and (not site.call.data or kernel == HOPPER.name)
    if HOPPER.runs_on(arch, BITS[site.dtype]) and dims is not None and able:
        return Forward(HOPPER.name, costs.HOPPER_FORWARD[dims])
    family = REFERENCE if site.device == "cpu" else PORTABLE
    return Forward(family.name, costs.forward_tiles(arch, BITS[site.dtype], site.head_dim, site.value_dim))
