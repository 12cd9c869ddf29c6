"""The portable kernels, Triton templates for all CUDA devices: the calls that they cover, their tiles, and the costs.

A matmul of the two-pass kernels runs at 650 TFLOP/s on an H100 (a cost of 0.2), and a step of the ordered kernel, its
five matmuls and its add, costs 1.9 tile pairs.  The other architectures have shapes that compile without large spills,
not measured ones.

Note [One kind of matmul]
    No kernel whose loop loads ahead has matmuls of both kinds: those of a warpgroup (`wgmma`, for 64 rows of a result
    or more on sm_90) and those of a warp (`mma.sync`).  Where both read a tile that is loaded ahead, Triton gives it
    one buffer, as for `mma.sync` alone, but lets the last `wgmma` of a step run on: the next tile is copied to where
    they still read.  So dk and dv were wrong on an H100, in tiles of 32 queries and 64 keys (Triton 3.6 and 3.7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from ...errors import ArgumentError
from ...model.architectures import SAME_AS, SHARED_BYTES, tables_of
from ...model.plan import Tiles
from ...model.relations import RELATIONS
from ...model.site import BITS, Site
from ..family import SCORES, Candidate, Family, padded

LIMIT, LIMIT_OF_16_BITS = 128, 512
"""The largest head dim for any dtype, and for 16 bits.

In fp32, tiles of 256 columns fit with 16 rows alone: forward and backward together took .7 of the time of PyTorch's
deterministic memory-efficient attention on an H200, but the forward three to six times as long as its forward.  In 16
bits, a tile of more columns has 1024 of them, and the kernels take 112 KB of shared memory, which sm_89 does not have.
"""


def _limit(bits: int) -> int:
    return LIMIT_OF_16_BITS if bits == 16 else LIMIT


Key = tuple[str, int, int]  # architecture, bits of the dtype, the larger head dim padded to a power of two


def _rows(
    arch: str, bits: int, dims: tuple[int, ...], dkdv: str, dq: str, ordered: str
) -> dict[Key, tuple[Candidate, ...]]:
    """Returns the same two candidates for several head dims: for two_pass, and for ordered single-pass schedules."""
    two_pass = Candidate(Tiles.parse(dkdv), Tiles.parse(dq))
    one_pass = Candidate(Tiles.parse(ordered), matmul=0.3, reduce=0.4, handover=0.1)
    return {(arch, bits, dim): (two_pass, one_pass) for dim in dims}


CANDIDATES: dict[Key, tuple[Candidate, ...]] = {
    **_rows("sm_80", 16, (128,), dkdv="64x64w4s2", dq="64x64w4s2", ordered="64x64w4s2"),
    **_rows("sm_80", 16, (16, 32, 64), dkdv="64x128w8s2", dq="128x64w8s2", ordered="64x128w8s2"),
    **_rows("sm_89", 16, (128,), dkdv="32x64w4s2", dq="64x32w4s2", ordered="32x64w4s2"),
    **_rows("sm_89", 16, (16, 32, 64), dkdv="64x64w4s2", dq="64x64w4s2", ordered="64x64w4s2"),
    **_rows("sm_90", 16, (128,), dkdv="64x64w4s2", dq="128x64w8s3", ordered="64x128w8s3"),
    **_rows("sm_90", 16, (16, 32, 64), dkdv="64x64w4s3", dq="64x64w4s3", ordered="64x128w8s3"),
    **_rows("sm_100", 16, (128,), dkdv="64x64w4s2", dq="128x64w8s2", ordered="64x128w8s2"),
    **_rows("sm_100", 16, (16, 32, 64), dkdv="64x64w4s3", dq="64x64w4s3", ordered="64x128w8s2"),
}
# Tiles of 32 rows have one kind of matmul, `mma.sync`: Note [One kind of matmul].  Eight warps compute each score of
# 32 x 32 twice.
CANDIDATES |= _rows("sm_80", 16, (256,), dkdv="32x64w8s2", dq="64x32w8s2", ordered="32x64w8s2")
CANDIDATES |= _rows("sm_89", 16, (256,), dkdv="32x32w8s1", dq="32x32w8s1", ordered="32x32w8s1")
for _arch in ("sm_90", "sm_100"):
    CANDIDATES |= _rows(_arch, 16, (256,), dkdv="32x32w4s2", dq="32x32w4s2", ordered="32x32w8s2")
for _arch in SHARED_BYTES:
    CANDIDATES |= _rows(_arch, 16, (512,), dkdv="16x16w8s1", dq="16x16w8s1", ordered="16x16w8s1")
    CANDIDATES |= _rows(_arch, 32, (16, 32, 64, 128), dkdv="32x32w8s1", dq="32x32w8s1", ordered="32x32w8s1")
CANDIDATES |= _rows("sm_90", 16, (512,), dkdv="32x32w8s2", dq="32x32w8s2", ordered="32x32w8s1")
# In sm_90 tiles of 64 own rows use the matmuls of a warpgroup.
CANDIDATES |= _rows("sm_90", 32, (16, 32), dkdv="32x64w4s1", dq="64x64w4s1", ordered="32x32w8s1")
CANDIDATES |= _rows("sm_90", 32, (64,), dkdv="32x64w4s1", dq="64x32w4s1", ordered="32x32w8s1")
CANDIDATES |= _rows("sm_90", 32, (128,), dkdv="32x32w8s1", dq="64x32w8s1", ordered="32x32w8s1")

ForwardKey = tuple[str, int, int, int]  # architecture, bits of the dtype, padded head dims of q and k, and of v


def _forward(
    arch: str, bits: int, up_to_64: str, up_to_128: str, up_to_256: str = "", narrow_v: str = "", wide: str = ""
) -> dict[ForwardKey, Tiles]:
    """Returns forward tiles by the larger head dim; at 256 also by the smaller: `narrow_v` is for v of at most 128."""
    rows: dict[ForwardKey, Tiles] = {}
    dims = [dim for dim in (16, 32, 64, 128, 256, 512) if dim <= _limit(bits)]
    for dim, value_dim in product(dims, dims):
        largest = max(dim, value_dim)
        by_size = {64: up_to_64, 128: up_to_128, 256: up_to_256, 512: wide}
        shape = by_size[max(64, largest)]
        rows[arch, bits, dim, value_dim] = Tiles.parse(narrow_v if value_dim < dim == 256 else shape)
    return rows


FORWARD_TILES: dict[ForwardKey, Tiles] = {
    **_forward("sm_80", 16, "128x64w4s3", "128x64w8s3", "64x64w8s2", "128x64w8s2", "16x16w8s1"),
    **_forward("sm_89", 16, "128x64w4s2", "128x64w8s2", "64x32w8s2", "64x64w8s2", "16x16w8s1"),
    **_forward("sm_90", 16, "128x64w4s3", "128x64w8s3", "128x64w8s2", "128x64w8s3", "64x32w8s2"),
    **_forward("sm_100", 16, "128x64w8s3", "128x64w8s3", "128x64w8s2", "128x64w8s2", "16x16w8s1"),
}
"""Tiles of the portable forward.  They compile without large spills; the tiles of sm_90 have been measured."""
for _arch in SHARED_BYTES:
    FORWARD_TILES |= _forward(_arch, 32, "32x32w8s1", "32x16w8s1")
FORWARD_TILES |= _forward("sm_90", 32, "64x64w4s2", "64x32w4s2")


def forward_tiles(arch: str, bits: int, head_dim: int, value_dim: int) -> Tiles:
    """Returns the tiles of the portable forward.

    Args:
        arch: a GPU architecture, such as "sm_90", that has tables of tiles or uses those of another one.
        bits: bits of the dtype, 16 or 32.
        head_dim, value_dim: head dims of q and k, and of v.

    Raises:
        ArgumentError: the architecture is unknown, or the kernel does not cover the dtype or the head dims.
    """
    known = tables_of(arch)
    if known == "cpu":
        raise ArgumentError("arch", arch, [*SHARED_BYTES, *SAME_AS])
    if bits not in (16, 32):
        raise ArgumentError("bits", bits, (16, 32))
    for name, dim in (("head_dim", head_dim), ("value_dim", value_dim)):
        if not 1 <= dim <= _limit(bits):
            raise ArgumentError(name, dim, f"a number from 1 to {_limit(bits)}")
    return FORWARD_TILES[known, bits, padded(head_dim), padded(value_dim)]


class Portable(Family):
    """The family of the portable kernels: Triton templates for all CUDA devices."""

    name = "portable"
    head_dims = f"all up to {LIMIT}, and up to {LIMIT_OF_16_BITS} in 16 bits"
    reads = RELATIONS
    scores = SCORES

    def runs_on(self, arch: str, bits: int) -> bool:
        return arch != "cpu"

    def has_head_dims(self, head_dim: int, value_dim: int) -> bool:
        return max(head_dim, value_dim) <= LIMIT_OF_16_BITS

    def covers_dims(self, site: Site, arch: str) -> bool:
        limit = _limit(BITS[site.dtype])
        return super().covers_dims(site, arch) and max(site.head_dim, site.value_dim) <= limit

    def candidates(self, site: Site, arch: str) -> Sequence[Candidate]:
        found = CANDIDATES[arch, BITS[site.dtype], padded(max(site.head_dim, site.value_dim))]
        is_widest = max(site.head_dim, site.value_dim) > 256
        if site.spec.bias is None or not (arch == "sm_80" or is_widest):
            return found
        # A tile of the bias takes what loading ahead needs: registers on sm_80, and shared memory for the widest tiles.
        one = [replace(candidate, dkdv=replace(candidate.dkdv, num_stages=1)) for candidate in found]
        if is_widest:
            one = [c if c.dq is None else replace(c, dq=replace(c.dq, num_stages=1)) for c in one]
        return tuple(one)

    def forward_tiles(self, site: Site, arch: str, backward: str) -> Tiles | None:
        if arch == "cpu":
            return None
        found = forward_tiles(arch, BITS[site.dtype], site.head_dim, site.value_dim)
        if site.spec.bias is None:
            return found
        if max(site.head_dim, site.value_dim) > 256:
            found = replace(found, block_q=min(32, found.block_q))  # with 64 rows it would spill 0.9 KB a thread
        # Tiles of pairs, perhaps of float32, are loaded ahead: two of them, or one with tiles that fill the memory.
        is_wide, is_narrow = max(site.head_dim, site.value_dim) > LIMIT, site.value_dim <= LIMIT < site.head_dim
        is_full = is_narrow or (is_wide and arch == "sm_100")
        if not is_full and not site.spec.traits.has("dense"):
            return found
        return replace(found, num_stages=max(1, found.num_stages - 1))


FAMILY = Portable()
