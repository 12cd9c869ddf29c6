"""Builds the work list of a forward over documents, see `schedule.document_tiles`.

Note [Documents of a mask]
    Documents of packed operators are known to be sequences of neighbouring tokens.  A mask of segment ids says so only
    at run time, and so does a causal mask that hides the keys before a number of the query, the first token of its
    document.  Let the *number* of a token be this number or, of segment ids, the first token with the same id.  If the
    number changes only at tokens that have themselves as number, a batch element is a sequence of documents, too, and
    its q tiles go into a work list as those of packed documents do.  Any other batch element, and one with very short
    documents (`schedule.document_tiles.most_q_tiles`), is computed by lists of kv tiles.  A forward launches a kernel
    for each of the two; where one has no batch element, it ends at once.  Which of them computes a batch element
    depends on the mask of this element alone, so that its bits are the same in any batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...model.attention_spec import AttentionSpec
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
"""Slots that a program of `device.document_tiles` reads at once."""

TOKENS = 8192
"""Tokens that a program of `device.document_tiles.find_documents` reads at once."""

CALLS = LaunchLists()
"""Launch lists of the operator that builds work lists."""


def has_documents(spec: AttentionSpec) -> bool:
    """Returns whether a call's mask may be computed by its documents, see Note [Documents of a mask].

    Its one component must be segment ids, the same for queries and keys, which makes as many of both, or lower bounds
    of the positions of keys; and the band must let every token see itself and, beside bounds, no later one.  Dropout
    and sinks read the rows of the mask, so calls with them are left to lists.
    """
    mask, band = spec.mask, spec.mask.band
    segments, interval = mask.segments, mask.interval
    if len(mask.components) != 1 or spec.given:
        return False
    if interval is not None:
        first_tokens = interval.lo is not None and interval.hi is None and interval.number is None
        return first_tokens and band.anchor == "top_left" and band.lo == 0 and (band.hi is None or band.hi >= 0)
    if segments is None or segments.varlen_layout is not None or segments.q != segments.kv:
        return False
    return (band.lo is None or band.lo <= 0) and (band.hi is None or band.hi >= 0)


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

    The first entry holds the number of q tiles, and zeros; entries after the last q tile are undefined.

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

    new = partial(_new, notes, keys.device)
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


def _new(notes: Notes, device: torch.device, *shape: int) -> Tensor:
    """A tensor of int32, which is not initialized; `notes` records it on a GPU."""
    if device.type != "cuda":
        return torch.empty(shape, dtype=torch.int32, device=device)
    return notes.allocate(shape, dense_strides(shape, range(len(shape))), torch.int32)


def shapes_by_mask(batch: Any, length: Any, tiles: Tiles) -> tuple[tuple[Any, int], tuple[Any]]:
    """Returns the shapes of the results of `build_by_mask`; sizes are integers or symbols."""
    return (1 + batch * _slots(length, tiles), WORDS), (1 + batch,)


def _slots(length: Any, tiles: Tiles) -> Any:
    """The q tiles of a batch element for which there is room, as `most_q_tiles` defines it."""
    return 2 * ((length + tiles.block_q - 1) // tiles.block_q)


def build_by_mask(numbers: Tensor, band: Band, tiles: Tiles, notes: Notes | None = None) -> tuple[Tensor, Tensor]:
    """Builds the work list of the documents of a mask, on the device of the numbers.

    Args:
        numbers: int32 or int64 [batch, tokens], any strides, any values: those of Note [Documents of a mask].
        band: the band of the mask, which lets every token see itself.
        tiles: those of the forward.
        notes: records the allocations and launches, for a replay.

    Returns:
        The list, as `build` returns it, with room for `most_q_tiles`; and int32 [1 + batch]: how many batch elements
        are not in the list, and their indices; what follows them is undefined.
    """
    (batch, length), notes = numbers.shape, notes or Notes([])
    band = band.resolve(length, length)
    lo, hi = (EVERYWHERE if band.lo is None else band.lo), (0 if band.hi is None else band.hi)
    slots = _slots(length, tiles)

    new = partial(_new, notes, numbers.device)

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        notes.launched(launch_kernel(kernel, numbers.device, grid, *arguments, **constants), arguments)

    with torch.cuda.device(numbers.device) if numbers.is_cuda else nullcontext():
        documents, counts = new(batch, slots, document_tiles.DOCUMENT), new(batch, 2)
        entries, steps = new(batch * slots, WORDS), new(batch * slots)
        found, elements = (new(*shape) for shape in shapes_by_mask(batch, length, tiles))
        launch(
            document_tiles.find_documents, (batch,), numbers, documents, counts, *numbers.stride(), length, slots,
            warps=8, CONSUMERS=tiles.block_q // ROW_BLOCK, ROW_BLOCK=ROW_BLOCK, BLOCK=TOKENS,
        )  # fmt: skip
        launch(
            document_tiles.measure_documents_of_mask, (-(-slots // SLOTS), batch), documents, counts, entries, steps,
            elements, slots, lo, hi,
            KV_RANGE=schedule_module("two_pass", document_band(band.hi is not None)).dash_kv_range,
            CONSUMERS=tiles.block_q // ROW_BLOCK, ROW_BLOCK=ROW_BLOCK, BLOCK_KV=tiles.block_kv, BLOCK=SLOTS,
        )  # fmt: skip
        number = batch * slots
        launch(document_tiles.order_q_tiles, (-(-number // SLOTS),), entries, steps, found, number, BLOCK=SLOTS)
    return found, elements


def reference_by_mask(numbers: Tensor, band: Band, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """As `build_by_mask`, in Python from the definition, zeros where it is undefined: for the CPU and tests."""
    batch, length = numbers.shape
    found, elements = list[tuple[int, int, int, int]](), list[int]()
    rows: list[list[int]] = numbers.tolist()
    for b, row in enumerate(rows):
        lengths = [(number, len([*run])) for number, run in itertools.groupby(row)]
        begins = itertools.accumulate((tokens for _, tokens in lengths), initial=0)
        returns = any(number != begin for (number, _), begin in zip(lengths, begins, strict=False))
        needed = sum(-(-tokens // tiles.block_q) for _, tokens in lengths)
        if returns or needed > _slots(length, tiles):
            elements.append(b)
        else:
            found += [(begin, begin, tokens, b) for begin, tokens in lengths]
    problem = Problem(band, length, length, ROW_BLOCK, tiles.block_kv)
    entries = q_tiles(found, problem, tiles.block_q // ROW_BLOCK)
    listed = [QTile(len(entries), 0, 0, 0), *entries]
    both: tuple[list[Any], list[Any]] = listed, [len(elements), *elements]
    results = []
    for values, shape in zip(both, shapes_by_mask(batch, length, tiles), strict=True):
        result = torch.zeros(shape, dtype=torch.int32)
        result[: len(values)] = torch.tensor(values, dtype=torch.int32)
        results.append(result.to(numbers.device))
    return results[0], results[1]


def reference(mask: Mask, extras: Sequence[Tensor], tiles: Tiles) -> Tensor:
    """As `build`, in plain Python from the definition, with zeros after the last q tile: for the CPU and for tests."""
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
