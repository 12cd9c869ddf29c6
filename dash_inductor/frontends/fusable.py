"""Adapts the layout of SDPA calls that PyTorch's fused operators would otherwise reject, in Dynamo's graph.

Fused operators take four dimensions and, on CUDA, a mask whose last dimension is contiguous.  PyTorch computes all
other calls by its math backend, which decomposes them before the joint graph is traced.  The calls are therefore
adapted earlier, in Dynamo's graph, where each is still one node:

- Leading dimensions of query, key and value are flattened into one batch dimension if that is a view of each of them
  and of the mask.  Tensors of three dimensions get a dimension for the heads; a mask of three dimensions gets one for
  the batch.
- A mask whose last dimension is not contiguous is copied once.  Otherwise every kernel would read each element of a
  tile of the mask from a cache line of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from ..config import config
from ..graph import sizes
from ..upstream.attention import scaled_dot_product_attention
from ..upstream.tensors import is_functorch_wrapped

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
CALLS = (F.scaled_dot_product_attention, scaled_dot_product_attention)
"""The SDPA functions that a Dynamo graph may call."""
_PLANE = 3
"""The number of dimensions after the batch: heads, length, head dim."""


def make_fusable(graph: Graph) -> bool:
    """Change the layout of SDPA calls in a Dynamo graph so that PyTorch's fused operators accept them.

    Returns:
        Whether any call changed.
    """
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target in CALLS]
    steps = _with_one_batch_dimension, _with_batch_of_mask, _with_contiguous_mask
    changed = [step(call) for call in calls if _is_replaced_on(call) for step in steps]
    return any(changed)


def _is_replaced_on(call: Node) -> bool:
    """Return whether calls on this device are replaced and all tensors of the call have example values.

    Calls inside a `torch.func` transform (`vmap`, `grad`) are excluded: their tensors have the sizes and strides that
    the transform shows, and cannot be used in a computation after the transform has ended.
    """
    tensors = _tensors(call)
    values = [_value(node) for node in (*tensors.values(), call)]
    if len(tensors) < 3 or not all(isinstance(value, Tensor) for value in values):
        return False
    if any(is_functorch_wrapped(value) for value in values):
        return False
    device = _value(call).device.type
    return device == "cuda" or (device == "cpu" and config.cpu != "off")


def _tensors(call: Node) -> dict[str, Node]:
    """Return query, key, value and, if there is one, the mask, by name."""
    return {name: node for name, node in _arguments(call).items() if isinstance(node, Node) and name in _NAMES[:4]}


def _arguments(call: Node) -> dict[str, Any]:
    return dict(zip(_NAMES, call.args, strict=False)) | call.kwargs


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def _set(call: Node, name: str, node: Node) -> None:
    if name in call.kwargs:
        call.update_kwarg(name, node)
    else:
        call.update_arg(_NAMES.index(name), node)


def _inserted(call: Node, source: Node, method: str, *args: Any) -> Node:
    """Insert a call of the method `method` of `source` before `call`."""
    with call.graph.inserting_before(call):
        return _described(call.graph.call_method(method, (source, *args)), call, source, method, *args)


def _described(node: Node, call: Node, source: Node, method: str, *args: Any) -> Node:
    about = {key: call.meta[key] for key in ("stack_trace", "nn_module_stack") if key in call.meta}
    with torch.no_grad():
        node.meta = about | {"example_value": getattr(_value(source), method)(*args)}
    return node


def _with_batch_of_mask(call: Node) -> bool:
    mask = _tensors(call).get("attn_mask")
    if mask is None or _value(mask).dim() != _PLANE or _value(call).dim() != _PLANE + 1:
        return False
    _set(call, "attn_mask", _inserted(call, mask, "unsqueeze", 0))
    return True


def _with_contiguous_mask(call: Node) -> bool:
    mask = _tensors(call).get("attn_mask")
    if mask is None or _value(call).device.type != "cuda":  # CPU kernels read any strides
        return False
    value = _value(mask)
    if not value.dim() or sizes.static(value.stride(-1)) in (None, 1) or sizes.static(value.shape[-1]) == 1:
        return False
    _set(call, "attn_mask", _inserted(call, mask, "contiguous"))
    return True


def _with_one_batch_dimension(call: Node) -> bool:
    tensors = _tensors(call)
    values = [_value(node) for node in tensors.values()]
    dims, mask = values[0].dim(), tensors.get("attn_mask")
    if dims < 3 or dims == 4 or any(value.dim() != dims for value in values[1:3]) or _value(call).dim() != dims:
        return False
    if dims == 3:
        return _arguments(call).get("enable_gqa") is not True and _with_heads(call, tensors)
    lead = values[0].shape[:-_PLANE]
    restored = [-1 if sizes.static(size) is None else int(size) for size in lead]
    same = all(sizes.same_all(value.shape[:-_PLANE], lead) for value in values[1:3])
    if not same or restored.count(-1) > 1 or not all(map(_is_one_batch, values[:3])):
        return False
    if mask is not None and not _fits(_value(mask), lead):
        return False
    for name, node in tensors.items():
        if _value(node).dim() > _PLANE + 1:
            _set(call, name, _inserted(call, node, "flatten", 0, -_PLANE - 1))
    _restore(call, "flatten", (0, -_PLANE - 1), "unflatten", (0, tuple(restored)))
    return True


def _with_heads(call: Node, tensors: dict[str, Node]) -> bool:
    """Turn tensors [batch, length, head dim] into tensors with one head."""
    for name, node in tensors.items():
        if _value(node).dim() == 3:
            _set(call, name, _inserted(call, node, "unsqueeze", 1))
    _restore(call, "unsqueeze", (1,), "squeeze", (1,))
    return True


def _restore(call: Node, method: str, args: tuple[Any, ...], inverse: str, inverse_args: tuple[Any, ...]) -> None:
    """Restore the original dimensions of the call's result for its readers."""
    users, whole = list(call.users), _value(call)
    with torch.no_grad():
        call.meta["example_value"] = getattr(whole, method)(*args)
    with call.graph.inserting_after(call):
        node = _described(call.graph.call_method(inverse, (call, *inverse_args)), call, call, inverse, *inverse_args)
    for user in users:
        user.replace_input_with(call, node)


def _fits(mask: Tensor, lead: Sequence[sizes.Dim]) -> bool:
    """Return whether a view of the mask broadcasts to one batch dimension in place of the dimensions `lead`."""
    if mask.dim() <= _PLANE:
        return True
    own = [*[1] * (len(lead) + _PLANE - mask.dim()), *mask.shape[:-_PLANE]]
    if all(sizes.static(size) == 1 for size in own):
        return True
    return len(own) == len(lead) and sizes.same_all(own, lead) and _is_one_batch(mask)


def _is_one_batch(value: Tensor) -> bool:
    """Return whether all dimensions before the heads can be viewed as one dimension, without a copy."""
    lead = [
        (size, stride)
        for size, stride in zip(value.shape[:-_PLANE], value.stride()[:-_PLANE], strict=True)
        if sizes.static(size) != 1
    ]
    return all(sizes.same(outer, size * inner) for (_, outer), (size, inner) in itertools.pairwise(lead))
