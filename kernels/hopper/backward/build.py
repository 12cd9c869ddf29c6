"""From a `Specialisation` (dtype, head dims, group, kind of mask, tiles) to its compiled `Kernels`.

Compiling needs neither driver nor GPU; lengths, batch and strides are arguments, so one build serves all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

from triton.experimental.gluon import language as gl

from ....errors import ArgumentError
from ....model.mask import ROW_BLOCK, Band, Mask
from ....model.plan import Plan, Tiles
from ....model.site import DType, Site
from ....schedule import schedules
from ....upstream.gluon import GluonASTSource
from ....upstream.triton_compiler import ASTSource
from ...common.compiling import COLUMNS, TYPES, columns, compile_kernel, descriptor, schedule_module
from ..family import FAMILY
from ..settings import VARIANTS, dims_of_tile
from ..shared import place_arguments
from ..shared.device import dropout
from ..shared.device.ends import MOST_STAGES
from ..shared.device.operations import DQ_LAYOUT, DQ_ROW
from . import data
from .device import stamps
from .device.entry import hopper_backward
from .device.finish import finish
from .device.prepare import prepare

WARPS = 8
"""Warps of the consumers; producer and reducers come on top."""

ROW_LAYOUT = gl.NVMMASharedLayout(0, 32, rank=1)
FINISH_ROWS, FINISH_WARPS = 32, 4
TARGETS = "dk", "dv"
"""The results that the main kernel writes to tokens, where the mask is one of rows."""


def variant(head_dim: int, value_dim: int) -> tuple[int, int]:
    """The dims of the tile of these head dims, a key of `VARIANTS`.

    Raises:
        ArgumentError: head dims that no variant fits.
    """
    dims = dims_of_tile(head_dim, value_dim)
    if dims is None:
        raise ArgumentError("head_dim, value_dim", (head_dim, value_dim), f"up to one of {[*VARIANTS]}")
    return dims


@dataclass(frozen=True)
class Specialisation:
    """The facts for which the kernels are compiled.

    Args:
        head_dim, value_dim: of q and k, of v.
        group: query heads per kv head.
        even_kv: kv_len is a multiple of the kv tile; not asked where the mask is data.
        has_codes: the mask has keys or segments.
        has_dense: the mask has a dense mask.
        has_dropout: probabilities are dropped.
        placed: the mask is one of rows, see `places`.
        stamped: the main kernel writes down when it does what, see `stamps`; its results are the same.
    """

    dtype: Literal["float16", "bfloat16"]
    head_dim: int
    value_dim: int
    group: int
    schedule: str
    has_lo: bool
    has_hi: bool
    even_kv: bool
    tiles: Tiles
    has_codes: bool = False
    has_dense: bool = False
    has_dropout: bool = False
    placed: bool = False
    stamped: bool = False

    def __post_init__(self) -> None:
        ahead = VARIANTS[variant(self.head_dim, self.value_dim)].ahead
        if ahead and self.tiles.num_stages < 2:  # a step would wait for what only its own end makes room for
            raise ArgumentError("tiles", str(self.tiles), "num_stages >= 2 at these head dims")
        if self.tiles.num_stages > MOST_STAGES:
            raise ArgumentError("tiles", str(self.tiles), f"num_stages <= {MOST_STAGES}")
        if self.tiles.num_warps != WARPS:
            raise ArgumentError("tiles", str(self.tiles), f"num_warps={WARPS}")

    @staticmethod
    def of(
        mask: Mask, plan: Plan, dtype: DType, dims: tuple[int, int], group: int, kv_len: int, has_dropout: bool = False,
        stamped: bool = False,
    ) -> Specialisation:  # fmt: skip
        """Return the facts for which the kernels of a plan are compiled.

        Args:
            dims: the head dims of q and k, and of v.
            group: query heads per kv head.
            has_dropout: probabilities are dropped.
            stamped: the main kernel writes down when it does what.

        Raises:
            ArgumentError: a dtype of another width, or tiles that the kernel does not have.
        """
        if dtype == "float32":
            raise ArgumentError("dtype", dtype, ("float16", "bfloat16"))
        even = kv_len % plan.dkdv.block_kv == 0 and not mask.operands
        bounds = mask.band.lo is not None, mask.band.hi is not None
        kinds = data.kinds(mask)
        placed = mask.placed is not None
        return Specialisation(
            dtype, *dims, group, plan.schedule, *bounds, even, plan.dkdv, *kinds, has_dropout, placed, stamped
        )

    @staticmethod
    def of_site(site: Site, plan: Plan, stamped: bool = False) -> Specialisation:
        """Return the facts for which the kernels of a site's plan are compiled.

        If they are `stamped`, the kernels write down when they do what.

        Raises:
            ArgumentError: a plan of another kernel, or a site whose kv_len is not known.
        """
        if plan.kernel != FAMILY.name:
            raise ArgumentError("plan", str(plan), "a plan of the hopper kernel")
        if site.kv_len is None:
            raise ArgumentError("site", site, "a site whose kv_len is known")
        dims = site.head_dim, site.value_dim
        drops = site.call.dropout is not None
        return Specialisation.of(site.mask, plan, site.dtype, dims, site.group, site.kv_len, drops, stamped)

    @property
    def has_data(self) -> bool:
        """The mask is data: walks come from tables."""
        return self.has_codes or self.has_dense

    @property
    def row_block(self) -> int:
        """Rows of a row block of a mask of rows, 0 where tokens are rows."""
        return ROW_BLOCK if self.placed else 0

    @property
    def band(self) -> Band:
        """Any band with these bounds: their values are arguments."""
        return Band(0 if self.has_lo else None, 0 if self.has_hi else None)


class Kernels:
    """prepare, main and finish of a `Specialisation`, compiled on first use."""

    def __init__(self, of: Specialisation) -> None:
        self.of = of
        dims = variant(of.head_dim, of.value_dim)
        self.variant = VARIANTS[dims]
        self.functions = schedule_module(of.schedule, of.band)
        self.schedule = schedules.define(of.schedule, of.band)
        self.columns, self.value_columns = dims  # of a tile
        self.block_d = self.columns - self.variant.tail

    @property
    def rows_of_a_load(self) -> int:
        """Rows of q and do that a load brings: a q tile's, or a piece's if the piece has several blocks.

        A piece of one block lies right before the next piece, as the rows of a whole tile do.
        """
        one_block = self.columns == self.value_columns == COLUMNS
        return self.of.tiles.block_q // (1 if one_block else self.variant.halves)

    @cached_property
    def main(self) -> Any:
        p, f, v, tiles = self.of, self.functions, self.variant, self.of.tiles
        q, kv, d = tiles.block_q, tiles.block_kv, self.block_d
        of_places = place_arguments.types(TYPES[p.dtype], *TARGETS)
        alone = self.schedule.resident is not None
        constants = {
            "LAUNCH": f.dash_launch, "KV_TILE": f.dash_kv_tile, "VISITS": f.dash_visits,
            "Q_TILE": f.dash_q_tile, "RANK": f.dash_rank, "Q_RANGE": f.dash_q_range,
            "SEEN_ROWS": f.dash_seen_rows, "SEEN_KEYS": f.dash_seen_keys,
            "PARTS": self.schedule.parts, "CO_RESIDENT": alone, "GROUP": p.group,
            "HAS_LO": p.has_lo, "HAS_HI": p.has_hi,
            "EVEN_KV": p.even_kv and self.schedule.parts == 1, "BLOCK_Q": q, "BLOCK_KV": kv, "BLOCK_D": d,
            "TAIL_D": v.tail, "BLOCK_DV": self.value_columns, "STAGES": tiles.num_stages,
            "DQ_STAGES": 1 if v.one_dq else tiles.num_stages, "STEP": v.step,
            "AHEAD": v.ahead, "LEFT_IN_REGISTERS": v.left_in_registers, "ROLE_REGISTERS": v.registers,
            "HAS_CODES": p.has_codes, "HAS_DENSE": p.has_dense, "DROPOUT": p.has_dropout, "PLACED": p.row_block,
            "STAMPED": p.stamped,
            **self._absent(data.MAIN), **({} if p.has_dropout else dict.fromkeys(dropout.ARGUMENTS)),
            **({} if p.placed else dict.fromkeys(of_places)),
            **({} if p.stamped else dict.fromkeys(stamps.ARGUMENTS)),
        }  # fmt: skip
        accumulator = [math.gcd(q * d, q * v.tail) // DQ_ROW.value, DQ_ROW.value]
        types = {
            **dict.fromkeys(("q_desc", "do_desc"), columns(p.dtype, self.rows_of_a_load)),
            **dict.fromkeys(("k_desc", "v_desc", "dk_desc", "dv_desc"), columns(p.dtype, kv)),
            "dq_desc": descriptor("fp32", accumulator, DQ_LAYOUT.value),
            "lse_desc": descriptor("fp32", [q], ROW_LAYOUT),
            "delta_desc": descriptor("fp32", [q], ROW_LAYOUT),
            "semaphores": "*i32", "ticket_ptr": "*i32", "group_sums": "*fp32", "group_semaphores": "*i32",
            "scale": "fp32", "scale_log2": "fp32", **data.TYPES, **dropout.TYPES, **of_places,
            **stamps.TYPES,
        }  # fmt: skip
        options = {"num_warps": WARPS, "launch_cooperative_grid": alone, "launch_pdl": not alone}
        return compile_kernel(
            hopper_backward, GluonASTSource, constants, types,
            data.ANY_ADDRESS | dropout.ANY_ADDRESS | place_arguments.multiples(*TARGETS), options,
        )  # fmt: skip

    @cached_property
    def prepare(self) -> Any:
        p = self.of
        constants = {
            "BLOCK_Q": p.tiles.block_q,
            "DIM": p.value_dim,
            "BLOCK_DV": self.value_columns,
            "HAS_DATA": p.has_data,
            "PLACED": p.row_block,
            **self._tokens_are_rows,
        }
        dtype = TYPES[p.dtype]
        types = {"out_ptr": f"*{dtype}", "do_ptr": f"*{dtype}", "lse_ptr": "*fp32", "lse2_ptr": "*fp32",
                 "delta_ptr": "*fp32", "counters_ptr": "*i32",
                 **dict.fromkeys(_OUT_STRIDES + _LSE_STRIDES, "i64"), **place_arguments.PLACES}  # fmt: skip
        multiples = dict.fromkeys(_OUT_STRIDES, 8) | place_arguments.ANY_ADDRESS
        return compile_kernel(prepare, ASTSource, constants, types, multiples, {"num_warps": 8})

    @cached_property
    def finish(self) -> Any:
        p = self.of
        constants = {"KV_RANGE": self.functions.dash_kv_range, "BLOCK_Q": p.tiles.block_q,
                     "BLOCK_KV": p.tiles.block_kv, "DIM": p.head_dim, "BLOCK_D": self.block_d,
                     "TAIL_D": self.variant.tail, "ROWS": FINISH_ROWS, "HAS_DATA": p.has_data,
                     "PLACED": p.row_block, **self._absent(data.FINISH), **self._tokens_are_rows}  # fmt: skip
        types = {"accumulator": "*fp32", "semaphores": "*i32", "dq_ptr": f"*{TYPES[p.dtype]}", "scale": "fp32",
                 **data.TYPES, **dict.fromkeys(_DQ_STRIDES, "i64"), **place_arguments.PLACES}  # fmt: skip
        options = {"num_warps": FINISH_WARPS, "launch_pdl": True}
        multiples = dict.fromkeys(_DQ_STRIDES, 8) | data.ANY_ADDRESS | place_arguments.ANY_ADDRESS
        return compile_kernel(finish, ASTSource, constants, types, multiples, options)

    @property
    def _tokens_are_rows(self) -> dict[str, None]:
        """Arguments about a mask of rows as constants, where there is none."""
        return {} if self.of.placed else dict.fromkeys(place_arguments.PLACES)

    def _absent(self, arguments: tuple[str, ...]) -> dict[str, None]:
        """Arguments about data as constants, where there are no data."""
        return {} if self.of.has_data else dict.fromkeys(arguments)


_OUT_STRIDES = ("out_b", "out_h", "out_row", "do_b", "do_h", "do_row")
_LSE_STRIDES = ("lse_b", "lse_h", "lse_row")
_DQ_STRIDES = ("dq_b", "dq_h", "dq_row")


@cache
def kernels(of: Specialisation, device: int) -> Kernels:
    """The kernels of a specialisation; a compiled kernel is loaded into one device, so each device has its own."""
    return Kernels(of)
