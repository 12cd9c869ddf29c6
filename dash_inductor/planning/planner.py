"""The planner: `decide` returns a plan for a site, or the reason for a fallback; `plan` raises instead.

Both are pure functions.  Bits may depend on dtype, head dim, heads, mask and architecture, but not on batch size or on
which lengths are static: a graph with dynamic lengths and one with static lengths must agree.  The kernel family is the
most specific one that covers the site (`kernels.families`).  Schedule and tiles are chosen among its candidates on a
fixed nominal problem (`nominal`): the shortest critical path wins; of equal ones, the earlier candidate.  Predictions
for the site itself (`prediction`) do not influence the choice.  Schedules that need co-resident CTAs, and `descending`,
run only if the program names them.  Masks with segments or an interval use only the schedules of `UPWARD`.

Lengths influence only `head_chunk`, the launch grouping, which never changes bits.
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
from ..model.plan import Decision, Fallback, Plan
from ..model.reasons import Reason
from ..model.site import BITS, NOMINAL_LEN, Site
from ..schedule.names import CO_RESIDENT, NAMES, check_name, supports
from .forward import forward_of
from .nominal import critical_path, launched_together, must_be_simulated, work
from .numerics import components, numerics_key

UPWARD = ("ascending", "spt", "two_pass")
"""The schedules for masks with segments or an interval.  Their tile schedules ascend: in descending ones, all kv tiles
of a document would begin at its last q tile, and wait there for one another."""

SIDE_BY_SIDE = 4
"""The least number of heads per head chunk if the CTAs of a head use less of the L2 cache than `_fits_l2` counts: under
`ascending`, where all start at the first q tile and advance together, and under windows, where the CTAs that run at the
same time visit only a part of the head.  This changes only speed."""

L2_BYTES = 20 << 20
"""The bytes of an H100's L2 cache (50 MB) that the heads of one head chunk may use; the next head chunk already needs
its share when the last CTAs of this one finish."""

SEGMENTS = 2
"""The number of documents assumed per sequence when head chunks are sized for the L2 cache; this changes only speed."""


def decide(site: Site, arch: str, schedule: str = "auto", *, compiler: str = "", split_kv: bool = True) -> Decision:
    """Returns the plan of a site, or the reason why no kernel can run it (`Fallback`).

    Args:
        site: the static properties of the site.
        arch, compiler, split_kv: as for `plan`.
        schedule: the schedule to use, or "auto".  If the site does not support it, the planner chooses another one,
            and `schedule_note` of the plan says why.
    """
    note = ""
    try:
        known = tables_of(arch)
        if not any(f.covers(site, known) for f in FAMILIES):
            return _why_not(site, known)
        if schedule != "auto":
            try:
                return plan(site, arch, schedule=schedule, compiler=compiler, split_kv=split_kv)
            except ArgumentError as error:
                note = f"the setting schedule={schedule!r} cannot be followed here: {error}"
        return replace(plan(site, arch, compiler=compiler, split_kv=split_kv), schedule_note=note)
    except DashError as error:  # an architecture without tables, or lengths that are too long
        return Fallback(Reason.SCHEDULE_UNSUPPORTED, str(error))


def _why_not(site: Site, arch: str) -> Fallback:
    dims = f"head dimension {site.head_dim}" + (
        "" if site.value_dim == site.head_dim else f", of value {site.value_dim}"
    )
    if any(f.covers_dims(site, arch) for f in FAMILIES):
        return Fallback(Reason.MASK_UNSUPPORTED, f"{components(site)} at {dims}")
    reason = Reason.HEAD_DIM if site.value_dim == site.head_dim else Reason.VALUE_DIM
    return Fallback(reason, f"{dims}; covered are {head_dims_in_words(site, arch)}")


def plan(site: Site, arch: str, schedule: str | None = None, *, compiler: str = "", split_kv: bool = True) -> Plan:
    """Returns the plan for a site: kernel families, schedule and tiles of the forward and the backward.

    Args:
        site: the static properties of the site.
        arch: the architecture, "sm_80", "sm_89", "sm_90", "sm_100" or "cpu".  An architecture of `SAME_AS` gets the
            plan of the one it maps to, under a numerics key of its own.
        schedule: the schedule to use, which must support the mask; None lets the planner choose.
        compiler: the compiler settings that may change bits, as text (`toolchain.numerics`), for the numerics key.
        split_kv: whether the forward may split the keys of few queries, see `Config.split_kv`.

    Raises:
        ArgumentError: `site` is not a `Site`, the architecture or schedule is unknown, the schedule does not support
            the mask, or no kernel covers the site.
    """
    if not isinstance(site, Site):
        raise ArgumentError("site", site, "a dash_inductor.model.Site")
    return made(site, arch, choose(site, arch, schedule), compiler=compiler, split_kv=split_kv)


@dataclass(frozen=True)
class Choice:
    """The planner's choice of a schedule, a kernel family and tiles for a site.

    Args:
        schedule: the name of the schedule.
        kernel: the name of the kernel family.
        candidate: its tile shapes and costs.
        length: the critical path on the nominal problem, in units of one 128 x 128 tile pair.
    """

    schedule: str
    kernel: str
    candidate: Candidate
    length: float


def choose(site: Site, arch: str, schedule: str | None = None) -> Choice:
    """The schedule, kernel family and tiles that the planner chooses for a site's backward.

    Arguments and errors are those of `plan`.
    """
    known = tables_of(arch)
    _check(site, arch, schedule)
    allowed = schedules_for(site) if schedule is None else (schedule,)
    named = schedule is not None
    return _choose(known, candidates(site, arch, named), site.band, allowed, named, site.likely_band)


def candidates(site: Site, arch: str, named: bool = False) -> tuple[tuple[str, Candidate], ...]:
    """The candidates for a site, each with the name of its kernel family; preferred families come first.

    Args:
        site, arch: as for `plan`.
        named: whether the program names the schedule.  If so, `Family.leaves` (sites that a family leaves to another
            one because it is slower there) is ignored, because it was measured with the schedules that are chosen.
    """
    known = tables_of(arch)
    covering = [f for f in reversed(FAMILIES) if f.covers(site, known)]
    if not named:
        covering.sort(key=lambda f: f.leaves(site) is not None)
    return tuple((f.name, c) for f in covering for c in f.candidates(site, known))


def schedules_for(site: Site) -> tuple[str, ...]:
    """The schedules that the planner considers for a site; not all of them may support its mask."""
    return UPWARD if site.mask.by_query else NAMES


def made(site: Site, arch: str, choice: Choice, *, compiler: str = "", split_kv: bool = True) -> Plan:
    """The plan that runs `choice` at a site, which its kernel family must cover; other arguments as for `plan`."""
    known = tables_of(arch)
    name, kernel, candidate = choice.schedule, choice.kernel, choice.candidate
    tf32 = site.allow_tf32 and site.dtype == "float32" and site.device == "cuda"
    forward = forward_of(site, known, kernel, split_kv)
    head_chunk = _head_chunk(name, site, known, kernel, candidate)
    key = numerics_key(site, arch, kernel, name, candidate, forward, tf32)
    key += f"/{compiler}" if compiler else ""
    return Plan(
        kernel, name, forward.name, candidate.dkdv, candidate.dq, head_chunk, tf32, forward.tiles,
        split_kv=forward.split_kv, critical_path=choice.length, numerics_key=key,
    )  # fmt: skip


def keeping(plan: Plan, operator: str) -> Plan:
    """The plan with the graph's own forward instead of ours; the numerics key then contains the forward's operator."""
    key = re.sub(r"/forward=[^/]*", f"/forward=keep:{operator}", plan.numerics_key)
    return replace(plan, forward="keep", forward_tiles=None, split_kv=True, numerics_key=key)


def check_kind(site: Site, arch: str) -> None:
    """Raises ArgumentError unless the site's dtype is supported and `arch` is "cpu" exactly for sites on the CPU."""
    if (arch == "cpu") != (site.device == "cpu"):
        raise ArgumentError("arch", arch, "'cpu' exactly for sites on the cpu")
    if site.dtype not in BITS:
        raise ArgumentError("dtype", site.dtype, BITS)


def _check(site: Site, arch: str, schedule: str | None) -> None:
    check_kind(site, arch)
    for name, dim in (("head_dim", site.head_dim), ("value_dim", site.value_dim)):
        if dim < 1:
            raise ArgumentError(name, dim, "at least 1")
    known = tables_of(arch)
    if not any(f.covers_dims(site, known) for f in FAMILIES):
        dims = site.head_dim, site.value_dim
        raise ArgumentError("head_dim, value_dim", dims, head_dims_in_words(site, known))
    if not any(f.covers(site, known) for f in FAMILIES):
        raise ArgumentError("mask", components(site), "a mask that kernels for these head dims read")
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
    """The choice with the shortest critical path on the nominal problem, within the first family that has a choice.

    Args:
        arch: an architecture with tables of its own.
        candidates: (family name, candidate) pairs; those of a family must be consecutive.
        mask: the band of the mask.
        names: the schedules to choose from; if `named`, the one that must be used.
        named: whether the program names the schedule.
        likely: the band for which kernels that read tile tables are planned, if the mask has components besides its
            band; else None.
    """
    able = [
        (index, name, kernel, candidate, scheduled_band(name, kernel, mask, likely))
        for index, ((kernel, candidate), name) in enumerate(itertools.product(candidates, names))
        if objection(name, kernel, candidate, mask, likely, named) is None
    ]
    options = [option for option in able if option[2] == able[0][2]]
    # Choices that need a simulation come last: their lower bound nearly always exceeds the others' critical paths.
    options.sort(key=lambda option: must_be_simulated(option[1], option[3], option[4], arch))
    best: tuple[float, int, Choice] | None = None
    for index, name, kernel, candidate, scheduled in options:
        if best is not None and (work(name, candidate, scheduled, arch), index) > best[:2]:
            continue
        length = critical_path(name, candidate, scheduled, arch)
        if best is None or (length, index) < best[:2]:
            best = length, index, Choice(name, kernel, candidate, length)
    if best is None:
        raise ArgumentError("schedule", names[0], "one whose CTAs wait for earlier ones alone: the mask is data")
    return best[2]


def scheduled_band(name: str, kernel: str, mask: Band, likely: Band | None) -> Band:
    """The band for which a schedule is planned: `likely` for kernels that read tile tables, else `mask`."""
    by_tables = likely is not None and family(kernel).tile_schedules_by_tables and supports(name, likely) is None
    return likely if likely is not None and by_tables else mask


def objection(name: str, kernel: str, candidate: Candidate, mask: Band, likely: Band | None, named: bool) -> str | None:
    """Why the planner does not consider a schedule with a candidate, in words; None if it does.

    Args:
        name: the schedule.
        kernel: the kernel family of the candidate.
        candidate: the tile shapes.
        mask, likely, named: as for `_choose`.
    """
    if (name == "two_pass") != (candidate.dq is not None):
        return "the tiles are those of two passes" if candidate.dq is not None else "the tiles are those of one pass"
    reason = supports(name, mask)
    if reason is not None:
        return reason
    by_tables = likely is not None and family(kernel).tile_schedules_by_tables
    scheduled = likely if likely is not None and by_tables else mask
    if not named:
        reason = supports(name, scheduled)
        if reason is not None:
            return reason
        if name in CO_RESIDENT:
            return "its CTAs must all be resident at the same time; it runs only where it is named"
        if name == "descending":
            return "its CTAs begin at the same q tile and wait there, which its critical path does not show; named only"
    if by_tables and name in CO_RESIDENT:
        return "the mask is data: restricted to what is seen, its CTAs could wait for one another"
    return None


def _head_chunk(name: str, site: Site, arch: str, kernel: str, candidate: Candidate) -> int:
    length = NOMINAL_LEN if site.kv_len is None else site.kv_len
    if family(kernel).cta_per_query_head:
        longest = max(length, NOMINAL_LEN if site.q_len is None else site.q_len)
        longest = -(-longest // SEGMENTS) if site.mask.by_query else longest
        together = name == "ascending" or (site.band.is_window and not site.mask.by_query)
        return _fits_l2(site, longest, SIDE_BY_SIDE if together else 1)
    return launched_together(name, site.band, arch, -(-length // candidate.dkdv.block_kv))


def _fits_l2(site: Site, length: int, least: int) -> int:
    """The number of query heads, a power of two, whose q, do (16-bit) and dq (fp32) fit into `L2_BYTES` together.

    Every kv tile reads q and do and adds to dq.  The result is at least `least`, unless the site has fewer heads.
    """
    heads = max(least, L2_BYTES // (8 * length * max(64, padded(site.head_dim))))
    if site.batch is not None:
        heads = min(heads, site.batch * site.q_heads)
    return 1 << (int(heads).bit_length() - 1)
