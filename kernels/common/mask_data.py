"""A mask that is data as the builders of tables take it, and what they make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...model.mask import Band, Mask
from ...model.relations import fit_tables
from ...model.terms import Term

_TRUTHS = (torch.bool, torch.uint8)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class MaskData:
    """A band, and the data of the other terms, at least one of them.

    Args:
        band: any anchor.
        batch, q_heads, kv_heads, q_len, kv_len: of the attention.
        values: for each term, in the order of `model.terms.TERMS`, its kind and the tensors of its operands by field,
            without those that it lacks.  They are shaped as the axes of the operands say, those of pairs of size 1
            where they do not differ; with any strides; truth values (of keys bool or uint8, of pairs bool) or integers.

    Raises:
        ArgumentError: no data; a tensor of another dtype, shape or device.
    """

    band: Band
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    values: tuple[tuple[type[Term], Mapping[str, Tensor]], ...]

    def __post_init__(self) -> None:
        found = [(kind, name, value) for kind, values in self.values for name, value in values.items()]
        if not found:
            raise ArgumentError("values", self.values, "the tensors of at least one term")
        sizes = {"b": self.batch, "h": self.q_heads, "q": self.q_len, "kv": self.kv_len}
        first, device = f"{found[0][0].NAME}.{found[0][1]}", self.device
        for kind, field, tensor in found:
            name, axes = f"{kind.NAME}.{field}", kind.AXES[field]
            shape = [sizes[axis] for axis in axes]
            broadcasts = kind.ROLES[field] in kind.RELATION.pairs
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
        batch, q_heads, kv_heads, q_len, kv_len = sizes
        values = tuple(
            (type(term), {name: extras[operand.index] for name, operand in term.given.items()}) for term in mask.others
        )
        return MaskData(mask.band, batch, q_heads, kv_heads, q_len, kv_len, values)

    @property
    def device(self) -> torch.device:
        return next(value for _, values in self.values for value in values.values()).device

    @property
    def pairs(self) -> list[Tensor]:
        """The operands of pairs: bool [batch, heads, q_len, kv_len], of size 1 where they do not differ."""
        return [
            value
            for kind, values in self.values
            for name, value in values.items()
            if kind.ROLES[name] in kind.RELATION.pairs
        ]

    @property
    def dense(self) -> Tensor | None:
        """The one operand of pairs that tables have room for; None where there is none."""
        return next(iter(self.pairs), None)

    @property
    def by_head(self) -> bool:
        """Whether it differs from head to head."""
        return any(value.shape[1] != 1 for value in self.pairs)

    @property
    def has_room(self) -> bool:
        """Whether tables have room for its terms."""
        return fit_tables([kind.RELATION for kind, _ in self.values])


class MaskTables(NamedTuple):
    """The tensors that the Hopper kernels read of a mask that is data, see `schedule.table_walk`.

    A table belongs to a batch element and, where the mask differs from head to head, to a query head.

    Attributes:
        q_vectors, kv_vectors: int32 [batch, vectors, q_len], [batch, vectors, kv_len]: what relations other than those
            of pairs read, in the order of `relations.Layout`.  Without vectors they have the shape [0].
        keys_seen: bool [batch, 1 or q_heads, kv_len]: keys that a query sees.
        counts, row_steps: int32 [tables, q tiles], [tables, q tiles, n_kv]: the walks of the forward.
        visits, steps: int32 [tables, n_kv], [tables, n_kv, n_q]: the walks of the backward.
        contributions: int32 [tables, n_q]: kv tiles that add to a q tile of the backward.
        seen_bits: int32 [tables, row blocks, n_kv, threads, words]: who sees whom, bit by bit, see Note [Seen bits] in
            `schedule.table_walk`; of the forward's row blocks and kv tiles.  Empty where there is no dense mask.
    """

    q_vectors: Tensor
    kv_vectors: Tensor
    keys_seen: Tensor
    counts: Tensor
    row_steps: Tensor
    visits: Tensor
    steps: Tensor
    contributions: Tensor
    seen_bits: Tensor
