"""The configs of the Hopper kernels, by the head dims of q and k, and of v, of a tile.

TMA fills a tile up with zeros where the head dims are smaller.  A config changes speed and resources; of all that is in
it, the tiles alone change bits.  What a user sets is a setting (`dash_inductor.config`), and never a config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...errors import ArgumentError
from ...model.mask import ROW_BLOCK
from ...model.plan import Tiles
from ...model.traits import Traits
from ..family import Candidate

CONSUMER_WARPS = 4

Dims = tuple[int, int]
"""Head dims of a tile, of q and k, and of v."""


def _candidate(tiles: str, matmul: float) -> Candidate:
    return Candidate(Tiles.parse(tiles), matmul=matmul, reduce=0.3, handover=0.3, depth=2)


CANDIDATES: dict[Dims, Candidate] = {
    (64, 64): _candidate("128x128w8s2", 0.25),
    (128, 128): _candidate("64x128w8s2", 0.232),
    (192, 128): _candidate("64x128w8s2", 0.25),
    (256, 256): _candidate("64x64w8s1", 0.43),
}
"""Tiles of the backward.  Matmuls run at 560, 520 and 300 TFLOP/s for head dims up to 128, 64 and 256; the reducers
hide the add."""


def dims_of_tile(head_dim: int, value_dim: int) -> Dims | None:
    """The dims of the smallest tile that holds these head dims, None where there is none."""
    for dims in CANDIDATES:
        if head_dim <= dims[0] and value_dim <= dims[1]:
            return dims
    return None


@dataclass(frozen=True)
class BackwardConfig:
    """How the main kernel of the backward is built: speed and resources depend on it, and never bits.

    Args:
        step: the form of a step, see `steps`.
        ahead: a step ends with S of the next one; always where steps overlap.
        left_in_registers: K and V are left operands in registers.
        tail: columns of q and k in tiles of their own: the other columns are a power of two.
        one_dq: one dq tile in shared memory, where there is no room for one per stage.
        registers: registers per thread of producer and reducers.
    """

    step: Literal["overlapped", "halved", "shared"]
    ahead: bool = False
    left_in_registers: bool = False
    tail: int = 0
    one_dq: bool = False
    registers: int = 24

    @property
    def pieces(self) -> int:
        """Pieces of a q tile in shared memory."""
        return 2 if self.step == "halved" else 1


BACKWARD_CONFIGS: dict[Dims, BackwardConfig] = {
    (64, 64): BackwardConfig("halved", ahead=True, left_in_registers=True),
    (128, 128): BackwardConfig("overlapped", ahead=True),
    (192, 128): BackwardConfig("halved", tail=64, one_dq=True),
    (256, 256): BackwardConfig("shared"),
}
"""Configs of the backward."""


@dataclass(frozen=True)
class ForwardConfig:
    """How the main kernel of the forward is built; of all fields, block_kv and sums_by_matmul alone change bits.

    Args:
        block_kv: keys of a kv tile.
        stages: tiles of the rings of K and of V.
        consumers: warpgroups with a row block of their own, 2 or 3.
        q_stages: Q tiles in shared memory, so that the next one is there when a tile ends.
        tail: columns of q and k in tiles of their own: the other columns are a power of two.
        out_in_q: out takes the place of q in shared memory, where there is no room for both.
        registers: per thread of the consumers (the first of them gets what is left).
        producer_registers: per thread of the producer.
        codes_ahead: see `listed.ListedMask`, and `Specialisation.codes_ahead`.
        half_tiles: see Note [Half tiles] in `half_tile`, and `Specialisation.half_tiles`.
        sums_by_matmul: when, see Note [Sums] in `sums` and `Specialisation.sums_by_matmul`: always, where scores are
            bounded, or never, because the eight registers would spill others.
        section_mib: of K and V of a section of heads, see `launch._sections`; less than the L2 cache of any Hopper GPU.
    """

    block_kv: int
    stages: int
    consumers: int = 2
    q_stages: int = 1
    tail: int = 0
    out_in_q: bool = False
    registers: int = 240
    producer_registers: int = 24
    codes_ahead: int = 1
    half_tiles: bool = False
    sums_by_matmul: Literal["always", "bounded", "never"] = "bounded"
    section_mib: int = 16

    def __post_init__(self) -> None:
        if self.half_tiles and self.block_kv != 2 * ROW_BLOCK:
            raise ArgumentError("block_kv", self.block_kv, f"{2 * ROW_BLOCK}, of which {ROW_BLOCK} are a half")

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return ROW_BLOCK * self.consumers

    @property
    def tiles(self) -> Tiles:
        """The tiles as a plan names them."""
        return Tiles(self.rows, self.block_kv, CONSUMER_WARPS * self.consumers, self.stages)


FORWARD_CONFIGS: dict[Dims, ForwardConfig] = {
    (64, 64): ForwardConfig(
        128, 4, consumers=3, q_stages=2, registers=160, producer_registers=32, codes_ahead=0, half_tiles=True,
        sums_by_matmul="always", section_mib=32,
    ),
    (128, 128): ForwardConfig(128, 2, q_stages=2, codes_ahead=2),
    (192, 128): ForwardConfig(
        128, 2, tail=64, out_in_q=True, registers=232, producer_registers=40, half_tiles=True, sums_by_matmul="never",
    ),
    (256, 256): ForwardConfig(64, 2, out_in_q=True),
}  # fmt: skip
"""Configs of the forward.  docs/what-we-know.md has the rates of these and of others."""

SHORT_CONFIGS: dict[Dims, ForwardConfig] = {
    (64, 64): ForwardConfig(128, 4, q_stages=2, codes_ahead=0, half_tiles=True, sums_by_matmul="always"),
}
"""Configs for heads of so few queries that tiles of two row blocks are not more than tiles of three, see `is_short`.

They give the same bits: the kv tile is the same, and a row block is computed alike, whatever tile it is in.  Plans name
the tiles of `FORWARD_CONFIGS`."""

FEW_QUERIES = 16
"""The most queries of a head whose keys are cut into parts, see Note [Parts of the keys] in `forward.device.few`: most
rows of the tiles of the main kernel would be rows that nobody needs."""
FEW_LEAST_ROWS, FEW_ROWS = 16, 64
"""Rows of a product of warps, and the most rows of a tile: queries of all query heads of a group."""
PART, MOST_PARTS = 512, 64
"""Keys of the shortest part, and the most parts of a head."""


def has_few(traits: Traits, q_len: int, group: int) -> bool:
    """Whether a call has few queries.

    Args:
        traits: of the call: under a mask, with dropout, sinks or a bound of scores, the main kernel runs.
        group: query heads per kv head.
    """
    plain = not (traits.has_lo or traits.has_hi or traits.asks or traits.placed or traits.sinks)
    return plain and 0 < q_len <= FEW_QUERIES and group * q_len <= FEW_ROWS


def suits_parts(traits: Traits, q_len: int, kv_len: int, group: int) -> bool:
    """Whether the keys of a call are cut into parts, few queries against many keys; arguments as of `has_few`."""
    return has_few(traits, q_len, group) and kv_len > 2 * PART


def part_of(kv_len: int) -> int:
    """Keys of a part, PART times a power of two: a function of the number of keys alone, and so are bits."""
    length = PART
    while -(-kv_len // length) > MOST_PARTS:
        length *= 2
    return length
