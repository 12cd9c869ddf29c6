"""The budget of the Hopper kernel, compiled without a GPU, and the order of instructions that its determinism needs."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import expecttest
import pytest

from dash_inductor.kernels.hopper.backward import build
from dash_inductor.kernels.hopper.shared.device import step_signals
from dash_inductor.model import Band

from ....support import kernel_code, sass
from ....support.cases import some
from ....support.hopper_builds import TILES, Built, Case, built
from ....support.triton_version import PINNED, TRITON
from .ptx import following

FULL, CAUSAL, WINDOW = Band(), Band(0), Band(0, 1023)
HALF = "float16"

# Every pair of head dims and every schedule, masks, dtypes, groups and ragged lengths spread over them.
SOON = [
    Case((64, 64), FULL, "ascending"),
    Case((64, 64), FULL, "shift", HALF, 4),
    Case((64, 64), CAUSAL, "bent_fold", HALF, 4, even_kv=False),
    Case((64, 64), CAUSAL, "symmetric_shift"),
    Case((64, 64), WINDOW, "descending", even_kv=False),
    Case((128, 128), FULL, "ascending", HALF, 4, even_kv=False),
    Case((128, 128), CAUSAL, "spt"),
    Case((128, 128), WINDOW, "spt", even_kv=False),
    Case((192, 128), CAUSAL, "spt", HALF),
    Case((192, 128), WINDOW, "spt", group=4, even_kv=False),
    Case((256, 256), CAUSAL, "spt", group=4),
    Case((256, 256), WINDOW, "descending", even_kv=False),
]
# If all tests are run: every pair of head dims with every schedule that it runs.
LATER = [
    Case((64, 64), CAUSAL, "spt"),
    Case((128, 128), FULL, "shift"),
    Case((128, 128), CAUSAL, "descending", HALF),
    Case((128, 128), WINDOW, "spt", group=4),
    Case((192, 128), FULL, "ascending"),
    Case((256, 256), FULL, "ascending", HALF),
]
CASES = [*SOON, *LATER]
cases = some(CASES, SOON)

SHARED_BYTES = 227 << 10
"""Shared memory that one CTA may have on sm_90."""

GROUP_ADD = r"(atom|red)\.global\.gpu\.relaxed\.add\.v4\.f32"
"""An add whose result nobody reads: from Triton 3.9 on it is spelt as such."""

EVENTS = {
    "acquire": r"ld\.acquire\.gpu",
    "proxy fence": r"fence\.proxy\.async;",
    "store": r"cp\.async\.bulk\.tensor\S*\.global\.shared::cta",
    "reduce": r"cp\.reduce\.async\.bulk\.tensor\S*\.global\.shared::cta\.add",
    "read": r"cp\.async\.bulk\.wait_group\.read 0",
    "buffer free": r"mbarrier\.arrive\.shared",
    "group": rf"(st|ld)\.global\.(cg\.)?v4|{GROUP_ADD}",
    "warps meet": r"bar\.sync 0, 256",
    "performed": r"cp\.async\.bulk\.wait_group 0",
    "lanes meet": r"bar\.warp\.sync 0xffffffff",
    "release": r"st\.release\.gpu",
}
ORDER = {
    "acquire": {"proxy fence"},
    "proxy fence": {"store", "reduce"},
    "store": {"read"},
    "reduce": {"read"},
    "read": {"buffer free"},
    "buffer free": {"performed"},
    "performed": {"lanes meet"},
    "lanes meet": {"release"},
}
"""Note [Ordered accumulation on Hopper] as instructions: after each, the only ones that may be next."""

GROUP_ORDER = ORDER | {
    "proxy fence": {"store", "reduce", "buffer free"},
    "buffer free": {"performed", "acquire", "end"},
    "group": {"warps meet"},
    "warps meet": {"release"},
}
"""With the way of grouped heads' dk and dv: the producer waits for their semaphore and arrives at a barrier; the
consumers, who wait there, load, store and add, meet at their own barrier, and release."""


def order(ptx: str) -> dict[str, set[str]]:
    found = following(ptx, EVENTS, "acquire", "release") | following(ptx, EVENTS, "group", "release")
    return {name: after - {name} for name, after in found.items()}  # a tile is stored or added in several pieces


def is_ordered(ptx: str, group: int) -> bool:
    """Whether a kernel has the order of its kind; Triton 3.9 lets another instruction of grouped heads be the last."""
    found = order(ptx)
    if group == 1:
        return found == ORDER
    return found | {"buffer free": found.get("buffer free", set()) | {"end"}} == GROUP_ORDER


@cases
def test_fits(case: Case) -> None:
    """Shared memory, registers, no matrix instruction made to wait, spills, barriers."""
    used = built(case)
    assert used.shared_memory <= SHARED_BYTES
    assert used.report.registers <= 168  # times 384 threads; the roles hand theirs over with setmaxnreg
    assert not used.report.serialised
    assert used.loops.count == case.step_texts
    spilled, in_loop = spill_bounds(case)
    assert max(used.report.spill_stores, used.report.spill_loads) <= spilled, str(used)
    assert used.loops.spills <= in_loop, str(used)
    assert used.loops.barriers == case.barriers, "Triton lets warps meet where it is not sure"


def test_barriers_of_a_loop_are_counted() -> None:
    """Only barriers at which warps wait count, and none that stand before the loop."""
    lines = "BAR.SYNC 0x0", "HGMMA R8, gdesc[UR4]", "BAR.SYNC 0x0, 0x100", "BAR.ARV R1, 0x120", "@P0 BRA 0x10", "EXIT"
    text = "".join(f"/*{16 * i:04x}*/ {line} ;\n" for i, line in enumerate(lines))
    assert sass.matmul_loops(text) == sass.MatmulLoops(count=1, spills=0, spills_of_branches=0, barriers=1)


def spill_bounds(case: Case) -> tuple[int, int]:
    """Spilled bytes per thread, and spill instructions that every step runs: of scalars, never of tiles.

    Values that live from tile schedule to tile schedule, and are nothing to a step, are spilled once for every tile
    schedule.

    A step has over a thousand instructions, and an accumulator hundreds of bytes per thread: with these bounds none is
    spilled.  With head dims of 192 and 128, dk and dv alone take 160 of 240 registers.
    """
    if case.dims == (256, 256) or (case.mask.is_full and case.dims == (128, 128)):
        return (52 if TRITON >= (3, 9) else 40), 0  # between the tile schedules
    if case.dims == (192, 128):
        return (120, 8) if case.mask.is_full else (160, 30)
    if case.group > 1 and case.dims == (128, 128):
        return 16, 0  # between the tile schedules
    if case.step_texts > 1:
        return 64, 6  # two addresses in a step
    return 0, 0


@PINNED
def test_pinned() -> None:
    expecttest.assert_expected_inline(
        "\n".join(f"{case}: {built(case)}" for case in SOON),
        """\
64/64 full ascending bfloat16 group 1: registers 168, spilled 0/0, shared 199164, in loops 0+0
64/64 full shift float16 group 4: registers 168, spilled 0/0, shared 199212, in loops 0+0
64/64 causal bent_fold float16 group 4 ragged: registers 168, spilled 12/28, shared 199244, in loops 0+0
64/64 causal symmetric_shift bfloat16 group 1: registers 168, spilled 28/44, shared 199212, in loops 2+0
64/64 band(0,1023) descending bfloat16 group 1 ragged: registers 168, spilled 12/16, shared 199212, in loops 0+0
128/128 full ascending float16 group 4 ragged: registers 168, spilled 4/8, shared 214604, in loops 0+0
128/128 causal spt bfloat16 group 1: registers 168, spilled 0/0, shared 214572, in loops 0+0
128/128 band(0,1023) spt bfloat16 group 1 ragged: registers 168, spilled 0/0, shared 214572, in loops 0+0
192/128 causal spt float16 group 1: registers 168, spilled 100/132, shared 231004, in loops 8+4
192/128 band(0,1023) spt bfloat16 group 4 ragged: registers 168, spilled 104/128, shared 231052, in loops 8+2
256/256 causal spt bfloat16 group 4: registers 168, spilled 12/28, shared 214184, in loops 0+0
256/256 band(0,1023) descending bfloat16 group 1 ragged: registers 168, spilled 8/8, shared 214168, in loops 0+0""",
    )


@PINNED
@pytest.mark.full
def test_others_are_pinned() -> None:
    expecttest.assert_expected_inline(
        "\n".join(f"{case}: {built(case)}" for case in LATER),
        """\
64/64 causal spt bfloat16 group 1: registers 168, spilled 8/8, shared 199212, in loops 0+0
128/128 full shift bfloat16 group 1: registers 168, spilled 0/0, shared 214524, in loops 0+0
128/128 causal descending float16 group 1: registers 168, spilled 0/0, shared 214572, in loops 0+0
128/128 band(0,1023) spt bfloat16 group 4: registers 168, spilled 0/0, shared 214604, in loops 0+0
192/128 full ascending bfloat16 group 1: registers 168, spilled 92/100, shared 230972, in loops 6+0
256/256 full ascending float16 group 1: registers 168, spilled 0/0, shared 214028, in loops 0+0""",
    )


@PINNED
@cases
def test_code_is_that_of_the_golden_file(case: Case) -> None:
    """A change that should not touch this kernel does not; one that should rewrites the file, see `kernel_code`."""
    assert kernel_code.digest(built(case).ptx) == kernel_code.golden()[str(case)]


@cases
def test_adds_are_ordered(case: Case) -> None:
    assert is_ordered(built(case).ptx, case.group)


@cases
def test_kernels_overlap_in_order(case: Case) -> None:
    """`finish` may start only after `prepare` has ended: else it could meet the semaphores of the call before."""
    assert dependent_launches(built(case).ptx) == ["wait", "launch_dependents"]
    assert built(case).starts_early is (build.Kernels(case.specialisation()).schedule.resident is None)


def barriers_of_triton(ptx: str) -> set[int]:
    """The numbers of the named barriers that Triton itself uses, which it writes as they are."""
    return {int(number) for number in re.findall(r"\bbar(?:rier)?(?:\.cta)?\.\w+(?:\.aligned)?\s+(\d+)", ptx)}


@pytest.mark.parametrize("stamped", [False, True], ids=["plain", "stamped"])
@cases
def test_named_barriers_are_not_those_of_triton(case: Case, stamped: bool) -> None:
    """The barriers of signals have their numbers in registers; consumers arrive at each kind in one place of a step."""
    ptx = built(replace(case, stamped=stamped)).ptx
    assert 0 in barriers_of_triton(ptx), "that of the consumers"
    assert max(barriers_of_triton(ptx)) < step_signals.DQ_COMPLETE.value
    assert len(re.findall(r"barrier\.cta\.arrive\s+%r\d+, %r\d+;", ptx)) == (2 + stamped) * case.step_texts


def test_named_barriers_are_apart() -> None:
    first = [
        step_signals.DQ_COMPLETE.value,
        step_signals.ROOM.value,
        step_signals.NOTED.value,
        16,
    ]  # of which the hardware has 16
    assert all(end - number >= step_signals.MOST_STAGES for number, end in itertools.pairwise(first))


def test_barriers_of_triton_are_seen() -> None:
    ptx = "bar.sync \t0, 256; barrier.sync \t9; bar.warp.sync \t-1; barrier.cta.sync %r1, %r2; barrier.cta.arrive 3, 9;"
    assert barriers_of_triton(ptx) == {0, 9, 3}


def dependent_launches(ptx: str) -> list[str]:
    return re.findall(r"griddepcontrol\.(\w+) ?;", ptx)


@cases
def test_warps_trade_registers(case: Case) -> None:
    """The roles get fewer registers than they were launched with, the consumers more."""
    ptx = built(case).ptx
    counts = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
    assert counts == {build.BACKWARD_CONFIGS[build.tile_dims(*case.dims)].registers, 240}
    assert "wgmma.mma_async" in ptx
    assert "wait_group.read" in ptx


def test_every_variant_has_cases() -> None:
    assert (
        {build.tile_dims(*case.dims) for case in SOON}
        == set(build.BACKWARD_CONFIGS)
        == {build.tile_dims(*d) for d in TILES}
    )
    assert {case.schedule for case in SOON} == {case.schedule for case in CASES}


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (256, 256)], ids=str)
def test_prepare_and_finish(dims: tuple[int, int]) -> None:
    kernels = build.Kernels(Case(dims, CAUSAL, "spt", HALF, 4).specialisation())
    for compile in (lambda: kernels.prepare, lambda: kernels.finish):
        _, report = sass.compile_with_report(compile)
        assert max(report.spill_stores, report.spill_loads) <= 8  # they stream: 8 bytes cost nothing
    assert dependent_launches(kernels.prepare.asm["ptx"]) == ["launch_dependents"]
    assert not kernels.prepare.metadata.launch_pdl  # it resets what the call before may still use
    assert dependent_launches(kernels.finish.asm["ptx"]) == ["wait"]
    assert kernels.finish.metadata.launch_pdl


@pytest.fixture(scope="module")
def sample() -> Built:
    return built(SOON[0])


@cases
def test_one_thread_releases(case: Case) -> None:
    """One thread of each reducer, a warp, and of the consumers: a second could be late, and set a semaphore back."""
    ptx = built(case).ptx
    releases = [line.split() for line in ptx.splitlines() if "st.release.gpu" in line]
    assert all(words[0] == "@%first" for words in releases)
    assert first_threads(ptx) == ["%laneid"] * TILES[case.dims].num_stages + ["%tid.x"] * (case.group > 1)
    assert len(releases) == len(first_threads(ptx))


def first_threads(ptx: str) -> list[str]:
    """The registers that releases compare with zero, sorted."""
    blocks = [block for block in re.findall(r"\{[^{}]*\}", ptx) if "st.release.gpu" in block]
    return sorted(name for block in blocks for name in re.findall(r"mov\.u32\s+%\w+, (%laneid|%tid\.x);", block))


def test_the_order_of_groups_can_fail() -> None:
    """Members of a group that release before all warps have added are seen."""
    case = next(case for case in SOON if case.group > 1)
    lines = built(case).ptx.splitlines()
    adds = [i for i, line in enumerate(lines) if re.search(GROUP_ADD, line)]
    barrier = next(i for i in range(adds[-1], len(lines)) if "bar.sync" in lines[i])
    del lines[barrier]
    assert order("\n".join(lines)) != GROUP_ORDER


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"cp\.async\.bulk\.wait_group 0;", ""),
        (r"(cp\.async\.bulk\.wait_group) 0;", r"\1.read 0;"),
        (r"(bar\.warp\.sync 0xffffffff;)((.|\n)*?)(@%first st\.release\.gpu\S* \S+ \S+;)", r"\4\2\1"),
        (r"fence\.proxy\.async;", ""),
        (r"bar\.warp\.sync 0xffffffff;", ""),
    ],
    ids=["no completion", "only read", "release before the lanes meet", "no proxy fence", "lanes do not meet"],
)
def test_the_order_test_can_fail(sample: Built, old: str, new: str) -> None:
    text, count = re.subn(old, new, sample.ptx)
    assert count >= 1
    assert order(text) != ORDER


def test_serialised_matrix_instructions_are_seen() -> None:
    log = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    assert sass.serialisations(log)
    assert not sass.serialisations("ptxas info    : Used 168 registers, used 1 barriers")
