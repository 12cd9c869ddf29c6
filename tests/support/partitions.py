"""How PyTorch's partitioner cuts models with attention in two: what is saved for the backward, and what runs again."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import compile_fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dash_inductor
from dash_inductor import lowering
from dash_inductor.config import config
from dash_inductor.frontends import sdpa, varlen
from dash_inductor.records.records import clear_sites, sites

from .graphs import FORWARD, partition_with
from .packed import GROUPED, documents

aten = torch.ops.aten
FORWARDS = {FORWARD, *(pair.forward for pair in (*sdpa.PAIRS, *varlen.PAIRS))}
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
    """Expensive results are saved."""
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
        activations: bytes that the forward keeps for the backward.  Arguments of the model and views of them are there
            anyway, and of two views of one storage one counts.
        data: bytes of other tensors, which attentions note for their backwards: log-sum-exps, random state, masks and
            their tables.
        draws: how many operators of the backward, beside attention forwards, draw random numbers.
    """

    again: int
    activations: int
    data: int
    draws: int

    @staticmethod
    def of(forward: Graph, backward: Graph, own: int) -> Parts:
        """The parts of two graphs; the first `own` results of the forward are the model's own."""
        arguments = (node.meta.get("val") for node in forward.nodes if node.op == "placeholder")
        seen = {_storage(value) for value in arguments if isinstance(value, Tensor)}
        sums = [0, 0]
        (results,) = forward.output_node().args
        assert isinstance(results, (list, tuple))
        for node, index, value in _tensors(results[own:]):
            if _storage(value) not in seen:
                seen.add(_storage(value))
                sums[_is_data(node, index, value)] += _bytes(value)
        forwards = [node for node in backward.nodes if runs_forward(node)]
        draws = [
            node
            for node in backward.nodes
            if isinstance(node.target, OpOverload)
            and torch.Tag.nondeterministic_seeded in node.target.tags
            and node not in forwards
        ]
        return Parts(len(forwards), *sums, len(draws))


def _tensors(results: Iterable[Any]) -> Iterator[tuple[Node, int, Tensor]]:
    """The tensors that graphs return: a node, which of its results the tensor is, and the tensor."""
    for node in results:
        if not isinstance(node, Node):
            continue
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, Node)
            assert isinstance(index, int)
            yield source, index, node.meta["val"]
        else:
            values = node.meta["val"]  # the partitioner may save an operator's results in one
            for index, value in enumerate(values if isinstance(values, (list, tuple)) else [values]):
                if isinstance(value, Tensor):
                    yield node, index, value


def runs_forward(node: Node) -> bool:
    """Whether a node calls an attention forward, be it with the random state of another call."""
    operators = [node.target, *node.args] if isinstance(node.target, HigherOrderOperator) else [node.target]
    return any(isinstance(found, OpOverload) and found._schema.name in FORWARDS for found in operators)


def _is_data(node: Node, index: int, value: Tensor) -> bool:
    return not value.dtype.is_floating_point or (runs_forward(node) and index > 0)


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _bytes(value: Tensor) -> int:
    size: Any = value.untyped_storage().nbytes()
    return int(size if isinstance(size, int) else size.node.hint)


Cut = Callable[[GraphModule], tuple[GraphModule, GraphModule]]


def look_at_joint(
    case: Case, look: Callable[[GraphModule, Cut, int], object], *, device: str, active: bool, dynamic: bool = False
) -> int:
    """Compile a model, with or without dash_inductor, as far as the partitioner; returns how many sites were replaced.

    Args:
        look: called with the joint graph behind all passes, the partitioner, and how many results are the model's own.
    """
    cut = compile_fx.min_cut_rematerialization_partition

    def look_and_cut(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
        look(joint, lambda copied: cut(copied, *args, **kwargs), kwargs["num_fwd_outputs"])
        return cut(joint, *args, **kwargs)

    torch._dynamo.reset()
    clear_sites()
    compiled = torch.compile(case.run, backend=partition_with(id), fullgraph=True, dynamic=dynamic)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(compile_fx, "min_cut_rematerialization_partition", look_and_cut))
        stack.enter_context(mock.patch.object(lowering, "compile_kernels"))
        stack.enter_context(functorch_config.patch(graphsafe_rng_functionalization=False))  # it asks a real device
        stack.enter_context(inductor_config.patch(joint_graph_constant_folding=False))  # it computes with real tensors
        stack.enter_context(config.patch(cpu="reference"))
        if not active:
            stack.enter_context(dash_inductor.disabled())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        compiled(*case.inputs(device, torch.float32 if device == "cpu" else torch.bfloat16))
    return sum(record.status == "replaced" for record in sites())


def partitions(case: Case, settings: Sequence[dict[str, Any]], *, device: str, active: bool) -> tuple[list[Parts], int]:
    """The partitions of a model with each of some settings of ``torch._functorch``, with or without dash_inductor;
    and how many sites were replaced.
    """
    found: list[Parts] = []

    def look(joint: GraphModule, cut: Cut, own: int) -> None:
        for setting in settings:
            with functorch_config.patch(setting):
                forward, backward = cut(copy.deepcopy(joint))
            found.append(Parts.of(forward.graph, backward.graph, own))

    replaced = look_at_joint(case, look, device=device, active=active)
    return found, replaced


_PER_TOKEN = 40  # bytes that a mask may note for each token, for all layers: numbers of keys, documents and tables
_MASKED = frozenset({"padded", "documents", "value dim", "varlen", "grouped varlen", "packed"})
_LONGER = frozenset({"bias", "trained bias", "varlen", "grouped varlen", "packed"})  # log-sum-exps: two parts, or rows


def _noted(case: Case) -> int:
    """Bytes that our attentions may note for their backwards beside what PyTorch's do."""
    masks = _PER_TOKEN * TOKENS if case.attention in _MASKED else 0
    sums = 4 * BATCH * HEADS * LENGTH * case.layers if case.attention in _LONGER else 0
    return masks + sums


@dataclass(frozen=True)
class Comparison:
    """Partitions of one model without and with dash_inductor.

    Attributes:
        replaced: sites that were replaced.
        plain, ours: of each setting.
        worse: what is worse with dash_inductor, in words.
    """

    replaced: int
    plain: list[Parts]
    ours: list[Parts]
    worse: list[str]


def compare(case: Case, settings: Sequence[dict[str, Any]], device: str) -> Comparison:
    """Compare partitions with each of some settings.

    A memory budget is a share of what would be saved without one.  Where dash_inductor saves less than plain PyTorch,
    as it does without repeated heads or a mask of all pairs, the same share is less memory, for which more is computed
    again.  That is not worse if a larger budget, of at most twice as much, has as little computed again and saved.
    """
    (plain, _), (ours, replaced) = (partitions(case, settings, device=device, active=on) for on in (False, True))
    worse = []
    for setting, theirs, own in zip(settings, plain, ours, strict=True):
        as_good = _is_as_good(own, theirs, case)
        if not as_good and own.activations < theirs.activations:
            least = setting["activation_memory_budget"]
            larger = [least + (min(1.0, 2 * least) - least) * step / 20 for step in range(1, 21)]
            others = [{**setting, "activation_memory_budget": budget} for budget in larger]
            found, _ = partitions(case, others, device=device, active=True)
            as_good = any(_is_as_good(other, theirs, case) for other in found)
        if not as_good:
            worse.append(f"{case}, {setting}: {own} where PyTorch has {theirs}")
    return Comparison(replaced, plain, ours, worse)


def _is_as_good(own: Parts, theirs: Parts, case: Case) -> bool:
    as_little = own.again <= theirs.again and own.activations <= theirs.activations and own.draws == 0
    return as_little and own.activations + own.data <= theirs.activations + theirs.data + _noted(case)
