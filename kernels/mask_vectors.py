"""A mask that is data as the table builders take it, and the tables that they make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..model.mask import Band

_TRUTHS = (torch.bool, torch.uint8)
_IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Vectors:
    """A mask that is data: a band and vectors, at least one of them.

    Args:
        band: any anchor.
        q_len, kv_len: lengths in tokens.
        valid: bool or uint8 [batch, kv_len]; a key whose value is 0 is seen by nobody.
        segments: integers [batch, q_len] and [batch, kv_len]; a query sees keys of its own id alone.  Any ids, in any
            order.  All vectors may have any strides.

    Raises:
        ArgumentError: no vector; one of another dtype, shape or device.
    """

    band: Band
    q_len: int
    kv_len: int
    valid: Tensor | None = None
    segments: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        found = self._vectors()
        if not found:
            raise ArgumentError("valid, segments", (None, None), "at least one of them")
        batch, device = found[0][1].shape[0] if found[0][1].dim() == 2 else -1, found[0][1].device
        for name, vector, length in found:
            if vector.dim() != 2 or vector.shape != (batch, length) or batch < 1:
                raise ArgumentError(f"{name}.shape", tuple(vector.shape), f"[batch >= 1, {length}], of one batch size")
            if vector.device != device:
                raise ArgumentError(f"{name}.device", str(vector.device), f"{device}, as of {found[0][0]}")
            allowed = _TRUTHS if name == "valid" else _IDS
            if vector.dtype not in allowed:
                raise ArgumentError(f"{name}.dtype", vector.dtype, allowed)

    @property
    def batch(self) -> int:
        """Batch elements; symbolic in a trace."""
        return self._vectors()[0][1].shape[0]

    @property
    def device(self) -> torch.device:
        return self._vectors()[0][1].device

    def _vectors(self) -> list[tuple[str, Tensor, int]]:
        """Those that there are: name, vector, length."""
        found = [] if self.valid is None else [("valid", self.valid, self.kv_len)]
        if self.segments is not None:
            found += [("segments[0]", self.segments[0], self.q_len), ("segments[1]", self.segments[1], self.kv_len)]
        return found


class BackwardTables(NamedTuple):
    """What the walks of a backward read; int32.

    Attributes:
        base, visits: [batch, n_kv]: where the walk of a kv tile begins in its row of `steps`, and how long it is.
        steps: [batch, n_q * n_kv], as `table_walk.entry`; uninitialised where no walk reads.
        contributions: [batch, n_q]: kv tiles that contribute to a q tile.
        tickets: [batch * heads * n_kv]: ``(b * heads + head) * n_kv + kv`` of each ticket.
    """

    base: Tensor
    visits: Tensor
    steps: Tensor
    contributions: Tensor
    tickets: Tensor


class ForwardTables(NamedTuple):
    """What the walks of a forward read; int32.

    Attributes:
        visits: [batch, n_q]: kv tiles that a q tile sees.
        steps: [batch, n_q * n_kv]: from ``q * n_kv`` on those kv tiles, ascending, as `table_walk.entry` of the kv tile
            and rank 0; uninitialised where no walk reads.
        order: [batch, n_q]: q tiles, the longest walks first.
    """

    visits: Tensor
    steps: Tensor
    order: Tensor
