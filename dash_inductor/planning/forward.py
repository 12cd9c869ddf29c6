"""The forward that runs at a site is always one of our own, of the fastest kernel family that covers it.

No forward is borrowed, because a library's forward does not promise what the product promises: cuDNN's log-sum-exp can
differ from call to call, FlashAttention-2 splits the kv range by batch size and number of SMs, and both are wrong for
some masks, lengths or scales (docs/what-we-know.md has the cases).  Bits of our own forwards are a function of the
(batch element, head) and its mask.

With ``config.forward = "keep"`` the graph's own forward stays (`planner.keeping`), and its promises with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError
from ..kernels.families import FAMILIES
from ..model.plan import Tiles
from ..model.site import Site


@dataclass(frozen=True)
class Forward:
    """The forward of a site.

    Args:
        name: the kernel family, as in `Plan.forward`.
        tiles: as in `Plan.forward_tiles`.
    """

    name: str
    tiles: Tiles


def forward_of(site: Site, arch: str, kernel: str) -> Forward:
    """The forward of a site on an architecture with tables of its own: of the most special family that has one for it.

    Args:
        kernel: the family of the backward.

    Raises:
        ArgumentError: no family has one.
    """
    for family in reversed(FAMILIES):
        tiles = family.forward_tiles(site, arch, kernel)
        if tiles is not None:
            return Forward(family.name, tiles)
    raise ArgumentError("arch", arch, "an architecture on which a forward runs")
