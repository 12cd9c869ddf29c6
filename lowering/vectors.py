"""The tensors that a call reads beside query, key and value, as inputs of templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.ir import Pointwise, TensorBox
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V, ops

from ..kernels.portable import templates
from ..model.call import Call
from ..model.mask import ROW_BLOCK
from .template import realized

aten, prims = torch.ops.aten, torch.ops.prims


class Vectors:
    """The extra tensors of a call for the kernels of one site; each is computed once, if it is computed at all.

    Args:
        plane: batch, query heads, q_len and kv_len, of the mask.
        heads: of keys.
    """

    def __init__(self, call: Call, extras: Sequence[TensorBox], plane: Sequence[Any], heads: Any) -> None:
        self._call, self._plane, self._heads = call, plane, heads
        mask = call.mask
        self._valid = None if mask.keys is None else in_words(extras[mask.keys.valid.index])
        segments = mask.segments
        self._ids = [] if segments is None else [in_words(extras[side.index]) for side in (segments.q, segments.kv)]
        placed = mask.placed
        self._placed = [] if placed is None else [realized(extras[o.index]) for o in (placed.place, placed.count)]
        self._dense = None if mask.dense is None else expanded(extras[mask.dense.mask.index], plane)
        self._bias = None if call.bias is None else expanded(extras[call.bias.operand.index], plane)
        self._seed = None if call.dropout is None else realized(extras[call.dropout.seed.index])
        self._seen: TensorBox | None = None

    def arguments(self, *, sums_keys: bool) -> list[TensorBox]:
        """The tensors in the order in which a template takes them; `sums_keys` as in `templates.reads_keys`.

        Ids that are one tensor for queries and keys are two arguments of a template.
        """
        traits, found = self._call.traits, list(self._ids)
        if templates.reads_keys(traits, sums_keys=sums_keys):
            keys = self._seen_keys() if sums_keys and templates.decided_by_pairs(traits) else self._valid
            assert keys is not None
            found.append(self._of_heads(keys))
        others = (other for other in (self._dense, self._bias, self._seed) if other is not None)
        return [*found, *others, *self._placed]

    @property
    def placed(self) -> list[TensorBox]:
        """Place and count of a mask of rows; empty where tokens are rows."""
        return self._placed

    def _of_heads(self, keys: TensorBox) -> TensorBox:
        """A vector of keys, [batch, kv_len] or [batch or 1, kv heads or 1, kv_len], as [batch, kv heads, kv_len]."""
        batch, _, _, kv_len = self._plane
        return expanded(keys, [batch, self._heads, kv_len], missing=1)

    def _seen_keys(self) -> TensorBox:
        """The keys that a query sees: int32 [batch or 1, kv heads or 1, kv_len], not zero for those.

        A kernel of Inductor's own that visits all pairs, once for all heads that see the same, and writes none of them.
        """
        if self._seen is not None:
            return self._seen
        (batch, q_heads, q_len, kv_len), band = self._plane, self._call.mask.band
        offset = kv_len - q_len if band.anchor == "bottom_right" else 0
        loaders = [side.make_loader() for side in self._ids]
        dense = None if self._dense is None else self._dense.make_loader()
        by_head = self._dense is not None and not _is_broadcast(self._dense, 1)
        by_element = bool(self._ids) or (self._dense is not None and not _is_broadcast(self._dense, 0))
        heads, group = (self._heads, V.graph.sizevars.guard_int(q_heads // self._heads)) if by_head else (1, 1)

        def pair(index: Sequence[Any]) -> Any:
            b, h, j, g, i = index
            distance = ops.index_expr(i + offset - j, torch.int64)
            found = []
            if loaders:
                q_id, kv_id = (load([b, at]) for load, at in zip(loaders, (i, j), strict=True))
                found.append(ops.eq(ops.to_dtype(q_id, torch.int64), ops.to_dtype(kv_id, torch.int64)))
            if dense is not None:
                found.append(ops.to_dtype(dense([b, h * group + g, i, j]), torch.bool))
            if band.lo is not None:
                found.append(ops.ge(distance, ops.constant(band.lo, torch.int64)))
            if band.hi is not None:
                found.append(ops.le(distance, ops.constant(band.hi, torch.int64)))
            sees, *others = found
            for other in others:
                sees = ops.and_(sees, other)
            return sees

        of_pairs = self._ids[0] if self._ids else self._dense
        assert of_pairs is not None
        device = of_pairs.get_device()
        assert device is not None
        ranges = [batch if by_element else 1, heads, kv_len, group, q_len]
        pairs = Pointwise.create(device=device, dtype=torch.bool, inner_fn=pair, ranges=ranges)
        seen = lowerings[aten.any](pairs, [3, 4])
        if self._valid is not None:
            seen = lowerings[aten.logical_and](seen, lowerings[aten.unsqueeze](self._valid, 1))
        self._seen = in_words(seen)
        return self._seen


def in_words(x: TensorBox) -> TensorBox:
    """`x` as a buffer of elements of at least 32 bits, as Note [Data operands] wants them: as int32 if it has fewer."""
    return realized(x if x.get_dtype().itemsize >= 4 else lowerings[prims.convert_element_type.default](x, torch.int32))


def sizes_of(
    call: Call, extras: Sequence[TensorBox], query: TensorBox, key: TensorBox, value: TensorBox
) -> templates.Sizes:
    """The sizes of a call; lengths are those of its mask."""
    guard, placed = V.graph.sizevars.guard_int, call.mask.placed
    (_, q_heads, q_len, head_dim), (_, heads, kv_len, _) = query.get_size(), key.get_size()
    if placed is not None:
        q_len = kv_len = extras[placed.place.index].get_size()[0] * ROW_BLOCK
    group = guard(q_heads) // guard(heads)
    return templates.Sizes(q_len, kv_len, guard(head_dim), guard(value.get_size()[3]), group)


def expanded(x: TensorBox, size: Sequence[Any], *, missing: int = 0) -> TensorBox:
    """A view of `x` of this size: dimensions of size 1 are repeated without a copy.

    Args:
        missing: where the dimension is that `x` may lack.
    """
    buffer = realized(x)
    sizes, strides = list(buffer.get_size()), list(buffer.get_stride())
    if len(sizes) < len(size):
        sizes.insert(missing, 1)
        strides.insert(missing, 0)
    known = V.graph.sizevars.statically_known_equals
    strides = [0 if known(extent, 1) else stride for extent, stride in zip(sizes, strides, strict=True)]
    view: TensorBox = lowerings[aten.as_strided](buffer, list(size), strides, buffer.get_layout().offset)
    return view


def _is_broadcast(x: TensorBox, dim: int) -> bool:
    """Whether an expanded tensor repeats its elements along a dimension."""
    return bool(V.graph.sizevars.statically_known_equals(x.get_stride()[dim], 0))
