"""Chooses the forward kernel of a site: always one of dash_inductor's, of the most specific family that covers it.

Library forwards are not used, because they do not give the same guarantees: cuDNN's log-sum-exp can differ from call to
call, FlashAttention-2 splits the kv range by batch size and number of SMs, and both are wrong for some masks, lengths
or scales (cases in docs/what-we-know.md).  The bits of dash_inductor's forwards depend only on the inputs of one (batch
element, head) and its mask.

With ``config.forward = "keep"`` the graph keeps its own forward (`planner.keeping`), with that forward's guarantees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import ArgumentError
from ..kernels.families import FAMILIES
from ..model.plan import Tiles
from ..model.site import Site


@dataclass(frozen=True)
class Forward:
    """The forward kernel that runs at a site: its family and its tiles.

    Args:
        name: the kernel family, as in `Plan.forward`.
        tiles: the tile shape, as in `Plan.forward_tiles`.
        split_kv: as in `Plan.split_kv`; True for families that never split keys.
    """

    name: str
    tiles: Tiles
    split_kv: bool = True


def forward_of(site: Site, arch: str, kernel: str, split_kv: bool) -> Forward:
    """The forward kernel of a site: that of the most specific family with a forward for it.

    Args:
        site: the site.
        arch: an architecture with tables of its own (see `model.architectures.tables_of`).
        kernel: the kernel family of the backward.
        split_kv: whether the forward may split keys.

    Raises:
        ArgumentError: no family has a forward for the site on this architecture.
    """
    for family in reversed(FAMILIES):
        tiles = family.forward_tiles(site, arch, kernel)
        if tiles is not None:
            of_any_lengths = replace(site, q_len=None, kv_len=None)
            return Forward(family.name, tiles, split_kv or not family.splits_keys(of_any_lengths))
    raise ArgumentError("arch", arch, "an architecture on which a forward runs")
