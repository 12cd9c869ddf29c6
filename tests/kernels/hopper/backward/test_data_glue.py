"""The roles of the Hopper kernel under masks that are data, run as plain Python for every CTA, against the tables."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest

from dash_inductor.kernels.hopper.backward import build
from dash_inductor.kernels.hopper.backward.data import BackwardData
from dash_inductor.model import Band
from dash_inductor.schedule.jobs import Column
from dash_inductor.schedule.schedules import supports
from dash_inductor.schedule.tile_schedule import ClosedForm
from dash_inductor.schedule.visibility import EMPTY, FULL, Pairs

from ....support.calls import traits_of
from ....support.cases import some
from ....support.hopper_data import NO_KEY, data_of, keep_of, segment_ids_of, tile_pairs
from ....support.hopper_glue import Fault, Pointer, Simulation
from .test_glue import (
    BLOCK_KV,
    BLOCK_Q,
    SCHEDULES,
    STAGES,
    Expected,
    Launch,
    TileSchedules,
    check,
    tile_schedules_of,
    ways,
)


@dataclass(frozen=True)
class DataLaunch(Launch):
    """A launch with a batch element for each kind of segment ids."""

    kinds: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{super().__str__()} {','.join(self.kinds)}"

    @cached_property
    def pairs(self) -> list[Pairs]:
        """The tile pairs of each batch element."""
        return tile_pairs(self._keep[:, 0], BLOCK_Q, BLOCK_KV)

    @cached_property
    def _segment_ids(self) -> Any:
        return segment_ids_of(self.mask, self.q_len, self.kv_len, self.kinds)

    @cached_property
    def _keep(self) -> Any:
        return keep_of(self.mask, self._segment_ids, None, (self.batch, self.q_len, self.kv_len))

    @cached_property
    def data(self) -> BackwardData:
        return data_of(ClosedForm(self.schedule, self.tables), self._keep, self._segment_ids, None)

    def specialisation(self) -> build.Specialisation:
        return replace(super().specialisation(), even_kv=False, traits=traits_of(self.mask, segment_ids=True))

    def data_arguments(self) -> dict[str, dict[str, Any]]:
        names = "visits", "packed_tiles", "q_vectors", "kv_vectors", "keys_seen", "seen_bits"
        return {"data": {name: Pointer(name) for name in names} | {"table_b": 1, "table_h": 0}}

    def run(self, *args: Any, **how: Any) -> Any:
        tensors = {"visits": self.data.visits, "packed_tiles": self.data.steps, "keys_seen": self.data.keys_seen}
        memory = {name: tensor.flatten().tolist() for name, tensor in tensors.items()}
        return super().run(*args, memory=memory, **how)


class DataExpected(Expected):
    """In steps with the mask, the segment ids of both tiles are what probabilities were computed from, too."""

    def __init__(self, launch: DataLaunch) -> None:
        super().__init__(launch)
        self.pairs = launch.pairs

    def masked(self, b: int, q: int, kv: int, half: int) -> set[Any]:
        if self.pairs[b][q][kv] == FULL:
            return set()
        row = b * self.launch.q_len + q * BLOCK_Q + half * BLOCK_Q // self.halves
        segment_ids = {("q_vectors", row), ("kv_vectors", b * self.launch.kv_len + kv * BLOCK_KV, -1)}
        return segment_ids | self.band(q, kv, half)


def visible_tile_schedules(launch: DataLaunch) -> TileSchedules:
    """The tile schedules of the band, of which the pairs that nobody sees are left out, and ranks counted anew."""
    tile_schedules = tile_schedules_of(launch)

    def rank(b: int, q_head: int, q: int, rank: int) -> int:
        """How many of those before this one add to the q tile."""
        columns = (column for (b1, head, _), (_, column) in tile_schedules.items() if (b1, head) == (b, q_head))
        before = (c.kv for c in columns for q1, r in c.steps if q1 == q and r < rank)
        return sum(launch.pairs[b][q][kv] != EMPTY for kv in before)

    def visible(b: int, q_head: int, column: Column) -> Column:
        steps = [(q, rank(b, q_head, q, r)) for q, r in column.steps if launch.pairs[b][q][column.kv] != EMPTY]
        return replace(column, steps=tuple(steps))

    return {(b, h, kv): (work_id, visible(b, h, column)) for (b, h, kv), (work_id, column) in tile_schedules.items()}


MASKS = [
    (Band(), 70, 45),
    (Band(0), 100, 100),
    (Band(0), 40, 90),
    (Band(0, None, "bottom_right"), 100, 50),
    (Band(0, 40), 120, 70),
    (Band(None, -20), 70, 64),
]
KINDS = [
    ("ones", "packed"), ("left padding", "packed and padded"), ("holes", "nobody"), ("repeated ids", "one key"),
    ("right padding", "packed"),
]  # fmt: skip
_masks = {name: itertools.cycle([m for m in MASKS if supports(name, m[0]) is None]) for name in SCHEDULES}
_kinds, _groups = itertools.cycle(KINDS), itertools.cycle((1, 2, 3))
LAUNCHES = [
    DataLaunch(dims, stages, name, *next(_masks[name]), next(_groups), batch=2, kinds=next(_kinds))
    for name in SCHEDULES
    for dims, stages in STAGES
]
LAUNCHES += [
    DataLaunch((128, 128), 2, "bent_fold", Band(0), 2080, 40, kv_heads=1, batch=2, kinds=("packed", "holes"))
]  # long enough for tile schedules to be bent


@some(LAUNCHES, [*LAUNCHES[:-1:3], LAUNCHES[-1]], "launch")
def test_roles_agree_with_the_tables(launch: DataLaunch) -> None:
    tile_schedules, expected = visible_tile_schedules(launch), DataExpected(launch)
    for way in ways(launch):
        simulation = launch.run(**way)
        check(launch, simulation, tile_schedules, expected)
        for b, q_head, q in itertools.product(range(2), range(launch.tables.heads), range(launch.tables.n_q)):
            released = simulation.semaphores[Pointer("semaphores", expected.tile_index(b, q_head, q))]
            assert released == launch.data.contributions[b, q], "what `finish` waits for"
        check_cleared(launch, simulation, tile_schedules, expected)


class ExpectedOfGlobal(DataExpected):
    """As `DataExpected`, where segment ids of queries have no room in shared memory."""

    def masked(self, b: int, q: int, kv: int, half: int) -> set[Any]:
        return {(*tag, 0) if tag[0] == "q_vectors" else tag for tag in super().masked(b, q, kv, half)}


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_vectors_without_room_are_those_of_the_step(dims: tuple[int, int]) -> None:
    launch = replace(FLAGSHIP, dims=dims)
    tile_schedules, expected = visible_tile_schedules(launch), ExpectedOfGlobal(launch)
    for late in (False, True):
        check(launch, launch.run(late=late, constants={"SHARED": 0}), tile_schedules, expected)


def check_cleared(
    launch: DataLaunch, simulation: Simulation, tile_schedules: TileSchedules, expected: Expected
) -> None:
    """K and V with keys that no query sees, once for each tile schedule; Q and dO with queries that see none, in each
    step.
    """
    wanted: Counter[tuple[Any, ...]] = Counter()
    seen, seeing = launch.data.keys_seen[:, 0], launch._keep[:, 0].any(2)
    for (b, q_head, kv), (_, column) in tile_schedules.items():
        if column.steps and not seen[b, kv * BLOCK_KV : (kv + 1) * BLOCK_KV].all():
            tags = set[Any]().union(*expected.keys(b, q_head, kv))
            wanted.update(tuple(place) for *place, column in tags if column == 0)
        for q, _ in column.steps:
            if not seeing[b, q * BLOCK_Q : (q + 1) * BLOCK_Q].all():
                for half in range(expected.halves):
                    tags = set[Any]().union(*expected.queries(b, q_head, q, half))
                    (lse,) = (tag for tag in tags if tag[0] == "lse_desc")
                    tiles = (tag for tag in tags if tag[0] in ("q_desc", "do_desc"))
                    wanted.update((*place, lse) for *place, column in tiles if column == 0)
    found: Counter[tuple[Any, ...]] = Counter()
    for tile, hidden in simulation.cleared:
        *place, column = tile[0]
        if column == 0:  # a tail is a tile of its own
            found[(*place, *hidden)] += 1
    assert found == wanted


FLAGSHIP = DataLaunch((128, 128), 2, "bent_fold", Band(0), 200, 100, group=2, batch=2, kinds=("packed", "left padding"))
_MASKED = "if packed_tile >> MASKED != 0:\n            if self.tile_schedule.MASK.HAS_DENSE"
CONTROLS = {
    "rank and flag together": (
        "(packed_tile >> PACKED_TILE_BITS) & ((1 << PACKED_TILE_BITS) - 1)",
        "packed_tile >> PACKED_TILE_BITS",
    ),
    "q tile and rank together": ("packed_tile & ((1 << PACKED_TILE_BITS) - 1)", "packed_tile"),
    "the mask is forgotten": (_MASKED, _MASKED.replace("packed_tile >> MASKED != 0", "False")),
    "the mask of full tiles": (_MASKED, _MASKED.replace("packed_tile >> MASKED != 0", "True")),
    "the table of the first batch element": ("return self.work.batch * self.data.table_b", "return self.data.table_b"),
    "the next packed tile id": ("(self.row(kv) * self.work.n_q + step)", "(self.row(kv) * self.work.n_q + step + 1)"),
    "keys of the first batch element": ("((self.MASK.KEYS * self.element() + i) * work.kv_len + keys)", "(keys)"),
    "queries of the first batch element": ("(QUERIES * self.element() * work.q_len + positions)", "(positions)"),
    "segment ids of the first half": ("gl.minimum(rows + piece * ROWS, ", "gl.minimum(rows, "),
    "segment ids in the stage of the first half": ("(stage * PIECES + piece)", "(stage * PIECES)"),
    "segment ids that nobody waits for": ("async_copy.mbarrier_arrive(full)", "pass"),
    "segment ids of another stage": ("piece = stage * (work", "piece = (stage + 1) % 2 * (work"),
    "the packed tile id of another stage": ("ring.index(here(stage))", "ring.index(here((stage + 1) % 2))"),
    "the second packed tile id first": ("gl.minimum(step, n_q - 1)", "gl.minimum(step + 1, n_q - 1)"),
    "the packed tile id of the same step": ("gl.minimum(after, steps - 1)", "gl.minimum(step, steps - 1)"),
    "the packed tile id of the other reducer": ("step, step + WARPS, steps", "step, step + 1, steps"),
    "keys that take no part": ("(step == 0) & (unseen != 0)", "False"),
    "keys cleared in every step": ("(step == 0) & (unseen != 0)", "unseen != 0"),
    "keys cleared before they are there": ("    mbarrier.wait(shared.k_full.index(1), landings & 1)\n", ""),
    "values cleared before they are there": ("    mbarrier.wait(shared.v_full.index(1), landings & 1)\n", ""),
    "queries cleared before they are there": (
        "    mbarrier.wait(shared.q_full.index(shared.STAGES), landings & 1)\n",
        "",
    ),
    "gradients cleared before they are there": (
        "    mbarrier.wait(shared.do_full.index(shared.STAGES), landings & 1)\n",
        "",
    ),
    "landings that are not counted": ("query_landings += 1", "pass"),
    "tile schedules that are not counted": ("key_landings += 1", "pass"),
    "cleared behind the matmuls' back": (
        "    fence_async_shared()\n    role_barrier()\n    mbarrier.arrive",
        "    mbarrier.arrive",
    ),
    "seen keys of the first batch element": ("self.data.keys_seen, self._table()", "self.data.keys_seen, 0"),
    "the half that is not": (
        "hidden = blind_queries(shared.lse.index(piece))",
        "hidden = blind_queries(shared.lse.index(stage))",
    ),
}


class BlindLaunch(DataLaunch):
    """Every seventh query sees no key, so that many steps of a tile schedule have such queries."""

    @cached_property
    def _segment_ids(self) -> Any:
        q_segment_ids, kv_segment_ids = segment_ids_of(self.mask, self.q_len, self.kv_len, self.kinds)
        q_segment_ids[:, ::7] = NO_KEY
        return q_segment_ids, kv_segment_ids


PARTS = replace(FLAGSHIP, schedule="symmetric_shift", q_len=128, kv_len=128, kinds=("holes", "holes"))
LAUNCHES_OF = {
    "landings that are not counted": BlindLaunch(**vars(FLAGSHIP)),
    "tile schedules that are not counted": PARTS,
}
"""Launches for controls of which the launch of the others shows nothing."""


@some(CONTROLS, [*CONTROLS][::3], "control")
def test_faults_are_seen(control: str) -> None:
    """With one line changed for the worse the launch fails, or ends with other results than the tables want."""
    launch = LAUNCHES_OF.get(control, replace(FLAGSHIP, dims=(64, 64)) if "half" in control else FLAGSHIP)
    tile_schedules, expected = visible_tile_schedules(launch), DataExpected(launch)

    def run(**how: Any) -> None:
        for late in (False, True):
            simulation = launch.run(late=late, **how)
            check(launch, simulation, tile_schedules, expected)
            check_cleared(launch, simulation, tile_schedules, expected)

    run()
    with pytest.raises((Fault, AssertionError, IndexError)):
        run(edits=(CONTROLS[control],))
