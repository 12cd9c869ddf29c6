"""The Hopper kernel family (Gluon, sm_90): the calls that it covers, its tiles, their costs and predicted times."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.mask import MAX_LENGTH
from ...model.operands import ADDED
from ...model.plan import Plan, Tiles
from ...model.relations import RELATIONS, fit_tables
from ...model.site import BITS, Site
from ..family import SCORES, Candidate, Documents, Family
from .calibration import CALIBRATIONS
from .kernel_configs import CANDIDATES, FORWARD_CONFIGS, dims_of_tile, suits_parts
from .prediction import ARCH, backward_us, forward_us, rates_of_forward, unpredicted

NARROW = 64
"""Window size in tokens, to either side; up to it about a third of the pairs of the visited Hopper tiles is visible."""


def _narrow(site: Site) -> str | None:
    """Returns why a narrow window at small head dims is left to the portable kernels, or None if it is not.

    A 64 x 64 tile wastes less of such a window than a 128 x 128 one.  This was measured with one kv head per query
    head; plans do not depend on the number of heads in a group.
    """
    reach = max(NARROW + 1 if bound is None else abs(bound) for bound in (site.band.lo, site.band.hi))
    measured = site.spec.traits.asks <= {"keys", "dropout"}
    if dims_of_tile(site.head_dim, site.value_dim) != (64, 64) or not 0 < reach <= NARROW or not measured:
        return None
    return f"a window of at most {NARROW} to either side takes longer on Hopper kernels: benchmarks/results/bands.json"


def _fits_tables(site: Site) -> bool:
    return fit_tables([kind.RELATION for kind in site.spec.traits.kinds])


class Hopper(Family):
    """The kernel family of the warp-specialised Gluon kernels for sm_90 (H100, H200)."""

    name = "hopper"
    head_dims = "multiples of 8, equal ones from 40 to 256, and 136 to 192 beside 72 to 128 of value"
    reads = RELATIONS
    scores = SCORES.difference(ADDED)
    cta_per_query_head = True
    tile_schedules_by_tables = True
    stamps = True
    times = CALIBRATIONS

    def runs_on(self, arch: str, bits: int) -> bool:
        return (arch, bits) == (ARCH, 16)

    def has_head_dims(self, head_dim: int, value_dim: int) -> bool:
        if dims_of_tile(head_dim, value_dim) is None:
            return False
        if head_dim == value_dim:  # the templates fit the smallest heads better than tiles of 64, mostly zeros
            return head_dim > 32
        return 128 < head_dim <= 192 and 64 < value_dim <= 128

    def candidates(self, site: Site, arch: str) -> Sequence[Candidate]:
        dims = dims_of_tile(site.head_dim, site.value_dim)
        return () if dims is None else (CANDIDATES[dims],)

    def forward_tiles(self, site: Site, arch: str, backward: str) -> Tiles | None:
        """Returns the tiles of the forward for a site, or None if these kernels cannot run its forward.

        If the mask is data, the forward runs only with this family's backward, because the mask's tables are built for
        both.
        """
        dims = dims_of_tile(site.head_dim, site.value_dim)
        able = not self.lacks(site.spec.traits) and (not site.spec.traits.data or backward == self.name)
        return (
            FORWARD_CONFIGS[dims].tiles if self.runs_on(arch, BITS[site.dtype]) and dims is not None and able else None
        )

    def covers(self, site: Site, arch: str) -> bool:
        """Returns whether the kernels can run `site` on `arch`, and the tables have room for all mask components."""
        return super().covers(site, arch) and _fits_tables(site)

    def why_not(self, site: Site, arch: str) -> str:
        if self.covers_dims(site, arch) and not self.lacks(site.spec.traits) and not _fits_tables(site):
            others = " and ".join(kind.NAME for kind in site.spec.traits.kinds if not kind.RELATION.segment_ids)
            return f"its tables have no room for {others} together"
        return super().why_not(site, arch)

    def leaves(self, site: Site) -> str | None:
        return _narrow(site)

    def splits_keys(self, site: Site) -> bool:
        q_len = 1 if site.q_len is None else site.q_len
        kv_len = MAX_LENGTH if site.kv_len is None else site.kv_len
        return suits_parts(site.spec.traits, q_len, kv_len, site.group)

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
        return 0.0 if rates is None else rates.tile_schedule / rates.step


FAMILY = Hopper()
