"""The input of the builders of mask tables, `MaskData`, and their result, `MaskTables`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...model.components import Component, HeadInterval, Interval
from ...model.mask import Band, Mask
from ...model.relations import Axis, fit_tables

_TRUTHS = (torch.bool, torch.uint8)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class MaskData:
    """A mask that is data: a band, and the tensors of at least one other mask component.

    Args:
        band: the band, with any anchor.
        batch, q_heads, kv_heads, q_len, kv_len: sizes of the attention.
        values: for each component, in the order of `model.components.COMPONENTS`, its kind and the tensors of its
            operands by field, without absent operands.  The shape follows the axes of the operand; operands with a
            dimension of heads (elementwise masks and kv ranges by head) may have size 1 where they broadcast.  Strides
            are arbitrary.  The dtype is an integer type, or for booleans bool or, for operands of keys, uint8.
        varlen: whether positions are the padded rows of packed documents (`model.VarlenLayout`), not tokens.

    Raises:
        ArgumentError: there is no data, or a tensor has another dtype, shape or device.
    """

    band: Band
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    values: tuple[tuple[type[Component], Mapping[str, Tensor]], ...]
    varlen: bool = False

    def __post_init__(self) -> None:
        found = [(kind, name, value) for kind, values in self.values for name, value in values.items()]
        if not found:
            raise ArgumentError("values", self.values, "the tensors of at least one component")
        sizes = {"b": self.batch, "h": self.q_heads, "q": self.q_len, "kv": self.kv_len}
        first, device = f"{found[0][0].NAME}.{found[0][1]}", self.device
        for kind, field, tensor in found:
            name, axes = f"{kind.NAME}.{field}", kind.AXES[field]
            shape = [sizes[axis] for axis in axes]
            if kind.BY_HEAD and "h" in axes:
                shape[-1] = 1  # a number of the query
            broadcasts = "h" in axes
            allowed = (_TRUTHS[:1] if broadcasts else _TRUTHS) if kind.RELATION.truths else _INTEGERS
            fits = tensor.dim() == len(shape) and all(
                size == wanted or (size == 1 and broadcasts) for size, wanted in zip(tensor.shape, shape, strict=True)
            )
            if not fits:
                raise ArgumentError(f"{name}.shape", tuple(tensor.shape), str(shape))
            if tensor.device != device:
                raise ArgumentError(f"{name}.device", str(tensor.device), f"{device}, as of {first}")
            if tensor.dtype not in allowed:
                raise ArgumentError(f"{name}.dtype", tensor.dtype, allowed)

    @staticmethod
    def of(mask: Mask, extras: Sequence[Tensor], sizes: Sequence[int]) -> MaskData:
        """Returns the `MaskData` of a call's mask: its band, and the tensors that its components reference.

        Args:
            extras: the call's extra tensors, which the components reference by index.
            sizes: batch, q_heads, kv_heads, q_len, kv_len.

        Raises:
            ArgumentError: the mask references a tensor that is not in `extras`; or as the constructor.
        """
        missing = [operand.index for operand in mask.operands if operand.index >= len(extras)]
        if missing:
            raise ArgumentError("extras", f"{len(extras)} tensors", f"more: the mask {mask} reads number {missing[0]}")
        batch, q_heads, kv_heads, q_len, kv_len = sizes
        values = tuple(
            (type(component), {name: extras[operand.index] for name, operand in component.given.items()})
            for component in mask.others
        )
        return MaskData(mask.band, batch, q_heads, kv_heads, q_len, kv_len, values, mask.varlen_layout is not None)

    @property
    def device(self) -> torch.device:
        return next(value for _, values in self.values for value in values.values()).device

    @property
    def dense(self) -> Tensor | None:
        """The elementwise mask, bool [batch, heads, q_len, kv_len], with size 1 where it broadcasts; None without one.

        Mask tables support at most one (see `has_room`).
        """
        return next((value for kind, values in self.values if kind.RELATION.pairs for value in values.values()), None)

    @property
    def by_head(self) -> bool:
        """Whether the mask may differ between heads: an operand's dimension of heads is larger than 1, or its numbers
        of queries are by head.
        """
        return any(
            kind.BY_HEAD or value.shape[kind.AXES[name].index("h")] != 1
            for kind, values in self.values
            for name, value in values.items()
            if "h" in kind.AXES[name]
        )

    def of_heads(self) -> MaskData:
        """Returns the mask in which each query head of a batch element is a batch element with one head of its own.

        A mask without kv ranges by head is returned as it is.
        """
        if not any(kind.BY_HEAD for kind, _ in self.values):
            return self
        values = tuple(
            (
                Interval if kind is HeadInterval else kind,
                {name: self._of_heads(kind.AXES[name], value) for name, value in values.items()},
            )
            for kind, values in self.values
        )
        return replace(self, batch=self.batch * self.q_heads, q_heads=1, kv_heads=1, values=values)

    def _of_heads(self, axes: tuple[Axis, ...], value: Tensor) -> Tensor:
        """Returns an operand of `of_heads`: [batch * q_heads, q_len or kv_len]."""
        by_head = value.squeeze(3) if "h" in axes else value[:, None]
        length = self.kv_len if axes[-1] == "kv" and "h" not in axes else self.q_len
        return by_head.expand(self.batch, self.q_heads, length).flatten(0, 1)

    @property
    def has_room(self) -> bool:
        """Whether mask tables support this combination of components."""
        return fit_tables([kind.RELATION for kind, _ in self.values])


class MaskTables(NamedTuple):
    """The tensors that the Hopper kernels read of a mask that is data, see `schedule.table_tile_schedule`.

    There is one table per batch element and, where the mask differs between heads, per query head.

    Attributes:
        q_vectors, kv_vectors: int32 [batch, vectors, q_len], [batch, vectors, kv_len]: the per-token data that
            relations other than elementwise masks read, in the order of `relations.Layout`.  With kv ranges by head,
            there are those of each table in place of each batch element.  Shape [0] if there are no vectors.
        keys_seen: bool [batch, 1 or q_heads, kv_len]: whether some query sees the key.
        counts, row_steps: int32 [tables, q tiles], [tables, q tiles, n_kv]: the tile schedules of the forward.  Empty
            with packed documents, whose forward reads a work list, see `document_tiles`.
        seen_bits: int32 [tables, row blocks, n_kv, threads, words]: the elementwise mask as bits, see Note [Seen bits]
            in `schedule.table_tile_schedule`, for the forward's row blocks and kv tiles.  Empty where there is no
            elementwise mask.
        visits, steps: int32 [tables, n_kv], [tables, n_kv, n_q]: the tile schedules of the backward.
        contributions: int32 [tables, n_q]: number of kv tiles that add to a q tile of the backward.
        backward_bits: int32 [tables, n_kv, n_q, words, threads]: as `seen_bits`, for the tile pairs of the backward,
            undefined for those that the mask hides or shows as a whole.

    `visits`, `steps`, `contributions` and `backward_bits` are empty where only a forward reads the tables.
    """

    q_vectors: Tensor
    kv_vectors: Tensor
    keys_seen: Tensor
    counts: Tensor
    row_steps: Tensor
    seen_bits: Tensor
    visits: Tensor
    steps: Tensor
    contributions: Tensor
    backward_bits: Tensor
