"""`decide`: from the facts of a site to what becomes of it, as a pure function; `plan` raises where it says no.

Bits may depend on dtype, head dim, heads, mask and architecture, not on batch or on which lengths are static: a graph
with dynamic lengths and one with static lengths must agree.  The kernel family is the most special one that covers the
site (`kernels.families`).  Among its candidates schedule and tiles are chosen on a fixed nominal problem (`nominal`):
the one with the shortest critical path wins, of equally good ones the earlier.  Predictions for the site itself
(`prediction`) decide nothing.  Schedules that need co-residency, and `descending`, are never chosen, only taken when
named.  Masks with segments are planned among `UPWARD` alone.

Lengths decide one thing, `section`, the launch grouping, which never changes bits.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from ..errors import ArgumentError, DashError
from ..kernels.families import FAMILIES, family, head_dims_in_words
from ..kernels.family import Candidate, padded
from ..model.architectures import tables_of
from ..model.mask import MAX_LENGTH, Band
from ..model.plan import Decision, Kept, Plan
from ..model.reasons import Reason
from ..model.site import BITS, NOMINAL_LEN, Site
from ..schedule.names import CO_RESIDENT, NAMES, check_name, supports
from .forward import forward_of
from .nominal import critical_path, launched_together, must_be_simulated, work
from .numerics import numerics_key, terms

UPWARD = ("ascending", "spt", "two_pass")
"""The schedules that masks with segments or an interval are planned with.  All heads have the same walks and ranks, and
a walk goes up: down, all kv tiles of a document would begin at its last q tile, and wait there for one another."""

SIDE_BY_SIDE = 4
"""Heads that are launched together at least where the CTAs of a head keep less of it in the L2 cache than `_fits_l2`
counts: under `ascending`, where all begin at the first q tile and walk side by side, and under windows, where those
that run at the same time walk a part of it.  This changes speed alone."""

L2_BYTES = 20 << 20
"""The bytes that the heads of a section may keep in an H100's L2 cache (50 MB): the next section is there already when
the last CTAs of one finish."""

SEGMENTS = 2
"""Documents that a sequence is taken to hold, where the L2 cache decides about sections; this changes speed alone."""


def decide(site: Site, arch: str, schedule: str = "auto", *, compiler: str = "") -> Decision:
    """Decide about `site`, from static facts alone: a plan, or the reason why no kernel can run it.

    Args:
        arch, compiler: as for `plan`.
        schedule: a schedule to prefer, or "auto".  Where the site cannot have it, the plan is the planner's own, and
            its `schedule_note` says why.
    """
    note = ""
    try:
        known = tables_of(arch)
        if not any(f.covers(site, known) for f in FAMILIES):
            return _why_not(site, known)
        if schedule != "auto":
            try:
                return plan(site, arch, schedule=schedule, compiler=compiler)
            except ArgumentError as error:
                note = f"the setting schedule={schedule!r} cannot be followed here: {error}"
        return replace(plan(site, arch, compiler=compiler), schedule_note=note)
    except DashError as error:  # an architecture without tables, or lengths that are too long
        return Kept(Reason.SCHEDULE_UNSUPPORTED, str(error))


def _why_not(site: Site, arch: str) -> Kept:
    dims = f"head dimension {site.head_dim}" + (
        "" if site.value_dim == site.head_dim else f", of value {site.value_dim}"
    )
    if any(f.covers_dims(site, arch) for f in FAMILIES):
        return Kept(Reason.MASK_UNSUPPORTED, f"{terms(site)} at {dims}")
    reason = Reason.HEAD_DIM if site.value_dim == site.head_dim else Reason.VALUE_DIM
    return Kept(reason, f"{dims}; there are {head_dims_in_words(site, arch)}")


def plan(site: Site, arch: str, schedule: str | None = None, *, compiler: str = "") -> Plan:
    """The plan for `site` on architecture `arch` ("sm_80", "sm_89", "sm_90", "sm_100" or "cpu").

    Args:
        schedule: take this schedule instead of choosing one; it must support the mask.
        compiler: what may change bits of the compiler (`toolchain.numerics`); part of the numerics key.

    An architecture of `SAME_AS` gets the plan of its relative, under a numerics key of its own.

    Raises:
        ArgumentError: no `Site`, an unknown architecture or schedule, a schedule that does not support the mask, or a
            site that no kernel covers.
    """
    if not isinstance(site, Site):
        raise ArgumentError("site", site, "a dash_inductor.model.Site")
    return made(site, arch, choose(site, arch, schedule), compiler=compiler)


@dataclass(frozen=True)
class Choice:
    """A choice for a site: a schedule with the tiles of a kernel family.

    Args:
        kernel: the name of the family.
        length: the critical path on the nominal problem.
    """

    schedule: str
    kernel: str
    candidate: Candidate
    length: float


def choose(site: Site, arch: str, schedule: str | None = None) -> Choice:
    """The choice for a site, with arguments and errors as for `plan`."""
    known = tables_of(arch)
    _check(site, arch, schedule)
    allowed = schedules_for(site) if schedule is None else (schedule,)
    named = schedule is not None
    return _choose(known, candidates(site, arch, named), site.band, allowed, named, site.likely_band)


def candidates(site: Site, arch: str, named: bool = False) -> tuple[tuple[str, Candidate], ...]:
    """The tiles to choose from at a site, with the names of their kernel families: those that are preferred first.

    Args:
        named: whether the schedule is named; what families leave was measured with the schedules that are chosen.
    """
    known = tables_of(arch)
    covering = [f for f in reversed(FAMILIES) if f.covers(site, known)]
    if not named:
        covering.sort(key=lambda f: f.leaves(site) is not None)
    return tuple((f.name, c) for f in covering for c in f.candidates(site, known))


def schedules_for(site: Site) -> tuple[str, ...]:
    """The schedules among which the planner chooses at a site, as far as they support its mask."""
    return UPWARD if site.mask.by_query else NAMES


def made(site: Site, arch: str, choice: Choice, *, compiler: str = "") -> Plan:
    """The plan that runs `choice` at a site that its kernels cover; arguments as for `plan`."""
    known = tables_of(arch)
    name, kernel, candidate = choice.schedule, choice.kernel, choice.candidate
    tf32 = site.allow_tf32 and site.dtype == "float32" and site.device == "cuda"
    forward = forward_of(site, known, kernel)
    section = _section(name, site, known, kernel, candidate)
    key = numerics_key(site, arch, kernel, name, candidate, forward, tf32)
    key += f"/{compiler}" if compiler else ""
    return Plan(
        kernel, name, forward.name, candidate.dkdv, candidate.dq, section, tf32, forward.tiles,
        critical_path=choice.length, numerics_key=key,
    )  # fmt: skip


def keeping(plan: Plan, operator: str) -> Plan:
    """The plan with the graph's own forward, the operator of this name, which its numerics key then names."""
    key = re.sub(r"/forward=[^/]*", f"/forward=keep:{operator}", plan.numerics_key)
    return replace(plan, forward="keep", forward_tiles=None, numerics_key=key)


def check_kind(site: Site, arch: str) -> None:
    """Raise ArgumentError unless the dtype of a site is known and the architecture is one of its device."""
    if (arch == "cpu") != (site.device == "cpu"):
        raise ArgumentError("arch", arch, "'cpu' exactly for sites on the cpu")
    if site.dtype not in BITS:
        raise ArgumentError("dtype", site.dtype, BITS)


def _check(site: Site, arch: str, schedule: str | None) -> None:
    check_kind(site, arch)
    for name, dim in (("head_dim", site.head_dim), ("value_dim", site.value_dim)):
        if dim < 8 or dim % 8:
            raise ArgumentError(name, dim, "a multiple of 8")
    known = tables_of(arch)
    if not any(f.covers_dims(site, known) for f in FAMILIES):
        dims = site.head_dim, site.value_dim
        raise ArgumentError("head_dim, value_dim", dims, head_dims_in_words(site, known))
    if not any(f.covers(site, known) for f in FAMILIES):
        raise ArgumentError("mask", terms(site), "a mask that kernels for these head dims read")
    for name, length in (("q_len", site.q_len), ("kv_len", site.kv_len)):
        if length is not None and length > MAX_LENGTH:
            raise ArgumentError(name, length, f"at most {MAX_LENGTH}")
    if site.kv_heads < 1 or site.q_heads < 1 or site.q_heads % site.kv_heads:
        raise ArgumentError("q_heads", site.q_heads, f"a multiple of kv_heads={site.kv_heads}")
    if schedule is not None:
        check_name(schedule)
        reason = supports(schedule, site.band)
        if reason is not None:
            raise ArgumentError("schedule", schedule, f"one that supports the mask {site.band}: {reason}")


@lru_cache(maxsize=256)
def _choose(
    arch: str,
    candidates: tuple[tuple[str, Candidate], ...],
    mask: Band,
    names: tuple[str, ...],
    named: bool,
    likely: Band | None,
) -> Choice:
    """The choice with the shortest critical path on the nominal problem, of the first family that has one.

    Args:
        candidates: the members of a family stand next to one another.
        names: the schedules to choose from; if `named`, the one that must be taken.
        likely: what kernels that walk by tables are planned for, where the mask has other terms than its band `mask`;
            else None.
    """
    able = [
        (index, name, kernel, candidate, walked_band(name, kernel, mask, likely))
        for index, ((kernel, candidate), name) in enumerate(itertools.product(candidates, names))
        if objection(name, kernel, candidate, mask, likely, named) is None
    ]
    options = [option for option in able if option[2] == able[0][2]]
    # Choices that must be simulated come last: their work alone nearly always exceeds the others' critical paths.
    options.sort(key=lambda option: must_be_simulated(option[1], option[3], option[4], arch))
    best: tuple[float, int, Choice] | None = None
    for index, name, kernel, candidate, walked in options:
        if best is not None and (work(name, candidate, walked, arch), index) > best[:2]:
            continue
        length = critical_path(name, candidate, walked, arch)
        if best is None or (length, index) < best[:2]:
            best = length, index, Choice(name, kernel, candidate, length)
    if best is None:
        raise ArgumentError("schedule", names[0], "one whose CTAs wait for earlier ones alone: the mask is data")
    return best[2]


def walked_band(name: str, kernel: str, mask: Band, likely: Band | None) -> Band:
    """The band for whose tile pairs a schedule is planned: `likely` for kernels that walk by tables, else `mask`."""
    by_tables = likely is not None and family(kernel).walks_by_tables and supports(name, likely) is None
    return likely if likely is not None and by_tables else mask


def objection(name: str, kernel: str, candidate: Candidate, mask: Band, likely: Band | None, named: bool) -> str | None:
    """Why a schedule is not considered with tiles of a kernel, in words; None where it is.

    Args:
        mask, likely, named: as for `_choose`.
    """
    if (name == "two_pass") != (candidate.dq is not None):
        return "the tiles are those of two passes" if candidate.dq is not None else "the tiles are those of one pass"
    reason = supports(name, mask)
    if reason is not None:
        return reason
    by_tables = likely is not None and family(kernel).walks_by_tables
    walked = likely if likely is not None and by_tables else mask
    if not named:
        reason = supports(name, walked)
        if reason is not None:
            return reason
        if name in CO_RESIDENT:
            return "its CTAs must all be resident at the same time; it runs only where it is named"
        if name == "descending":
            return "its CTAs begin at the same q tile and wait there, which its critical path does not show; named only"
    if by_tables and name in CO_RESIDENT:
        return "the mask is data: restricted to what is seen, its CTAs could wait for one another"
    return None


def _section(name: str, site: Site, arch: str, kernel: str, candidate: Candidate) -> int:
    length = NOMINAL_LEN if site.kv_len is None else site.kv_len
    if family(kernel).cta_per_query_head:
        longest = max(length, NOMINAL_LEN if site.q_len is None else site.q_len)
        longest = -(-longest // SEGMENTS) if site.mask.by_query else longest
        together = name == "ascending" or (site.band.is_window and not site.mask.by_query)
        return _fits_l2(site, longest, SIDE_BY_SIDE if together else 1)
    return launched_together(name, site.band, arch, -(-length // candidate.dkdv.block_kv))


def _fits_l2(site: Site, length: int, least: int) -> int:
    """Query heads whose q, do and fp32 dq fit the L2 cache together: every kv tile reads and adds to them.

    At least `least` of them, as far as there are so many.
    """
    heads = max(least, L2_BYTES // (8 * length * max(64, padded(site.head_dim))))
    if site.batch is not None:
        heads = min(heads, site.batch * site.q_heads)
    return 1 << (int(heads).bit_length() - 1)
