"""The kernel families: which kernels there are, which of them is preferred, and what each covers.

This is the planner's half, which needs neither torch nor Triton; `kernels.registry` knows how the kernels of a family
are compiled and launched.  Every limit of head dims stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..model.site import Site
from . import costs
from .costs import Candidate

BITS = {"float16": 16, "bfloat16": 16, "float32": 32}


@dataclass(frozen=True)
class KernelFamily:
    """Kernels of the backward for one kind of device.

    Args:
        name: the value of `Plan.kernel`.
        runs_on: whether there are kernels for an architecture and dtype (its width in bits).
        head_dims: the head dims that are covered, in words.
        has_head_dims: whether it covers the head dims of q and k, and of v, both multiples of 8.
        reads: the kinds of data that it reads, of those of `Call.data`.
        cta_per_query_head: every query head has CTAs of its own; else those of a kv head walk for its whole group.
        walks_by_tables: under a mask that is data only the visible tile pairs are walked (`schedule.table_walk`).
        candidates: the tiles to choose from at a site that is covered.
        leaves: why a site that is covered is left to more general kernels, in words, with the measurement; None where
            it is not.
    """

    name: str
    runs_on: Callable[[str, int], bool]
    head_dims: str
    has_head_dims: Callable[[int, int], bool]
    reads: frozenset[str]
    cta_per_query_head: bool
    walks_by_tables: bool
    candidates: Callable[[Site, str], Sequence[Candidate]]
    leaves: Callable[[Site], str | None] = lambda _: None

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
        return self.covers_dims(site, arch) and site.call.data <= self.reads

    def why_not(self, site: Site, arch: str) -> str:
        """Why it cannot run a site that it does not cover, in words."""
        if not self.runs_on(arch, BITS[site.dtype]):
            return f"there are no such kernels for {arch} and {site.dtype}"
        if not self.covers_dims(site, arch):
            return f"head dims {site.head_dim} of q and k and {site.value_dim} of v are not covered: {self.head_dims}"
        return f"its kernels do not read {', '.join(sorted(site.call.data - self.reads))}"


EVERYTHING = frozenset({"keys", "segments", "dense", "bias", "dropout"})
"""All kinds of data."""

PORTABLE_LIMIT = 128
"""Largest head dim of the templates: wider tiles do not fit the registers of a CTA in plain Triton."""


def _equal(head_dim: int, value_dim: int) -> bool:
    return head_dim == value_dim <= PORTABLE_LIMIT


def hopper_dims(head_dim: int, value_dim: int) -> tuple[int, int] | None:
    """The dims of the smallest tile that holds these head dims (a key of `costs.HOPPER`), None where there is none."""
    for dims in costs.HOPPER:
        if head_dim <= dims[0] and value_dim <= dims[1]:
            return dims
    return None


def _hopper_has(head_dim: int, value_dim: int) -> bool:
    if head_dim == value_dim:  # the templates fit the smallest heads better than tiles of 64, mostly zeros
        return head_dim > 32 and hopper_dims(head_dim, value_dim) is not None
    return 128 < head_dim <= 192 and 64 < value_dim <= 128


def _hopper_candidates(site: Site, arch: str) -> Sequence[Candidate]:
    dims = hopper_dims(site.head_dim, site.value_dim)
    return () if dims is None else (costs.HOPPER[dims],)


NARROW = 64
"""Where a band reaches at most so far to either side, about a third of the pairs of its Hopper tiles are visible."""


def _narrow(site: Site) -> str | None:
    """Narrow windows at small head dims: a tile of 64 x 64 suits them better than one of 128 x 128.

    It was measured with a kv head for every query head; plans do not know how many heads share one.
    """
    reach = max(NARROW + 1 if bound is None else abs(bound) for bound in (site.band.lo, site.band.hi))
    measured = site.call.data <= {"keys", "dropout"}
    if hopper_dims(site.head_dim, site.value_dim) != (64, 64) or not 0 < reach <= NARROW or not measured:
        return None
    return f"a window of at most {NARROW} to either side takes longer on Hopper kernels: benchmarks/results/bands.json"


def _portable_candidates(site: Site, arch: str) -> Sequence[Candidate]:
    found = costs.PORTABLE[arch, BITS[site.dtype], costs.padded(site.head_dim)]
    if site.call.bias is None or arch != "sm_80":
        return found
    # A tile of the bias takes the registers that loading ahead needs: with two stages the assembler runs out of them.
    return tuple(replace(candidate, dkdv=replace(candidate.dkdv, num_stages=1)) for candidate in found)


def _of_table(table: dict[costs.Key, tuple[Candidate, ...]]) -> Callable[[Site, str], Sequence[Candidate]]:
    return lambda site, arch: table[arch, BITS[site.dtype], costs.padded(site.head_dim)]


REFERENCE = KernelFamily(
    "reference", lambda arch, bits: arch == "cpu", f"equal ones up to {PORTABLE_LIMIT}", _equal,
    EVERYTHING, False, False, _of_table(costs.REFERENCE),
)  # fmt: skip
PORTABLE = KernelFamily(
    "portable", lambda arch, bits: arch != "cpu", f"equal ones up to {PORTABLE_LIMIT}", _equal,
    EVERYTHING, False, False, _portable_candidates,
)  # fmt: skip
HOPPER = KernelFamily(
    "hopper", lambda arch, bits: (arch, bits) == ("sm_90", 16),
    "equal ones from 40 to 256, and 136 to 192 beside 72 to 128 of value", _hopper_has,
    EVERYTHING - {"bias"}, True, True,
    _hopper_candidates, _narrow,
)  # fmt: skip

FAMILIES = (REFERENCE, PORTABLE, HOPPER)
"""From the most general to the most special.  The planner takes the last one that covers a site and does not leave it:
predicted times of different families are not calibrated together, so it compares none of them.
"""


def family(name: str) -> KernelFamily:
    """The family of this name, a value of `Plan.kernel`."""
    return next(family for family in FAMILIES if family.name == name)


def head_dims_in_words(site: Site, arch: str) -> str:
    """The head dims that can be planned for sites like this one."""
    ranges = [f"{f.name}: {f.head_dims}" for f in FAMILIES if f.runs_on(arch, BITS[site.dtype])]
    return f"multiples of 8 ({'; '.join(ranges)})"
