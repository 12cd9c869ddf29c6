"""The tensors of dropout and of a mask that is data, as the Hopper forward is given them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ....errors import ArgumentError
from ....model.call import Call
from ....model.dropout import Dropout
from ....model.mask import ROW_BLOCK


class ForwardData(NamedTuple):
    """The data that say which scores count, beside the band; see `listed` for what the tables hold.

    A query sees a key only if their codes are equal; under a dense mask, if their bit is set.

    Args:
        q_codes, kv_codes: int32 [batch, q_len] and [batch, kv_len], contiguous; both, or neither under a dense mask.
        keys_seen: bool [batch, tables of a batch element, kv_len], contiguous: the keys that a query sees.  Rows of v
            that are false here may hold anything.
        counts: int32 [tables, tiles of a head], contiguous: how many kv tiles the producer brings for a tile, >= 1.
        steps: int32 [tables, tiles of a head, kv tiles], contiguous: their words in the order of the walk.
        seen_bits: int32 [tables, row blocks, kv tiles, threads, words], contiguous, under a dense mask: all that the
            mask says, see Note [Seen bits] in `schedule.table_walk`.
        q_spans, kv_numbers: of an interval, as of `MaskTables`; the latter if they are not positions.
        row_place, row_count: place and count of a mask of rows, see `model.Placed`; then lengths are the mask's.

    `tables` is the batch size, or that times the q heads where the dense mask differs from head to head.
    """

    q_codes: Tensor | None
    kv_codes: Tensor | None
    keys_seen: Tensor
    counts: Tensor
    steps: Tensor
    seen_bits: Tensor | None = None
    q_spans: Tensor | None = None
    kv_numbers: Tensor | None = None
    row_place: Tensor | None = None
    row_count: Tensor | None = None

    @property
    def rows(self) -> int | None:
        """The lengths of a mask of rows, None where tokens are rows."""
        return None if self.row_place is None else ROW_BLOCK * len(self.row_place)

    def addresses(self) -> tuple[int, ...]:
        """The address of every tensor, 0 for a missing one."""
        return tuple(0 if t is None else t.data_ptr() for t in self)

    @staticmethod
    def of(call: Call, extras: Sequence[Tensor]) -> ForwardData | None:
        """From the operator's extras: the operands of the call, then keys_seen, counts and steps.

        Before these are the mask's codes, spans and numbers, or behind them its bits, if there is a dense mask.

        Raises:
            ArgumentError: a mask that is data, without its tables.
        """
        mask, operands = call.mask, len(call.operands)
        if not mask.operands:
            return None
        traits, made = call.traits, list(extras[operands:])
        has_codes = (traits.has("keys") or traits.has("segments")) and not traits.has("dense")
        wanted = (4 if traits.has("dense") else 3 + 2 * has_codes) + traits.has("interval") + traits.numbers
        if len(made) != wanted:
            allowed = f"the {operands} operands of {call}, then {wanted} tensors made from them"
            raise ArgumentError("extras", f"{len(extras)} tensors", allowed)
        if mask.dense is not None:
            return ForwardData(None, None, *made)
        q_codes, kv_codes = (made.pop(0), made.pop(0)) if has_codes else (None, None)
        spans = made.pop(0) if traits.has("interval") else None
        numbers = made.pop(0) if traits.numbers else None
        keys_seen, counts, steps = made
        data = ForwardData(q_codes, kv_codes, keys_seen, counts, steps, q_spans=spans, kv_numbers=numbers)
        if mask.placed is None:
            return data
        place, count = mask.placed.place, mask.placed.count
        return data._replace(row_place=extras[place.index], row_count=extras[count.index])


class ForwardDropout(NamedTuple):
    """The dropout of probabilities: `threshold` of all 2**16 sets of random bits drop one.

    Note [Random bits of dropout] in reference_dropout.py defines the bits.  Dropout does not change the log-sum-exp.

    Args:
        seed: int64 [1], from which all bits follow.
        threshold: at least 0, where nothing is dropped, and less than 2**16.
        rescale: the factor of kept probabilities, see `model.dropout.Dropout`.
    """

    seed: Tensor
    threshold: int
    rescale: float

    @staticmethod
    def of(dropout: Dropout | None, extras: Sequence[Tensor]) -> ForwardDropout | None:
        """From the operator's extras, among which is the seed."""
        if dropout is None:
            return None
        return ForwardDropout(extras[dropout.seed.index], dropout.threshold, dropout.rescale)
