"""Frontend for FlexAttention, whose operators take functions of the program: `mask_mod` and `score_mod`.

The computation of `mask_mod` is inlined into the graph as a mask, which is then read like any other; the tensors of the
block mask are not read.  A `score_mod` must have one of the forms in `scores`; what it adds to the score is inlined as
a bias, and what it multiplies it by as a factor of query or key.  Its gradients are taken from PyTorch's joint graph of
the score_mod (`score_gradients`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..graph.nodes import Argument, op_name, origin
from ..graph.temporaries import Temporaries
from ..masks.bounds import bounds
from ..model.mask import Band
from ..model.plan import Fallback
from ..model.reasons import Reason
from .attention import Attention, Backward, Forward, Found, Gradient, Inputs, NotReadable, Output, Refusal, tensors_of
from .factors import Factors, Side
from .logsumexp import LogSumExp
from .mods import Mod, Plane, scalar, unread
from .operators import Pair, calls
from .score_gradients import check_gradient_of_score
from .scores import ONLY_READ, Score, ScoreFactor, read_score
from .tensor_gradients import TensorGradient, side_of

aten, prims = torch.ops.aten, torch.ops.prims

FLEX = Pair("flex_attention", "flex_attention_backward", random_state=())

_OUT, _LOGSUMEXP = range(2)
"""Indices of the forward's results; the third result is the maximum of the scores."""

_WHOLE = 1 << 30
"""The block size of the block mask that PyTorch makes if the program passes none."""

_DEFAULTS = {
    "BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
}  # fmt: skip
_OF_PYTORCH = ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX")
"""Kernel options that PyTorch sets itself."""


def find(graph: Graph) -> Iterator[Found]:
    """Yield the attentions in a graph that call FlexAttention's operators; implements `Frontend`."""
    temporaries = Temporaries(graph)
    for _, node in calls(graph, [FLEX]):
        yield _found(node, temporaries)


def _found(node: Node, temporaries: Temporaries) -> Found:
    """Return the attention of a call, or a refusal if its arguments are not those of a known version."""
    try:
        own = _Call(node, temporaries)
        source = FLEX.forward_of(node) if FLEX.is_backward(node) else node
        forward = None if source is None else _Call(source, temporaries)
    except (TypeError, KeyError, ValueError) as error:
        fallback = Fallback(Reason.FLEX_ATTENTION, f"its arguments are not those that are known: {error}")
        return Refusal(node, op_name(node), fallback, FLEX.is_backward(node), tensors_of(node.args[:3]))
    backward = own if FLEX.is_backward(node) else None
    return Attention(
        None if forward is None else forward.as_forward(),
        None if backward is None else backward.as_backward(),
        FLEX.forward,
        functools.partial(_refusal, forward, backward),
        note=own.note,
    )


def _refusal(forward: _Call | None, backward: _Call | None) -> Fallback | None:
    for call in (forward, backward):
        cause = "" if call is None else call.cause_of_fallback()
        if cause:
            return Fallback(Reason.FLEX_ATTENTION, cause)
    cause = _results_used(forward, backward)
    return Fallback(Reason.FLEX_ATTENTION, cause) if cause else None


def _results_used(forward: _Call | None, backward: _Call | None) -> str:
    """Return why the used results exclude a replacement; "" if the program uses at most output and log-sum-exp."""
    if backward is not None and not isinstance(backward.args["grad_out"], Node):
        return "its output has no gradient"
    if forward is not None:
        given = forward.as_forward()
        backwards = frozenset() if backward is None else {backward.node}
        if given.given(backwards) - {_OUT, _LOGSUMEXP}:
            return "the program uses the maximum of its scores"
    return ""


@dataclass(frozen=True)
class _Written(Argument):
    """A tensor that is written into the graph when it is first read."""

    write: Callable[[], Node]

    @property
    def value(self) -> Node:
        return self.write()


class _Call:
    """A call of the forward or backward operator, with the program's functions that it takes.

    Raises:
        TypeError, KeyError, ValueError: the arguments are not those of a known version.
    """

    def __init__(self, node: Node, temporaries: Temporaries) -> None:
        self.node, self._temporaries = node, temporaries
        self.args: Mapping[str, Any] = FLEX.arguments(node)
        self._plane = Plane(self.args["query"], self.args["key"])
        self._score_mod: Any = self.args["fw_graph" if FLEX.is_backward(node) else "score_mod"]
        self._joint_graph: Any = self.args.get("joint_graph")
        self._tokens: dict[object, int] = {}
        self._given: Sequence[Any] = [_plain(x) for x in self.args["score_mod_other_buffers"]]
        self._mask_given: Sequence[Any] = [_plain(x) for x in self.args["mask_mod_other_buffers"]]
        *_, self._q_block, self._kv_block, self._mask_mod = self.args["block_mask"]
        self._options: Mapping[str, Any] = self.args["kernel_options"]

    @property
    def note(self) -> str:
        """The kernel options that the program has set, which have no effect; "" without any."""
        own = {k: v for k, v in self._options.items() if k not in _OF_PYTORCH and _DEFAULTS.get(k) != v}
        return "" if not own else f"kernel_options are not used: {', '.join(f'{k}={v}' for k, v in own.items())}"

    def as_forward(self) -> Forward:
        return Forward(self.node, self._inputs(), Output(self.node, _OUT), LogSumExp(self.node, _LOGSUMEXP, base=2.0))

    def as_backward(self) -> Backward:
        return Backward(
            self.node,
            self._inputs(),
            grad_out=FLEX.view(self.node, "grad_out"),
            out=FLEX.view(self.node, "out"),
            logsumexp=None,
            gradients=FLEX.gradients(self.node),
            grad_logsumexp=None if self.args["grad_logsumexp"] is None else self._grad_logsumexp,
            tensor_gradients=lambda: self._tensor_gradients[0],
            factor_gradients=lambda: self._tensor_gradients[1],
        )

    @property
    def _grad_logsumexp(self) -> Gradient:
        """The gradient of the log-sum-exp, which has base 2."""
        return Gradient(FLEX.argument(self.node, "grad_logsumexp"), 1 / math.log(2))

    def cause_of_fallback(self) -> str:
        """Return why the call is not replaced, as far as this is known before its functions are inlined; else ""."""
        try:
            score, mask, _ = self._score, self._mask, self._factors
        except NotReadable as error:
            return error.fallback.detail
        if self._hides_blocks:
            blocks = "PyTorch's compiled kernels skip blocks that it does not list, and its eager code does not"
            return f"its mask_mod hides nothing, and its block mask may: {blocks}; give it a mask_mod"
        fills = {part.fill for part in score.hidden} | ({-math.inf} if mask is not None and score.hidden else set())
        if len(fills) > 1:
            return f"score_mod: {self._scores.text()} hides scores by {max(fills)}, others are hidden by {min(fills)}"
        low = self._cause_of_low_scores(max(fills, default=-math.inf))
        if low:
            return low
        if score.factor != 1.0 and not isinstance(self.args["scale"], float):
            return f"score_mod: {self._scores.text()} multiplies the score, and the scale is {self.args['scale']}"
        if mask is not None and mask.result.meta["val"].dtype != torch.bool:
            return f"mask_mod: {mask.text()} is not bool"
        return self._cause_of_factors() or self._cause_of_gradients()

    def _cause_of_low_scores(self, fill: float) -> str:
        """Return why a visible score may be as low as a hidden one, `fill`; "" if none is, or hidden ones are -inf.

        A query all of whose keys are as low would see the hidden ones, too.
        """
        for part in self._score.added if fill > -math.inf else ():
            found = bounds(part.node)
            if found is None or min(part.factor * each for each in found) < fill / 2:
                what = f"adds {self._scores.text(part.node)}, which may be as low as {fill}, by which it hides scores"
                return f"score_mod: {self._scores.text()} {what}"
        return ""

    def _cause_of_factors(self) -> str:
        """Return why neither query nor key can be multiplied by a factor of the score; "" if one of them can be."""
        for factor in self._score.factors:
            if (
                side_of(self._scores, factor) == "key"
                and self._plane.shares_keys
                and 1 in self._scores.axes(factor.node)
            ):
                by = self._scores.text(factor.node)
                return f"score_mod: {self._scores.text()} multiplies by {by} of head and key, and heads share keys"
        return ""

    def _cause_of_gradients(self) -> str:
        """Return why a backward's gradients differ from those that our backward computes; "" if they do not."""
        if not FLEX.is_backward(self.node):
            return ""
        try:
            if any(sink.used is not None for sink in FLEX.gradients(self.node)[:2]):
                check_gradient_of_score(self._scores, self._joint, self._score)
        except NotReadable as error:
            return error.fallback.detail
        return ""

    @functools.cached_property
    def _scores(self) -> Mod:
        return Mod("score_mod", self._module(self._score_mod), self._given, tokens=self._tokens)

    @functools.cached_property
    def _joint(self) -> Mod:
        """PyTorch's joint graph of the score_mod, in a backward."""
        module = self._module(self._joint_graph)
        return Mod("the joint graph of score_mod", module, self._given, is_joint=True, tokens=self._tokens)

    @functools.cached_property
    def _score(self) -> Score:
        return read_score(self._scores)

    @functools.cached_property
    def _masks(self) -> Mod:
        return Mod("mask_mod", self._module(self._mask_mod), self._mask_given)

    @property
    def _mask(self) -> Mod | None:
        """The mask_mod; None if it hides no key."""
        return None if scalar(self._masks, self._masks.result) == 1.0 else self._masks

    @property
    def _hides_blocks(self) -> bool:
        """Whether the block mask may hide keys that the mask_mod does not hide."""
        sizes = (self._q_block, self._kv_block)
        return self._mask is None and not all(isinstance(size, int) and size >= _WHOLE for size in sizes)

    def _module(self, reference: Any) -> GraphModule:
        found = getattr(self.node.graph.owning_module, str(getattr(reference, "target", "")), None)
        if not isinstance(found, GraphModule):
            raise unread(f"{reference} is no graph")
        return found

    def _inputs(self) -> Inputs:
        query, key, value = (FLEX.view(self.node, name) for name in ("query", "key", "value"))
        scale = self.args["scale"]
        try:
            score, masked, factors = self._score, self._mask is not None, self._factors
        except NotReadable:  # `cause_of_fallback` refuses the call
            return Inputs(query, key, value, scale, 0.0, flags=None, band=Band)
        masked = masked or bool(score.hidden)
        return Inputs(
            query,
            key,
            value,
            scale * score.factor if isinstance(scale, float) else scale,
            0.0,
            flags=None if masked or self._hides_blocks else Band(),
            band=Band,
            mask=_Written(self.node, "mask_mod", lambda: self._written_mask) if masked else None,
            mask_only=ONLY_READ if any(part.fill != -math.inf for part in score.hidden) else "",
            mask_text=self._masks.text(),
            data=self._masks.tensors(self._masks.result),
            modifiers={"softcap": score.softcap},
            bias=_Written(self.node, "score_mod", lambda: self._written_bias) if score.added else None,
            factors=factors,
        )

    @functools.cached_property
    def _factors(self) -> Factors:
        sides = {factor: side_of(self._scores, factor) for factor in self._score.factors}
        of_query, of_key = ([factor for factor, own in sides.items() if own == side] for side in get_args(Side))
        return Factors(
            _Written(self.node, "score_mod", lambda: self._written_factor(of_query, "query")) if of_query else None,
            _Written(self.node, "score_mod", lambda: self._written_factor(of_key, "key")) if of_key else None,
        )

    def _written_factor(self, factors: Sequence[ScoreFactor], side: Side) -> Node:
        """The inlined product of factors, float32 [batch or 1, heads or 1, length or 1, 1]."""
        found = []
        for factor in factors:
            node = self._in_float32(self._scores, factor.node)
            found.append(self._call(aten.reciprocal.default, node) if factor.inverse else node)
        product = functools.reduce(functools.partial(self._call, aten.mul.Tensor), found)
        return product if side == "query" else self._call(aten.permute.default, product, [0, 1, 3, 2])

    def _in_float32(self, mod: Mod, node: Node) -> Node:
        """Inline a node of a mod as float32, four dimensions."""
        written = self._write(mod, node, floats=True)
        if written.meta["val"].dtype != torch.float32:
            written = self._call(prims.convert_element_type.default, written, torch.float32)
        return written if written.meta["val"].dim() else self._call(aten.view.default, written, [1] * 4)

    @functools.cached_property
    def _written_mask(self) -> Node:
        """The inlined mask: bool, True where a query sees a key.

        Where a finite number hides scores, it is added to the scores: float32, 0 where a query sees a key, else the
        lowest number.
        """
        found = [] if self._mask is None else [self._write(self._mask, self._mask.result)]
        for part in self._score.hidden:
            condition = self._write(self._scores, part.node)
            found.append(self._call(aten.logical_not.default, condition) if part.where else condition)
        visible = functools.reduce(functools.partial(self._call, aten.bitwise_and.Tensor), found)
        if all(part.fill == -math.inf for part in self._score.hidden):
            return visible
        facts = {"dtype": torch.float32, "device": visible.meta["val"].device}
        numbers = 0.0, torch.finfo(torch.float32).min
        shown, hidden = (self._temporaries.call(aten.full.default, [], x, like=visible, **facts) for x in numbers)
        return self._call(aten.where.self, visible, shown, hidden)

    @functools.cached_property
    def _written_bias(self) -> Node:
        """The inlined sum of everything that is added to the scores: float32, four dimensions."""
        found = []
        for part in self._score.added:
            node = self._in_float32(self._scores, part.node)
            if part.factor == -1.0:
                node = self._call(aten.neg.default, node)
            elif part.factor != 1.0:
                node = self._call(aten.mul.Tensor, node, part.factor)
            found.append(node)
        return functools.reduce(functools.partial(self._call, aten.add.Tensor), found)

    def _write(self, mod: Mod, node: Node, *, floats: bool = False) -> Node:
        return mod.write(node, self._plane, self._temporaries, self.node, floats=floats)

    def _call(self, target: Any, *args: Any) -> Node:
        return self._temporaries.call(target, *args, like=self.node)

    @functools.cached_property
    def _tensor_gradients(self) -> tuple[tuple[TensorGradient, ...], tuple[TensorGradient, ...]]:
        """The gradients of tensors that score_mod reads, as far as the graph uses them: of summands, and of factors.

        Raises:
            NotReadable: one of them does not follow from the gradients of the bias, the query and the key.
        """
        used = [
            (result.args[1], result)
            for results in Output(self.node, 3).readers
            for result in results.users
            if result.target is operator.getitem and result.users
        ]
        seen = [(self._scores.token(part.node), not part.where) for part in self._score.hidden]
        of_bias, of_factors = list[TensorGradient](), list[TensorGradient]()
        write = self._write_factor
        for number, gradient in used:
            assert isinstance(number, int)
            read = self._joint, self._scores, number, gradient, self._score, self._plane, write
            of_factor = TensorGradient.of_factor(*read)
            if of_factor is not None:
                of_factors.append(of_factor)
            elif self._score.added:
                of_bias.append(TensorGradient.of(self._joint, number, gradient, seen, self._written_bias, write))
            else:
                raise unread(f"{self._scores.text()}: nothing is added that has a gradient")
        return tuple(of_bias), tuple(of_factors)

    def _write_factor(self, node: Node) -> Node:
        """Inline a node of the joint graph that does not depend on the gradient, as a temporary node."""
        written = self._joint.write(node, self._plane, self._temporaries, self.node, floats=True)
        if not isinstance(written.meta["val"], Tensor):  # a dynamic size
            return written
        return self._temporaries.call(aten.alias.default, written, like=written)


def _plain(value: Any) -> Any:
    """Return a tensor of the program without aliases, so that forward and backward refer to the same node."""
    return origin(value) if isinstance(value, Node) else value
