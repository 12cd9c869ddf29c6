"""Graphs whose operators write every element that they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.fx import GraphModule, Node

from ..upstream.dispatch import HigherOrderOperator, OpOverload
from ..upstream.inductor import is_generated
from . import sizes
from .nodes import bind

OURS = frozenset({"dash_inductor", "inductor", "inductor_prims", "rngprims", "_c10d_functional"})
"""Namespaces of operators that allocate nothing which they do not write."""
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
"""Operators of PyTorch outside of the kernels that Inductor generates, which write all of what they return."""


def _writes_bags(node: Node) -> bool:
    """Bags of embeddings: CUDA's kernel has a thread for each bag and column.  It leaves out the size of a last bag
    that is none, and where there are no bags or columns, to which bag an index belongs.
    """
    args = bind(node)
    counts = args["offsets"].meta["val"].shape[0], args["weight"].meta["val"].shape[1]
    return not args["include_last_offset"] and all(sizes.differ(count, 0) for count in counts)


WRITTEN_IF: Mapping[str, Callable[[Node], bool]] = {
    "_embedding_bag": _writes_bags,
    "_embedding_bag_forward_only": _writes_bags,
    "_embedding_bag_backward": lambda node: not bind(node)["sparse"],
}
"""Operators of PyTorch that write all of what they return in some calls; everything counts that they allocate."""
PARTIAL = frozenset({"_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"})
"""Operators of PyTorch that Inductor may leave to PyTorch although it has a lowering for them, and that leave rows
unwritten: those behind the last offset.  `passes.ops.grouped_mm` puts one of ours in the place of the first."""
NESTING = frozenset(
    {"cond", "while_loop", "invoke_subgraph", "triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"}
)
"""Higher-order operators that allocate nothing by themselves."""
PYTHON = frozenset({"_operator", "operator", "math", "torch", "torch.sym"})
"""Modules of functions of numbers."""


def all_written(gm: GraphModule) -> bool:
    """Whether all operators of a graph and of those nested in it are known to write all elements of their results.

    What Inductor generates counts: its kernels write into memory of Inductor's, which PyTorch fills in no case.
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
