"""From an attention in the graph to a `Match`: facts for the planner and its plan, or the one reason to keep it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...config import config
from ...entries import varlen
from ...entries.attention_ops import BACKENDS, FLASH, KEPT, Backend, backend_of, is_attention_backward
from ...entries.biases import Bias, find_bias, may_broadcast
from ...graph import sizes as layout
from ...graph.arguments import name_of
from ...graph.nodes import is_alias, op_name, origin
from ...masks.documents import Documents
from ...masks.nodes import inputs_of
from ...masks.normal_form import Terms
from ...masks.recognition import recognise
from ...model.call import Bias as CallBias
from ...model.call import Call, Order
from ...model.dropout import Dropout
from ...model.mask import Band, Mask
from ...model.plan import Kept, Plan
from ...model.reasons import Reason
from ...model.site import DType, Site
from ...model.terms import Dense, Interval, Keys, Operand, Placed, Segments
from ...planning import decide
from ...records.records import Tensors
from ...upstream import arch, configs, toolchain
from .operands import Operands, find_operands, output

DTYPES: dict[torch.dtype, DType] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}


class NotReadable(Exception):
    """Raised while a site is read: it is `kept`."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.kept = Kept(reason, detail)


@dataclass(frozen=True)
class Match:
    """An attention that can be replaced: a backward, or a forward without one in its graph.

    Attributes:
        node: the backward; the forward where that is alone.
        backend: the operator.
        args: the node's arguments, as `Backend.arguments` names them.
        site, plan: the facts that the planner was given, and its answer.
        operands: the query, key and value that the new operators read, and the layouts of the gradients.
        terms: the mask, with the nodes from which the call's extra operands are computed.
        bias: the bias that is added to the scores, beside the mask; None for none.
        note: why it is a bias and no mask.
    """

    node: Node
    backend: Backend
    args: dict[str, Any]
    site: Site
    plan: Plan
    operands: Operands
    terms: Terms
    bias: Bias | None = None
    note: str = ""

    @property
    def device(self) -> torch.device:
        """The device on which the site runs."""
        return _device(self.node)

    @property
    def has_backward(self) -> bool:
        """Whether the node is a backward."""
        return is_attention_backward(self.node)

    @property
    def detail(self) -> str:
        """The detail of the record: how the site was matched."""
        dropout = "" if self.site.dropout is None else f"dropout with probability {self.site.dropout.p}"
        return "; ".join(filter(None, (dropout, self.operands.detail, self.note, self.plan.schedule_note)))

    def refreshed(self) -> Match:
        """The same match after other sites were replaced: their new nodes may be this site's arguments."""
        args = self.backend.arguments(self.node)
        bias = self.bias
        if bias is not None:
            bias = _bias(self.node, self.backend, args)
        return replace(self, args=args, operands=find_operands(self.node, self.backend, args), bias=bias)


@dataclass
class Facts:
    """The facts known of a site so far; a kept site's record shows them too.  The fields are those of `SiteRecord`."""

    site: Site | None = None
    mask: str = ""
    tensors: Tensors | None = None
    inputs: tuple[str, ...] = ()
    recognised: str = ""
    arch: str = ""


def analyse(node: Node, facts: Facts) -> Match:
    """Read one backward, or one forward that is alone.  `facts` is filled in as far as the reading gets.

    Raises:
        NotReadable: the node stays as it is.
    """
    _look(node, facts)
    device = _device(node)
    if device.type == "cpu" and config.cpu == "off":
        raise NotReadable(Reason.CPU_OFF)
    if not arch.is_supported(device):
        raise NotReadable(Reason.DEVICE, str(device))
    if op_name(node) in KEPT:
        raise NotReadable(KEPT[op_name(node)], _replaced_instead(op_name(node)))
    backend = backend_of(node)
    assert backend is not None
    args = backend.arguments(node)
    if backend.packed:
        _check_packed(node, backend, args)
    query, key, value = (backend.heads_first(args[name].meta["val"]) for name in ("query", "key", "value"))
    _check_sizes(query, key, value)
    _check_dtypes(backend, args)
    if not is_attention_backward(node):
        _check_lone_forward(node, backend)
    elif not backend.packed:  # whose forward is always replaced
        _check_logsumexp(args["logsumexp"].meta["val"], query)
    terms, bias, cause = _terms(node, backend, args, facts)
    mask = mask_of(terms)
    facts.mask = str(mask) if bias is None else f"{mask} + bias"
    # Only now, because a guard is for sites that are replaced: heads and head dimensions become numbers.
    q_heads, kv_heads, head_dim, value_dim = map(_known, (query.shape[1], key.shape[1], query.shape[3], value.shape[3]))
    if not kv_heads or q_heads % kv_heads:
        raise NotReadable(Reason.SHAPE, f"{q_heads} heads of query, {kv_heads} of key")
    call = _call(mask, bias, args, head_dim)
    operands = find_operands(node, backend, args)
    dtype = DTYPES[query.dtype]
    lengths: list[layout.Dim] = [query.shape[2], key.shape[2]]
    if terms.documents is not None:
        lengths = [terms.documents.rows(length) for length in lengths]
    q_len, kv_len = map(layout.static, lengths)
    facts.site = site = Site(
        device="cpu" if device.type == "cpu" else "cuda",
        dtype=dtype,
        batch=layout.static(query.shape[0]),
        q_heads=q_heads,
        kv_heads=_known(operands.kv_heads),
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=value_dim,
        call=call,
        allow_tf32=dtype == "float32" and arch.allow_tf32(device),
    )
    facts.arch = arch.arch_of(device)
    for name, gradient in zip(("dq", "dk", "dv"), operands.gradients, strict=True):
        if gradient.order is None:
            raise NotReadable(Reason.LAYOUT, f"{name} is not dense")
    decision = decide(site, facts.arch, config.schedule, compiler=toolchain.settings())
    if isinstance(decision, Kept):
        if decision.reason is Reason.MASK_UNSUPPORTED and cause is not None:
            raise NotReadable(cause.reason, cause.detail)
        raise NotReadable(decision.reason, decision.detail)
    note = ""
    if cause is not None:
        note = ": ".join(filter(None, ("the mask is added as a bias", cause.reason.value, cause.detail)))
    return Match(node, backend, args, site, decision, operands, terms, bias, note)


def _look(node: Node, facts: Facts) -> None:
    """Find the facts that can be seen without reading anything back."""
    backend = backend_of(node)
    if backend is None:
        facts.tensors = _tensors(node.args[:3])  # of FlexAttention, and of other operators of PyTorch
        return
    args = backend.arguments(node)
    facts.tensors = _tensors([args[name] for name in ("query", "key", "value")])
    mask = args[backend.mask] if backend.mask else None
    sources = [args["cu_seq_q"], args["cu_seq_k"]] if backend.packed else [mask]
    nodes = [source for source in sources if isinstance(source, Node)]
    facts.inputs = tuple(dict.fromkeys(name_of(found) for source in nodes for found in inputs_of(source)))
    if isinstance(mask, Node):
        facts.recognised = f"not read: {_mask_text(mask)}"
    elif not backend.packed:
        facts.mask = str(Band(0, None) if args["is_causal"] else Band())


def _mask_text(mask: Node) -> str:
    value = mask.meta["val"]
    shape = "x".join("?" if n is None else str(n) for n in map(layout.static, value.shape))
    return f"a tensor {shape} {str(value.dtype).removeprefix('torch.')}"


def _tensors(nodes: Sequence[object]) -> Tensors | None:
    """The record of query, key and value; None where they are something else than tensors."""
    values = [node.meta.get("val") if isinstance(node, Node) else None for node in nodes]
    found = [value for value in values if isinstance(value, Tensor)]
    if len(found) != 3:
        return None
    query, key, value = (tuple(layout.static(n) for n in tensor.shape) for tensor in found)
    return Tensors(query, key, value, str(found[0].dtype).removeprefix("torch."), str(found[0].device))


def _device(node: Node) -> torch.device:
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if isinstance(value, Tensor):
            return value.device
    raise ValueError(f"no tensor argument of {node.format_node()} has a value")


def _known(x: layout.Dim) -> int:
    """A size that kernels are compiled for: a dynamic one is guarded, so that another value compiles another graph."""
    value = layout.specialised(x)
    if value is None:
        raise NotReadable(Reason.DYNAMIC_DIMS, f"a size is {x}")
    return int(value)


def _call(mask: Mask, bias: Bias | None, args: dict[str, Any], head_dim: int) -> Call:
    """The call; its operands are counted in the order in which `extras` makes them."""
    call = Call(mask, _scale(args["scale"], head_dim))
    if bias is not None:
        call = replace(call, bias=CallBias(Operand(len(call.operands)), bias.gradient is not None))
    return replace(call, dropout=_dropout(args["dropout_p"], Operand(len(call.operands))))


def _scale(scale: object, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    value = _number(scale)
    if value is None:
        raise NotReadable(Reason.DYNAMIC_DIMS, f"scale={scale}")
    return value


def _dropout(p: object, seed: Operand) -> Dropout | None:
    value = _number(p)
    if value == 0.0:
        return None
    if value is None or not 0.0 < value < 1.0:
        raise NotReadable(Reason.DROPOUT, f"dropout_p={p}")
    if configs.functorch.activation_memory_budget == 0:  # saves inputs alone, whatever a node says of itself
        raise NotReadable(Reason.DROPOUT, "activation_memory_budget=0 has random numbers drawn again in the backward")
    return Dropout(value, seed)


def _number(argument: object) -> float | None:
    """A number that kernels are compiled for, guarded where it is symbolic; None where it cannot be known."""
    number = argument.meta["val"] if isinstance(argument, Node) else argument
    value = layout.specialised(number) if isinstance(number, (int, float, torch.SymInt, torch.SymFloat)) else None
    return None if value is None else float(value)


def _check_sizes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.dim() == key.dim() == value.dim() == 4:
        raise NotReadable(Reason.SHAPE, f"{query.dim()}, {key.dim()} and {value.dim()} dimensions")
    shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
    # Dynamic sizes that may differ as far as the graph knows are equal: PyTorch's operators need that too.
    pairs = [
        (query.shape[0], key.shape[0]),
        *zip(key.shape[:3], value.shape[:3], strict=True),
        (query.shape[3], key.shape[3]),
    ]
    if any(layout.differ(a, b) for a, b in pairs) or 0 in map(layout.static, (*query.shape, *key.shape)):
        raise NotReadable(Reason.SHAPE, shapes)


def _replaced_instead(name: str) -> str:
    """An operator of `KEPT` and, where it is packed attention, those that are replaced."""
    if KEPT[name] is not Reason.VARLEN:
        return name
    return f"{name}; {' and '.join(b.forward for b in BACKENDS if b.packed)} are replaced"


def _check_packed(node: Node, backend: Backend, args: dict[str, Any]) -> None:
    forward = backend.forward_of(node)
    cause = varlen.cause_to_keep(args, {} if forward is None else backend.arguments(forward))
    if cause:
        raise NotReadable(Reason.VARLEN, cause)


def _check_dtypes(backend: Backend, args: dict[str, Any]) -> None:
    names = [name for name in ("query", "key", "value", "out", backend.grad_out) if name in args]
    dtypes = [args[name].meta["val"].dtype for name in names]
    if len(set(dtypes)) != 1 or dtypes[0] not in DTYPES:
        raise NotReadable(Reason.DTYPE, ", ".join(f"{n}: {d}" for n, d in zip(names, dtypes, strict=True)))


def _check_lone_forward(forward: Node, backend: Backend) -> None:
    if config.forward == "keep":
        raise NotReadable(Reason.FORWARD_OFF)
    if not only_output_used(forward):
        raise NotReadable(Reason.FORWARD_RESULTS)
    if out_order(backend, forward) is None:
        raise NotReadable(Reason.LAYOUT, "its output is not dense")


def only_output_used(forward: Node, backwards: Set[Node] = frozenset()) -> bool:
    """Whether nothing but these backwards uses more of a forward than its output."""
    return all(
        user.target is operator.getitem and (user.args[1] == 0 or _only_used_by(user, backwards))
        for user in forward.users
    )


def _only_used_by(node: Node, allowed: Set[Node]) -> bool:
    return all(u in allowed or (is_alias(u) and _only_used_by(u, allowed)) for u in node.users)


def out_order(backend: Backend, forward: Node) -> Order | None:
    """The dimensions of the forward's output, [batch, heads, length, head dim], from the largest stride to the
    smallest; None if it is not dense.
    """
    out = backend.heads_first(forward.meta["val"][0])
    return layout.dense_order(out.shape, out.stride())


def _check_logsumexp(logsumexp: Tensor, query: Tensor) -> None:
    """[B, H, >= Sq] as flash and efficient have it, or [B, H, Sq, 1] as cuDNN has it; fp32."""
    trailing_one = logsumexp.dim() == 4 and layout.static(logsumexp.shape[3]) == 1
    heads_fit = logsumexp.dim() >= 3 and layout.same_all(logsumexp.shape[:2], query.shape[:2])
    if logsumexp.dtype != torch.float32 or not heads_fit or not (logsumexp.dim() == 3 or trailing_one):
        raise NotReadable(Reason.LAYOUT, f"log-sum-exp {logsumexp.dtype} {tuple(logsumexp.shape)}")


def _terms(node: Node, backend: Backend, args: dict[str, Any], facts: Facts) -> tuple[Terms, Bias | None, Kept | None]:
    """The mask; what is added to the scores beside it; and why that is a bias and no mask."""
    if backend.packed:
        facts.recognised = "documents of packed tokens, whose offsets are arguments of the operator"
        return Terms(varlen.band(args), documents=Documents(origin(args["cu_seq_q"]))), None, None
    query, key = args["query"], args["key"]
    q_len, kv_len = query.meta["val"].shape[2], key.meta["val"].shape[2]
    found = []
    if args["is_causal"]:
        # Where the lengths differ, flash aligns bottom right and the others top left; PyTorch avoids flash then.
        if backend is FLASH and not layout.same(q_len, kv_len):
            raise NotReadable(Reason.CAUSAL_LENGTHS, f"query length {q_len}, key length {kv_len}")
        found.append(Terms(Band(0, None)))
    mask = args[backend.mask] if backend.mask else None
    bias = cause = None
    if mask is not None and _bias_gradient(node, args) is not None:
        cause = Kept(Reason.BIAS_GRADIENT)
    elif mask is not None:
        result = recognise(mask, query=query, key=key)
        if result.terms is None:
            cause = Kept(Reason(f"mask_{result.reason}"), result.detail)
        else:
            facts.recognised = result.how
            found.append(result.terms)
    if cause is not None:
        assert mask is not None
        facts.recognised = f"not recognised: {_mask_text(mask)}"
        bias = _bias(node, backend, args)
        if bias is not None:
            facts.recognised += ", which is added to the scores as it is"
        if bias is None:
            raise NotReadable(*_why_no_bias(mask, [*query.meta["val"].shape[:3], kv_len], cause))
    band = intersect([terms.band for terms in found], layout.static(q_len), layout.static(kv_len))
    return replace(found[-1], band=band) if found else Terms(band), bias, cause


def _bias_gradient(node: Node, args: dict[str, Any]) -> Node | None:
    """The gradient of the bias, if something uses it."""
    return output(node, 3) if args.get("grad_input_mask", (False,) * 4)[3] else None


def _bias(node: Node, backend: Backend, args: dict[str, Any]) -> Bias | None:
    """The bias that is added to the scores, as it is."""
    assert backend.mask is not None
    query, key = (args[name].meta["val"].shape for name in ("query", "key"))
    return find_bias(args[backend.mask], _bias_gradient(node, args), [*query[:3], key[2]])


def _why_no_bias(mask: Node, plane: Sequence[layout.Dim], cause: Kept) -> tuple[Reason, str]:
    """Why a mask that cannot be read cannot be added to the scores either: the true cause, if that is in the sizes."""
    value = mask.meta["val"]
    if not value.dtype.is_floating_point or not may_broadcast(mask, plane):
        return cause.reason, cause.detail
    sizes = f"the mask has the sizes {list(value.shape)}, the scores {list(plane)}"
    return Reason.DYNAMIC_DIMS, f"{sizes}: whether these are the same is not known"


def mask_of(terms: Terms) -> Mask:
    """The mask of these terms; its operands are counted in the order in which `extras` makes them."""
    numbers = itertools.count()

    def operand() -> Operand:
        return Operand(next(numbers))

    if terms.documents is not None:
        return Mask(terms.band, segments=Segments(operand(), operand(), Placed(operand(), operand())))
    segments = keys = dense = interval = None
    if terms.segments is not None:
        q = operand()
        segments = Segments(q, q if terms.segments.is_one_vector else operand())
    if terms.keys is not None:
        keys = Keys(operand())
    if terms.dense is not None:
        dense = Dense(operand())
    if terms.interval is not None:
        lo, hi = (None if bound is None else operand() for bound in (terms.interval.lo, terms.interval.hi))
        number = None
        if terms.interval.number is not None:
            number = (lo or hi) if terms.interval.is_one_vector else operand()
        interval = Interval(lo, hi, number)
    return Mask(terms.band, keys, segments, dense, interval)


def intersect(bands: list[Band], q_len: int | None, kv_len: int | None) -> Band:
    """The band of what all of them show.

    Raises:
        NotReadable: it is no band: empty, or the offset between two anchors is not known.
    """
    if len({band.anchor for band in bands if not band.is_full}) > 1:
        if q_len is None or kv_len is None:
            raise NotReadable(Reason.MASK_NOT_A_BAND, " and ".join(map(str, bands)) + " with dynamic lengths")
        bands = [band.resolve(q_len, kv_len) for band in bands]
    bands = [band for band in bands if not band.is_full]
    lo = max((band.lo for band in bands if band.lo is not None), default=None)
    hi = min((band.hi for band in bands if band.hi is not None), default=None)
    if lo is not None and hi is not None and lo > hi:
        raise NotReadable(Reason.MASK_NOT_A_BAND, "nothing is visible: " + " and ".join(map(str, bands)))
    return Band(lo, hi, bands[0].anchor if bands else "top_left")
