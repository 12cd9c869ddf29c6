"""The roles of the Hopper backward under masks of rows, run as plain Python for every CTA, against the tables."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.hopper.backward import build
from dash_inductor.kernels.hopper.shared.arguments import VARLEN_LAYOUT
from dash_inductor.model import Band
from dash_inductor.schedule.schedules import supports

from ....support.calls import traits_of
from ....support.hopper_glue import Fault, Pointer, Store
from ....support.varlen_layout import Rows
from .test_data_glue import DataExpected, DataLaunch, check_cleared, visible_tile_schedules
from .test_glue import BLOCK_KV, BLOCK_Q, SCHEDULES, STAGES, TileSchedules, check_dq, query_head, terms, ways

ROW_BLOCK = 8


@dataclass(frozen=True)
class VarlenLaunch(DataLaunch):
    """A launch whose rows have the tokens of documents; lengths, behind: as of `Rows`."""

    lengths: tuple[int, ...] = ()
    behind: int = 0

    @staticmethod
    def of(rows: Rows, dims: tuple[int, int], stages: int, schedule: str, band: Band, group: int = 1) -> VarlenLaunch:
        return VarlenLaunch(
            dims, stages, schedule, band, rows.rows, rows.rows, group, lengths=rows.lengths, behind=rows.behind
        )  # fmt: skip

    @property
    def rows(self) -> Rows:
        return rows_of(self.lengths, self.behind)

    @cached_property
    def _segment_ids(self) -> tuple[Tensor, Tensor]:
        queries, keys, *_ = self.rows.operands()
        return torch.where(queries == keys, queries, -2), keys

    def specialisation(self) -> build.Specialisation:
        return replace(super().specialisation(), traits=traits_of(self.mask, segment_ids=True, varlen=True))

    def data_arguments(self) -> dict[str, dict[str, Any]]:
        ones = dict.fromkeys(("batch_stride", "head_stride", "row_stride", "dim"), 1)
        targets = {name: {"ptr": Pointer(f"{name}_ptr")} | ones for name in ("dk", "dv")}
        varlen_layout = {name: Pointer(name) for name in VARLEN_LAYOUT.names}
        return super().data_arguments() | {"varlen_layout": varlen_layout, "targets": targets}

    def run(self, *args: Any, **how: Any) -> Any:
        *_, place, count = self.rows.operands()
        tensors = {"visits": self.data.visits, "packed_tiles": self.data.steps, "keys_seen": self.data.keys_seen}
        tensors |= {"token_offset_ptr": place, "token_count_ptr": count}
        memory = {name: tensor.flatten().tolist() for name, tensor in tensors.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "ROW_BLOCK", ROW_BLOCK)
            return super(DataLaunch, self).run(*args, memory=memory, **how)


def rows_of(lengths: tuple[int, ...], behind: int = 0) -> Rows:
    return Rows(lengths, behind, ROW_BLOCK, max(BLOCK_Q, BLOCK_KV))


class VarlenExpected(DataExpected):
    """Tiles come from the token of their first row."""

    def __init__(self, launch: VarlenLaunch) -> None:
        super().__init__(launch)
        *_, place, count = launch.rows.operands()
        self.place, self.count = place.tolist(), count.tolist()

    def keys(self, b: int, q_head: int, kv: int) -> tuple[set[Any], set[Any]]:
        place = b, q_head // self.launch.group, self.place[kv * BLOCK_KV // ROW_BLOCK]
        return self._rows("k_desc", *place, self.columns), self._rows("v_desc", *place, self.value_columns)

    def queries(self, b: int, q_head: int, q: int, half: int) -> tuple[set[Any], set[Any]]:
        offset = half * BLOCK_Q // self.halves
        row = self.place[q * BLOCK_Q // ROW_BLOCK] + offset
        flat = self.tile_index(b, q_head, q) * BLOCK_Q + offset
        q_rows = self._rows("q_desc", b, q_head, row, self.columns)
        do_rows = self._rows("do_desc", b, q_head, row, self.value_columns)
        return q_rows | {("lse_desc", flat)}, do_rows | {("delta_desc", flat)}

    def tokens(self, kv: int) -> int:
        """The number of tokens of a kv tile."""
        first = kv * BLOCK_KV // ROW_BLOCK
        return sum(self.count[first : first + BLOCK_KV // ROW_BLOCK])


def check(launch: VarlenLaunch, simulation: Any, tile_schedules: TileSchedules, expected: VarlenExpected) -> None:
    """Sums of dq by rows; dk and dv of whole kv tiles by TMA, of others the tokens that they have.

    Kv tiles without a token take no part in the sums of groups.
    """
    check_dq(simulation, expected, tile_schedules)
    for pointer, _half in simulation.sums:
        tile = pointer.offset // (BLOCK_KV * (expected.columns + expected.value_columns))
        assert expected.tokens(tile % launch.tables.n_kv), pointer
    stored: dict[Any, Store] = {}
    for store in simulation.stores:
        nothing = store.how == "some rows" and store.coordinates[-1] == 0
        if store.descriptor != "dq_desc" and not nothing:
            assert store.how in ("store", "some rows")
            assert (store.descriptor, *store.coordinates) not in stored
            stored[(store.descriptor, *store.coordinates)] = store
    for kv_head, kv in itertools.product(range(launch.kv_heads), range(launch.tables.n_kv)):
        members = range(kv_head * launch.group, (kv_head + 1) * launch.group)
        tokens, place = expected.tokens(kv), expected.place[kv * BLOCK_KV // ROW_BLOCK]
        for name, columns, width in (
            ("dk", expected.columns, expected.columns - build.BACKWARD_CONFIGS[build.tile_dims(*launch.dims)].tail),
            ("dv", expected.value_columns, expected.value_columns),
        ):
            of = expected.dk_terms if name == "dk" else expected.dv_terms
            sums = [of(0, member, tile_schedules[0, member, kv][1]) for member in members]
            if tokens == BLOCK_KV:
                keys = [(f"{name}_desc", 0, kv_head, place, column) for column in range(0, columns, 64)]
            elif tokens:
                keys = [(f"{name}_ptr", kv_head, place, column, tokens) for column in range(0, columns, width)]
            else:
                keys = []  # whatever its place is, nothing is stored
            for key in keys:
                store = stored.pop(key)
                assert store.work_id == tile_schedules[0, members[-1], kv][0]
                got = terms(store.parts)
                assert [[t for t in got if query_head(t) == member] for member in members] == sums
    assert not stored


BANDS = [Band(0), Band(), Band(0, 40), Band(-9, 20)]
DOCUMENTS = [((70, 1, 40), 0), ((32, 31, 0, 33), 9), ((5,), 0), ((64, 8, 90), 0)]
_bands = {name: itertools.cycle([band for band in BANDS if supports(name, band) is None]) for name in SCHEDULES}
_documents, _groups = itertools.cycle(DOCUMENTS), itertools.cycle((1, 2, 3))
LAUNCHES = [
    VarlenLaunch.of(rows_of(*next(_documents)), dims, stages, name, next(_bands[name]), next(_groups))
    for name in SCHEDULES
    for dims, stages in STAGES
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_roles_agree_with_the_tables(launch: VarlenLaunch) -> None:
    tile_schedules, expected = visible_tile_schedules(launch), VarlenExpected(launch)
    for way in ways(launch):
        simulation = launch.run(**way)
        check(launch, simulation, tile_schedules, expected)
        check_cleared(launch, simulation, tile_schedules, expected)


SAMPLE = VarlenLaunch.of(rows_of((70, 1, 40), 3), (128, 128), 2, "spt", Band(0), 2)
_NEXT = "q_token = varlen_layout.token(tile_schedule.q_tile(ahead) * BLOCK_Q)"
CONTROLS = {
    "keys of rows": ("kv_row = varlen_layout.token(kv * BLOCK_KV)", "kv_row = kv * BLOCK_KV"),
    "queries of rows": ("q_row = q_token", "pass"),
    "queries of the next step": (
        f"q_row = q_token\n                        {_NEXT}\n",
        f"{_NEXT}\n                        q_row = q_token\n",
    ),
    "queries of the first step": (
        "q_token = varlen_layout.token(tile_schedule.q_tile(ahead) * BLOCK_Q)\n                unseen",
        "pass\n                unseen",
    ),
    "results of rows": ("token = varlen_layout.token(row)", "token = row"),
    "whole tiles alone": ("if count >= tile.shape[0]:", "if True:"),
    "tokens of the first row block": ("first = row + i * self.VARLEN_ROWS", "first = row"),
    "the first column of both": ("shared.k_tail, WARPS, shared.k.shape[1]", "shared.k_tail, WARPS"),
    "values for keys": ("targets.dk, dk_desc, work.batch, work.head, row, dk_tile, WARPS)",
                        "targets.dk, dk_desc, work.batch, work.head, row, dv_tile, WARPS)"),
    "K free while the other warpgroup stores rows of it": (
        "role_barrier()\n        if not shared.RESULTS_IN_DQ", "if not shared.RESULTS_IN_DQ",
    ),
    "sums of tiles without a token": ("(varlen_layout.count(kv * BLOCK_KV, BLOCK_KV) > 0)", "True"),
    "tiles of tokens that nobody sees passed over": ("(varlen_layout.count(kv * BLOCK_KV, BLOCK_KV) > 0)", "False"),
    "the wrong tensor": ("store_tile(varlen_layout, targets.dv,", "store_tile(varlen_layout, targets.dk,"),
}  # fmt: skip


@pytest.mark.parametrize("control", CONTROLS)
def test_faults_are_seen(control: str) -> None:
    """With one line changed for the worse a launch fails, or ends with other results than the tables want."""
    launch = replace(SAMPLE, dims=(192, 128)) if "column" in control or "rows of it" in control else SAMPLE
    tile_schedules, expected = visible_tile_schedules(launch), VarlenExpected(launch)

    def run(**how: Any) -> None:
        for seed in range(8):
            check(launch, launch.run(ctas=1, seed=seed, **how), tile_schedules, expected)

    run()
    with pytest.raises((Fault, AssertionError, KeyError)):
        run(edits=(CONTROLS[control],))
