"""Launches the segment sum kernels of `device.segments`, which add the rows of a tensor that have the same key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .....kernels.common.launch_list import LaunchLists, Notes
from .....kernels.common.launching import launch_kernel
from .....kernels.common.strides import dense_strides
from .....upstream.cuda import current_device
from .device import segments

NARROW, ELEMENTS, ENTRIES = 16, 4096, 1024
"""The maximum number of columns for scans, and the elements and entries that a scanning program sums."""
WALKED, COLUMNS = 64, 128
"""The number of entries of a walk, and its maximum number of columns, four per lane of its warp."""


def is_walked(columns: int) -> bool:
    """Returns whether `walk_segments` sums rows of this many columns; else `scan_segments` does.

    The results of the two can differ in their last bits.
    """
    return columns > NARROW


def chunk_of(columns: int) -> int:
    """Returns how many list entries a program sums if rows have this many columns.

    The order of additions, and so the bits of results, depend on this number.
    """
    return WALKED if is_walked(columns) else min(ELEMENTS // _wide(columns), ENTRIES)


def tile_of(columns: int) -> int:
    """Returns how many columns a program sums if rows have this many columns.

    For `walk_segments`, the bits of results do not depend on it.
    """
    return min(_wide(columns), COLUMNS) if is_walked(columns) else _wide(columns)


def _wide(columns: int) -> int:
    return 1 << max(columns - 1, 0).bit_length()


def levels(count: int, chunk: int) -> list[int]:
    """Returns the lengths of the lists that are summed by one launch each: `count`, then those of the chunks' parts.

    Args:
        count: the number of entries.
        chunk: the number of entries that a program sums.
    """
    found = [count]
    while found[-1] > chunk:
        found.append(2 * -(-found[-1] // chunk))
    return found


def add_segments(base: Tensor | None, values: Tensor, keys: Tensor, order: Tensor, rows: int) -> Tensor:
    """Returns, for each row, `base` plus the sum of the values with its key: contiguous [batch, rows, columns].

    Args:
        base: [batch, rows, columns] with the dtype of `values`, or None for zeros.
        values: [batch, m, columns], floating point, any strides.
        keys: sorted integers [n] up to `rows`; entries with key `rows` are skipped.  Larger ones trigger a device
            assertion.
        order: int64 or int32 [n], the row of `values` of each entry.  One out of bounds triggers a device assertion.
        rows: the number of rows.
    """
    if values.shape[2] == 1:  # sum batch elements together, as columns
        turned = None if base is None else base.transpose(0, 2)
        return _sums(turned, values.transpose(0, 2), keys, order, rows).transpose(0, 2).contiguous()
    return _sums(base, values, keys, order, rows)


def _sums(base: Tensor | None, values: Tensor, keys: Tensor, order: Tensor, rows: int) -> Tensor:
    out = into(base, values, rows)
    if not values.numel() or not rows or not keys.numel():
        return out
    operands = values, keys, order, out

    def first(notes: Notes) -> Sequence[Tensor]:
        _add(notes, *operands, has_base=base is not None)
        return ()

    if values.is_cuda:
        CALLS.call(base is not None, operands, first)
    else:
        first(Notes(operands))
    return out


def into(base: Tensor | None, values: Tensor, rows: int) -> Tensor:
    """Allocates the initial result of a segment sum, contiguous [batch, rows, columns]: a copy of `base`, or zeros.

    Args:
        base: [batch, rows, columns], or None for zeros.
        values: [batch, m, columns]; the result has its dtype and device.
        rows: the number of rows.
    """
    if values.is_cuda and current_device() != values.device.index:  # Triton uses the current device
        with torch.cuda.device(values.device):
            return into(base, values, rows)
    shape = values.shape[0], rows, values.shape[2]
    if base is None:
        return torch.zeros(shape, dtype=values.dtype, device=values.device)
    return new(Notes([]), shape, values.dtype, values.device).copy_(base)


CALLS = LaunchLists(views=False)
"""The captured launches of segment sums."""


def _add(notes: Notes, values: Tensor, keys: Tensor, order: Tensor, out: Tensor, has_base: bool) -> None:
    """Adds the segments to `out`, [batch, rows, columns], contiguous, which contains zeros or the base."""
    batch, rows, columns = out.shape
    exact = torch.float64 if values.dtype == torch.float64 else torch.float32
    chunk, tile, is_wide = chunk_of(columns), tile_of(columns), is_walked(columns)
    lengths = levels(keys.shape[0], chunk)
    for level, length in enumerate(lengths):
        chunks, is_last = -(-length // chunk), level == len(lengths) - 1
        number = 1 if is_last else 2 * chunks
        parts = new(notes, (batch, number, columns), exact, values.device)
        part_keys = new(notes, (number,), torch.int32, values.device)
        constants: dict[str, Any] = {
            "CHUNK": chunk, "COLUMNS": tile, "HAS_ORDER": level == 0, "HAS_BASE": has_base, "IS_LAST": is_last,
        }  # fmt: skip
        numbers = *values.stride(), length, chunks, rows, values.shape[1], columns
        arguments: tuple[Tensor | int, ...] = (values, keys, order, out, parts, part_keys, *numbers)
        launcher = launch_kernel(
            segments.walk_segments if is_wide else segments.scan_segments, values.device,
            (chunks * batch * -(-columns // tile),), *arguments,
            warps=1 if is_wide else 4, debug=level == 0, **constants,
        )  # fmt: skip
        notes.launched(launcher, arguments)
        values, keys = parts, part_keys


def new(notes: Notes, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates a contiguous tensor without initializing it, not even by PyTorch's deterministic NaN fill.

    Args:
        notes: records the allocation, so that the launches can be repeated.
        shape: the shape.
        dtype: the dtype.
        device: the CPU or the current CUDA device.
    """
    if device.type != "cuda":
        return torch.empty(shape, dtype=dtype, device=device)
    return notes.allocate(shape, dense_strides(shape, range(len(shape))), dtype)
