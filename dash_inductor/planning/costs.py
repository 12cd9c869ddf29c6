"""Every constant of the planner: tile shapes and costs per kernel family, architecture, dtype and head dims.

Costs are in units of the compute of one 128 x 128 tile pair at the architecture's best rate, five matmuls in one pass.
They are calibrated from benchmarks/results/tiles.json (H100), never at run time: there a matmul of the two-pass kernels
runs at 650 TFLOP/s (0.2), and a step of the ordered kernel, its five matmuls and its add, costs 1.9 such tile pairs.
The Hopper kernel's matmuls run at 560, 520 and 300 TFLOP/s for head dims up to 128, 64 and 256; its reducers hide the
add. The other architectures have shapes that compile without large spills, not measured ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError
from ..model.plan import Tiles

NUMERICS_VERSION = 11
"""Raise it whenever a kernel changes the bits of a gradient for an otherwise equal numerics key."""

WORKERS = {"sm_80": 108, "sm_89": 142, "sm_90": 132, "sm_100": 148, "cpu": 1}
"""Nominal CTAs at a time per architecture; a constant, whatever the device in the machine has."""

SAME_AS = {"sm_86": "sm_89", "sm_87": "sm_80", "sm_103": "sm_100", "sm_120": "sm_89", "sm_121": "sm_89"}
"""Architectures that use the tables of another one, by the shared memory of a CTA."""

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
"""Shared memory that one CTA may use."""

L2_BYTES = 20 << 20
"""What the heads of a section may keep in an H100's L2 cache (50 MB): the next section is there already when the last
CTAs of one finish."""

NOMINAL_LEN, NOMINAL_BATCH, NOMINAL_HEADS = 2048, 8, 16
"""The problem on which candidates are compared, 16384 tokens of width 2048: work and waits decide, not the tail."""


@dataclass(frozen=True)
class Candidate:
    """Tile shapes with their costs.

    Args:
        dkdv, dq: tiles; `dq` only for two_pass.
        matmul: cost of one matmul over a 128 x 128 tile pair.  The one-pass kernel does 5 per pair, the two kernels of
            two_pass do 4 and 3.
        reduce: cost of adding a 128-row dq tile in order.
        handover: latency between two writers of one accumulator.
        depth: dq buffers of a separate writer; 0 where adding blocks the CTA.
    """

    dkdv: Tiles
    dq: Tiles | None = None
    matmul: float = 0.2
    reduce: float = 0.0
    handover: float = 0.0
    depth: int = 0


Key = tuple[str, int, int]  # architecture, bits of the dtype, head dim padded to a power of two


def _rows(
    arch: str, bits: int, dims: tuple[int, ...], dkdv: str, dq: str, ordered: str
) -> dict[Key, tuple[Candidate, ...]]:
    """The same two candidates for several head dims: one for two_pass, one for the ordered single-pass schedules."""
    two_pass = Candidate(Tiles.parse(dkdv), Tiles.parse(dq))
    one_pass = Candidate(Tiles.parse(ordered), matmul=0.3, reduce=0.4, handover=0.1)
    return {(arch, bits, dim): (two_pass, one_pass) for dim in dims}


PORTABLE: dict[Key, tuple[Candidate, ...]] = {
    **_rows("sm_80", 16, (128,), dkdv="64x64w4s2", dq="64x64w4s2", ordered="64x64w4s2"),
    **_rows("sm_80", 16, (16, 32, 64), dkdv="64x128w8s2", dq="128x64w8s2", ordered="64x128w8s2"),
    **_rows("sm_89", 16, (128,), dkdv="32x64w4s2", dq="64x32w4s2", ordered="32x64w4s2"),
    **_rows("sm_89", 16, (16, 32, 64), dkdv="64x64w4s2", dq="64x64w4s2", ordered="64x64w4s2"),
    **_rows("sm_90", 16, (128,), dkdv="64x64w4s2", dq="128x64w8s3", ordered="64x128w8s3"),
    **_rows("sm_90", 16, (16, 32, 64), dkdv="64x64w4s3", dq="64x64w4s3", ordered="64x128w8s3"),
    **_rows("sm_100", 16, (128,), dkdv="64x64w4s2", dq="128x64w8s2", ordered="64x128w8s2"),
    **_rows("sm_100", 16, (16, 32, 64), dkdv="64x64w4s3", dq="64x64w4s3", ordered="64x128w8s2"),
}
for _arch in SHARED_BYTES:
    PORTABLE |= _rows(_arch, 32, (16, 32, 64, 128), dkdv="32x32w8s1", dq="32x32w8s1", ordered="32x32w8s1")
# In sm_90 tiles of 64 own rows use the matmuls of a warpgroup.
PORTABLE |= _rows("sm_90", 32, (16, 32), dkdv="32x64w4s1", dq="64x64w4s1", ordered="32x32w8s1")
PORTABLE |= _rows("sm_90", 32, (64,), dkdv="32x64w4s1", dq="64x32w4s1", ordered="32x32w8s1")
PORTABLE |= _rows("sm_90", 32, (128,), dkdv="32x32w8s1", dq="64x32w8s1", ordered="32x32w8s1")

REFERENCE: dict[Key, tuple[Candidate, ...]] = {
    **_rows("cpu", 16, (16, 32, 64, 128), dkdv="64x64w1s1", dq="64x64w1s1", ordered="64x64w1s1"),
    **_rows("cpu", 32, (16, 32, 64, 128), dkdv="64x64w1s1", dq="64x64w1s1", ordered="64x64w1s1"),
}


def _hopper(tiles: str, matmul: float) -> Candidate:
    return Candidate(Tiles.parse(tiles), matmul=matmul, reduce=0.3, handover=0.3, depth=2)


HOPPER: dict[tuple[int, int], Candidate] = {
    (64, 64): _hopper("128x128w8s2", 0.25),
    (128, 128): _hopper("64x128w8s2", 0.232),
    (192, 128): _hopper("64x128w8s2", 0.25),
    (256, 256): _hopper("64x64w8s1", 0.43),
}
"""By the head dims of q and k, and of v, of a tile: smaller ones are filled up with zeros."""


HOPPER_FORWARD: dict[tuple[int, int], Tiles] = {
    (64, 64): Tiles(192, 128, 12, 4),
    (128, 128): Tiles(128, 128, 8, 2),
    (192, 128): Tiles(128, 128, 8, 2),
    (256, 256): Tiles(128, 64, 8, 2),
}
"""Tiles of the Hopper forward, by the head dims of q and k, and of v, of a tile."""

ForwardKey = tuple[str, int, int, int]  # architecture, bits of the dtype, padded head dims of q and k, and of v


def _forward(arch: str, bits: int, up_to_64: str, up_to_128: str, wide: str, narrow_v: str) -> dict[ForwardKey, Tiles]:
    """Tiles by the larger head dim, where that is 256 also by the smaller one: `narrow_v` is for v of at most 128."""
    rows: dict[ForwardKey, Tiles] = {}
    for dim in (16, 32, 64, 128, 256):
        for value_dim in (16, 32, 64, 128, 256):
            largest = max(dim, value_dim)
            shape = up_to_64 if largest <= 64 else up_to_128 if largest <= 128 else wide
            rows[arch, bits, dim, value_dim] = Tiles.parse(narrow_v if value_dim < dim == 256 else shape)
    return rows


FORWARD_TILES: dict[ForwardKey, Tiles] = {
    **_forward("sm_80", 16, "128x64w4s3", "128x64w8s3", "64x64w8s2", "128x64w8s2"),
    **_forward("sm_89", 16, "128x64w4s2", "128x64w8s2", "64x32w8s2", "64x64w8s2"),
    **_forward("sm_90", 16, "128x64w4s3", "128x64w8s3", "128x64w8s2", "128x64w8s3"),
    **_forward("sm_100", 16, "128x64w8s3", "128x64w8s3", "128x64w8s2", "128x64w8s2"),
    **_forward("cpu", 16, *["64x64w1s1"] * 4),
    **_forward("cpu", 32, *["64x64w1s1"] * 4),
}
"""Tiles of the portable forward.  They compile without large spills; those of sm_90 have been measured."""
for _arch in SHARED_BYTES:
    FORWARD_TILES |= _forward(_arch, 32, "32x32w8s1", "32x16w8s1", *["16x16w8s1"] * 2)
FORWARD_TILES |= _forward("sm_90", 32, "64x64w4s2", "64x32w4s2", *["16x16w8s1"] * 2)


def forward_tiles(arch: str, bits: int, head_dim: int, value_dim: int) -> Tiles:
    """Tiles of the portable forward on `arch`, a name of `WORKERS` or `SAME_AS`, for elements of `bits` bits.

    Raises:
        ArgumentError: an unknown architecture, or head dims (of q and k, of v) that the kernel does not cover.
    """
    if arch not in WORKERS and arch not in SAME_AS:
        raise ArgumentError("arch", arch, [*WORKERS, *SAME_AS])
    for name, dim in (("head_dim", head_dim), ("value_dim", value_dim)):
        if dim % 8 or not 8 <= dim <= 256:
            raise ArgumentError(name, dim, "a multiple of 8 from 8 to 256")
    if bits not in (16, 32):
        raise ArgumentError("bits", bits, (16, 32))
    return FORWARD_TILES[SAME_AS.get(arch, arch), bits, padded(head_dim), padded(value_dim)]


def padded(dim: int) -> int:
    """A head dim as the tables count it: the power of two that holds it."""
    return int(max(16, 1 << (dim - 1).bit_length()))
