"""The Hopper kernels in Gluon for sm_90: the calls that they cover, their tiles, and the costs and times of these."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.plan import Plan, Tiles
from ...model.relations import RELATIONS, fit_tables
from ...model.site import BITS, Site
from ..family import SCORES, Candidate, Documents, Family
from .calibration import CALIBRATIONS
from .kernel_configs import CANDIDATES, FORWARD_CONFIGS, dims_of_tile
from .prediction import ARCH, backward_us, forward_us, rates_of_forward, unpredicted

NARROW = 64
"""A band that reaches at most so far to either side shows about a third of the pairs of its Hopper tiles."""


def _narrow(site: Site) -> str | None:
    """Narrow windows at small head dims: a tile of 64 x 64 suits them better than one of 128 x 128.

    It was measured with a kv head for every query head; plans do not know how many heads share one.
    """
    reach = max(NARROW + 1 if bound is None else abs(bound) for bound in (site.band.lo, site.band.hi))
    measured = site.call.traits.asks <= {"keys", "dropout"}
    if dims_of_tile(site.head_dim, site.value_dim) != (64, 64) or not 0 < reach <= NARROW or not measured:
        return None
    return f"a window of at most {NARROW} to either side takes longer on Hopper kernels: benchmarks/results/bands.json"


def _fits_tables(site: Site) -> bool:
    return fit_tables([kind.RELATION for kind in site.call.traits.kinds])


class Hopper(Family):
    """Warp-specialised kernels in Gluon."""

    name = "hopper"
    head_dims = "equal ones from 40 to 256, and 136 to 192 beside 72 to 128 of value"
    reads = RELATIONS
    scores = SCORES - {"bias"}
    cta_per_query_head = True
    walks_by_tables = True
    stamps = True
    times = CALIBRATIONS

    def runs_on(self, arch: str, bits: int) -> bool:
        return (arch, bits) == (ARCH, 16)

    def has_head_dims(self, head_dim: int, value_dim: int) -> bool:
        if head_dim == value_dim:  # the templates fit the smallest heads better than tiles of 64, mostly zeros
            return head_dim > 32 and dims_of_tile(head_dim, value_dim) is not None
        return 128 < head_dim <= 192 and 64 < value_dim <= 128

    def candidates(self, site: Site, arch: str) -> Sequence[Candidate]:
        dims = dims_of_tile(site.head_dim, site.value_dim)
        return () if dims is None else (CANDIDATES[dims],)

    def forward_tiles(self, site: Site, arch: str, backward: str) -> Tiles | None:
        """A mask that is data has this forward beside this backward alone: its tables are made for both."""
        dims = dims_of_tile(site.head_dim, site.value_dim)
        able = not self.lacks(site.call.traits) and (not site.call.traits.data or backward == self.name)
        return (
            FORWARD_CONFIGS[dims].tiles if self.runs_on(arch, BITS[site.dtype]) and dims is not None and able else None
        )

    def covers(self, site: Site, arch: str) -> bool:
        """Bits of a dense mask say all that a forward learns of pairs: there are none of an interval beside it."""
        return super().covers(site, arch) and _fits_tables(site)

    def why_not(self, site: Site, arch: str) -> str:
        if self.covers_dims(site, arch) and not self.lacks(site.call.traits) and not _fits_tables(site):
            others = " and ".join(kind.NAME for kind in site.call.traits.kinds if not kind.RELATION.codes)
            return f"its tables have no room for {others} together"
        return super().why_not(site, arch)

    def leaves(self, site: Site) -> str | None:
        return _narrow(site)

    def unpredicted(self, plan: Plan, site: Site, arch: str, gpu: str, documents: Documents | None) -> str | None:
        return unpredicted(plan, site, arch, gpu, CALIBRATIONS[gpu], documents)

    def predicted_us(self, plan: Plan, site: Site, gpu: str, documents: Documents | None) -> float:
        return backward_us(plan, site, CALIBRATIONS[gpu], documents)

    def predicted_forward_us(self, plan: Plan, site: Site, arch: str, gpu: str) -> float | None:
        rates = rates_of_forward(site, arch, CALIBRATIONS[gpu])
        return None if rates is None else forward_us(plan, site, rates)

    def beside_steps(self, site: Site, arch: str, gpu: str) -> float:
        dims = dims_of_tile(site.head_dim, site.value_dim)
        rates = None if dims is None or arch != ARCH else CALIBRATIONS[gpu].backward.get(dims)
        return 0.0 if rates is None else rates.walk / rates.step


FAMILY = Hopper()
