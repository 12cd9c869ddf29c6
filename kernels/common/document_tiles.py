"""Builds the work list of a forward over packed documents, see `schedule.document_tiles`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...model.mask import ALIGNMENT, ROW_BLOCK, Band, Mask
from ...model.plan import Tiles
from ...schedule.document_tiles import EVERYWHERE, WORDS, QTile, document_band, q_tiles
from ...schedule.tile_schedule import Problem
from .compiling import schedule_module
from .device import document_tiles
from .launch_list import LaunchLists, Notes
from .launching import launch_kernel
from .strides import dense_strides

SLOTS = 64
"""Slots of ALIGNMENT padded rows that a program of `device.document_tiles` reads at once."""

CALLS = LaunchLists()
"""Launch lists of the operator that builds work lists."""


def size(rows: int) -> tuple[int, int]:
    """Returns the shape of the work list for this many padded rows."""
    return 1 + rows // ALIGNMENT, WORDS


def _operands(mask: Mask, extras: Sequence[Tensor]) -> list[Tensor]:
    """Returns the segment ids of queries and of keys, [rows], and the token offsets and counts of row blocks.

    Raises:
        ArgumentError: the mask has no varlen layout.
    """
    segments, layout = mask.segments, mask.varlen_layout
    if segments is None or layout is None:
        raise ArgumentError("mask", str(mask), "segments with a varlen layout")
    of = segments.q, segments.kv, layout.token_offset, layout.token_count
    queries, keys, offsets, counts = (extras[operand.index] for operand in of)
    return [queries[0], keys[0], offsets, counts]


def build(mask: Mask, extras: Sequence[Tensor], tiles: Tiles, notes: Notes | None = None) -> Tensor:
    """Builds the work list on the device of the mask's tensors: int32 [1 + rows / ALIGNMENT, WORDS].

    The first entry holds the number of q tiles, and zeros; entries behind the last q tile are undefined.

    Args:
        mask: a band, and segments with a varlen layout.
        extras: the tensors to which the mask refers by index.
        tiles: those of the forward.
        notes: records the allocations and launches, for a replay.

    Raises:
        ArgumentError: the mask has no varlen layout.
    """
    queries, keys, offsets, counts = _operands(mask, extras)
    slots, band, notes = len(keys) // ALIGNMENT, mask.band, notes or Notes([])
    lo, hi = (EVERYWHERE if band.lo is None else band.lo), (0 if band.hi is None else band.hi)

    def new(*shape: int) -> Tensor:
        if not keys.is_cuda:
            return torch.empty(shape, dtype=torch.int32, device=keys.device)
        return notes.allocate(shape, dense_strides(shape, range(len(shape))), torch.int32)

    with torch.cuda.device(keys.device) if keys.is_cuda else nullcontext():  # Triton uses the current device
        entries, steps, found, grid = new(slots, WORDS), new(slots), new(1 + slots, WORDS), (-(-slots // SLOTS),)
        measured = (
            queries, keys, offsets, counts, entries, steps, queries.stride(0), keys.stride(0), slots, lo, hi,
        )  # fmt: skip
        notes.launched(
            launch_kernel(
                document_tiles.measure_documents, keys.device, grid, *measured,
                KV_RANGE=schedule_module("two_pass", document_band(band.hi is not None)).dash_kv_range,
                CONSUMERS=tiles.block_q // ROW_BLOCK, ROW_BLOCK=ROW_BLOCK, BLOCK_KV=tiles.block_kv,
                ALIGNMENT=ALIGNMENT, BLOCK=SLOTS,
            ),
            measured,
        )  # fmt: skip
        ordered = entries, steps, found, slots
        notes.launched(launch_kernel(document_tiles.order_q_tiles, keys.device, grid, *ordered, BLOCK=SLOTS), ordered)
    return found


def reference(mask: Mask, extras: Sequence[Tensor], tiles: Tiles) -> Tensor:
    """As `build`, in plain Python from the definition, with zeros behind the last q tile: for the CPU and for tests."""
    queries, keys, offsets, counts = (operand.tolist() for operand in _operands(mask, extras))
    per_slot, documents = ALIGNMENT // ROW_BLOCK, dict[int, int]()  # signed lengths by first row
    for slot in range(len(keys) // ALIGNMENT):
        row, tokens = slot * ALIGNMENT, sum(counts[slot * per_slot : (slot + 1) * per_slot])
        documents[keys[row]] = documents.get(keys[row], 0) + (tokens if queries[row] == keys[row] else -tokens)
    found = [(offsets[row // ROW_BLOCK], row, length) for row, length in sorted(documents.items()) if length]
    band = Band(mask.band.lo, mask.band.hi)  # queries and keys of a document are the same tokens
    sizes = Problem(band, len(keys), len(keys), ROW_BLOCK, tiles.block_kv)
    entries = q_tiles(found, sizes, tiles.block_q // ROW_BLOCK)
    listed = [QTile(len(entries), 0, 0, 0), *entries]
    listed += [QTile(0, 0, 0, 0)] * (size(len(keys))[0] - len(listed))
    return torch.tensor(listed, dtype=torch.int32, device=extras[0].device)
