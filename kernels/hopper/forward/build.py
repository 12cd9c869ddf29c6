"""Compiles the kernels of the forward, `Kernels`, for a `Specialisation` (dtype, head dims, traits of the call).

Compiling needs neither driver nor GPU.  Lengths, bounds, heads, batch and strides are run-time arguments, so one build
serves all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from ....errors import ArgumentError
from ....model.components import Segments
from ....model.plan import Tiles
from ....model.site import DType, Site
from ....model.traits import Traits
from ....schedule.document_tiles import document_band
from ....schedule.table_tile_schedule import from_the_end
from ....upstream.gluon import GluonASTSource
from ....upstream.triton_compiler import ASTSource
from ...common import score
from ...common.arguments import Group
from ...common.compiling import TYPES, columns, compile_kernel, schedule_module
from ...common.device.relations.equal import SEGMENT_IDS
from ...common.relations import Layout, layout
from ..kernel_configs import CONSUMER_WARPS, FORWARD_CONFIGS, SHORT_CONFIGS, ForwardConfig, dims_of_tile, has_few
from ..shared import arguments as shared
from ..shared import operands
from . import arguments
from .device.entry import hopper_forward
from .device.prepare import prepare
from .device.tile_work import ROWS


def tile_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Returns the tile dims (of q and k, of v) for these head dims, a key of `FORWARD_CONFIGS`.

    Raises:
        ArgumentError: no kernel fits the head dims, or TMA cannot read them.
    """
    dims = dims_of_tile(head_dim, value_dim)
    if dims is None:
        allowed = f"multiples of 8 up to one of {[*FORWARD_CONFIGS]}"
        raise ArgumentError("head_dim, value_dim", (head_dim, value_dim), allowed)
    return dims


def is_short(dims: tuple[int, int], q_len: int) -> bool:
    """Returns whether the forward uses a config of `SHORT_CONFIGS`, which has smaller q tiles, for this q_len.

    It does so if `q_len` queries need no more of the smaller tiles than of those of `FORWARD_CONFIGS`.

    dims: the tile dims, as `tile_dims` returns them.
    """
    return dims in SHORT_CONFIGS and -(-q_len // SHORT_CONFIGS[dims].rows) == -(-q_len // FORWARD_CONFIGS[dims].rows)


def check_tiles(dims: tuple[int, int], tiles: Tiles) -> None:
    """Raises ArgumentError unless a plan's forward tiles are those of `FORWARD_CONFIGS[dims]`."""
    used = FORWARD_CONFIGS[dims].tiles
    if tiles != used:
        raise ArgumentError("plan.forward_tiles", str(tiles), f"{used} at head dims up to {dims}")


@dataclass(frozen=True)
class Specialisation:
    """What the forward kernels are compiled for; kernels are cached by it.

    Args:
        head_dim, value_dim: head dims of q and k, and of v.
        traits: traits of the call.
        even_kv: whether kv_len is a multiple of the kv tile.
        short: whether a config of `SHORT_CONFIGS` is used, with two row blocks per tile.
        elements: whether only the batch elements of `arguments.ELEMENTS` are computed.
    """

    dtype: DType
    head_dim: int
    value_dim: int
    traits: Traits
    even_kv: bool
    short: bool = False
    elements: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "bfloat16"):
            raise ArgumentError("dtype", self.dtype, ("float16", "bfloat16"))
        dims = tile_dims(self.head_dim, self.value_dim)  # it raises where no kernel fits
        if self.short and not (self.plain and dims in SHORT_CONFIGS):
            raise ArgumentError(
                "short", True, f"False but for plain bands at head dims up to one of {[*SHORT_CONFIGS]}"
            )

    @staticmethod
    def of_site(site: Site) -> Specialisation:
        """Returns the specialisation for an attention site; `tensors.site_of` gives the site of a call.

        If q_len is dynamic, the config is not a short one.

        Raises:
            ArgumentError: the site is not 16-bit, its kv_len is dynamic, or no kernel fits the head dims.
        """
        if site.kv_len is None:
            raise ArgumentError("site", site, "a site whose kv_len is known")
        dims = tile_dims(site.head_dim, site.value_dim)
        even_kv = site.kv_len % FORWARD_CONFIGS[dims].block_kv == 0
        found = Specialisation(site.dtype, *dims, site.spec.traits, even_kv)
        short = site.q_len is not None and found.plain and is_short(dims, site.q_len)
        return replace(found, short=short)

    def by_documents(self) -> Specialisation:
        """Returns the specialisation for the documents of a mask: that of packed documents."""
        traits = replace(self.traits, components=(Segments.NAME,), varlen=True)
        return Specialisation(self.dtype, self.head_dim, self.value_dim, traits, True)

    @property
    def config(self) -> ForwardConfig:
        return (SHORT_CONFIGS if self.short else FORWARD_CONFIGS)[tile_dims(self.head_dim, self.value_dim)]

    @property
    def has_dense(self) -> bool:
        """Whether the kernel reads the bits of a dense mask."""
        return self.traits.of_pairs

    @property
    def layout(self) -> Layout:
        """The mask vectors and relations that the kernel reads.

        There are none with a dense mask, whose bits include all relations, and none with packed documents, whose tiles
        belong to one document each.
        """
        return Layout.of([]) if self.has_dense or self.traits.varlen else layout(self.traits)

    @property
    def segment_ids_ahead(self) -> int:
        """In which iterations vectors are loaded early, see `ListedMask`: the config's value, or less where registers
        are scarce.

        It is 0 if the mask has no vectors.
        """
        forms = self.layout.FORMS
        if not forms or self.traits.reads("dropout"):
            return 0
        one_comparison = self.even_kv and not self.traits.has_hi and forms == (SEGMENT_IDS,)
        most = 2 if one_comparison else 1  # a condition of loads, a second bound take some
        return min(self.config.segment_ids_ahead, most)

    @property
    def plain(self) -> bool:
        """Whether the mask is a band and there is no dropout: the only case in which short configs are used."""
        return not (self.traits.components or self.traits.reads("dropout"))

    @property
    def bounds(self) -> tuple[bool, bool]:
        """Whether the kernel tests the lower and the upper bound of the band; with packed documents always the lower
        one, which hides all keys from the tokens after the last document.
        """
        has_lo, has_hi = self.traits.bounds
        return has_lo or self.traits.varlen, has_hi

    @property
    def fixed_base(self) -> bool:
        """Whether the softmax needs no row maximum: no exponential of a score overflows the dtype of P, which is that
        of q.

        Sums are then computed by matmuls: without a maximum no probability is exactly one, and a row that sees one key
        would return that key's value with a rounding error.
        """
        low = self.traits.low_scores and self.dtype == "bfloat16"
        return low and self.config.sums_by_matmul != "never" and not self.exact_sums

    @property
    def sums_by_matmul(self) -> bool:
        """Whether matmuls compute the row sums of P, which is faster where the forward is bound by instruction issue.

        See Note [Sums] in `device.sums`.
        """
        return self.fixed_base or (self.config.sums_by_matmul == "always" and not self.exact_sums)

    @property
    def exact_sums(self) -> bool:
        """Whether row sums must be those of the unrounded P in fp32: the program uses the log-sum-exp, or dropout."""
        return self.traits.logsumexp or self.traits.reads("dropout")

    @property
    def half_tiles(self) -> bool:
        """Whether hidden halves of first kv tiles are skipped, see Note [Half tiles] in `device.half_tile`.

        The config must allow it, and the mask must be a band with a lower bound, of a document or of all tokens,
        without dropout.
        """
        band = self.traits.varlen or (self.plain and self.traits.has_lo)
        return self.config.half_tiles and band and not self.traits.reads("dropout")


def nominal_q_lens(site: Site, usual: int) -> tuple[int, ...]:
    """Returns one representative q_len for each compiled variant of the forward that an attention may need at run time.

    There is a variant for short q_len and one for others.  If q_len is fixed, the result is one value; if it is dynamic
    and there is a short variant, it is (short, `usual`).

    Args:
        site: the attention; its q_len is None if dynamic.
        usual: a q_len that is not short.
    """
    if site.q_len is not None and has_few(site.spec.traits, site.q_len, site.group):
        return (site.q_len,)
    dims = tile_dims(site.head_dim, site.value_dim)
    short = SHORT_CONFIGS[dims].rows if dims in SHORT_CONFIGS else usual
    if not Specialisation.of_site(replace(site, q_len=short, kv_len=usual)).short:
        return (usual,)
    if site.q_len is None:
        return short, usual
    return (short if is_short(dims, site.q_len) else usual,)


class Kernels:
    """The kernels prepare and main of a `Specialisation`; each is compiled when it is first accessed."""

    def __init__(self, of: Specialisation) -> None:
        self.of, self.config = of, of.config
        self.columns, self.value_columns = tile_dims(of.head_dim, of.value_dim)  # of a tile
        # the ranges of a band are the same in every schedule; this one runs on all bands
        self.functions = schedule_module(
            "two_pass", document_band(of.traits.has_hi) if of.traits.varlen else of.traits.band
        )

    @cached_property
    def main(self) -> Any:
        p, traits, v = self.of, self.of.traits, self.config
        types: dict[str, Any] = {
            **dict.fromkeys(("q_desc", "out_desc"), columns(p.dtype, int(ROWS.value))),
            **dict.fromkeys(("k_desc", "v_desc"), columns(p.dtype, v.block_kv)),
            "lse_ptr": "*fp32", "counter_ptr": "*i32", "problem": arguments.PROBLEM,
            "data": self._data, "elements": arguments.ELEMENTS if p.elements else None,
            "documents": arguments.DOCUMENTS if traits.varlen else None,
            "target": shared.target(TYPES[p.dtype]) if traits.varlen else None,
            "bound": score.bound(traits), **operands.types(arguments.OPERANDS, traits),
        }  # fmt: skip
        constants = {"SCHEDULE": self._schedule, "MASK": self._mask, "FORM": self._form}
        options = {"num_warps": CONSUMER_WARPS, "launch_pdl": True}
        return compile_kernel(hopper_forward, GluonASTSource, constants, types, options)

    @property
    def _data(self) -> Group | None:
        """The argument group of a mask that is data, or None; packed documents have a group of their own."""
        return arguments.DATA if self.of.traits.components and not self.of.traits.varlen else None

    @property
    def _schedule(self) -> arguments.Schedule:
        f = self.functions
        return arguments.Schedule(f.dash_kv_range, f.dash_seen_rows, f.dash_seen_keys)

    @property
    def _mask(self) -> arguments.MaskKind:
        p, traits = self.of, self.of.traits
        return arguments.MaskKind(
            *p.bounds, p.even_kv and not traits.varlen, from_the_end(traits.has_lo, p.has_dense), p.has_dense,
            p.segment_ids_ahead, p.half_tiles, p.layout.has_ranges, traits.by_head,
            p.layout.reads_positions, **p.layout._asdict(),
        )  # fmt: skip

    @property
    def _form(self) -> arguments.Form:
        v = self.config
        return arguments.Form(
            v.block_kv, self.columns - v.tail, v.tail, self.value_columns, v.q_stages, v.stages, v.consumers,
            v.out_in_q, v.registers, v.producer_registers, self.of.fixed_base, self.of.sums_by_matmul,
        )  # fmt: skip

    @cached_property
    def prepare(self) -> Any:
        padding = arguments.PADDING if self.of.traits.varlen else None
        types: dict[str, Any] = {"counter_ptr": "*i32", "padding": padding}
        constants = {"COUNTERS": 1 + self.of.elements, "ROWS": int(ROWS.value)}
        return compile_kernel(prepare, ASTSource, constants, types, {"num_warps": 1})


@cache
def kernels(of: Specialisation, device: int) -> Kernels:
    """Returns the compiled `Kernels` of a specialisation for a device index, from a cache.

    Each device has its own, since a kernel is loaded into one device.
    """
    return Kernels(of)
