"""Detects graphs whose operators all write every element of their results, so that no uninitialized memory is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.fx import GraphModule, Node

from ..upstream.dispatch import HigherOrderOperator, OpOverload
from ..upstream.inductor import is_generated
from . import sizes
from .nodes import bind

OURS = frozenset({"dash_inductor", "inductor", "inductor_prims", "rngprims", "_c10d_functional"})
"""Namespaces whose operators write everything that they allocate."""
WRITTEN = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_cudnn_rnn", "_cudnn_rnn_backward",
    "_thnn_fused_lstm_cell", "_fused_rms_norm", "_weight_norm_interface_backward", "embedding_dense_backward",
    "_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward",
    "index_add", "index_put", "index_put_", "scatter", "scatter_add", "scatter_reduce", "index_reduce",
    "masked_scatter", "masked_scatter_backward", "sort", "topk", "cumsum", "cumprod", "cummax", "cummin", "nonzero",
    "logcumsumexp",
    "_unique2", "unique_consecutive", "unique_dim", "repeat_interleave", "bincount", "histc", "multinomial", "rand",
    "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "uniform", "exponential",
    "grid_sampler_2d_backward", "max_pool3d_with_indices_backward", "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward",
    "replication_pad1d_backward", "replication_pad2d_backward", "upsample_bicubic2d_backward",
    "upsample_linear1d_backward", "upsample_trilinear3d_backward", "view_as_complex", "view_as_real", "_fft_r2c",
    "_fft_c2c", "_fft_c2r",
})  # fmt: skip
"""ATen operators, apart from those that Inductor generates kernels for, that write every element of their results."""


def _writes_bags(node: Node) -> bool:
    """Return whether a call of an embedding bag operator writes its whole result.

    CUDA's kernel has a thread for each bag and column.  With `include_last_offset` it does not write the size for the
    last offset, which is not a bag; without bags or columns, it does not write which bag an index belongs to.
    """
    args = bind(node)
    counts = args["offsets"].meta["val"].shape[0], args["weight"].meta["val"].shape[1]
    return not args["include_last_offset"] and all(sizes.differ(count, 0) for count in counts)


WRITTEN_IF: Mapping[str, Callable[[Node], bool]] = {
    "_embedding_bag": _writes_bags,
    "_embedding_bag_forward_only": _writes_bags,
    "_embedding_bag_backward": lambda node: not bind(node)["sparse"],
}
"""ATen operators that write everything that they allocate in those calls for which the function returns True."""
PARTIAL = frozenset({"_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"})
"""ATen operators that Inductor may call instead of its own lowering and that do not write all rows: those after the
last offset.  `passes.ops.grouped_mm` replaces the first one by an operator of this package."""
NESTING = frozenset(
    {"cond", "while_loop", "invoke_subgraph", "triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"}
)
"""Higher-order operators that allocate nothing themselves."""
PYTHON = frozenset({"_operator", "operator", "math", "torch", "torch.sym"})
"""Modules of functions on Python numbers."""


def all_written(gm: GraphModule) -> bool:
    """Return whether all operators of a graph and its subgraphs are known to write every element of their results.

    Kernels that Inductor generates count as such: they write to memory that Inductor allocates and PyTorch never fills.
    """
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    return all(_writes(node) for graph in graphs for node in graph.nodes if node.op == "call_function")


def _writes(node: Node) -> bool:
    target: object = node.target
    if isinstance(target, OpOverload):
        namespace, name = target._schema.name.split("::")
        if namespace == "aten" and name in WRITTEN_IF:
            return WRITTEN_IF[name](node)
        is_known = (namespace == "aten" and name in WRITTEN) or is_generated(target)
        return namespace in OURS or (is_known and name not in PARTIAL)
    if isinstance(target, HigherOrderOperator):
        return target.name() in NESTING
    return getattr(target, "__module__", "") in PYTHON
