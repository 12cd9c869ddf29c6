"""Joint graphs for tests: captured before and after the joint passes of a compile, or traced on fake CUDA tensors."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.config import config
from dash_inductor.graph.emit import Emitter
from dash_inductor.graph.nodes import op_name
from dash_inductor.model.reasons import Reason
from dash_inductor.passes.all import rewrite_graph
from dash_inductor.passes.attention.rewrite import AttentionRewrite
from dash_inductor.passes.ops.embeddings import EmbeddingsRewrite
from dash_inductor.records.records import SiteRecord, clear_sites, sites

aten = torch.ops.aten
FORWARD, BACKWARD = "dash_inductor::attention_forward", "dash_inductor::attention_backward"
CPU_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
CPU_FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
WITHOUT_KERNELS = (AttentionRewrite(), EmbeddingsRewrite())
"""The rewrites, which compile no kernels."""


def op_counts(graph: Graph) -> Counter[str]:
    """How often each operator is called."""
    return Counter(name for name in map(op_name, graph.nodes) if name)


def planes(graph: Graph, length: int) -> list[str]:
    """The nodes that hold a tensor with `length` or more elements in both of its last two dimensions."""
    found = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dim() >= 2 and min(value.shape[-2:]) >= length:
            found.append(node.format_node())
    return found


@dataclass
class JointGraphs:
    """The joint (and inference, and nested) graphs of a compile.

    Attributes:
        plane_length: what `planes` counts as a materialised mask or score matrix.
        before, after: operator counts per graph, before the first and after the last joint pass.
        partitions: operator counts of the forward, backward and inference graphs that come out of the joint ones.
        parts: those graphs themselves.
        texts, planes: the graphs after the passes, and what is left of length x length tensors in them.
    """

    plane_length: int
    before: list[Counter[str]] = field(default_factory=list)
    after: list[Counter[str]] = field(default_factory=list)
    partitions: list[Counter[str]] = field(default_factory=list)
    parts: list[Graph] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    planes: list[str] = field(default_factory=list)

    def count(self, op: str) -> int:
        """Calls of an operator in all graphs, after the passes."""
        return sum(counts[op] for counts in self.after)

    def count_before(self, op: str) -> int:
        """Calls of an operator in all graphs, before the passes."""
        return sum(counts[op] for counts in self.before)

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`torch.compile` with Inductor's passes before autograd, over joint graphs and its partitioner, and no more.

        Takes a fraction of the time of Inductor's code generation; within `capture`, `torch.compile` does the whole.
        """
        compiled: Callable[..., Any] = torch.compile(function, backend=self._backend, **options)
        return compiled

    @functools.cached_property  # one for all: Dynamo compiles anew for every other backend
    def _backend(self) -> Callable[[GraphModule, list[Any]], Any]:
        return partition_with(self._see_partition)

    def _see_before(self, graph: Graph) -> None:
        self.before.append(op_counts(graph))

    def _see_after(self, graph: Graph) -> None:
        self.after.append(op_counts(graph))
        self.texts.append(str(graph))
        self.planes += planes(graph, self.plane_length)

    def _see_partition(self, graph: Graph) -> None:
        self.partitions.append(op_counts(graph))
        self.parts.append(graph)


def partition_with(
    see: Callable[[Graph], object], decompositions: dict[Any, Callable[..., Any]] | None = None
) -> Callable[[GraphModule, list[Any]], Any]:
    """A backend of `torch.compile` with Inductor's joint passes and partitioner, where the graphs then run as they are.

    Args:
        see: called with every forward, backward and inference graph.
        decompositions: None for Inductor's.
    """

    def run(part: GraphModule, _: Any) -> Any:
        see(part.graph)
        return make_boxed_func(part.forward)

    def infer(part: GraphModule, _: Any) -> Any:
        return run(compile_fx._recursive_joint_graph_passes(part), _)

    def backend(module: GraphModule, inputs: list[Any]) -> Any:
        compiler = aot_autograd(
            fw_compiler=run,
            bw_compiler=run,
            inference_compiler=infer,
            partition_fn=compile_fx.partition_fn,
            decompositions=select_decomp_table() if decompositions is None else decompositions,
            keep_inference_input_mutations=True,
        )
        with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            return compiler(compile_fx._recursive_pre_grad_passes(module, inputs), inputs)

    return backend


@contextmanager
def capture(plane_length: int = 1 << 30, **settings: Any) -> Iterator[JointGraphs]:
    """Compile from nothing and keep the graphs; CPU sites are replaced unless a setting says otherwise."""
    graphs = JointGraphs(plane_length)
    torch._dynamo.reset()
    clear_sites()
    passes: dict[str, Any] = {
        "joint_custom_pre_pass": graphs._see_before,
        "joint_custom_post_pass": graphs._see_after,
        "post_grad_custom_pre_pass": graphs._see_partition,
    }
    with inductor_config.patch(passes), config.patch(**{"cpu": "reference"} | settings):
        yield graphs


def tensors(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Reproducible normal tensors that want gradients."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def step(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradients of all inputs, for one fixed gradient of the output."""
    output = function(*inputs)
    grad_out = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad_out)]


def assert_as_exact(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], results: Sequence[Tensor], *, strides: bool = True,
    cancels: bool = False,
) -> None:  # fmt: skip
    """`results` (of `step`) are at most twice as far from double precision as eager, and have its shapes and strides.

    The floor of 8 units in the last place of the largest element covers results that eager gets exactly right by luck.

    Args:
        cancels: results may be sums that cancel, as gradients of sinks: the floor is of the largest of all results.
    """
    eager = step(function, inputs)
    exact = step(function, [t.detach().double().requires_grad_() for t in inputs])
    largest = max(float(true.abs().max()) for true in exact) if cancels else 0.0
    for ours, theirs, true in zip(results, eager, exact, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert not strides or ours.stride() == theirs.stride()
        floor = 8 * torch.finfo(ours.dtype).eps * max(float(true.abs().max()), largest)
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max() + floor


# ---- by hand: the CUDA operators on fake tensors, forward and backward in one graph as a joint graph has them ----


@dataclass(frozen=True)
class Shape:
    """Sizes of a hand-made graph; `layout` is the order of dimensions in memory, "bhsd" or "bshd"."""

    batch: int = 2
    heads: int = 8
    kv_heads: int = 8
    q_len: int = 128
    kv_len: int = 128
    head_dim: int = 64
    value_dim: int = 64
    layout: str = "bhsd"
    dtype: torch.dtype = torch.bfloat16


Maker = Callable[..., tuple[Any, ...]]


def flash(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, causal: bool = True, dropout: float = 0.0) -> tuple[Any, ...]:
    """out, dq, dk, dv as ``F.scaled_dot_product_attention`` leaves them with FlashAttention."""
    out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, dropout, causal, scale=0.125
    )
    backward = aten._scaled_dot_product_flash_attention_backward
    return out, *backward(do, q, k, v, aten.alias(out), lse, cq, ck, mq, mk, dropout, causal, seed, offset, scale=0.125)


def efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    causal: bool = False,
    bias: Callable[[], Tensor] | None = None,
    bias_grad: bool = False,
) -> tuple[Any, ...]:
    """out, dq, dk, dv of the memory-efficient kernel; the log-sum-exp is padded to a multiple of 32."""
    mask = bias() if bias else None
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal)
    backward = aten._scaled_dot_product_efficient_attention_backward
    grads = backward(do, q, k, v, mask, aten.alias(out), lse, seed, offset, 0.0, [True, True, True, bias_grad], causal)
    return out, *grads[: 4 if bias_grad else 3]


def cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    causal: bool = True,
    bias: Callable[[], Tensor] = lambda: None,  # type: ignore[assignment, return-value]
) -> tuple[Any, ...]:
    """out, dq, dk, dv of cuDNN; the log-sum-exp is [B, H, Sq, 1]."""
    added = bias()
    out, lse, cq, ck, mq, mk, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, added, True, 0.0, causal
    )
    backward = aten._scaled_dot_product_cudnn_attention_backward
    return out, *backward(do, q, k, v, aten.alias(out), lse, seed, offset, added, cq, ck, mq, mk, 0.0, causal)


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, lse: tuple[int, ...] = (2, 8, 128)
) -> tuple[Any, ...]:
    """dq, dk, dv: the backward alone, also with shapes that no forward gives."""
    lse_tensor = torch.empty(lse, device="cuda")
    rng = torch.empty(2, dtype=torch.uint64, device="cuda")
    backward = aten._scaled_dot_product_flash_attention_backward
    return backward(do, q, k, v, torch.empty_like(do), lse_tensor, None, None, 128, 128, 0.0, True, rng, rng)


def trace(function: Callable[..., Any], inputs: Callable[[], Sequence[Tensor]]) -> GraphModule:
    """The graph of `function` on fake tensors, made inside the fake mode by `inputs`."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        module = make_fx(function)(*inputs())
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def cuda_inputs(shape: Shape) -> list[Tensor]:
    """query, key, value and the gradient of the output, on a CUDA device that need not exist."""

    def tensor(heads: int, length: int, dim: int) -> Tensor:
        if shape.layout == "bshd":
            return torch.empty(shape.batch, length, heads, dim, dtype=shape.dtype, device="cuda").transpose(1, 2)
        return torch.empty(shape.batch, heads, length, dim, dtype=shape.dtype, device="cuda")

    key, value = (tensor(shape.kv_heads, shape.kv_len, dim) for dim in (shape.head_dim, shape.value_dim))
    query, grad_out = (tensor(shape.heads, shape.q_len, dim) for dim in (shape.head_dim, shape.value_dim))
    return [query, key, value, grad_out]


def joint_graph(maker: Maker, shape: Shape = Shape(), **options: Any) -> GraphModule:
    """A hand-made joint graph of one site on fake CUDA tensors."""
    return trace(lambda *inputs: maker(*inputs, **options), lambda: cuda_inputs(shape))


def rewritten(module: GraphModule, capability: tuple[int, int] = (9, 0)) -> tuple[Graph, SiteRecord]:
    """The graph after the rewrite on a GPU of this compute capability, and the record of its only site."""
    rewrite_on(module.graph, capability)
    (record,) = sites()
    return module.graph, record


def assert_not_replaced_after_an_error(module: GraphModule, number: int) -> None:
    """An error behind the `number`-th node that the rewrite of the only site adds leaves the graph as it was."""
    text, original, nodes = str(module.graph), Emitter.call, []

    def fail(self: Emitter, *args: Any, **kwargs: Any) -> Node:
        nodes.append(original(self, *args, **kwargs))
        if len(nodes) == number:
            raise ZeroDivisionError("on purpose")
        return nodes[-1]

    with mock.patch.object(Emitter, "call", fail):
        graph, record = rewritten(module)
    assert (record.reason, str(graph)) == (Reason.INTERNAL_ERROR, text)


def rewrite_on(graph: Graph, capability: tuple[int, int] = (9, 0)) -> bool:
    """Rewrite a graph as on a GPU of this compute capability: whether it changed.  It must stay sound."""
    before = str(graph)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        changed = rewrite_graph(graph, WITHOUT_KERNELS)
    graph.lint()
    assert changed == (str(graph) != before)
    return changed


def causal_bias(length: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """An additive causal mask made from indices on the (fake) CUDA device, [length, length]."""
    index = torch.arange(length, device="cuda")
    zero, low = (torch.full((), x, dtype=dtype, device="cuda") for x in (0.0, -math.inf))
    return torch.where(index.unsqueeze(0) <= index.unsqueeze(1), zero, low)
