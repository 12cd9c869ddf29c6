"""How PyTorch's partitioner cuts models with attention in two: what is saved for the backward, what runs there again."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dash_inductor
from dash_inductor import lowering
from dash_inductor.config import config
from dash_inductor.matching.attention_ops import BACKENDS, op_name
from dash_inductor.observe.records import clear_sites, sites

from .graphs import FORWARD, partition_with
from .packed import GROUPED, documents

aten = torch.ops.aten
FORWARDS = {FORWARD, *(backend.forward for backend in BACKENDS.values())}
BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 256, 4, 2, 64
WIDTH = HEADS * DIM
TOKENS = BATCH * LENGTH

Attention = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor]], Tensor]


def _causal(q: Tensor, k: Tensor, v: Tensor, data: Sequence[Tensor]) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _grouped(q: Tensor, k: Tensor, v: Tensor, data: Sequence[Tensor]) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :KV_HEADS], v[:, :KV_HEADS], is_causal=True, enable_gqa=True)


def _repeated(q: Tensor, k: Tensor, v: Tensor, data: Sequence[Tensor]) -> Tensor:
    k, v = (t[:, :KV_HEADS].repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _padded(q: Tensor, k: Tensor, v: Tensor, data: Sequence[Tensor]) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, data[0][:, None, None, :])


def _documents(q: Tensor, k: Tensor, v: Tensor, data: Sequence[Tensor]) -> Tensor:
    rows = torch.arange(q.shape[2], device=q.device)
    ids = data[0]
    return F.scaled_dot_product_attention(
        q, k, v, (ids[:, None, :, None] == ids[:, None, None, :]) & (rows[:, None] >= rows)
    )


def _added(q: Tensor, k: Tensor, v: Tensor, data: Sequence[Tensor]) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, data[0])


def _wide(q: Tensor, k: Tensor, v: Tensor, data: Sequence[Tensor]) -> Tensor:
    """Head dims of 192 and 128."""
    q, k, v = (torch.cat([t] * times, 3) for t, times in ((q, 3), (k, 3), (v, 2)))
    return F.scaled_dot_product_attention(q, k, v, data[0][:, None, None, :])[..., :DIM]


def _varlen(q: Tensor, k: Tensor, v: Tensor, data: Sequence[Tensor]) -> Tensor:
    q, k, v = (t.transpose(1, 2).reshape(TOKENS, -1, DIM) for t in (q, k, v))
    out: Tensor = varlen_attn(q, k, v, data[0], data[0], LENGTH, LENGTH, window_size=(-1, 0))
    return out.view(BATCH, LENGTH, HEADS, DIM).transpose(1, 2)


def _grouped_varlen(q: Tensor, k: Tensor, v: Tensor, data: Sequence[Tensor]) -> Tensor:
    q, k, v = (t.transpose(1, 2).reshape(TOKENS, -1, DIM) for t in (q, k[:, :KV_HEADS], v[:, :KV_HEADS]))
    out: Tensor = varlen_attn(q, k, v, data[0], data[0], LENGTH, LENGTH, window_size=(-1, 0), **GROUPED)
    return out.view(BATCH, LENGTH, HEADS, DIM).transpose(1, 2)


def _packed(q: Tensor, k: Tensor, v: Tensor, data: Sequence[Tensor]) -> Tensor:
    """As jagged tensors reach it on CUDA."""
    q, k, v = (t.transpose(1, 2).reshape(TOKENS, -1, DIM) for t in (q, k, v))
    out: Tensor = aten._flash_attention_forward(q, k, v, data[0], data[0], LENGTH, LENGTH, 0.0, True, False)[0]
    return out.view(BATCH, LENGTH, HEADS, DIM).transpose(1, 2)


def _dropped(q: Tensor, k: Tensor, v: Tensor, data: Sequence[Tensor]) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)


def _nothing(device: str, dtype: torch.dtype) -> list[Tensor]:
    return []


def _valid(device: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.ones(BATCH, LENGTH, dtype=torch.bool, device=device)]


def _ids(device: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=device)]


def _starts(device: str, dtype: torch.dtype) -> list[Tensor]:
    return [documents(0, LENGTH, LENGTH + 100, TOKENS, device=device)]


def _bias(device: str, dtype: torch.dtype, gradient: bool = False) -> list[Tensor]:
    return [torch.zeros(1, HEADS, LENGTH, LENGTH, dtype=dtype, device=device, requires_grad=gradient)]


ATTENTIONS: dict[str, tuple[Attention, Callable[[str, torch.dtype], list[Tensor]]]] = {
    "causal": (_causal, _nothing),
    "grouped": (_grouped, _nothing),
    "repeated": (_repeated, _nothing),
    "padded": (_padded, _valid),
    "documents": (_documents, _ids),
    "bias": (_added, _bias),
    "trained bias": (_added, functools.partial(_bias, gradient=True)),
    "value dim": (_wide, _valid),
    "varlen": (_varlen, _starts),
    "grouped varlen": (_grouped_varlen, _starts),
    "packed": (_packed, _starts),
    "dropout": (_dropped, _nothing),
}
"""Attention of [batch, heads, length, dim], and the data that all layers share."""


def _layer(attention: Attention, x: Tensor, weights: Sequence[Tensor], data: Sequence[Tensor]) -> Tensor:
    qkv, out, up, down = weights
    q, k, v = (F.layer_norm(x, (WIDTH,)) @ qkv).view(BATCH, LENGTH, 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
    x = attention(q, k, v, data).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH) @ out + x
    return F.gelu(F.layer_norm(x, (WIDTH,)) @ up) @ down + x


def _selected(_: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    """What is expensive is saved."""
    expensive = op in (aten.mm.default, aten.addmm.default) or "attention" in str(op)
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


def _products(_: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Products are saved, attention is not."""
    return CheckpointPolicy.MUST_SAVE if op is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "whole layers": {},
    "expensive saved": {"context_fn": functools.partial(create_selective_checkpoint_contexts, _selected)},
    "products saved": {"context_fn": functools.partial(create_selective_checkpoint_contexts, _products)},
}


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        attention: a key of `ATTENTIONS`.
        layers: how many it has.
        checkpoints: a key of `CHECKPOINTS`, or "" for none.
    """

    attention: str
    layers: int = 2
    checkpoints: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.attention, f"{self.layers} layers", self.checkpoints)))

    def run(self, x: Tensor, weights: Sequence[Sequence[Tensor]], data: Sequence[Tensor]) -> Tensor:
        layer = functools.partial(_layer, ATTENTIONS[self.attention][0])
        for own in weights:
            if self.checkpoints:
                x = checkpoint(layer, x, own, data, use_reentrant=False, **CHECKPOINTS[self.checkpoints])
            else:
                x = layer(x, own, data)
        return x

    def inputs(self, device: str, dtype: torch.dtype) -> tuple[Tensor, list[list[Tensor]], list[Tensor]]:
        def tensor(*size: int) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device, requires_grad=True)

        sizes = (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
        weights = [[tensor(*size) for size in sizes] for _ in range(self.layers)]
        return tensor(BATCH, LENGTH, WIDTH), weights, ATTENTIONS[self.attention][1](device, dtype)


@dataclass(frozen=True)
class Parts:
    """The forward and the backward that the partitioner made of a joint graph.

    Attributes:
        again: how many attention forwards the backward has.
        activations: by the name of a node of the forward, the bytes that are kept for the backward because of it.  What
            is an argument of the model, or a view of one, is there anyway, and of two views of one storage one counts.
        data: the same of what is no activation, but what attentions note for their backwards: log-sum-exps, random
            state, masks and their tables.
    """

    again: int
    activations: dict[str, int]
    data: dict[str, int]

    @property
    def sums(self) -> tuple[int, int, int]:
        """Attention forwards that run again, bytes of activations, bytes of data."""
        return self.again, sum(self.activations.values()), sum(self.data.values())

    @staticmethod
    def of(forward: Graph, backward: Graph, own: int) -> Parts:
        """Those of two graphs; the first results of the forward, so many, are the model's own."""
        again = sum(op_name(node) in FORWARDS for node in backward.nodes)
        seen = {_storage(node) for node in forward.nodes if node.op == "placeholder"}
        found: tuple[dict[str, int], dict[str, int]] = {}, {}
        (results,) = forward.output_node().args
        assert isinstance(results, (list, tuple))
        for node in results[own:]:
            storage = _storage(node) if isinstance(node, Node) else None
            if storage is not None and storage not in seen:
                seen.add(storage)
                found[_is_data(node)][node.name] = _bytes(node)
        return Parts(again, *found)


def partitions(
    case: Case, settings: Sequence[dict[str, Any]], *, device: str, active: bool, dynamic: bool = False
) -> tuple[list[Parts], int]:
    """What the partitioner makes of a model with each of some settings of ``torch._functorch``, with or without
    dash_inductor; and how many sites were replaced.
    """
    found: list[Parts] = []
    cut = compile_fx.min_cut_rematerialization_partition

    def cut_with_all(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
        for setting in settings:
            with functorch_config.patch(setting):
                parts = cut(copy.deepcopy(joint), *args, **kwargs)
            found.append(Parts.of(*(part.graph for part in parts), own=kwargs["num_fwd_outputs"]))
        return cut(joint, *args, **kwargs)

    torch._dynamo.reset()
    clear_sites()
    compiled = torch.compile(case.run, backend=partition_with(id), fullgraph=True, dynamic=dynamic)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(compile_fx, "min_cut_rematerialization_partition", cut_with_all))
        stack.enter_context(mock.patch.object(lowering, "compile_kernels"))
        stack.enter_context(inductor_config.patch(joint_graph_constant_folding=False))  # it computes with real tensors
        stack.enter_context(config.patch(cpu="reference"))
        if not active:
            stack.enter_context(dash_inductor.disabled())
        if device == "cuda":
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        compiled(*case.inputs(device, torch.float32 if device == "cpu" else torch.bfloat16))
    return found, sum(record.status == "replaced" for record in sites())


def _is_data(node: Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    of_forward = isinstance(source, Node) and op_name(source) in FORWARDS and node.args[1] != 0
    return of_forward or not node.meta["val"].dtype.is_floating_point


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _bytes(node: Node) -> int:
    size = node.meta["val"].untyped_storage().nbytes()
    return int(size if isinstance(size, int) else size.node.hint)
