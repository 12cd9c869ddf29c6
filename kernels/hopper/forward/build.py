"""From a class of problems to compiled kernels: `Kernels` is what one (dims, dtype, mask kind) needs.

Compiling needs neither driver nor GPU; lengths, bounds, heads, batch and strides are arguments, so one build serves all
of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from ....errors import ArgumentError
from ....model.mask import ROW_BLOCK, Band
from ....model.plan import Tiles
from ....model.site import DType, Site
from ....schedule.table_walk import from_the_end
from ....upstream.gluon import GluonASTSource
from ....upstream.triton_compiler import ASTSource
from ...common.compiling import TYPES, columns, compile_kernel, schedule_module
from ..settings import CONSUMER_WARPS, SETTINGS, SHORT, Settings, dims_of_tile
from ..shared import place_arguments
from .device.entry import hopper_forward
from .device.prepare import prepare
from .device.work import ROWS

DATA_ARGUMENTS = {
    **dict.fromkeys(("counts_ptr", "steps_ptr"), "*i32"), "tables": "i32",
    **dict.fromkeys(("q_codes_ptr", "kv_codes_ptr", "seen_bits_ptr"), "*i32"), "keys_seen_ptr": "*i8",
}  # fmt: skip
"""Arguments of the main kernel that describe a mask that is data, and their types; kernels of bands have none."""

DROPOUT_ARGUMENTS = {"seed_ptr": "*i64", "threshold": "i32", "rescale": "fp32"}
"""Arguments of the main kernel about dropout, and their types; kernels without dropout have none."""

TARGET = "out"
"""The result that the main kernel writes to tokens, where the mask is one of rows."""


def dims_of(head_dim: int, value_dim: int) -> tuple[int, int]:
    """The key of `SETTINGS` for these head dims.

    Raises:
        ArgumentError: head dims that no kernel fits, or that TMA cannot read.
    """
    dims = dims_of_tile(head_dim, value_dim)
    if dims is None or head_dim % 8 or value_dim % 8:
        allowed = f"multiples of 8 up to one of {[*SETTINGS]}"
        raise ArgumentError("head_dim, value_dim", (head_dim, value_dim), allowed)
    return dims


def is_short(dims: tuple[int, int], q_len: int) -> bool:
    """Whether heads of `q_len` queries have settings in `SHORT`, see `Specialisation.for_queries`."""
    return dims in SHORT and -(-q_len // SHORT[dims].rows) == -(-q_len // SETTINGS[dims].rows)


def check_tiles(dims: tuple[int, int], tiles: Tiles) -> None:
    """Raise ArgumentError unless a plan's `tiles` are those that `SETTINGS` has for these dims, a key of it."""
    used = SETTINGS[dims].tiles
    if tiles != used:
        raise ArgumentError("plan.forward_tiles", str(tiles), f"{used} at head dims up to {dims}")


@dataclass(frozen=True)
class Specialisation:
    """The facts for which the kernels are compiled.

    Args:
        head_dim, value_dim: of q and k, of v.
        has_lo, has_hi: which bounds the mask has.
        even_kv: kv_len is a multiple of the kv tile.
        has_codes, has_dense: the part of `data.ForwardData` that says who sees whom, beside a band; one at most.
        has_dropout: probabilities are dropped, see `data.ForwardDropout`.
        placed: the mask is one of rows, see `hopper.places`.
        short: with the settings of `SHORT`.
    """

    dtype: DType
    head_dim: int
    value_dim: int
    has_lo: bool
    has_hi: bool
    even_kv: bool
    has_codes: bool = False
    has_dense: bool = False
    has_dropout: bool = False
    placed: bool = False
    short: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "bfloat16"):
            raise ArgumentError("dtype", self.dtype, ("float16", "bfloat16"))
        if self.has_codes and self.has_dense:
            raise ArgumentError("has_codes, has_dense", (True, True), "one of them: bits say what codes say")
        dims = dims_of(self.head_dim, self.value_dim)  # it raises where no kernel fits
        if self.short and not (self.plain and dims in SHORT):
            raise ArgumentError("short", True, f"False but for plain bands at head dims up to one of {[*SHORT]}")

    @staticmethod
    def of_site(site: Site) -> Specialisation:
        """Return the facts for which the kernels of a site are compiled.

        Raises:
            ArgumentError: a site that is not 16-bit or whose kv_len is not known, or head dims that no kernel fits.
        """
        if site.kv_len is None:
            raise ArgumentError("site", site, "a site whose kv_len is known")
        dims = dims_of(site.head_dim, site.value_dim)
        even = site.kv_len % SETTINGS[dims].block_kv == 0
        has_bounds = site.band.lo is not None, site.band.hi is not None
        has_dense, has_dropout = site.mask.dense is not None, site.call.dropout is not None
        has_codes = not has_dense and (site.mask.keys is not None or site.mask.segments is not None)
        placed = site.mask.placed is not None
        found = Specialisation(site.dtype, *dims, *has_bounds, even, has_codes, has_dense, has_dropout, placed)
        return found if site.q_len is None else found.for_queries(site.q_len)

    def for_queries(self, q_len: int) -> Specialisation:
        """The same with the settings for heads of `q_len` queries."""
        dims = dims_of(self.head_dim, self.value_dim)
        return replace(self, short=self.plain and is_short(dims, q_len))

    @property
    def settings(self) -> Settings:
        return (SHORT if self.short else SETTINGS)[dims_of(self.head_dim, self.value_dim)]

    @property
    def codes_ahead(self) -> int:
        """The settings' value, as far as nothing else takes the registers."""
        if self.has_dense or self.has_dropout:
            return 0
        most = 2 if self.even_kv and not self.has_hi else 1  # a load with a condition and a second bound take some
        return min(self.settings.codes_ahead, most)

    @property
    def plain(self) -> bool:
        """The mask is a band, and nothing is dropped.  For others neither halves nor short settings were measured."""
        return not (self.has_codes or self.has_dense or self.placed or self.has_dropout)

    @property
    def halves(self) -> bool:
        """The settings' value, for bands with a lower bound."""
        return self.settings.halves and self.has_lo and self.plain

    @property
    def band(self) -> Band:
        """Any band with these bounds: their values are arguments."""
        return Band(0 if self.has_lo else None, 0 if self.has_hi else None)


def nominal_q_lens(site: Site, usual: int) -> tuple[int, ...]:
    """Numbers of queries that stand for all that a site may have: one for each setting that these may need.

    Args:
        usual: one that is not short.
    """
    dims = dims_of(site.head_dim, site.value_dim)
    few = SHORT[dims].rows if dims in SHORT else usual
    if not Specialisation.of_site(replace(site, q_len=few, kv_len=usual)).short:
        return (usual,)
    if site.q_len is None:
        return few, usual
    return (few if is_short(dims, site.q_len) else usual,)


class Kernels:
    """prepare and main of a `Specialisation`, compiled on first use."""

    def __init__(self, of: Specialisation) -> None:
        self.of, self.settings = of, of.settings
        self.columns, self.value_columns = dims_of(of.head_dim, of.value_dim)  # of a tile
        # the ranges of a band are the same in every schedule; this one runs on all bands
        self.functions = schedule_module("two_pass", of.band)

    @cached_property
    def main(self) -> Any:
        p, f, v = self.of, self.functions, self.settings
        constants = {
            "KV_RANGE": f.dash_kv_range, "SEEN_ROWS": f.dash_seen_rows, "SEEN_KEYS": f.dash_seen_keys,
            "HAS_LO": p.has_lo, "HAS_HI": p.has_hi, "FROM_THE_END": from_the_end(p.has_lo, p.has_dense),
            "EVEN_KV": p.even_kv, "BLOCK_KV": v.block_kv,
            "BLOCK_D": self.columns - v.tail, "TAIL_D": v.tail, "BLOCK_DV": self.value_columns,
            "Q_STAGES": v.q_stages, "STAGES": v.stages, "CONSUMERS": v.consumers, "OUT_IN_Q": v.out_in_q,
            "REGISTERS": v.registers, "PRODUCER_REGISTERS": v.producer_registers,
            "HAS_CODES": p.has_codes, "HAS_DENSE": p.has_dense, "DROPOUT": p.has_dropout,
            "CODES_AHEAD": p.codes_ahead, "PLACED": ROW_BLOCK if p.placed else 0,
            "HALVES": p.halves,
        }  # fmt: skip
        of_places = place_arguments.types(TYPES[p.dtype], TARGET)
        if not p.placed:
            constants |= dict.fromkeys(of_places)
        if not (p.has_codes or p.has_dense):
            constants |= dict.fromkeys(DATA_ARGUMENTS)
        if not p.has_dropout:
            constants |= dict.fromkeys(DROPOUT_ARGUMENTS)
        rows = int(ROWS.value)
        types = {
            **dict.fromkeys(("q_desc", "out_desc"), columns(p.dtype, rows)),
            **dict.fromkeys(("k_desc", "v_desc"), columns(p.dtype, v.block_kv)),
            "lse_ptr": "*fp32", "counter_ptr": "*i32", "scale_log2": "fp32", **DATA_ARGUMENTS, **DROPOUT_ARGUMENTS,
            **of_places,
        }  # fmt: skip
        options = {"num_warps": CONSUMER_WARPS, "launch_pdl": True}
        multiples = {"seed_ptr": 8} | place_arguments.multiples(TARGET)
        return compile_kernel(hopper_forward, GluonASTSource, constants, types, multiples, options)

    @cached_property
    def prepare(self) -> Any:
        return compile_kernel(prepare, ASTSource, {}, {"counter_ptr": "*i32"}, {}, {"num_warps": 1})


@cache
def kernels(of: Specialisation, device: int) -> Kernels:
    """The kernels of a specialisation; a compiled kernel is loaded into one device, so each device has its own."""
    return Kernels(of)
