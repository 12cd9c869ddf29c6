"""The Hopper kernel with stamps: simulated roles write the right times and change nothing else; the kernels fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import expecttest
import pytest

from dash_inductor.kernels.hopper.shared.device import operations, step_signals
from dash_inductor.model import Band

from ....support.cases import some
from ....support.hopper_builds import TILES, Case, built
from ....support.hopper_glue import Fault, Pointer, Simulation
from ....support.triton_version import PINNED
from .test_budgets import HALF, SHARED_BYTES, dependent_launches, is_ordered
from .test_data_glue import DataExpected, DataLaunch, visible_tile_schedules
from .test_glue import (
    BLOCK_Q,
    EMPTY_FIRST,
    FLAGSHIP,
    GROUPED_PAIRS,
    Expected,
    Launch,
    TileSchedules,
    check,
    in_two_parts,
    tile_schedules_of,
)

DATA = DataLaunch((128, 128), 2, "spt", Band(0), 100, 100, 2, batch=2, kinds=("left padding", "packed"))
PAIRS = Launch((192, 128), 1, "symmetric_shift", Band(0), 100, 100, batch=2)
LAUNCHES = [replace(launch, stamped=True) for launch in (FLAGSHIP, PAIRS, GROUPED_PAIRS, DATA)]
EMPTY_PART = replace(EMPTY_FIRST, stamped=True)


def stamps_of(launch: Launch, simulation: Simulation) -> dict[tuple[int, int, int], list[int]]:
    """The numbers of each entry that was written, by query head among all of the batch, kv tile, entry."""
    work, found = launch.tables, dict[tuple[int, int, int], list[int]]()
    for pointer, number in sorted(simulation.stamps.items(), key=lambda item: item[0].offset):
        assert pointer.name == "stamps"
        rest, entry = divmod(pointer.offset // 4, 1 + work.n_q)
        place = (*divmod(rest, work.n_kv), entry)
        found.setdefault(place, []).append(number)
        assert len(found[place]) == pointer.offset % 4 + 1
    return found


def check_stamps(
    launch: Launch, simulation: Simulation, tile_schedules: TileSchedules, heads: int | None = None
) -> None:
    """Every step of the first `heads` query heads has its four times, and no other pair of tiles has any."""
    found, expected = stamps_of(launch, simulation), Expected(launch)
    rows = BLOCK_Q * expected.columns // operations.DQ_ROW.value
    said = {
        work_id: [t for n, t in all_ if n >= step_signals.NOTED.value] for work_id, all_ in simulation.arrived.items()
    }
    issued: dict[tuple[int, int], list[int]] = {}  # by work id and q tile
    for store in simulation.stores:
        if store.descriptor == "dq_desc" and store.coordinates[0] % rows == 0:
            issued.setdefault((store.work_id, store.coordinates[0] // rows), []).append(store.time)
    for (b, q_head, kv), (work_id, column) in tile_schedules.items():
        head, before = b * launch.tables.heads + q_head, 0
        if not column.steps or (heads is not None and head >= heads):
            continue
        assert found.pop((head, kv, 0)) == [work_id, 1000 + simulation.taken[work_id]]
        for q, rank in column.steps:
            tile = expected.tile_index(b, q_head, q)
            start, wait, added, end = found.pop((head, kv, 1 + q))
            assert before < start < wait
            assert wait > max(said[work_id].pop(0), said[work_id].pop(0)), "both warpgroups have said so"
            assert issued[work_id, tile].pop(0) < added < end
            assert end > simulation.passed[Pointer("semaphores", tile), rank]
            before = wait
    assert not found


def tile_schedules(launch: Launch) -> TileSchedules:
    return visible_tile_schedules(launch) if isinstance(launch, DataLaunch) else tile_schedules_of(launch)


@pytest.mark.parametrize("how", [{"late": True}, {"seed": 1, "ctas": 2}, {"seed": 2}], ids=str)
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_times_of_every_step(launch: Launch, how: dict[str, Any]) -> None:
    """All that goes to global memory is what the tables want, too, as without stamps."""
    simulation = launch.run(**how)
    expected = DataExpected(launch) if isinstance(launch, DataLaunch) else None
    check(launch, simulation, tile_schedules(launch), expected)
    check_stamps(launch, simulation, tile_schedules(launch))


def test_a_part_without_steps() -> None:
    schedule, found = in_two_parts(EMPTY_PART)
    simulation = EMPTY_PART.run(schedule, {"PARTS": 2}, seed=1)
    check(EMPTY_PART, simulation, found)


@pytest.mark.parametrize("heads", [0, 1, 3])
def test_heads_without_room_are_not_stamped(heads: int) -> None:
    launch = LAUNCHES[0]
    simulation = launch.run(stamped_heads=heads)
    check(launch, simulation, tile_schedules(launch))
    check_stamps(launch, simulation, tile_schedules(launch), heads)


WAITS, AGAIN, WRONG = "everybody waits", "again before the others", ""
ADD = """            _accumulate(dq_desc, row, shared.dq.index(stage), rank)
            if TAIL_ROWS > 0:
                _accumulate(dq_desc, row + ROWS, shared.dq_tail.index(stage), rank)
"""
ADDED = "            added = stamps.now()\n"
PASSED = "            release_semaphore(semaphores + tile, rank)\n"
END = "            stamps.write(work, kv, 1 + tile_schedule.q_tile(packed_tile), 2, added, stamps.now())\n"
DONE = "            wait_for_signal(shared, NOTED, it, shared.CONSUMERS)\n"
NOTED = "mbarrier.arrive(stamps.noted.index(stage), count=1)"
WAIT = "            wait = stamps.now()\n"
TOLD = f"            {NOTED}\n"
CONTROLS = {
    "a step refilled before it is stamped": (AGAIN, "    stamps.wait_until_noted(it)", "    pass"),
    "the producer is not told": (WAITS, NOTED, "pass"),
    "wait before the consumers are done": (AGAIN, DONE, ""),
    "wait before listening": (WRONG, DONE + TOLD + WAIT, WAIT + DONE + TOLD),
    "one number for room and stamper": (AGAIN, "NOTED = gl.constexpr(12)", "NOTED = gl.constexpr(10)"),
    "added before the add": (WRONG, ADD + ADDED, ADDED + ADD),
    "end before the semaphore is released": (WRONG, PASSED + END, END + PASSED),
    "times of another tile": (
        "stamped twice",
        "1 + tile_schedule.q_tile(packed_tile), 0, start, wait",
        "1, 0, start, wait",
    ),
    "times of another head": (
        "stamped twice",
        "work.batch * work.q_heads + work.q_head()\n        n_kv",
        "work.head\n        n_kv",
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_faults_are_seen(control: str) -> None:
    """With one line changed for the worse, one of six orders of events shows it at least."""
    fault, old, new = CONTROLS[control]
    launch, messages = LAUNCHES[0], list[str]()
    for seed in range(6):
        try:
            simulation = launch.run(seed=seed, edits=((old, new),))
            check(launch, simulation, tile_schedules(launch))
            check_stamps(launch, simulation, tile_schedules(launch))
            messages.append("no fault")
        except Fault as error:
            messages.append(str(error))
        except (AssertionError, KeyError):
            messages.append(WRONG)
        if messages[-1] == fault or (fault and fault in messages[-1]):
            return
    pytest.fail(str(messages))


FULL, CAUSAL = Band(), Band(0)
SOON = [
    Case((64, 64), CAUSAL, "symmetric_shift"),
    Case((128, 128), CAUSAL, "bent_fold"),
    Case((128, 128), CAUSAL, "bent_fold", segment_ids=True, dense=True),
    Case((256, 256), CAUSAL, "spt", group=4),
]
LATER = [
    Case((64, 64), CAUSAL, "bent_fold", HALF, 4, even_kv=False),
    Case((128, 128), FULL, "ascending"),
    Case((128, 128), CAUSAL, "spt", group=4, segment_ids=True, varlen=True),
    Case((128, 128), CAUSAL, "bent_fold", dropout=True),
    Case((192, 128), CAUSAL, "spt"),
]
CASES = [*SOON, *LATER]
cases = some(CASES, SOON)


@cases
def test_fits(case: Case) -> None:
    """With the threads and spills of the kernel without stamps: the spills are the consumers', who do not stamp."""
    used, plain = built(replace(case, stamped=True)), built(case)
    assert used.shared_memory <= SHARED_BYTES
    assert used.report.registers == plain.report.registers
    assert not used.report.serialised
    assert used.loops.count == plain.loops.count
    assert max(used.report.spill_stores, used.report.spill_loads) <= plain.report.spill_loads + 64, str(used)
    assert used.loops.spills <= plain.loops.spills + 4, str(used)
    threads = re.compile(r"\.reqntid \d+")
    assert threads.findall(used.ptx) == threads.findall(plain.ptx) != []


@cases
def test_the_order_is_the_same(case: Case) -> None:
    ptx = built(replace(case, stamped=True)).ptx
    if case.varlen:  # stores of parts of tiles are no stores of sums
        ptx = re.sub(r"@%p\d+ st\.global\.v4\.b32", "", ptx)
    assert is_ordered(ptx, case.group)
    assert dependent_launches(ptx) == ["wait", "launch_dependents"]


FLOATING = re.compile(r"\b(?:\w+\.[\w.:]*(?:f32|f16|bf16)[\w.:]*|wgmma\.mma_async\S*|cp\.reduce\S*)")


@cases
def test_the_arithmetic_is_the_same(case: Case) -> None:
    """The same instructions on floating-point numbers in the same order, so that no bit depends on stamps."""
    plain, used = (FLOATING.findall(built(replace(case, stamped=stamped)).ptx) for stamped in (False, True))
    assert len(plain) > 200
    assert used == plain


@cases
def test_who_looks_at_the_clock(case: Case) -> None:
    """The stamper twice, and every reducer; without stamps nobody."""
    reducers = min(TILES[case.dims].num_stages, 2)
    stamped = built(replace(case, stamped=True)).ptx
    assert stamped.count("%globaltimer") == 2 * (1 + reducers)
    assert not re.search(r"%globaltimer|%clock|%smid", built(case).ptx)


@PINNED
def test_pinned() -> None:
    expecttest.assert_expected_inline(
        "\n".join(f"{case}: {built(replace(case, stamped=True))}" for case in SOON),
        """\
64/64 causal symmetric_shift bfloat16 group 1: registers 168, spilled 56/92, shared 199244, in loops 2+0
128/128 causal bent_fold bfloat16 group 1: registers 168, spilled 0/0, shared 214604, in loops 0+0
128/128 causal bent_fold bfloat16 group 1 segments dense: registers 168, spilled 44/76, shared 214668, in loops 0+0
256/256 causal spt bfloat16 group 4: registers 168, spilled 20/40, shared 214200, in loops 0+0""",
    )


@PINNED
@pytest.mark.full
def test_others_are_pinned() -> None:
    expecttest.assert_expected_inline(
        "\n".join(f"{case}: {built(replace(case, stamped=True))}" for case in LATER),
        """\
64/64 causal bent_fold float16 group 4 ragged: registers 168, spilled 12/32, shared 199292, in loops 0+0
128/128 full ascending bfloat16 group 1: registers 168, spilled 0/0, shared 214572, in loops 0+0
128/128 causal spt bfloat16 group 4 segments varlen: registers 168, spilled 44/80, shared 215260, in loops 0+0
128/128 causal bent_fold bfloat16 group 1 dropout: registers 168, spilled 24/36, shared 214604, in loops 2+0
192/128 causal spt bfloat16 group 1: registers 168, spilled 108/116, shared 231052, in loops 7+1""",
    )
