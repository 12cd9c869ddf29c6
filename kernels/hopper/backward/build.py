"""Compiles the kernels of the backward, `Kernels`, for a `Specialisation` (dtype, head dims, group, mask, tiles).

Compiling needs neither driver nor GPU.  Lengths, batch and strides are run-time arguments, so one build serves all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

from triton.experimental.gluon import language as gl

from ....errors import ArgumentError
from ....model.mask import ROW_BLOCK
from ....model.plan import Plan, Tiles
from ....model.site import Site
from ....model.traits import Traits
from ....schedule import schedules
from ....upstream.gluon import GluonASTSource
from ....upstream.triton_compiler import ASTSource
from ...common import score
from ...common.arguments import Group
from ...common.compiling import COLUMNS, TYPES, columns, compile_kernel, descriptor, schedule_module
from ...common.relations import Layout, layout
from ..family import FAMILY
from ..kernel_configs import BACKWARD_CONFIGS, dims_of_tile
from ..shared import arguments as shared
from ..shared import operands
from ..shared.device.operations import DQ_LAYOUT, DQ_ROW
from ..shared.device.step_signals import MOST_STAGES
from . import arguments
from .device.entry import hopper_backward
from .device.finish import finish
from .device.prepare import prepare

WARPS = 8
"""Consumer warps; the warps of producer and reducers are additional."""

ROW_LAYOUT = gl.NVMMASharedLayout(0, 32, rank=1)
FINISH_ROWS, FINISH_WARPS = 32, 4


def tile_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Returns the tile dims (of q and k, of v) for these head dims, a key of `BACKWARD_CONFIGS`.

    Raises:
        ArgumentError: no config fits the head dims, or TMA cannot read them.
    """
    dims = dims_of_tile(head_dim, value_dim)
    if dims is None:
        allowed = f"multiples of 8 up to one of {[*BACKWARD_CONFIGS]}"
        raise ArgumentError("head_dim, value_dim", (head_dim, value_dim), allowed)
    return dims


@dataclass(frozen=True)
class Specialisation:
    """What the backward kernels are compiled for; kernels are cached by it.

    Args:
        head_dim, value_dim: head dims of q and k, and of v.
        group: query heads per kv head.
        traits: traits of the call.
        even_kv: whether kv_len is a multiple of the kv tile; False where the mask is data.
        stamped: whether the main kernel records timestamps, see `stamps`; results are the same.
    """

    dtype: Literal["float16", "bfloat16"]
    head_dim: int
    value_dim: int
    group: int
    schedule: str
    traits: Traits
    even_kv: bool
    tiles: Tiles
    stamped: bool = False

    def __post_init__(self) -> None:
        ahead = BACKWARD_CONFIGS[tile_dims(self.head_dim, self.value_dim)].ahead
        if ahead and self.tiles.num_stages < 2:  # a step would wait for what only its own end makes room for
            raise ArgumentError("tiles", str(self.tiles), "num_stages >= 2 at these head dims")
        if self.tiles.num_stages > MOST_STAGES:
            raise ArgumentError("tiles", str(self.tiles), f"num_stages <= {MOST_STAGES}")
        if self.tiles.num_warps != WARPS:
            raise ArgumentError("tiles", str(self.tiles), f"num_warps={WARPS}")

    @staticmethod
    def of_site(site: Site, plan: Plan, stamped: bool = False) -> Specialisation:
        """Returns the specialisation for an attention site under a plan; `tensors.site_of` gives the site of a call.

        Args:
            stamped: whether the main kernel records timestamps.

        Raises:
            ArgumentError: the plan is for another family, the site's kv_len is dynamic, its dtype is float32, or the
                kernel does not support the tiles.
        """
        if plan.kernel != FAMILY.name:
            raise ArgumentError("plan", str(plan), "a plan of the hopper kernel")
        if site.kv_len is None:
            raise ArgumentError("site", site, "a site whose kv_len is known")
        if site.dtype == "float32":
            raise ArgumentError("dtype", site.dtype, ("float16", "bfloat16"))
        traits, dims = site.spec.traits, (site.head_dim, site.value_dim)
        even = site.kv_len % plan.dkdv.block_kv == 0 and not traits.components
        return Specialisation(site.dtype, *dims, site.group, plan.schedule, traits, even, plan.dkdv, stamped)

    @property
    def row_block(self) -> int:
        """The padded rows per row block of a varlen layout; 0 without one, where every row is a token."""
        return ROW_BLOCK if self.traits.varlen else 0


class Kernels:
    """The kernels prepare, main and finish of a `Specialisation`; each is compiled when it is first accessed."""

    def __init__(self, of: Specialisation) -> None:
        self.of = of
        dims = tile_dims(of.head_dim, of.value_dim)
        self.config = BACKWARD_CONFIGS[dims]
        self.functions = schedule_module(of.schedule, of.traits.band)
        self.schedule = schedules.define(of.schedule, of.traits.band)
        self.columns, self.value_columns = dims  # of a tile
        self.block_d = self.columns - self.config.tail

    @property
    def rows_of_a_load(self) -> int:
        """The number of rows of q and do that one TMA load brings: those of a whole q tile, or of one of its pieces.

        A piece whose columns fit one block of 64 directly precedes the next piece in memory, as the rows of a whole
        tile do; so one load brings the whole tile.  Wider pieces are loaded separately.
        """
        one_block = self.columns == self.value_columns == COLUMNS
        return self.of.tiles.block_q // (1 if one_block else self.config.pieces)

    @cached_property
    def main(self) -> Any:
        p, v, tiles = self.of, self.config, self.of.tiles
        kind, q, kv, d = p.traits, tiles.block_q, tiles.block_kv, self.block_d
        alone = self.schedule.resident is not None
        accumulator = [math.gcd(q * d, q * v.tail) // DQ_ROW.value, DQ_ROW.value]
        target = shared.target(TYPES[p.dtype]) if kind.varlen else None
        types: dict[str, Any] = {
            **dict.fromkeys(("q_desc", "do_desc"), columns(p.dtype, self.rows_of_a_load)),
            **dict.fromkeys(("k_desc", "v_desc", "dk_desc", "dv_desc"), columns(p.dtype, kv)),
            "dq_desc": descriptor("fp32", accumulator, DQ_LAYOUT.value),
            **dict.fromkeys(("lse_desc", "delta_desc"), descriptor("fp32", [q], ROW_LAYOUT)),
            "workspace": arguments.WORKSPACE, "problem": arguments.PROBLEM,
            "data": self._data, "varlen_layout": self._varlen_layout, "targets": {"dk": target, "dv": target},
            **operands.types(arguments.OPERANDS, kind),
            "stamped": arguments.STAMPS if p.stamped else None, "bound": score.bound(kind),
        }  # fmt: skip
        options = {"num_warps": WARPS, "launch_cooperative_grid": alone, "launch_pdl": not alone}
        constants = {"SCHEDULE": self._schedule, "MASK": self._mask, "FORM": self._form}
        return compile_kernel(hopper_backward, GluonASTSource, constants, types, options)

    @property
    def _data(self) -> Group | None:
        """The argument group of a mask that is data, or None."""
        return arguments.DATA if self.of.traits.components else None

    @property
    def _schedule(self) -> arguments.Schedule:
        f, parts, alone = self.functions, self.schedule.parts, self.schedule.resident is not None
        return arguments.Schedule(
            f.dash_launch, f.dash_kv_tile, f.dash_visits, f.dash_q_tile, f.dash_rank, f.dash_q_range,
            f.dash_seen_rows, f.dash_seen_keys, parts, alone,
        )  # fmt: skip

    @property
    def _mask(self) -> arguments.MaskKind:
        p = self.of
        even = p.even_kv and self.schedule.parts == 1
        vectors = Layout.of(()) if p.traits.of_pairs else layout(p.traits)  # bits of pairs include what vectors say
        return arguments.MaskKind(
            *p.traits.bounds, even, p.traits.of_pairs, self.config.bits_ahead, p.row_block, vectors.has_ranges,
            p.traits.by_head, min(vectors.QUERIES, self.config.shared_vectors), **vectors._asdict(),
        )  # fmt: skip

    @property
    def _form(self) -> arguments.Form:
        p, v, tiles = self.of, self.config, self.of.tiles
        dq_stages = 1 if v.one_dq else tiles.num_stages
        return arguments.Form(
            p.group, tiles.block_q, tiles.block_kv, self.block_d, v.tail, self.value_columns, tiles.num_stages,
            dq_stages, v.step, v.ahead, v.left_in_registers, v.registers,
        )  # fmt: skip

    @cached_property
    def prepare(self) -> Any:
        p, dtype = self.of, TYPES[self.of.dtype]
        form = arguments.Prepare(
            p.tiles.block_q, p.value_dim, self.value_columns, bool(p.traits.components), p.row_block
        )
        types: dict[str, Any] = {
            **dict.fromkeys(("out_ptr", "do_ptr"), f"*{dtype}"),
            **dict.fromkeys(("lse_ptr", "lse2_ptr", "delta_ptr"), "*fp32"), "counters_ptr": "*i32",
            **dict.fromkeys(("out_strides", "do_strides"), arguments.OUT_STRIDES),
            "lse_strides": arguments.LSE_STRIDES, "varlen_layout": self._varlen_layout,
            **operands.types(arguments.PREPARE_OPERANDS, p.traits),
        }  # fmt: skip
        return compile_kernel(prepare, ASTSource, {"FORM": form}, types, {"num_warps": 8})

    @cached_property
    def finish(self) -> Any:
        p = self.of
        form = arguments.Finish(
            p.tiles.block_q, p.tiles.block_kv, p.head_dim, self.block_d, self.config.tail, FINISH_ROWS, p.row_block
        )
        types = {
            "accumulator": "*fp32", "semaphores": "*i32", "dq_ptr": f"*{TYPES[p.dtype]}", "scale": "fp32",
            "dq_strides": arguments.OUT_STRIDES, "data": arguments.CONTRIBUTIONS if p.traits.components else None,
            "varlen_layout": self._varlen_layout,
        }  # fmt: skip
        constants = {"KV_RANGE": self.functions.dash_kv_range, "FORM": form}
        return compile_kernel(finish, ASTSource, constants, types, {"num_warps": FINISH_WARPS, "launch_pdl": True})

    @property
    def _varlen_layout(self) -> Group | None:
        return shared.VARLEN_LAYOUT if self.of.traits.varlen else None


@cache
def kernels(of: Specialisation, device: int) -> Kernels:
    """Returns the compiled `Kernels` of a specialisation for a device index, from a cache.

    Each device has its own, since a kernel is loaded into one device.
    """
    return Kernels(of)
