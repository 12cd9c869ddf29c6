"""Frontend for varlen operators: documents of any lengths, packed as [tokens, heads, head dim].

If queries and keys have the same documents, this is attention of one batch element that contains all tokens: a query
sees the keys of its own document within the operator's window.  Distances within a document equal those among all
tokens, so the window is a band.  The documents are `Segments` (see `documents`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph import sizes
from ..graph.nodes import op_name, origin
from ..model.mask import MAX_LENGTH, Band
from ..model.plan import Fallback
from ..model.reasons import Reason
from .attention import Attention, Backward, Forward, Found, Inputs, Output
from .operators import Pair, Refused, calls

VARLEN = Pair(
    "torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward", random_state=("rng_state",), axes="thd",
    renamed={"logsumexp": "lse"}, without_keys=math.inf,
)  # fmt: skip
FLASH = Pair(
    "aten::_flash_attention_forward", "aten::_flash_attention_backward", random_state=("rng_state",), axes="thd",
    renamed={"cu_seq_q": "cum_seq_q", "cu_seq_k": "cum_seq_k"}, without_keys=math.inf,
)  # fmt: skip
PAIRS = (VARLEN, FLASH)

_INSTEAD = f"{' and '.join(pair.forward for pair in PAIRS)} are replaced"
_REFUSED = tuple(
    Refused(f"{name}_forward", f"{name}_backward", Reason.VARLEN, _INSTEAD)
    for name in ("aten::_efficient_attention", "aten::_cudnn_attention")
)

_READ = ("query", "key", "value", "cu_seq_q", "cu_seq_k")
"""The tensors of a varlen forward that are read."""

_DEPTH = 20
"""The maximum depth of operators that are compared to decide whether two nodes have the same value."""


def find(graph: Graph) -> Iterator[Found]:
    """Yield the attentions in a graph that call PyTorch's varlen operators; implements `Frontend`."""
    for found, node in calls(graph, (*PAIRS, *_REFUSED)):
        yield found.refusal(node) if isinstance(found, Refused) else _attention(found, node)


def _attention(pair: Pair, node: Node) -> Attention:
    """Return the attention of a call.  Our backward can only read the log-sum-exp of our own forward."""
    if not pair.is_backward(node):
        return Attention(_forward(pair, node), None, pair.forward, partial(_refusal, pair, node, node))
    found = pair.forward_of(node)
    backward = Backward(
        node,
        _inputs(pair, node),
        grad_out=pair.view(node, pair.grad_out),
        out=pair.view(node, "out"),
        logsumexp=None,
        gradients=pair.gradients(node),
        random_state=tuple(pair.argument(node, name) for name in pair.random_state),
    )
    forward = None if found is None else _forward(pair, found)
    return Attention(forward, backward, pair.forward, partial(_refusal, pair, node, found))


def _forward(pair: Pair, node: Node) -> Forward:
    return Forward(node, _inputs(pair, node), Output(node, 0, pair.axes), pair.logsumexp(node))


def _inputs(pair: Pair, node: Node) -> Inputs:
    return pair.inputs(node, flags=None, band=partial(band, pair.arguments(node)))


def _refusal(pair: Pair, node: Node, forward: Node | None) -> Fallback | None:
    cause = cause_of_fallback(pair.arguments(node), {} if forward is None else pair.arguments(forward))
    return Fallback(Reason.VARLEN, cause) if cause else None


def cause_of_fallback(args: Mapping[str, Any], forward: Mapping[str, Any]) -> str:
    """Return why the arguments of a varlen call prevent its replacement; "" if they do not.

    Args:
        args: the arguments of the backward, or of a forward without a backward, see `Pair.arguments`.
        forward: the arguments of the backward's forward; empty if there is none in the graph.
    """
    starts, key_starts = args["cu_seq_q"], args["cu_seq_k"]
    if not (isinstance(starts, Node) and isinstance(key_starts, Node)):
        return "it has no cu_seq_q and cu_seq_k; scaled_dot_product_attention, which needs none, is replaced"
    query, key = args["query"].meta["val"], args["key"].meta["val"]
    if not query.dim() == key.dim() == 3:
        return f"query and key have {query.dim()} and {key.dim()} dimensions; those of three are replaced"
    if not _same_value(starts, key_starts):
        return "cu_seq_q and cu_seq_k are not the same tensor; calls with one tensor for both are replaced"
    if not sizes.made_same(query.shape[0], key.shape[0]):
        counts = f"there are {query.shape[0]} tokens of query and {key.shape[0]} of key"
        return f"{counts}; calls with as many of both are replaced"
    found: Tensor = starts.meta["val"]
    readable = found.dim() == 1 and found.dtype in (torch.int32, torch.int64) and found.device == query.device
    if not readable or sizes.static(found.shape[0]) == 0:
        given = f"cu_seq_q is {found.dtype} {tuple(found.shape)} on {found.device}"
        return f"{given}; int32 or int64 [documents + 1] on {query.device} is read"
    if args["dropout_p"] != 0.0:
        return f"it has dropout_p={args['dropout_p']}; with 0.0 it is replaced"
    own = [name for name, value in forward.items() if name not in _READ and _is_tensor(value)]
    if own:
        return f"its forward has {' and '.join(own)}; without that it is replaced"
    if None in map(number, _window(args)):
        return f"its window is {_window(args)}, which no guard can fix; one of known numbers is replaced"
    return ""


def band(args: Mapping[str, Any]) -> Band:
    """Return the band of a varlen call, in positions within a document.

    Args:
        args: the arguments of a call for which `cause_of_fallback` returns "".
    """
    left, right = (_reach(number(bound)) for bound in _window(args))
    if args["is_causal"]:
        right = 0
    return Band(None if right is None else -right, left)


def _reach(bound: int | None) -> int | None:
    """Return how many tokens a window reaches to one side; None if it is unbounded, which a negative number means."""
    return None if bound is None or not 0 <= bound <= MAX_LENGTH else bound


def _window(args: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return how many tokens a query sees to the left and to the right."""
    if "window_size" in args:
        left, right = (-1, -1) if args["window_size"] is None else args["window_size"]
        return left, right
    left, right = args["window_size_left"], args["window_size_right"]
    return -1 if left is None else left, -1 if right is None else right


def number(bound: Any) -> int | None:
    """Return a bound of a window as a number for which kernels are compiled; a guard fixes it if it is symbolic.

    Return None if no guard can fix it.
    """
    value = sizes.specialised(bound.meta["val"] if isinstance(bound, Node) else bound)
    return None if value is None else int(value)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Node) and isinstance(value.meta["val"], Tensor)


def _vector(node: Node) -> Node:
    """Return the node whose value this one has, through aliases and one-dimensional views."""
    node = origin(node)
    while op_name(node) in ("aten::view", "aten::reshape"):
        source = node.args[0]
        assert isinstance(source, Node)
        shown, whole = node.meta["val"], source.meta["val"]
        if not shown.dim() == whole.dim() == 1 or shown.dtype != whole.dtype:
            return node
        node = origin(source)
    return node


def _same_value(a: Node, b: Node, depth: int = _DEPTH) -> bool:
    """Return whether two nodes provably have the same value: one node, or the same operators on the same nodes."""
    a, b = _vector(a), _vector(b)
    if a is b:
        return True
    computed = all(node.op == "call_function" and op_name(node).startswith(("aten::", "prims::")) for node in (a, b))
    if not depth or not computed or a.target is not b.target or a.kwargs.keys() != b.kwargs.keys():
        return False
    # Random and uninitialized tensors differ from node to node.
    if torch.Tag.nondeterministic_seeded in a.target.tags or "empty" in op_name(a):  # type: ignore[union-attr]
        return False

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Node) and isinstance(y, Node):
            return _same_value(x, y, depth - 1)
        if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
            return len(x) == len(y) and all(map(same, x, y))
        return type(x) is type(y) and bool(x == y)

    return same(a.args, b.args) and all(same(a.kwargs[name], b.kwargs[name]) for name in a.kwargs)
