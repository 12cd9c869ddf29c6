"""Producer, consumers and reducers of the Hopper kernel, run as plain Python for every CTA, against the tables."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.hopper.backward import build
from dash_inductor.kernels.hopper.shared import tensors
from dash_inductor.kernels.hopper.shared.device import operations, step_signals
from dash_inductor.model import Band, Tiles
from dash_inductor.schedule import Problem
from dash_inductor.schedule.jobs import Column, scheduled_query_heads, tables
from dash_inductor.schedule.schedules import NAMES, supports
from dash_inductor.schedule.tile_schedule import ClosedForm, functions

from ....support.calls import traits_of
from ....support.hopper_glue import (
    Descriptor,
    DType,
    Fault,
    Pointer,
    Simulation,
    Store,
    changed,
    grouped,
    python_functions,
)

BLOCK_Q, BLOCK_KV = 32, 16
STAGES = [((64, 64), 2), ((128, 128), 2), ((192, 128), 1), ((192, 128), 2), ((256, 256), 1), ((256, 256), 2)]
"""Head dims of q and of v, stages.  A step that holds the S of the next one in flight needs two."""

MASKS = [
    (Band(), 70, 45),
    (Band(0), 100, 100),
    (Band(0), 40, 90),  # the last kv tiles are empty
    (Band(0, None, "bottom_right"), 100, 50),
    (Band(0, 40), 120, 70),
    (Band(-35, -20), 50, 90),  # kv tiles at both ends are empty
    (Band(None, -20), 70, 64),  # the first kv tile is empty
    (Band(-9), 33, 64),
]
SCHEDULES = [name for name in NAMES if name != "two_pass"]


@dataclass(frozen=True)
class Launch:
    """A launch of the main kernel, and what its schedule's tables say of it."""

    dims: tuple[int, int]
    stages: int
    schedule: str
    mask: Band
    q_len: int
    kv_len: int
    group: int = 1
    kv_heads: int = 2
    batch: int = 1
    stamped: bool = False
    bounded: bool = False

    def __str__(self) -> str:
        heads = f"{self.batch} x {self.kv_heads} groups of {self.group}"
        of = f"{self.dims} {self.stages} {self.schedule} {self.mask} {self.q_len}x{self.kv_len}"
        return f"{of} {heads}{' bounded' * self.bounded}"

    @property
    def tables(self) -> Problem:
        heads = self.kv_heads * self.group
        return Problem(self.mask, self.q_len, self.kv_len, BLOCK_Q, BLOCK_KV, self.batch, heads, head_chunk=3)

    @property
    def co_resident(self) -> bool:
        return ClosedForm(self.schedule, self.tables).co_resident

    def specialisation(self) -> build.Specialisation:
        tiles = Tiles(BLOCK_Q, BLOCK_KV, 8, self.stages)
        even = self.kv_len % BLOCK_KV == 0
        return build.Specialisation(
            "bfloat16",
            *self.dims,
            self.group,
            self.schedule,
            traits_of(self.mask, softcap=self.bounded),
            even,
            tiles,
            self.stamped,
        )

    def constants(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Compile-time constants and types of the kernel's arguments, as `build` has them."""
        found: list[tuple[dict[str, Any], dict[str, Any]]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                build, "compile_kernel", lambda _f, _s, constants, types, *_: found.append((constants, types))
            )
            _ = build.Kernels(self.specialisation()).main
        return found[0]

    def data_arguments(self) -> dict[str, dict[str, Any]]:
        """The groups of arguments about a mask that is data."""
        return {}

    def run(
        self, schedule: SimpleNamespace | None = None, constants: dict[str, Any] | None = None,
        stamped_heads: int | None = None, ctas: int | None = None, **how: Any,
    ) -> Simulation:  # fmt: skip
        """Simulated with its schedule's functions and the constants of the build, or with others.

        Args:
            stamped_heads: how many query heads are stamped; by default all of a stamped launch.
            ctas: one for each work id by default, and always where the schedule needs that.
        """
        values, types = self.constants()
        f, work = schedule or functions(self.schedule, self.tables), self.tables
        functions_of = python_functions(values["SCHEDULE"], f)
        values = changed(values, **(functions_of | (constants or {})))
        lo, hi = work.bounds
        work_ids = self.batch * work.heads * f.dash_ctas_per_head(*work.tail())
        workspace = {name: Pointer(name) for name in ("semaphores", "group_sums", "group_semaphores")}
        groups = self.data_arguments() | {
            "workspace": workspace | {"work_id_ptr": Pointer("work_id")},
            "problem": {
                "work_ids": work_ids, "batch": self.batch, "q_heads": work.heads, "q_len": self.q_len,
                "kv_len": self.kv_len, "lo": lo, "hi": hi, "head_chunk": work.head_chunk, "scale": 1.0,
                "scale_log2": 1.0,
            },
        }  # fmt: skip
        if self.stamped:
            stamped = self.batch * work.heads if stamped_heads is None else stamped_heads
            groups |= {"stamped": {"pointer": Pointer("stamps"), "heads": stamped}}
        if self.bounded:
            groups |= {"bound": {"slope": 1.0}}
        arguments = grouped(types, **groups)
        for name, text in types.items():
            match = re.match(r"tensordesc<(\w+)\[([\d, ]+)\]", text) if isinstance(text, str) else None
            if match:
                shape = tuple(map(int, match[2].split(",")))
                arguments[name] = Descriptor(name, shape, DType(32 if match[1] == "fp32" else 16))
        if ctas is None or self.co_resident:
            ctas = work_ids
        simulation = Simulation(values, arguments, ctas, **{"resident": ctas, **how})
        simulation.run()
        return simulation


class Expected:
    """The operands from which every product must have been computed, by tags of TMA copies."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.work = launch, launch.tables
        self.columns, self.value_columns = build.tile_dims(*launch.dims)
        self.halves = build.BACKWARD_CONFIGS[self.columns, self.value_columns].pieces
        seen = [
            (i, j)
            for i, j in itertools.product(range(launch.q_len), range(launch.kv_len))
            if launch.mask.visible(i, j, launch.q_len, launch.kv_len)
        ]
        self.first_row, self.first_key = min(i for i, _ in seen), min(j for _, j in seen)

    def _rows(self, name: str, b: int, head: int, row: int, columns: int) -> set[Any]:
        return {(name, b, head, row, column) for column in range(0, columns, 64)}

    def keys(self, b: int, q_head: int, kv: int) -> tuple[set[Any], set[Any]]:
        """K and V of a kv tile."""
        place = b, q_head // self.launch.group, kv * BLOCK_KV - self.first_key
        return self._rows("k_desc", *place, self.columns), self._rows("v_desc", *place, self.value_columns)

    def queries(self, b: int, q_head: int, q: int, half: int) -> tuple[set[Any], set[Any]]:
        """Q with the log-sum-exp, dO with delta, of a piece of a q tile."""
        offset = half * BLOCK_Q // self.halves
        row, flat = q * BLOCK_Q + offset - self.first_row, self.tile_index(b, q_head, q) * BLOCK_Q + offset
        q_rows = self._rows("q_desc", b, q_head, row, self.columns)
        do_rows = self._rows("do_desc", b, q_head, row, self.value_columns)
        return q_rows | {("lse_desc", flat)}, do_rows | {("delta_desc", flat)}

    def tile_index(self, b: int, q_head: int, q: int) -> int:
        return (b * self.work.heads + q_head) * self.work.n_q + q

    def masked(self, b: int, q: int, kv: int, half: int) -> set[Any]:
        """The mask of a piece of a tile pair, if it is cut."""
        _, full_first, full_end, _ = functions(self.launch.schedule, self.work).dash_q_range(kv, *self.work.tail())
        return set() if full_first <= q < full_end else self.band(q, kv, half)

    def band(self, q: int, kv: int, half: int) -> set[Any]:
        return {("band", q * BLOCK_Q + half * BLOCK_Q // self.halves, kv * BLOCK_KV)}

    def dv_terms(self, b: int, q_head: int, column: Column) -> list[set[Any]]:
        terms = []
        for q, _ in column.steps:
            for half in range(self.halves):
                queries, others = self.queries(b, q_head, q, half)
                others = {tag for tag in others if tag[0] == "do_desc"}
                masked = self.masked(b, q, column.kv, half)
                terms.append(self.keys(b, q_head, column.kv)[0] | queries | others | masked)
        return terms

    def dk_terms(self, b: int, q_head: int, column: Column) -> list[set[Any]]:
        return [
            set().union(
                *self.keys(b, q_head, column.kv), *self.queries(b, q_head, q, half), self.masked(b, q, column.kv, half)
            )
            for q, _ in column.steps
            for half in range(self.halves)
        ]

    def dq_terms(self, b: int, q_head: int, q: int, kv: int) -> list[set[Any]]:
        pieces = [self.queries(b, q_head, q, half) for half in range(self.halves)]
        masked = (self.masked(b, q, kv, half) for half in range(self.halves))
        return [set().union(*self.keys(b, q_head, kv), *itertools.chain(*pieces), *masked)]


def tags(parts: Any) -> set[Any]:
    """The tags that something was computed from."""
    if parts and isinstance(parts[0], str):
        return {parts}
    return set().union(*(tags(part) for part in parts))


def terms(parts: tuple[Any, ...]) -> list[set[Any]]:
    """The tags of each matmul of a sum, without those whose left operand was zeros."""
    return [tags(pair) for pair in parts if pair[0]]


def query_head(term: set[Any]) -> int:
    return int(next(tag[2] for tag in term if tag[0] == "q_desc"))


TileSchedules = dict[tuple[int, int, int], tuple[int, Column]]
"""By batch element, query head and kv tile: the work id of the CTA, and the tile schedule."""


def tile_schedules_of(launch: Launch) -> TileSchedules:
    heads = launch.tables.heads
    scheduled = scheduled_query_heads(True, heads, launch.kv_heads)
    return {
        (job.head // heads, scheduled[job.head % heads][0], column.kv): (job.work_id, column)
        for job in tables(launch.schedule, launch.tables)
        for column in job.columns
    }


def check(
    launch: Launch, simulation: Simulation, tile_schedules: TileSchedules, expected: Expected | None = None
) -> None:
    """Everything that went to global memory is what the tile schedules say, by the CTAs and in the order that they
    say.
    """
    expected = expected or Expected(launch)
    check_dq(simulation, expected, tile_schedules)
    check_dk_dv(launch, simulation, expected, tile_schedules)


def check_dq(simulation: Simulation, expected: Expected, tile_schedules: TileSchedules) -> None:
    by_rank: dict[int, dict[int, tuple[int, list[set[Any]]]]] = {}
    for (b, q_head, kv), (work_id, column) in tile_schedules.items():
        for q, rank in column.steps:
            ranks = by_rank.setdefault(expected.tile_index(b, q_head, q), {})
            ranks[rank] = work_id, expected.dq_terms(b, q_head, q, kv)
    rows = BLOCK_Q * expected.columns // operations.DQ_ROW.value
    added: dict[int, dict[int, list[Store]]] = {}
    for store in simulation.stores:
        if store.descriptor == "dq_desc":
            tile, offset = divmod(store.coordinates[0], rows)
            assert store.coordinates[1] == 0
            added.setdefault(tile, {}).setdefault(offset, []).append(store)
    assert set(added) == set(by_rank)
    for tile, offsets in added.items():
        assert simulation.semaphores[Pointer("semaphores", tile)] == len(by_rank[tile])
        block = rows // len(offsets)
        assert sorted(offsets) == list(range(0, rows, block))
        for stores in offsets.values():
            assert [store.how for store in stores] == ["store"] + ["add"] * (len(stores) - 1)
            got = [(store.work_id, terms(store.parts)) for store in stores]
            assert got == [by_rank[tile][rank] for rank in range(len(by_rank[tile]))]


def check_dk_dv(launch: Launch, simulation: Simulation, expected: Expected, tile_schedules: TileSchedules) -> None:
    stored = {(*store.coordinates, store.descriptor): store for store in simulation.stores if store.how == "store"}
    places = itertools.product(range(launch.batch), range(launch.kv_heads), range(launch.tables.n_kv))
    for b, kv_head, kv in places:
        members = range(kv_head * launch.group, (kv_head + 1) * launch.group)
        for name, columns in (("dk_desc", expected.columns), ("dv_desc", expected.value_columns)):
            sums = [
                (expected.dk_terms if name == "dk_desc" else expected.dv_terms)(
                    b, member, tile_schedules[b, member, kv][1]
                )
                for member in members
            ]
            for column in range(0, columns, 64):
                store = stored.pop((b, kv_head, kv * BLOCK_KV, column, name))
                assert store.work_id == tile_schedules[b, members[-1], kv][0]
                got = terms(store.parts)
                assert [[t for t in got if query_head(t) == member] for member in members] == sums
                assert len(got) == sum(map(len, sums))
        released = simulation.semaphores[
            Pointer("group_semaphores", (b * launch.kv_heads + kv_head) * launch.tables.n_kv + kv)
        ]
        assert released == (launch.group if launch.group > 1 else 0)
    assert not [key for key in stored if key[-1] != "dq_desc"]


_masks = {name: itertools.cycle([m for m in MASKS if supports(name, m[0]) is None]) for name in SCHEDULES}
_groups = itertools.cycle((1, 2, 3, 1))
LAUNCHES = [
    Launch(dims, stages, name, *next(_masks[name]), group=(group := next(_groups)), batch=2 if group == 1 else 1)
    for name in SCHEDULES
    for dims, stages in STAGES
]
LAUNCHES += [
    Launch(dims, 2, "bent_fold", mask, 2080, 40, kv_heads=1, group=2)  # long enough for tile schedules to be bent
    for dims, mask in (((64, 64), Band(0)), ((128, 128), Band(-9)))
]


def ways(launch: Launch) -> list[dict[str, Any]]:
    """A CTA for every work id, with copies that arrive late; and fewer CTAs where the schedule allows any number, one
    alone, and five of which two may run at the same time, with copies at any time."""
    if launch.co_resident:
        return [{"late": True}, {"seed": 1}]
    return [{"late": True}, {"ctas": 1, "seed": 1}, {"ctas": 5, "resident": 2, "seed": 2}]


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_roles_agree_with_the_tables(launch: Launch) -> None:
    for way in ways(launch):
        simulation = launch.run(**way)
        check(launch, simulation, tile_schedules_of(launch))
        extra = 0 if launch.co_resident else simulation.ctas
        assert len(simulation.taken) == simulation.arguments["problem"].work_ids + extra, "every CTA finds the end once"


@pytest.mark.parametrize("launch", [replace(x, bounded=True) for x in LAUNCHES[::5]], ids=str)
def test_bounded_scores(launch: Launch) -> None:
    for way in ways(launch):
        check(launch, launch.run(**way), tile_schedules_of(launch))


def in_two_parts(launch: Launch) -> tuple[SimpleNamespace, TileSchedules]:
    """The tile schedules of `launch`, with kv tiles p and n-1-p scheduled by one CTA."""
    pairs = functions("symmetric_shift", replace(launch.tables, band=Band()))
    f = SimpleNamespace(**vars(functions(launch.schedule, launch.tables)))
    f.dash_launch, f.dash_ctas_per_head, f.dash_kv_tile = (
        pairs.dash_launch,
        pairs.dash_ctas_per_head,
        pairs.dash_kv_tile,
    )
    work, tile_schedules = launch.tables, tile_schedules_of(launch)
    work_ids = {}
    for work_id in range(work.batch * work.heads * f.dash_ctas_per_head(*work.tail())):
        head, cta_index = f.dash_launch(work_id, work.batch * work.heads, *work.tail(), work.head_chunk)
        for part in range(2):
            work_ids[head, f.dash_kv_tile(cta_index, part, *work.tail())] = work_id
    scheduled = scheduled_query_heads(True, work.heads, launch.kv_heads)
    heads = {(h // work.heads, scheduled[h % work.heads][0]): h for h in range(work.batch * work.heads)}
    return f, {key: (work_ids[heads[key[:2]], key[2]], column) for key, (_, column) in tile_schedules.items()}


# The first of four kv tiles is empty; it shares a CTA with the last one, which is not.
EMPTY_FIRST = Launch((128, 128), 2, "ascending", Band(None, -20), 70, 64)


@pytest.mark.parametrize(("dims", "stages"), STAGES, ids=str)
@pytest.mark.parametrize("kv_len", [64, 80])
def test_a_part_without_steps_before_one_with_steps(dims: tuple[int, int], stages: int, kv_len: int) -> None:
    launch = replace(EMPTY_FIRST, dims=dims, stages=stages, kv_len=kv_len, group=2)
    schedule, tile_schedules = in_two_parts(launch)
    lengths = {
        work_id: [len(c.steps) for t, c in tile_schedules.values() if t == work_id]
        for work_id, _ in tile_schedules.values()
    }
    assert any(steps[0] == 0 and steps[-1] > 0 for steps in lengths.values())
    for how in ({"late": True}, {"seed": 1}):
        check(launch, launch.run(schedule, {"PARTS": 2}, **how), tile_schedules)


FLAGSHIP = Launch((128, 128), 2, "bent_fold", Band(0), 200, 100, group=2)
PAIRS = Launch((192, 128), 2, "symmetric_shift", Band(0), 100, 100)
GROUPED_PAIRS = Launch((256, 256), 1, "symmetric_shift", Band(-9), 33, 64, group=3)
NARROW, WIDE = replace(FLAGSHIP, dims=(64, 64)), replace(FLAGSHIP, dims=(256, 256))
TAILS = Launch((192, 128), 2, "spt", Band(0), 100, 100)
SHORT = Launch((128, 128), 2, "spt", Band(0, 9), 100, 100, group=3)
EMPTY_KEYS = Launch((128, 128), 2, "spt", Band(0), 40, 200)
EMPTY_LAST = Launch((256, 256), 1, "spt", Band(0), 40, 200)
WAITS, EARLY, IN_USE = "everybody waits", "read before it is full", "overwritten while it is in use"
AGAIN, LEFT, THREADS = "again before the others", "left with somebody there", "for two numbers of threads"
HALF = "before both warpgroups have written it|before a fence"
_COMPLETE, _END = "signal(shared, DQ_COMPLETE, it, WARPS)", "end_step(shared, it, WARPS)"
_DK_WAIT, _HALVES_WAIT = (
    "dk = wait_for_matmuls(1, deps=(dk,))",
    "dq, dv, dk = wait_for_matmuls(1, deps=(dq, dv, dk))",
)
_NUMBER, _DO_FULL = "FIRST + it % shared.STAGES", "    mbarrier.wait(shared.do_full"
_MASKED = "cut = packed_tile >> MASKED != 0 if CUT is None else CUT"
_NEXT = "gl.where(after < steps, following >> MASKED, 2) << NEXT"
WRONG = ""  # the launch ends, with other results than the tables want
CONTROLS = {
    "the K of the tile schedule before": (
        FLAGSHIP, f"{EARLY}|{IN_USE}|{WAITS}", "k_full.index(0), n & 1", "k_full.index(0), 0",
    ),
    "the V of the tile schedule before": (
        FLAGSHIP, f"{EARLY}|{IN_USE}|{WAITS}", "v_full.index(0), n & 1", "v_full.index(0), 0",
    ),
    "K and V that nobody announces": (EMPTY_FIRST, WAITS, "if steps == 0:  # K", "if False:  # K"),
    "K and V in use": (FLAGSHIP, f"{EARLY}|{IN_USE}", "mbarrier.wait(shared.kv_empty.index(0), (n & 1) ^ 1)", "pass"),
    "results that K and V must make way for": (
        TAILS, f"{EARLY}|{IN_USE}|{WAITS}", "        if shared.RESULTS_IN_DQ:\n            mbarrier",
        "        if True:\n            mbarrier",
    ),
    "results over a dq tile": (FLAGSHIP, f"{IN_USE}|^$", "mbarrier.wait(self.dq_empty.index(stage), ", "max(0, "),
    "a dq tile over results": (FLAGSHIP, IN_USE, "        wait_for_own_stores()", "        pass"),
    "a dq tile of a half over results": (
        NARROW, IN_USE, "before it is written\n            wait_until_read()", "before it is written\n            pass",
    ),
    "results over those of the tile schedule before": (
        EMPTY_KEYS, IN_USE, 'if STEP != "overlapped" or steps == 0:', 'if STEP != "overlapped":',
    ),
    "an entry that nobody has left": (
        EMPTY_LAST, f"{WAITS}|^$", "wait_until_left(shared, n)\n    put_int32", "put_int32",
    ),
    "an entry that is never left": (SHORT, WAITS, "leave_tile_schedule(shared, n)\n        n += 1", "n += 1"),
    "two work ids of a CTA that others wait for": (PAIRS, WRONG, "if not SCHEDULE.CO_RESIDENT:", "if True:"),
    "room a phase later": (
        FLAGSHIP, WAITS, "wait_for_signal(shared, ROOM, it, ", "wait_for_signal(shared, ROOM, it + 1, ",
    ),
    "room not waited for": (
        FLAGSHIP, f"{AGAIN}|{IN_USE}|more arrivals", "            wait_for_room(shared, stamps, it)",
        "            pass",
    ),
    "stages of Q from zero in every tile schedule": (
        FLAGSHIP, f"{EARLY}|{IN_USE}|more arrivals", "stage = it % shared.STAGES\n                    full",
        "stage = step % shared.STAGES\n                    full",
    ),
    "another stage of dO": (
        FLAGSHIP, f"{EARLY}|{IN_USE}|more arrivals", f"stage = it % shared.STAGES\n{_DO_FULL}",
        f"stage = (it + 1) % shared.STAGES\n{_DO_FULL}",
    ),
    "one stage of dq": (
        FLAGSHIP, WAITS, "stage = it % shared.DQ_STAGES\n            row", "stage = 0\n            row",
    ),
    "dq buffer not waited for": (
        FLAGSHIP, f"{AGAIN}|{IN_USE}", "    wait_for_dq_room(shared, it)\n    dq, dv = ", "    dq, dv = ",
    ),
    "dq buffer free too early": (FLAGSHIP, IN_USE, "wait_until_read()\n            mbarrier", "mbarrier"),
    "dq tile not waited for": (
        FLAGSHIP, f"{HALF}|^$", "wait_for_signal(shared, DQ_COMPLETE, it, shared.CONSUMERS)", "pass",
    ),
    "dS without a fence": (FLAGSHIP, "before a fence", "ds.store(ds)\n    fence_async_shared()", "ds.store(ds)"),
    "dS over one that the other warpgroup reads": (
        FLAGSHIP, IN_USE, "    role_barrier()\n    shared.ds.store(ds)", "    shared.ds.store(ds)",
    ),
    "half of dS": (
        FLAGSHIP, HALF, "        wait_for_own_stores()\n    role_barrier()", "        wait_for_own_stores()",
    ),
    "P over one that the other warpgroup reads": (WIDE, IN_USE, "role_barrier()  # all have read", "pass  #"),
    "half of P": (WIDE, HALF, "role_barrier()\n    dv = ", "dv = "),
    "half of dS after P": (
        WIDE, HALF, "fence_async_shared()\n    role_barrier()\n    dq, ", "fence_async_shared()\n    dq, ",
    ),
    "a dq tile without a fence": (
        FLAGSHIP, HALF, f"    fence_async_shared()\n    {_COMPLETE}", f"    {_COMPLETE}\n    fence_async_shared()",
    ),
    "half of a dq tile": (
        FLAGSHIP, f"{HALF}|{AGAIN}", "    shared.dq.index(stage).store(in_fragments(dq))",
        f"    {_COMPLETE}\n    shared.dq.index(stage).store(in_fragments(dq))",
    ),
    "room for Q that dK reads": (
        FLAGSHIP, IN_USE, f"    {_DK_WAIT}\n    {_END}", f"    {_END}\n    {_DK_WAIT}",
    ),
    "room for Q that dK of a half reads": (
        NARROW, f"{AGAIN}|{IN_USE}", f"        {_HALVES_WAIT}\n    else",
        f"        {_END}\n        {_HALVES_WAIT}\n    else",
    ),
    "room that nobody hears of": (FLAGSHIP, LEFT, "range(done, done + shared.STAGES)", "range(0)"),
    "one warp too few": (
        FLAGSHIP, THREADS, f"arrive_at({_NUMBER}, 32 * (WARPS + 1))", f"arrive_at({_NUMBER}, 32 * WARPS)",
    ),
    "one number for dq and room": (
        FLAGSHIP, f"{AGAIN}|{WAITS}|more threads", "ROOM = gl.constexpr(10)", "ROOM = gl.constexpr(9)",
    ),
    "one number for two steps": (
        FLAGSHIP, f"{AGAIN}|{WAITS}|more threads", f"arrive_at({_NUMBER}", "arrive_at(FIRST",
    ),
    "K free while the other warpgroup reads it": (
        FLAGSHIP, f"{IN_USE}|{EARLY}|{WAITS}", "role_barrier()\n        if shared.RESULTS", "if shared.RESULTS",
    ),
    "half of dv": (
        FLAGSHIP, HALF, "role_barrier()\n    store_tile(varlen_layout, targets.dv",
        "store_tile(varlen_layout, targets.dv",
    ),
    "half of dk": (
        FLAGSHIP, HALF, "role_barrier()\n    store_tile(varlen_layout, targets.dk",
        "store_tile(varlen_layout, targets.dk",
    ),
    "a semaphore released before the other warpgroup has added": (
        FLAGSHIP, "before it is written|^$", "    role_barrier()\n    _release", "    _release",
    ),
    "rank of another tile": (
        FLAGSHIP, WAITS, "rank = tile_schedule.rank(packed_tile, kv)", "rank = tile_schedule.rank(packed_tile, kv) + 1",
    ),
    "row of the tensor": (
        replace(FLAGSHIP, mask=Band(30)), WRONG, "q * BLOCK_Q - work.first_row()", "q * BLOCK_Q",
    ),
    "query heads in another order": (
        FLAGSHIP, WRONG, "self.head * self.GROUP + self.member", "self.member * self.GROUP + self.head",
    ),
    "a member of a group out of order": (
        FLAGSHIP, "before it is written", "wait_semaphore(semaphores + _place(work, kv), work.member)", "pass",
    ),
    "a semaphore that is not waited for": (
        FLAGSHIP, "before it is written", "mbarrier.wait(shared.group_barrier.index(0), phase)", "pass",
    ),
    "the semaphore of the tile schedule before": (
        SHORT, WAITS, "wait_until_left(shared, n)  # the tile schedule before", "pass  # the tile schedule before",
    ),
    "a mask that is forgotten": (FLAGSHIP, WRONG, _MASKED, "cut = False"),
    "full tiles that are masked": (FLAGSHIP, WRONG, _MASKED, "cut = True"),
    "a run of cut steps that goes on": (NARROW, WRONG, _NEXT, "gl.where(after < steps, 1, 2) << NEXT"),
    "a run of whole steps that goes on": (NARROW, WRONG, _NEXT, "gl.where(after < steps, 0, 2) << NEXT"),
    "a tile schedule that goes on": (NARROW, f"{WAITS}|{AGAIN}|{EARLY}", _NEXT, "(following >> MASKED) << NEXT"),
    "a tile schedule that ends early": (
        NARROW, f"{WAITS}|{LEFT}", _NEXT, "gl.where(after < 2, following >> MASKED, 2) << NEXT",
    ),
    "a first step that is taken for a whole one": (
        NARROW, WRONG, "first = mask.read_packed_tile(wait_for_do(shared, done)) >> MASKED", "first = 0",
    ),
    "S of a step that does not follow": (
        NARROW, WAITS, "after = it + 1 - (following >> 1)", "after = it + 1",
    ),
    "a packed tile id in another stage": (
        FLAGSHIP, "read before it is written|^$", "put_int32(self.packed_tiles, stage, packed_tile)",
        "put_int32(self.packed_tiles, (stage + 1) % 2, packed_tile)",
    ),
    "bytes of K without its tail": (
        PAIRS, "fewer bytes", "BLOCK_KV * (D + shared.TAIL_D) * WIDTH", "BLOCK_KV * D * WIDTH",
    ),
    "the first piece of Q twice": (PAIRS, WRONG, "q_row + i * ROWS, full, q_ring", "q_row, full, q_ring"),
    "the first piece of dO twice": (PAIRS, WRONG, "q_row + i * ROWS, full, do_ring", "q_row, full, do_ring"),
    "log-sum-exps of the next rows": (NARROW, WRONG, "begin_load(lse_desc, [row]", "begin_load(lse_desc, [row + 64]"),
    "deltas of another step": (
        PAIRS, f"{EARLY}|{AGAIN}|{IN_USE}|uninitialised", "delta_ring.index(stage)", "delta_ring.index(1 - stage)",
    ),
}  # fmt: skip


ORDERS = [{"late": True}, {"late": True, "ctas": 2}, {"seed": 1, "ctas": 2}, *({"seed": seed} for seed in range(2, 12))]


def run_and_check(launch: Launch, order: dict[str, Any], edits: tuple[tuple[str, str], ...]) -> None:
    how = order | {"edits": edits}
    if launch is EMPTY_FIRST:
        schedule, tile_schedules = in_two_parts(launch)
        check(launch, launch.run(schedule, {"PARTS": 2}, **how), tile_schedules)
        return
    simulation = launch.run(**how)
    check(launch, simulation, tile_schedules_of(launch))
    assert not launch.co_resident or len(simulation.taken) == simulation.ctas


@pytest.mark.parametrize("control", CONTROLS)
def test_faults_are_seen(control: str) -> None:
    """With one line of the kernel changed for the worse, one of the orders of events shows it at least."""
    launch, fault, old, new = CONTROLS[control]
    assert fault == WRONG or not re.search(fault, "no fault"), "whatever happens would do"
    messages: list[str] = []
    while not any(message == fault if fault == WRONG else re.search(fault, message) for message in messages):
        assert len(messages) < len(ORDERS), messages
        try:
            run_and_check(launch, ORDERS[len(messages)], ((old, new),))
            messages.append("no fault")
        except Fault as error:
            messages.append(str(error))
        except AssertionError:
            messages.append(WRONG)


def test_a_step_ahead_needs_two_stages() -> None:
    """With one, consumers wait for a Q whose room they would have to leave first; the build refuses it."""
    launch = Launch((64, 64), 2, "ascending", Band(), 70, 45)
    with pytest.raises(Fault, match="everybody waits: consume of CTA 0 for parity"):
        launch.run(constants={"STAGES": 1, "DQ_STAGES": 1})
    with pytest.raises(ArgumentError, match="num_stages >= 2"):
        replace(launch, stages=1).specialisation()


@pytest.mark.parametrize("dims", [dims for dims, stages in STAGES if stages == 2], ids=str)
def test_stages_have_named_barriers(dims: tuple[int, int]) -> None:
    launch = Launch(dims, step_signals.MOST_STAGES, "ascending", Band(), 70, 45)
    launch.specialisation()
    with pytest.raises(ArgumentError, match="num_stages <= 2"):
        replace(launch, stages=3).specialisation()


@pytest.mark.parametrize(("first", "end"), [(0, 50), (13, 50), (0, 20), (30, 31), (50, 50), (70, -3)])
@pytest.mark.parametrize("shape", [(2, 3, 50, 24), (1, 1, 50, 8)])
def test_descriptors_hold_the_rows_that_take_part(shape: tuple[int, ...], first: int, end: int) -> None:
    """Read as TMA would, in BSHD order; one row, never read, where none takes part."""
    b, h, length, dim = shape
    tensor = torch.arange(b * h * length * dim).view(b, length, h, dim).transpose(1, 2)
    (sizes, strides), skipped = tensors.SeenRows.of(tensor, first, end)
    assert not any(stride * 2 % 16 for stride in strides[:3])
    assert not skipped % 16
    if end <= first:
        first, end = 0, 1
    assert torch.equal(tensor.as_strided(sizes, strides, skipped // 2), tensor[:, :, first:end])
