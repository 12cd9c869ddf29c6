"""Tile sizes, pipeline depths and register counts of the Hopper kernels, for each pair of tile head dims.

The keys are (columns of a tile of q and k, columns of a tile of v); TMA fills a tile with zeros where head dims are
smaller.  A config changes speed and resources; only the tile sizes (and `ForwardConfig.sums_by_matmul`) change the bits
of results.  Configs are internal; user settings are in `dash_inductor.config`.
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
"""Head dims of a tile: (of q and k, of v)."""


def _candidate(tiles: str, matmul: float) -> Candidate:
    return Candidate(Tiles.parse(tiles), matmul=matmul, reduce=0.3, handover=0.3, depth=2)


CANDIDATES: dict[Dims, Candidate] = {
    (64, 64): _candidate("128x128w8s2", 0.25),
    (128, 128): _candidate("64x128w8s2", 0.232),
    (192, 128): _candidate("64x128w8s2", 0.25),
    (256, 256): _candidate("64x64w8s1", 0.43),
}
"""Tiles of the backward.  Matmuls reach 560, 520 and 300 TFLOP/s at head dims up to 128, 64 and 256; the reducer warps
hide the cost of adding to dq."""


def dims_of_tile(head_dim: int, value_dim: int) -> Dims | None:
    """Returns the dims (of q and k, of v) of the smallest tile that holds these head dims.

    It is None if they are too large, or if TMA cannot read them: its rows begin at multiples of 16 bytes, so both must
    be multiples of 8.
    """
    if head_dim % 8 or value_dim % 8:
        return None
    for dims in CANDIDATES:
        if head_dim <= dims[0] and value_dim <= dims[1]:
            return dims
    return None


@dataclass(frozen=True)
class BackwardConfig:
    """How the main kernel of the backward is built; it affects speed and resources, never the bits of results.

    Args:
        step: the order of the matmuls in an iteration, see `shared.device.steps`.
        ahead: whether an iteration ends with the matmul S = K Q^T of the next one; always true for "overlapped".
        left_in_registers: whether K and V are read from registers as left operands of matmuls.
        tail: number of last columns of q and k that are stored in separate tiles, so that the number of the others is a
            power of two.
        one_dq: whether shared memory has a single dq tile, because one per stage does not fit.
        registers: registers per thread of the producer and the reducers.
        shared_vectors: the most per-query vectors of a mask that are kept in shared memory; any others are read from
            global memory.
        bits_ahead: whether the bits of a dense mask are loaded before the probabilities are computed, which takes
            registers.
    """

    step: Literal["overlapped", "halved", "shared"]
    ahead: bool = False
    left_in_registers: bool = False
    tail: int = 0
    one_dq: bool = False
    registers: int = 24
    shared_vectors: int = 8
    bits_ahead: bool = True

    @property
    def pieces(self) -> int:
        """The number of pieces that a q tile is cut into in shared memory."""
        return 2 if self.step == "halved" else 1


BACKWARD_CONFIGS: dict[Dims, BackwardConfig] = {
    (64, 64): BackwardConfig("halved", ahead=True, left_in_registers=True),
    (128, 128): BackwardConfig("overlapped", ahead=True),
    (192, 128): BackwardConfig("halved", tail=64, one_dq=True, shared_vectors=2, bits_ahead=False),
    (256, 256): BackwardConfig("shared"),
}
"""Configs of the backward."""


@dataclass(frozen=True)
class ForwardConfig:
    """How the main kernel of the forward is built; only block_kv and sums_by_matmul change the bits of results.

    Args:
        block_kv: keys of a kv tile.
        stages: tiles in each of the shared memory rings of K and V.
        consumers: number of consumer warpgroups, 2 or 3; each computes one row block.
        q_stages: Q tiles in shared memory; with 2 the next one is loaded while a tile is computed.
        tail: number of last columns of q and k that are stored in separate tiles, so that the number of the others is a
            power of two.
        out_in_q: whether out overwrites q in shared memory, because there is no room for both.
        registers: registers per thread of the consumers (the first one gets what is left).
        producer_registers: registers per thread of the producer.
        segment_ids_ahead: in which iterations the mask's vectors are loaded before the matmul, see `listed.ListedMask`
            and `Specialisation.segment_ids_ahead`.
        half_tiles: whether hidden halves of first kv tiles are skipped, see Note [Half tiles] in `half_tile` and
            `Specialisation.half_tiles`.
        sums_by_matmul: when matmuls compute the row sums of P (Note [Sums] in `sums`, `Specialisation.sums_by_matmul`):
            always; only where scores are bounded; or never, because the eight additional registers would cause spills.
        head_chunk_mib: MiB of K and V that a head chunk reads, see `launch._head_chunks`; less than the L2 cache of any
            Hopper GPU.
    """

    block_kv: int
    stages: int
    consumers: int = 2
    q_stages: int = 1
    tail: int = 0
    out_in_q: bool = False
    registers: int = 240
    producer_registers: int = 24
    segment_ids_ahead: int = 1
    half_tiles: bool = False
    sums_by_matmul: Literal["always", "bounded", "never"] = "bounded"
    head_chunk_mib: int = 16

    def __post_init__(self) -> None:
        if self.half_tiles and self.block_kv != 2 * ROW_BLOCK:
            raise ArgumentError("block_kv", self.block_kv, f"{2 * ROW_BLOCK}, of which {ROW_BLOCK} are a half")

    @property
    def rows(self) -> int:
        """The number of query rows of a q tile, over all consumers."""
        return ROW_BLOCK * self.consumers

    @property
    def tiles(self) -> Tiles:
        """The tile sizes, number of warps and number of stages, as the `Tiles` that a plan stores."""
        return Tiles(self.rows, self.block_kv, CONSUMER_WARPS * self.consumers, self.stages)


FORWARD_CONFIGS: dict[Dims, ForwardConfig] = {
    (64, 64): ForwardConfig(
        128, 4, consumers=3, q_stages=2, registers=160, producer_registers=32, segment_ids_ahead=0, half_tiles=True,
        sums_by_matmul="always", head_chunk_mib=32,
    ),
    (128, 128): ForwardConfig(128, 2, q_stages=2, segment_ids_ahead=2),
    (192, 128): ForwardConfig(
        128, 2, tail=64, out_in_q=True, registers=232, producer_registers=40, half_tiles=True, sums_by_matmul="never",
    ),
    (256, 256): ForwardConfig(64, 2, out_in_q=True),
}  # fmt: skip
"""Configs of the forward.  docs/what-we-know.md has the rates of these and of others."""

SHORT_CONFIGS: dict[Dims, ForwardConfig] = {
    (64, 64): ForwardConfig(128, 4, q_stages=2, segment_ids_ahead=0, half_tiles=True, sums_by_matmul="always"),
}
"""Configs with two row blocks per tile, for heads that need as many of these tiles as of tiles with three, see
`is_short`.

Results are bitwise the same, because the kv tile is the same and a row block is computed in the same way in any tile.
Plans store the tiles of `FORWARD_CONFIGS`."""

FEW_QUERIES = 16
"""Largest q_len for which the keys are split (split-KV), see Note [Parts of the keys] in `forward.device.few`: the
main kernel's tiles would consist mostly of padding rows."""
FEW_LEAST_ROWS, FEW_ROWS = 16, 64
"""Smallest and largest number of rows of a tile; its rows are the queries of all query heads of a group."""
PART, MOST_PARTS = 512, 64
"""Keys of the shortest part, and the largest number of parts per head."""


def has_few(traits: Traits, q_len: int, group: int) -> bool:
    """Returns whether a call has few enough queries for the split-KV kernels, and needs nothing that they lack.

    Args:
        traits: traits of the call; with a mask, dropout, sinks or a score modifier, the main kernel runs.
        group: query heads per kv head.
    """
    plain = not (traits.has_lo or traits.has_hi or traits.asks or traits.varlen or traits.reads("sinks"))
    return plain and 0 < q_len <= FEW_QUERIES and group * q_len <= FEW_ROWS


def suits_parts(traits: Traits, q_len: int, kv_len: int, group: int) -> bool:
    """Returns whether the split-KV kernels run a call, because it has few queries and many keys.

    Args:
        traits: traits of the call.
        group: query heads per kv head.
    """
    return has_few(traits, q_len, group) and kv_len > 2 * PART


def part_of(kv_len: int) -> int:
    """Returns the number of keys of a part (split) for split-KV: PART times a power of two.

    It depends on kv_len alone, and so do the bits of the results.
    """
    length = PART
    while -(-kv_len // length) > MOST_PARTS:
        length *= 2
    return length
