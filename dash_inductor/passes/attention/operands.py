"""The tensors that the new operators read, and the layouts in which they return what the rest of the graph expects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...frontends.attention import Attention, Sink, View
from ...frontends.repeat_kv import Repeat, Unused, find_repeat, find_sum, is_padded_repeat
from ...graph import sizes


@dataclass(frozen=True)
class Operands:
    """Query, key and value of one site.

    Attributes:
        query, key, value: the graph's own operands of the backward, or of a forward alone.
        repeats: how key and value repeat smaller tensors, where those are read instead; None where the operands are.
        kv_heads: heads of the key and value that are read.
        gradients: the sinks of dq, dk and dv; a forward that is alone has gradients that nothing uses.
        detail: a note for the record.
    """

    query: View
    key: View
    value: View
    repeats: tuple[Repeat, Repeat] | None
    kv_heads: sizes.Dim
    gradients: tuple[Sink, Sink, Sink]
    detail: str = ""


def find_operands(attention: Attention) -> Operands:
    """Operands of a site; repeated keys and values are looked through where their gradients allow it.

    Packed tokens, and those with lengths in front of heads, are read as they are, repeated or not.
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
