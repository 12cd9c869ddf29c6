"""The tensors that a call reads in addition to query, key and value (masks, biases, ...), as inputs of templates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..kernels.portable import templates
from ..model.attention_spec import AttentionSpec
from ..model.components import Component, Dense, Operand
from ..model.mask import ROW_BLOCK, Mask
from ..model.operands import OPERANDS
from ..model.relations import Relation
from ..upstream.inductor import Pointwise, TensorBox, V, lowerings, ops
from .template import realized

aten, prims = torch.ops.aten, torch.ops.prims


class Vectors:
    """The extra tensors of a call in the form in which a site's kernels read them, each computed at most once.

    Args:
        extras: the operator's extra tensors, which `spec` references by index.
        plane: the shape of the scores: batch, query heads, q_len and kv_len of the mask.
        heads: the number of kv heads.
    """

    def __init__(self, spec: AttentionSpec, extras: Sequence[TensorBox], plane: Sequence[Any], heads: Any) -> None:
        self._spec, self._plane, self._heads = spec, plane, heads
        mask = spec.mask
        self._relations = [
            (component.RELATION, self._of_component(component, extras))
            for component in mask.others
            if not component.RELATION.is_of_keys
        ]
        valid = [in_words(extras[o.index]) for t in mask.others if t.RELATION.is_of_keys for o in t.operands]
        self._valid = functools.reduce(_both, valid) if valid else None
        layout = mask.varlen_layout
        self._varlen_layout = (
            [] if layout is None else [realized(extras[o.index]) for o in (layout.token_offset, layout.token_count)]
        )
        self._operands = {name: self._operand(name, extras[part.operand.index]) for name, part in spec.given.items()}
        self._seen: TensorBox | None = None

    def arguments(self, *, sums_keys: bool) -> list[TensorBox]:
        """Returns the extra tensors of a template in the order in which it takes them, without the operands `of_rows`.

        A tensor that serves both queries and keys is passed as two arguments.

        Args:
            sums_keys: as in `templates.reads_keys`.
        """
        traits, found = self._spec.traits, [of[role] for relation, of in self._relations for role in relation.roles]
        if templates.reads_keys(traits, sums_keys=sums_keys):
            keys = self._seen_keys() if sums_keys and templates.decided_by_pairs(traits) else self._valid
            assert keys is not None
            found.append(self._of_heads(keys))
        of_pairs = (tensor for name, tensor in self._operands.items() if OPERANDS[name].changes != "rows")
        return [*found, *of_pairs, *self._varlen_layout]

    @property
    def of_rows(self) -> list[TensorBox]:
        """The operands with one value per row (sinks, gradient of the log-sum-exp), for kernels that own rows."""
        return [tensor for name, tensor in self._operands.items() if OPERANDS[name].changes == "rows"]

    @property
    def varlen_layout(self) -> list[TensorBox]:
        """[token offsets, token counts] of the row blocks of a varlen layout; an empty list without one."""
        return self._varlen_layout

    def _operand(self, name: str, tensor: TensorBox) -> TensorBox:
        """Returns an optional operand, with the sizes of the plane if it may be broadcast."""
        sizes = dict(zip(("b", "h", "q", "kv"), self._plane, strict=True))
        kind = OPERANDS[name]
        return expanded(tensor, [sizes[axis] for axis in kind.axes]) if kind.broadcasts else realized(tensor)

    def _of_component(self, component: Component, extras: Sequence[TensorBox]) -> dict[str, TensorBox]:
        """Returns a component's tensors by role: of queries [batch, q_len], of keys [batch, kv_len], of pairs all."""
        relation, given = (
            component.RELATION,
            {component.ROLES[name]: extras[o.index] for name, o in component.given.items()},
        )
        device = next(iter(given.values())).get_device()
        assert device is not None
        found = {}
        for role in relation.roles:
            if role in relation.pairs:
                found[role] = expanded(given[role], self._plane)
            else:
                found[role] = in_words(given[role]) if role in given else self._missing(relation, role, device)
        return found

    def _missing(self, relation: Relation, role: str, device: torch.device) -> TensorBox:
        """Returns an int64 vector that stands for an absent operand: a constant, or positions."""
        batch, _, q_len, kv_len = self._plane
        number = relation.missing[role]

        def value(index: Sequence[Any]) -> Any:
            if isinstance(number, int):
                return ops.constant(number, torch.int64)
            return ops.index_expr(index[1], torch.int64)

        ranges = [batch, q_len if role in relation.queries else kv_len]
        return realized(Pointwise.create(device=device, dtype=torch.int64, inner_fn=value, ranges=ranges))

    def _of_heads(self, keys: TensorBox) -> TensorBox:
        """Expands [batch, kv_len] or [batch or 1, kv heads or 1, kv_len] of keys to [batch, kv heads, kv_len]."""
        batch, _, _, kv_len = self._plane
        return expanded(keys, [batch, self._heads, kv_len], missing=1)

    def _seen_keys(self) -> TensorBox:
        """Returns int32 [batch or 1, kv heads or 1, kv_len], nonzero for keys that some query sees.

        Inductor generates this reduction over all pairs; it runs once for all heads with the same mask, and stores no
        pairs.
        """
        if self._seen is not None:
            return self._seen
        (batch, q_heads, q_len, kv_len), band = self._plane, self._spec.mask.band
        offset = kv_len - q_len if band.anchor == "bottom_right" else 0
        of_pairs = [of[role] for relation, of in self._relations for role in relation.pairs]
        by_head = not all(_is_broadcast(operand, 1) for operand in of_pairs)
        by_element = any(relation.queries for relation, _ in self._relations)
        by_element = by_element or not all(_is_broadcast(operand, 0) for operand in of_pairs)
        heads, group = (self._heads, V.graph.sizevars.guard_int(q_heads // self._heads)) if by_head else (1, 1)
        loaders = [
            (relation, {role: operand.make_loader() for role, operand in of.items()})
            for relation, of in self._relations
        ]

        def pair(index: Sequence[Any]) -> Any:
            b, h, j, g, i = index
            distance = ops.index_expr(i + offset - j, torch.int64)
            sees = ops.constant(True, torch.bool)
            if band.lo is not None:
                sees = sees & (distance >= ops.constant(band.lo, torch.int64))
            if band.hi is not None:
                sees = sees & (distance <= ops.constant(band.hi, torch.int64))
            places = {"queries": [b, i], "keys": [b, j], "pairs": [b, h * group + g, i, j]}
            for relation, load in loaders:
                queries, keys, pairs = (
                    [ops.to_dtype(load[role](place), torch.int64) for role in getattr(relation, side)]
                    for side, place in places.items()
                )
                sees = relation.test(sees, tuple(queries), (*keys, *pairs))
            return sees

        device = next(iter(self._relations[0][1].values())).get_device()
        assert device is not None
        ranges = [batch if by_element else 1, heads, kv_len, group, q_len]
        pairs = Pointwise.create(device=device, dtype=torch.bool, inner_fn=pair, ranges=ranges)
        seen = lowerings[aten.any](pairs, [3, 4])
        if self._valid is not None:
            seen = lowerings[aten.logical_and](seen, lowerings[aten.unsqueeze](self._valid, 1))
        self._seen = in_words(seen)
        return self._seen


def dense_of_heads(
    spec: AttentionSpec, extras: Sequence[TensorBox], plane: Sequence[Any]
) -> tuple[AttentionSpec, list[TensorBox]]:
    """Returns a spec and extras in which a dense mask stands for kv ranges by head, which templates do not read.

    Without kv ranges by head, they are those given.  The bools of all pairs are stored, as those of a dense mask that
    the program writes; `passes.attention.checks` limits them.

    Args:
        plane: the shape of the scores: batch, query heads, q_len and kv_len.
    """
    ranges = spec.mask.head_interval
    if ranges is None:
        return spec, [*extras]
    given = {ranges.ROLES[name]: realized(extras[o.index]) for name, o in ranges.given.items()}
    loaders = {role: expanded(tensor, [*plane[:3], 1]).make_loader() for role, tensor in given.items()}
    dense = spec.mask.dense
    shown = None if dense is None else expanded(extras[dense.mask.index], plane).make_loader()
    device = next(iter(given.values())).get_device()

    def sees(index: Sequence[Any]) -> Any:
        bounds = [
            ops.to_dtype(loaders[role]([*index[:3], 0]), torch.int64) if role in loaders else None
            for role in ranges.RELATION.queries
        ]
        key = ops.index_expr(index[3], torch.int64)
        seen = ops.constant(True, torch.bool) if shown is None else shown(index)
        return ranges.RELATION.test(seen, tuple(bounds), (key,))

    bools = Pointwise.create(device=device, dtype=torch.bool, inner_fn=sees, ranges=[*plane])
    mask = Mask(spec.mask.band, others=spec.mask.others, head_interval=None, dense=Dense(Operand(len(extras))))
    return replace(spec, mask=mask), [*extras, realized(bools)]


def _both(a: TensorBox, b: TensorBox) -> TensorBox:
    return in_words(lowerings[aten.logical_and](a, b))


def in_words(x: TensorBox) -> TensorBox:
    """Returns `x` as a buffer whose elements have at least 32 bits: smaller ones are converted to int32.

    Note [Data operands] in kernels/portable/device/groups.py gives the reason.
    """
    return realized(x if x.get_dtype().itemsize >= 4 else lowerings[prims.convert_element_type.default](x, torch.int32))


def sizes_of(
    spec: AttentionSpec, extras: Sequence[TensorBox], query: TensorBox, key: TensorBox, value: TensorBox
) -> templates.Sizes:
    """Returns the `Sizes` of a call for its templates; with a varlen layout the lengths are those of padded rows."""
    guard, layout = V.graph.sizevars.guard_int, spec.mask.varlen_layout
    (_, q_heads, q_len, head_dim), (_, heads, kv_len, _) = query.get_size(), key.get_size()
    if layout is not None:
        q_len = kv_len = extras[layout.token_offset.index].get_size()[0] * ROW_BLOCK
    group = guard(q_heads) // guard(heads)
    return templates.Sizes(q_len, kv_len, guard(head_dim), guard(value.get_size()[3]), group)


def expanded(x: TensorBox, size: Sequence[Any], *, missing: int = 0) -> TensorBox:
    """Returns a view of `x` with the shape `size`: dimensions of size 1 are broadcast without a copy.

    Args:
        missing: index of the dimension that `x` may lack.
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
    """Returns whether an expanded tensor repeats its elements along a dimension."""
    return bool(V.graph.sizevars.statically_known_equals(x.get_stride()[dim], 0))
