"""A kernel family: what it covers and why not more, its tiles, their costs, and times of its kernels.

A family is a `Family` in the module `family` of its folder, which needs neither torch nor Triton, and an `Execution` in
the module `execution` beside it, which is imported when the family is first compiled or run.

Costs are in units of the compute of one 128 x 128 tile pair at the architecture's best rate, five matmuls in one pass.
They are calibrated from benchmarks/results/tiles.json (H100), never at run time.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..model.call import MODIFIERS
from ..model.plan import Plan, Tiles
from ..model.relations import Relation
from ..model.site import BITS, Site
from ..model.traits import Traits

if TYPE_CHECKING:
    from .execution import Execution

SCORES = frozenset({"bias", "dropout", *MODIFIERS})
"""All that a call may do to scores and probabilities, see `Traits.scores`."""

Documents = tuple[int, ...]
"""Lengths of packed documents, one after the other."""


@dataclass(frozen=True)
class Candidate:
    """Tile shapes with their costs.

    Args:
        dkdv, dq: tiles; `dq` only for two_pass.
        matmul: cost of one matmul over a 128 x 128 tile pair.  The one-pass kernel does 5 per pair, the two kernels of
            two_pass do 4 and 3.
        reduce: cost of adding a 128-row dq tile in order.
        handover: latency between two writers of one accumulator.
        depth: dq buffers of a separate writer; 0 where adding blocks the CTA.
    """

    dkdv: Tiles
    dq: Tiles | None = None
    matmul: float = 0.2
    reduce: float = 0.0
    handover: float = 0.0
    depth: int = 0


class Family:
    """Kernels of one kind of device, in both directions.

    Attributes:
        name: the value of `Plan.kernel`, and of `Plan.forward`.
        head_dims: the head dims that the backward covers, in words.
        reads: the relations of masks whose operands it reads.
        scores: what it can do of `Traits.scores`.
        cta_per_query_head: every query head has CTAs of its own; else the CTAs of a kv head walk for its whole group.
        walks_by_tables: under a mask that is data only the visible tile pairs are walked (`schedule.table_walk`).
        stamps: the backward can write down when it does what, see `records.profiles`.
        device: "cpu" for kernels of the CPU, else "cuda".
        times: GPUs whose kernels have been timed, with what was measured, for predictions.
    """

    name: str
    head_dims: str
    reads: frozenset[Relation]
    scores: frozenset[str]
    cta_per_query_head = False
    walks_by_tables = False
    stamps = False
    device = "cuda"
    times: Mapping[str, object] = {}

    def runs_on(self, arch: str, bits: int) -> bool:
        """Whether there are kernels for an architecture with tables of its own, and a dtype of so many bits."""
        raise NotImplementedError

    def has_head_dims(self, head_dim: int, value_dim: int) -> bool:
        """Whether the backward covers the head dims of q and k, and of v, both multiples of 8."""
        raise NotImplementedError

    def candidates(self, site: Site, arch: str) -> Sequence[Candidate]:
        """The tiles of the backward to choose from at a site that is covered."""
        raise NotImplementedError

    def forward_tiles(self, site: Site, arch: str, backward: str) -> Tiles | None:
        """The tiles of its forward at a site; None where it has no tiles for the site.

        Args:
            backward: the name of the family of the backward.
        """
        raise NotImplementedError

    def leaves(self, site: Site) -> str | None:
        """Why a site that is covered is left to more general kernels, in words, with the measurement, or None."""
        return None

    def covers_dims(self, site: Site, arch: str) -> bool:
        """Whether it has the dtype and the head dims of `site` on `arch`, an architecture with tables of its own."""
        dims = site.head_dim, site.value_dim
        return (
            self.runs_on(arch, BITS[site.dtype])
            and all(dim >= 8 and dim % 8 == 0 for dim in dims)
            and self.has_head_dims(*dims)
        )

    def covers(self, site: Site, arch: str) -> bool:
        """Whether it can run `site` on `arch`, an architecture with tables of its own."""
        return self.covers_dims(site, arch) and not self.lacks(site.call.traits)

    def why_not(self, site: Site, arch: str) -> str:
        """Why it cannot run a site that it does not cover, in words."""
        if not self.runs_on(arch, BITS[site.dtype]):
            return f"there are no such kernels for {arch} and {site.dtype}"
        if not self.covers_dims(site, arch):
            return f"head dims {site.head_dim} of q and k and {site.value_dim} of v are not covered: {self.head_dims}"
        return f"its kernels do not {' or '.join(self.lacks(site.call.traits))}"

    def lacks(self, traits: Traits) -> list[str]:
        """The parts of a call that its kernels do not compute, in words."""
        unread = [kind.NAME for kind in traits.kinds if kind.RELATION not in self.reads]
        missing = traits.scores - self.scores
        operands = sorted([*unread, *(missing & {"bias"})])
        others = ("drop probabilities" if n == "dropout" else f"have a {n}" for n in sorted(missing - {"bias"}))
        return [*([f"read {', '.join(operands)}"] if operands else []), *others]

    def unpredicted(self, plan: Plan, site: Site, arch: str, gpu: str, documents: Documents | None) -> str | None:
        """Why the time of a backward is not predicted, in words; None where it is.

        Args:
            gpu: a GPU that some family has timed.
            documents: as for `planning.prediction.predicted_us`.
        """
        return f"the {self.name} kernels are not calibrated"

    def predicted_us(self, plan: Plan, site: Site, gpu: str, documents: Documents | None) -> float:
        """The time of a backward that is predicted, in microseconds; arguments as for `unpredicted`."""
        raise NotImplementedError

    def predicted_forward_us(self, plan: Plan, site: Site, arch: str, gpu: str) -> float | None:
        """The time of a forward in microseconds, None where nothing is known."""
        return None

    def beside_steps(self, site: Site, arch: str, gpu: str) -> float:
        """The time of a walk beside its steps, relative to one step; 0 where it has not been timed."""
        return 0.0

    @property
    def execution(self) -> Execution:
        """How its kernels are compiled and run."""
        found: Execution = importlib.import_module(f"{type(self).__module__.rpartition('.')[0]}.execution").EXECUTION
        return found


def padded(dim: int) -> int:
    """A head dim as tables of tiles count it: the power of two that holds it."""
    return int(max(16, 1 << (dim - 1).bit_length()))
