"""A mask that is data as the builders of tables take it, and what they make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...model.mask import Band, Mask
from ...model.terms import Dense, Interval, Keys, Segments, Term

_TRUTHS = (torch.bool, torch.uint8)
_IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class MaskData:
    """A band, and the data of the other terms, at least one of them.

    Args:
        band: any anchor.
        batch, q_heads, kv_heads, q_len, kv_len: of the attention.
        valid: bool or uint8 [batch, kv_len]; a key whose value is 0 is seen by nobody.
        segments: integers [batch, q_len] and [batch, kv_len]; a query sees keys of its own id alone.  Any ids, in any
            order.
        dense: bool [batch, heads, q_len, kv_len], of size 1 where it does not differ; who sees whom.
        interval: integers [batch, q_len] twice and [batch, kv_len], or None in their place, see `model.Interval`.  All
            tensors may have any strides.

    Raises:
        ArgumentError: no data; a tensor of another dtype, shape or device.
    """

    band: Band
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    valid: Tensor | None = None
    segments: tuple[Tensor, Tensor] | None = None
    dense: Tensor | None = None
    interval: tuple[Tensor | None, ...] | None = None

    def __post_init__(self) -> None:
        found = self._tensors()
        if not found:
            raise ArgumentError("valid, segments, dense, interval", (None, None, None, None), "at least one of them")
        device = found[0][1].device
        for name, tensor, allowed, shape in found:
            fits = tensor.dim() == len(shape) and all(
                size == wanted or (size == 1 and name == "dense")
                for size, wanted in zip(tensor.shape, shape, strict=True)
            )
            if not fits:
                raise ArgumentError(f"{name}.shape", tuple(tensor.shape), str(list(shape)))
            if tensor.device != device:
                raise ArgumentError(f"{name}.device", str(tensor.device), f"{device}, as of {found[0][0]}")
            if tensor.dtype not in allowed:
                raise ArgumentError(f"{name}.dtype", tensor.dtype, allowed)

    @staticmethod
    def of(mask: Mask, extras: Sequence[Tensor], sizes: Sequence[int]) -> MaskData:
        """The data of a call's mask.

        Args:
            extras: the tensors that its terms name by their place.
            sizes: batch, q_heads, kv_heads, q_len, kv_len.

        Raises:
            ArgumentError: a mask that reads a tensor that is not there; as the constructor.
        """
        missing = [operand.index for operand in mask.operands if operand.index >= len(extras)]
        if missing:
            raise ArgumentError("extras", f"{len(extras)} tensors", f"more: the mask {mask} reads number {missing[0]}")
        keys, segments, dense, interval = mask.keys, mask.segments, mask.dense, mask.interval
        batch, q_heads, kv_heads, q_len, kv_len = sizes
        return MaskData(
            mask.band,
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            valid=None if keys is None else extras[keys.valid.index],
            segments=None if segments is None else (extras[segments.q.index], extras[segments.kv.index]),
            dense=None if dense is None else extras[dense.mask.index],
            interval=None
            if interval is None
            else tuple(None if o is None else extras[o.index] for o in (interval.lo, interval.hi, interval.number)),
        )

    @property
    def terms(self) -> list[tuple[type[Term], dict[str, Tensor]]]:
        """The kinds of its terms, with the values of their operands."""
        found: list[tuple[type[Term], tuple[Tensor | None, ...] | None]] = [
            (Segments, self.segments),
            (Keys, None if self.valid is None else (self.valid,)),
            (Dense, None if self.dense is None else (self.dense,)),
            (Interval, self.interval),
        ]
        return [
            (kind, {field: value for field, value in zip(kind.AXES, values, strict=True) if value is not None})
            for kind, values in found
            if values is not None
        ]

    @property
    def device(self) -> torch.device:
        return self._tensors()[0][1].device

    @property
    def has_codes(self) -> bool:
        return self.valid is not None or self.segments is not None

    @property
    def by_head(self) -> bool:
        """Whether it differs from head to head."""
        return self.dense is not None and self.dense.shape[1] != 1

    def _tensors(self) -> list[tuple[str, Tensor, Sequence[torch.dtype], tuple[int, ...]]]:
        """The tensors that there are: name, tensor, allowed dtypes, shape."""
        keys = self.batch, self.kv_len
        found: list[tuple[str, Tensor, Sequence[torch.dtype], tuple[int, ...]]] = []
        queries = self.batch, self.q_len
        for name, tensor, shape in zip(
            ("lo", "hi", "number"), self.interval or (), (queries, queries, keys), strict=False
        ):
            if tensor is not None:
                found.append((f"interval.{name}", tensor, _IDS, shape))
        if self.valid is not None:
            found.append(("valid", self.valid, _TRUTHS, keys))
        if self.segments is not None:
            found.append(("segments[0]", self.segments[0], _IDS, (self.batch, self.q_len)))
            found.append(("segments[1]", self.segments[1], _IDS, keys))
        if self.dense is not None:
            plane = self.batch, self.q_heads, self.q_len, self.kv_len
            found.append(("dense", self.dense, (torch.bool,), plane))
        return found


class MaskTables(NamedTuple):
    """The tensors that the Hopper kernels read of a mask that is data, see `schedule.table_walk`.

    A table belongs to a batch element and, where the mask differs from head to head, to a query head.

    Attributes:
        q_codes, kv_codes: int32 [batch, q_len], [batch, kv_len]; besides what band and dense mask say, a query sees the
            keys of its own code.  Empty where the mask has neither valid keys nor segments.
        keys_seen: bool [batch, 1 or q_heads, kv_len]: keys that a query sees.
        counts, row_steps: int32 [tables, q tiles], [tables, q tiles, n_kv]: the walks of the forward.
        visits, steps: int32 [tables, n_kv], [tables, n_kv, n_q]: the walks of the backward.
        contributions: int32 [tables, n_q]: kv tiles that add to a q tile of the backward.
        seen_bits: int32 [tables, row blocks, n_kv, threads, words]: who sees whom, bit by bit, see Note [Seen bits] in
            `schedule.table_walk`; of the forward's row blocks and kv tiles.  Empty where there is no dense mask.
        q_spans: int32 [batch, 2, q_len]: the first number of a key that a query sees, and the first one behind.  If
            numbers are positions, a query sees no key that the band hides.  Empty where the mask has no interval.
        kv_numbers: int32 [batch, kv_len], the numbers of the keys.  Empty where they are their positions.
    """

    q_codes: Tensor
    kv_codes: Tensor
    keys_seen: Tensor
    counts: Tensor
    row_steps: Tensor
    visits: Tensor
    steps: Tensor
    contributions: Tensor
    seen_bits: Tensor
    q_spans: Tensor
    kv_numbers: Tensor
