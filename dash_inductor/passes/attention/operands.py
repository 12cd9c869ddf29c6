"""Chooses the query, key and value nodes that the new operators read, and where their gradients go.

Under GQA, models often repeat keys and values (`repeat_kv`) before the attention.  The new operators then read the
tensors before the repeat and return their gradients, already summed over each group of query heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...frontends.attention import Attention, Sink, View
from ...frontends.repeat_kv import Repeat, Unused, find_repeat, find_sum, is_padded_repeat
from ...graph import sizes


@dataclass(frozen=True)
class Operands:
    """The query, key and value that an attention's new operators read, and where their gradients go.

    Attributes:
        query, key, value: the operands of the replaced backward, or of the forward if there is no backward.
        repeats: the repeats that made key and value, if the new operators read the tensors before them instead; None if
            key and value are read as they are.
        kv_heads: the number of heads of the key and value that are read.
        gradients: where the program reads dq, dk and dv; all `Unused` for a forward without a backward.
        detail: a note for the record about repeated keys and values; may be empty.
    """

    query: View
    key: View
    value: View
    repeats: tuple[Repeat, Repeat] | None
    kv_heads: sizes.Dim
    gradients: tuple[Sink, Sink, Sink]
    detail: str = ""


def find_operands(attention: Attention) -> Operands:
    """Finds the operands of an attention: for repeated keys and values, the tensors before the repeat if possible.

    That requires the program to use the gradients of key and value only as sums over the repeated heads.  Operands that
    are packed or laid out [batch, length, heads, head dim] are read as they are, repeated or not.
    """
    inputs, backward = attention.inputs, attention.backward
    key, value = inputs.key.node, inputs.value.node
    gradients: tuple[Sink, Sink, Sink] = (Unused(), Unused(), Unused()) if backward is None else backward.gradients

    def as_they_are(note: str = "") -> Operands:
        heads = inputs.key.tensor.shape[1]
        return Operands(inputs.query, inputs.key, inputs.value, None, heads, gradients, note)

    if inputs.key.axes != "bhsd":
        return as_they_are()
    key_repeat, value_repeat = find_repeat(key), find_repeat(value)
    factor = inputs.factors.key
    if key_repeat is not None and factor is not None and sizes.static(factor.value.meta["val"].shape[1]) != 1:
        return as_they_are("key and value repeat heads, but the scores of each head have another factor of the key")
    if key_repeat is None or value_repeat is None:
        if is_padded_repeat(key) or is_padded_repeat(value):
            return as_they_are("key and value repeat heads, but are padded after that: the repeated tensors are read")
        if key_repeat is not None or value_repeat is not None:
            return as_they_are("only one of key and value repeats heads: the repeated tensor is read")
        return as_they_are()
    repeats = key_repeat, value_repeat
    if any(repeat.loses_range for repeat in repeats):
        cast = f"are cast to {key_repeat.dtype} after that"
        return as_they_are(f"key and value repeat heads, but {cast}: the repeated tensors are read")
    found: Iterable[Sink | None] = gradients[1:]
    if backward is not None:
        pairs = zip(gradients[1:], repeats, strict=True)
        found = [find_sum(of, repeat) if of.axes == "bhsd" else None for of, repeat in pairs]
    dk, dv = found
    if dk is None or dv is None or key_repeat.kv_heads != value_repeat.kv_heads:
        used = "their gradients are used otherwise"
        return as_they_are(f"key and value repeat heads, but {used}: the repeated tensors are read")
    note = f"key and value repeat each head {key_repeat.group} times: the tensors before that are read"
    return Operands(inputs.query, inputs.key, inputs.value, repeats, key_repeat.kv_heads, (gradients[0], dk, dv), note)
