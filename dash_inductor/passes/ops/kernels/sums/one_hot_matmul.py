"""Launches the kernels of `device.one_hot_matmul`, which add values to few rows by unsorted keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .....kernels.common.launch_list import LaunchLists, Notes
from .....kernels.common.launching import launch_kernel
from .device import one_hot_matmul as few
from .launch import into, new

CHUNK, OF_A_ROW, STEP, COLUMNS = 512, 16, 64, 64
"""The minimum number of entries of a program in total and per row, so that parts have at most a quarter of the bytes of
the values; the entries of one product; and the maximum number of columns.  The first three influence bits."""
GROUP, BLOCK = 64, 512
"""The number of parts that are added in sequence, which influences bits, and the elements of an adding program."""


def add_few(base: Tensor | None, values: Tensor, keys: Tensor, rows: int) -> Tensor:
    """Returns, for each row, `base` plus the sum of the values with its key: contiguous [batch, rows, columns].

    Args:
        base: [batch, rows, columns] with the dtype of `values`, or None for zeros.
        values: [batch, n, columns], floating point of 16 or 32 bits, any strides.
        keys: integers [n] up to `rows`; entries with key `rows` are skipped and not read.  Larger ones trigger a device
            assertion.
        rows: the number of rows; their sums must fit into the registers of a program.
    """
    if values.shape[2] == 1:  # sum batch elements together, as columns
        turned = None if base is None else base.transpose(0, 2)
        return _sums(turned, values.transpose(0, 2), keys, rows).transpose(0, 2).contiguous()
    return _sums(base, values, keys, rows)


def _sums(base: Tensor | None, values: Tensor, keys: Tensor, rows: int) -> Tensor:
    out = into(base, values, rows)
    if not values.numel() or not rows:
        return out
    operands = values, keys, out

    def first(notes: Notes) -> Sequence[Tensor]:
        _add(notes, *operands, has_base=base is not None)
        return ()

    if values.is_cuda:
        CALLS.call(base is not None, operands, first)
    else:
        first(Notes(operands))
    return out


CALLS = LaunchLists(views=False)
"""The captured launches of sums to few rows."""


def _add(notes: Notes, values: Tensor, keys: Tensor, out: Tensor, has_base: bool) -> None:
    batch, rows, columns = out.shape
    count, size, tile = keys.shape[0], rows * columns, min(max(_up(columns), 16), COLUMNS)
    rows_of = max(_up(rows), 16)
    chunk = max(CHUNK, OF_A_ROW * rows_of)
    parts_of = -(-count // chunk)
    parts = new(notes, (batch, parts_of, size), torch.float32, values.device)
    constants: dict[str, Any] = {"ROWS": rows_of, "CHUNK": chunk, "STEP": STEP, "COLUMNS": tile}
    numbers = *values.stride(), count, parts_of, rows, columns
    arguments: tuple[Tensor | int, ...] = (values, keys, parts, *numbers)
    grid = (parts_of * batch * -(-columns // tile),)
    notes.launched(
        launch_kernel(few.sum_chunks, values.device, grid, *arguments, debug=True, **constants), arguments
    )  # fmt: skip
    while True:
        groups = -(-parts_of // GROUP)
        is_last = groups == 1
        sums = out if is_last else new(notes, (batch, groups, size), torch.float32, values.device)
        arguments = (parts, sums, parts_of, groups, size)
        constants = {"GROUP": GROUP, "BLOCK": BLOCK, "HAS_BASE": has_base and is_last}
        grid = (groups * batch * -(-size // BLOCK),)
        notes.launched(launch_kernel(few.add_parts, values.device, grid, *arguments, **constants), arguments)
        if is_last:
            return
        parts, parts_of = sums, groups


def _up(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return int(1 << max(size - 1, 0).bit_length())
