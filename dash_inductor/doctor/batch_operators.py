"""What the bits of a row depend on, for each operator of a compiled graph: on the row alone, or on how many there are.

An operator is not known if no table names it and PyTorch does not say that it is elementwise or a view.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph import sizes
from ..graph.fully_written import NESTING, PYTHON
from ..graph.nodes import bind, called, is_elementwise, op_name
from ..graph.one_device import KERNELS
from ..graph.views import is_view
from ..upstream.dispatch import HigherOrderOperator, OpOverload
from ..upstream.pytree import tree_leaves


class Depends(enum.Enum):
    """What the bits of a row depend on besides the row."""

    PRODUCT = "products, whose kernels are chosen by the number of rows"
    ROW = "reductions of a row, which may be split by the number of rows"
    ATTENTION = "attention that is not replaced, whose kernels may split the keys by the batch size"
    FUSION = "elementwise operators in 16 bits, which are rounded only where Inductor does not fuse them"
    CHOICE = "choices among equal values, whose kernels are chosen by the number of rows"
    RANKS = "sums over ranks, whose order is chosen by the number of elements"
    RANDOM = "random numbers, which differ between places in the batch"
    BATCH = "reductions over the batch, which depend on the batch by definition"
    UNKNOWN = "whether these operators are batch invariant is not known"
    NOTHING = "batch invariant"


PRODUCTS = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "linear", "_addmm_activation", "_int_mm",
    "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2",
    "_weight_int4pack_mm", "_weight_int8pack_mm", "convolution", "convolution_backward", "_cdist_forward",
    "_trilinear", "_cudnn_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer",
))  # fmt: skip
"""Products of matrices, convolutions, and operators that consist of them."""

SUMS = frozenset((
    "sum", "nansum", "mean", "prod", "var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm", "logsumexp",
    "cumsum", "cumprod", "logcumsumexp", "_softmax", "_log_softmax", "_softmax_backward_data",
    "_log_softmax_backward_data", "scatter_add", "scatter_reduce", "index_add", "index_reduce", "band_sum",
))  # fmt: skip
"""Sums and the like along the dimensions that an argument names, or along all."""

CHOICES = frozenset(("topk", "sort", "kthvalue", "median", "nanmedian", "mode"))
"""The same of operators that choose among equal elements, unless their argument `stable` is true."""

COMPARISONS = frozenset((
    "amax", "amin", "aminmax", "argmax", "argmin", "max", "min", "any", "all", "cummax", "cummin", "count_nonzero",
    "short_sum",
))  # fmt: skip
"""The same of operators that compare elements, or add them in one order."""

OF_ROWS = frozenset(("native_layer_norm", "native_group_norm", "_fused_rms_norm"))
"""Other reductions of a row."""

OVER_ROWS = frozenset((
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_batch_norm_with_update",
    "_batch_norm_with_update_functional", "batch_norm_backward", "native_layer_norm_backward",
    "native_group_norm_backward", "_fused_rms_norm_backward", "embedding_dense_backward",
    "_embedding_bag_dense_backward", "_unsafe_masked_index_put_accumulate", "index_sums", "few_sums", "histc",
    "bincount", "equal",
))  # fmt: skip
"""Other reductions over the batch, and sums of rows by an index."""

ACCUMULATING = frozenset(("index_put", "_unsafe_index_put", "put"))
"""Operators that are sums by an index if their argument `accumulate` is true, else copies."""

RANDOM = frozenset(("inductor_random", "inductor_randint", "inductor_rand_eager_offset", "dropout_seed"))
"""Operators that make random numbers without a tag that says so."""

COPIES = frozenset((
    "copy", "fill", "embedding", "gather", "index", "_unsafe_index", "_unsafe_masked_index", "index_select", "take",
    "masked_select", "nonzero", "cat", "repeat", "roll", "flip", "rev", "tril", "triu", "im2col", "constant_pad_nd",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "scatter", "index_copy",
    "index_fill", "masked_scatter", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter",
    "diag_embed", "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "full",
    "full_like", "new_full", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "zero",
    "scalar_tensor", "arange", "iota", "inductor_seed", "inductor_seeds", "inductor_lookup_seed",
    "inductor_rand_eager_offsets", "inductor_force_stride_order", "put_distinct", "mask_tables", "document_tiles",
    "document_tiles_of_mask",
))  # fmt: skip
"""Operators that move elements, or make them of numbers and positions."""

FIXED = frozenset((
    "_native_batch_norm_legit_no_training", "fma", "searchsorted", "bucketize", "isin", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "_low_memory_max_pool_with_offsets", "_low_memory_max_pool_offsets_to_indices",
))  # fmt: skip
"""Operators that compute each element, or each row, by itself and in one order."""

_TABLES = {
    **dict.fromkeys(PRODUCTS, Depends.PRODUCT),
    **dict.fromkeys(OF_ROWS, Depends.ROW),
    **dict.fromkeys(OVER_ROWS, Depends.BATCH),
    **dict.fromkeys(RANDOM, Depends.RANDOM),
    **dict.fromkeys((*COPIES, *FIXED), Depends.NOTHING),
}
_ALONG = {
    **dict.fromkeys(SUMS, Depends.ROW),
    **dict.fromkeys(CHOICES, Depends.CHOICE),
    **dict.fromkeys(COMPARISONS, Depends.NOTHING),
}
_DIMENSIONS = ("dim", "dims")
"""Names of the argument with the dimensions of a reduction."""
_COMPARING = ("amax", "amin")
"""Values of an argument `reduce` for which elements are only compared."""
_NAMESPACES = frozenset(("aten", "prims", "dash_inductor"))
"""The namespaces of the operators in the tables."""

RANKS = {
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced"), Depends.RANKS),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"), Depends.RANKS),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced"), Depends.NOTHING),
    **dict.fromkeys(("all_to_all_single", "broadcast", "wait_tensor"), Depends.NOTHING),
}
"""The operators of the namespace `_c10d_functional`."""

_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
"""How the names of PyTorch's attention operators begin."""
_FLEX = ("flex_attention", "flex_attention_backward")
_FOREACH = "_foreach_"
_OURS = ("dash_inductor::attention_forward", "dash_inductor::attention_backward")


def depends(node: Node) -> Depends | None:
    """What the bits of a row of a node's results depend on; None if the node is no operator that computes a tensor.

    A higher-order operator that runs subgraphs is none: their nodes are.  Nor is attention of this package, of which
    there are records.
    """
    if node.op != "call_function" or op_name(node) in _OURS:
        return None
    operator = called(node)
    if operator is not None:
        return _of_operator(node, operator) if _makes_tensors(operator) else None
    if isinstance(node.target, HigherOrderOperator):
        if op_name(node) in _FLEX:
            return Depends.ATTENTION
        return None if op_name(node) in NESTING - KERNELS else Depends.UNKNOWN
    return None if getattr(node.target, "__module__", "") in PYTHON else Depends.UNKNOWN


def _makes_tensors(operator: OpOverload) -> bool:
    schema = operator._schema
    return schema.is_mutable or any("Tensor" in str(result.type) for result in schema.returns)


def _of_operator(node: Node, operator: OpOverload) -> Depends:
    namespace, _, name = operator._schema.name.partition("::")
    name = name if name.startswith("__") else name.removesuffix("_")
    if namespace == "_c10d_functional":
        return RANKS.get(name, Depends.UNKNOWN)
    if namespace not in _NAMESPACES:
        return Depends.UNKNOWN
    if name.startswith(_ATTENTION):
        return Depends.ATTENTION
    if torch.Tag.nondeterministic_seeded in operator.tags and name not in COPIES:
        return Depends.RANDOM
    if name in OVER_ROWS:
        return Depends.BATCH
    if is_elementwise(node) or is_view(operator) or _has_elementwise_counterpart(namespace, name):
        return Depends.NOTHING
    if name in ACCUMULATING:
        return Depends.BATCH if bind(node)["accumulate"] else Depends.NOTHING
    if name in _ALONG:
        return _of_reduction(node, _ALONG[name])
    if name in PRODUCTS and _is_exact(node):
        return Depends.NOTHING
    return _TABLES.get(name, Depends.UNKNOWN)


def _of_reduction(node: Node, of_row: Depends) -> Depends:
    """What a reduction depends on: the batch, if that is reduced, else `of_row`, or nothing.

    The dimension of the batch is the first that has another size than 1: that of tokens in ``[1, tokens, columns]``.
    """
    given = bind(node)
    source = next((value for value in map(_value, given.values()) if isinstance(value, Tensor)), None)
    if source is None:
        return Depends.UNKNOWN
    batch = next((dim for dim, size in enumerate(source.shape) if sizes.static(size) != 1), None)
    named = next((given[name] for name in _DIMENSIONS if name in given), None)
    dims = [named] if isinstance(named, int) else named or range(source.dim())
    if batch is not None and batch in {dim % source.dim() for dim in dims}:
        return Depends.BATCH
    is_exact = given.get("stable") or given.get("reduce") in _COMPARING or (of_row is Depends.ROW and _is_exact(node))
    return Depends.NOTHING if batch is None or is_exact else of_row


def _is_exact(node: Node) -> bool:
    """Whether all results are integers or truth values, whose sums are the same in any order."""
    found = [leaf for leaf in tree_leaves(_value(node)) if isinstance(leaf, Tensor)]
    return bool(found) and not any(value.dtype.is_floating_point or value.dtype.is_complex for value in found)


def _has_elementwise_counterpart(namespace: str, name: str) -> bool:
    """Whether an operator without tags, of prims or on lists of tensors, has an elementwise counterpart in ATen."""
    if namespace != "prims" and not name.startswith(_FOREACH):
        return False
    packet = getattr(torch.ops.aten, name.removeprefix(_FOREACH), None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, Node) else argument
