"""The tensors that calls read beside query, key and value, as inputs of templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.ir import Pointwise, TensorBox
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import ops

from ..kernels import templates
from ..model.call import Call
from .template import realized

aten = torch.ops.aten


class Vectors:
    """The extra tensors of a call for the kernels of one site, of which those that are computed are computed once.

    Args:
        lengths: q_len and kv_len.
    """

    def __init__(self, call: Call, extras: Sequence[TensorBox], lengths: tuple[Any, Any]) -> None:
        mask = call.mask
        self._call, self._mask, self._lengths = call, mask, lengths
        self._seed = [] if call.dropout is None else [realized(extras[call.dropout.seed.index])]
        self._valid = None if mask.keys is None else realized(extras[mask.keys.valid.index])
        segments = mask.segments
        self._ids = [] if segments is None else [realized(extras[side.index]) for side in (segments.q, segments.kv)]
        self._seen: TensorBox | None = None

    def arguments(self, *, sums_keys: bool) -> list[TensorBox]:
        """In the order in which a template takes them; `sums_keys` as in `templates.reads`.

        Ids that are one tensor for queries and keys are two arguments of a template.
        """
        reads = templates.reads(self._call, sums_keys=sums_keys)
        if not reads.keys:
            return [*self._ids, *self._seed]
        keys = self._seen_keys() if reads.segments and sums_keys else self._valid
        assert keys is not None
        return [*self._ids, keys, *self._seed]

    def _seen_keys(self) -> TensorBox:
        """Which keys a query sees: bool [batch, kv_len].

        A kernel of Inductor's own that visits all pairs, once for all heads, and writes none of them.
        """
        if self._seen is not None:
            return self._seen
        (q_len, kv_len), band = self._lengths, self._mask.band
        offset = kv_len - q_len if band.anchor == "bottom_right" else 0
        q_of, kv_of = (side.make_loader() for side in self._ids)

        def pair(index: Sequence[Any]) -> Any:
            b, j, i = index
            sees = ops.eq(ops.to_dtype(q_of([b, i]), torch.int64), ops.to_dtype(kv_of([b, j]), torch.int64))
            distance = ops.index_expr(i + offset - j, torch.int64)
            if band.lo is not None:
                sees = ops.and_(sees, ops.ge(distance, ops.constant(band.lo, torch.int64)))
            if band.hi is not None:
                sees = ops.and_(sees, ops.le(distance, ops.constant(band.hi, torch.int64)))
            return sees

        device = self._ids[0].get_device()
        assert device is not None
        batch = self._ids[0].get_size()[0]
        pairs = Pointwise.create(device=device, dtype=torch.bool, inner_fn=pair, ranges=[batch, kv_len, q_len])
        seen = lowerings[aten.any](pairs, 2)
        if self._valid is not None:
            seen = lowerings[aten.logical_and](seen, self._valid)
        self._seen = realized(seen)
        return self._seen
