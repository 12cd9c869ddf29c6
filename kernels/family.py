"""A kernel family: which attention sites its kernels cover, their tiles, the costs of tiles, and predicted times.

Every family has a folder.  The module `family` in it defines a `Family` and imports neither torch nor Triton; the
module `execution` next to it defines an `Execution` and is imported when the family is first compiled or run.

The unit of cost is the time of one 128 x 128 tile pair (five matmuls in one pass) at the best rate of the architecture.
Costs are calibrated from benchmarks/results/tiles.json (H100), never at run time.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..model.attention_spec import MODIFIERS
from ..model.operands import ADDED, OPERANDS
from ..model.plan import Plan, Tiles
from ..model.relations import Relation
from ..model.site import BITS, Site
from ..model.traits import Traits

if TYPE_CHECKING:
    from .execution import Execution

SCORES = frozenset((*(name for name, kind in OPERANDS.items() if kind.changes != "rows"), *MODIFIERS))
"""Everything that a call may apply to scores and probabilities, see `Traits.scores`."""

Documents = tuple[int, ...]
"""Lengths of packed documents in tokens, in the order in which they are packed."""


@dataclass(frozen=True)
class Candidate:
    """Tile shapes for a backward, with costs; 1 is the time of a 128 x 128 tile pair (five matmuls) at the best rate.

    Args:
        dkdv: tiles of the kernel that computes dk and dv, and in one pass dq, too.
        dq: tiles of the dq kernel of two_pass; else None.
        matmul: cost of one matmul over a 128 x 128 tile pair.  The one-pass kernel does 5 per pair; the two kernels of
            two_pass do 4 and 3.
        reduce: cost of adding a 128-row dq tile in semaphore order.
        handover: latency between two consecutive writers of one dq accumulator.
        depth: dq buffers of a separate writer warp; 0 where the adds block the CTA.
    """

    dkdv: Tiles
    dq: Tiles | None = None
    matmul: float = 0.2
    reduce: float = 0.0
    handover: float = 0.0
    depth: int = 0


class Family:
    """The kernels for one kind of device, forward and backward.

    Attributes:
        name: the value of `Plan.kernel` and of `Plan.forward`.
        head_dims: the head dims that the backward covers, in words.
        reads: the mask relations whose operands the kernels read.
        scores: what the kernels can apply to scores and probabilities (bias, dropout, modifiers, ...), a subset of
            `SCORES`.
        cta_per_query_head: whether every query head has CTAs of its own; if not, the CTAs of a kv head iterate over all
            query heads of its group.
        tile_schedules_by_tables: whether, under a mask that is data, the kernels iterate over the visible tile pairs
            only (`schedule.table_tile_schedule`).
        stamps: whether the backward can record timestamps, see `records.profiles`.
        device: "cpu" for kernels that run on the CPU, else "cuda".
        times: measured kernel times by GPU, from which times are predicted.
    """

    name: str
    head_dims: str
    reads: frozenset[Relation]
    scores: frozenset[str]
    cta_per_query_head = False
    tile_schedules_by_tables = False
    stamps = False
    device = "cuda"
    times: Mapping[str, object] = {}

    def runs_on(self, arch: str, bits: int) -> bool:
        """Returns whether the family has kernels for an architecture and for dtypes of `bits` bits.

        Args:
            arch: "cpu", or a GPU architecture that has tables of tiles, such as "sm_90".
        """
        raise NotImplementedError

    def has_head_dims(self, head_dim: int, value_dim: int) -> bool:
        """Returns whether the backward covers `head_dim` (q and k) with `value_dim` (v), both at least 1."""
        raise NotImplementedError

    def candidates(self, site: Site, arch: str) -> Sequence[Candidate]:
        """Returns the backward tile shapes to choose from, with their costs, for a site that the family covers."""
        raise NotImplementedError

    def forward_tiles(self, site: Site, arch: str, backward: str) -> Tiles | None:
        """Returns the tiles of the family's forward for a site, or None if the family has no forward for it.

        Args:
            backward: the name of the family that runs the backward.
        """
        raise NotImplementedError

    def leaves(self, site: Site) -> str | None:
        """Returns why a site that the family covers is better left to a more general family, or None if it is not.

        The reason is a sentence with the measurement that supports it.
        """
        return None

    def splits_keys(self, site: Site) -> bool:
        """Returns whether the forward of a site may split the keys, at lengths that the site may have.

        The bits of a query then depend on how many queries and keys there are.
        """
        return False

    def covers_dims(self, site: Site, arch: str) -> bool:
        """Returns whether the family covers the dtype and the head dims of `site` on `arch`, given as for `runs_on`."""
        dims = site.head_dim, site.value_dim
        return self.runs_on(arch, BITS[site.dtype]) and min(dims) >= 1 and self.has_head_dims(*dims)

    def covers(self, site: Site, arch: str) -> bool:
        """Returns whether the family can run `site` on `arch`: it supports dtype, head dims, mask and scores."""
        return self.covers_dims(site, arch) and not self.lacks(site.spec.traits)

    def why_not(self, site: Site, arch: str) -> str:
        """Returns why the family cannot run a site, in words; only for sites that it does not cover."""
        if not self.runs_on(arch, BITS[site.dtype]):
            return f"there are no such kernels for {arch} and {site.dtype}"
        if not self.covers_dims(site, arch):
            return f"head dims {site.head_dim} of q and k and {site.value_dim} of v are not covered: {self.head_dims}"
        return f"its kernels do not {' or '.join(self.lacks(site.spec.traits))}"

    def lacks(self, traits: Traits) -> list[str]:
        """Returns the features of a call that the kernels do not support, as verb phrases for an error message.

        The list is empty if all are supported.
        """
        unread = [kind.NAME for kind in traits.kinds if kind.RELATION not in self.reads]
        missing = traits.scores - self.scores
        added = missing.intersection(ADDED)
        operands = sorted([*unread, *added])
        others = ("drop probabilities" if n == "dropout" else f"have a {n}" for n in sorted(missing - added))
        return [*([f"read {', '.join(operands)}"] if operands else []), *others]

    def unpredicted(self, plan: Plan, site: Site, arch: str, gpu: str, documents: Documents | None) -> str | None:
        """Returns why the time of a backward cannot be predicted, in words; None where it can.

        Args:
            gpu: a GPU for which at least one family has measured times.
            documents: the lengths of the packed documents in tokens; None without documents or where lengths are
                unknown.
        """
        return f"the {self.name} kernels are not calibrated"

    def predicted_us(self, plan: Plan, site: Site, gpu: str, documents: Documents | None) -> float:
        """Returns the predicted time of a backward in microseconds; arguments as for `unpredicted`."""
        raise NotImplementedError

    def predicted_forward_us(self, plan: Plan, site: Site, arch: str, gpu: str) -> float | None:
        """Returns the predicted time of a forward in microseconds, or None if it cannot be predicted."""
        return None

    def beside_steps(self, site: Site, arch: str, gpu: str) -> float:
        """Returns the time that a CTA spends outside the loop over a tile schedule, in iterations of the loop.

        It is 0 if it was not measured.
        """
        return 0.0

    @property
    def execution(self) -> Execution:
        """The `Execution` of the family, imported on first use."""
        found: Execution = importlib.import_module(f"{type(self).__module__.rpartition('.')[0]}.execution").EXECUTION
        return found


def padded(dim: int) -> int:
    """Rounds a head dim up to the power of two, at least 16, by which tables of tiles are indexed."""
    return int(max(16, 1 << (dim - 1).bit_length()))
