"""The attention operators of PyTorch, by name: which are replaced, and which are known but kept."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node

from ..graph.nodes import bind, op_name, origin
from ..graph.views import viewed
from ..model.reasons import Reason


@dataclass(frozen=True)
class Backend:
    """One attention operator that can be replaced: its backward, and its forward.

    Attributes:
        backward, forward: qualified names.
        grad_out: the backward's argument that holds the gradient of the output.
        mask: the argument that holds an additive or boolean mask; None if the operator takes none.
        random_state: the arguments that tell the backward which random numbers its forward drew for dropout.
        packed: whether the tensors are [tokens, heads, head dim] of documents that lie one behind the other (`packed`).
        renamed: its own names of arguments, and the names that the others have for the same.
    """

    backward: str
    forward: str
    grad_out: str = "grad_out"
    mask: str | None = None
    random_state: tuple[str, ...] = ("philox_seed", "philox_offset")
    packed: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, node: Node) -> dict[str, Any]:
        """`bind` of its forward or its backward, by the names that the operators share; no dropout without a word."""
        return {"dropout_p": 0.0} | {self.renamed.get(name, name): value for name, value in bind(node).items()}

    def forward_of(self, node: Node) -> Node | None:
        """The forward that made a backward's `out` and `logsumexp`, None if it is elsewhere; a forward itself."""
        if op_name(node) == self.forward:
            return node
        args = self.arguments(node)
        out, logsumexp = (origin(args[name]) for name in ("out", "logsumexp"))
        for result, index in ((out, 0), (logsumexp, 1)):
            if result.target is not operator.getitem or result.args[1] != index:
                return None
        forward = out.args[0]
        assert isinstance(forward, Node)
        return forward if forward is logsumexp.args[0] and op_name(forward) == self.forward else None

    def heads_first(self, value: Tensor) -> Tensor:
        """Query, key, value, output or a gradient of one, as [batch, heads, length, head dim]."""
        return value.unsqueeze(0).transpose(1, 2) if self.packed else value


_SDPA = "aten::_scaled_dot_product_"
FLASH = Backend(_SDPA + "flash_attention_backward", _SDPA + "flash_attention")
EFFICIENT = Backend(
    _SDPA + "efficient_attention_backward", _SDPA + "efficient_attention", grad_out="grad_out_", mask="attn_bias"
)
CUDNN = Backend(_SDPA + "cudnn_attention_backward", _SDPA + "cudnn_attention", mask="attn_bias")
FLASH_CPU = Backend(
    _SDPA + "flash_attention_for_cpu_backward", _SDPA + "flash_attention_for_cpu", mask="attn_mask", random_state=()
)
VARLEN = Backend(
    "torch_attn::_varlen_attn_backward", "torch_attn::_varlen_attn", random_state=("rng_state",), packed=True,
    renamed={"lse": "logsumexp"},
)  # fmt: skip
FLASH_PACKED = Backend(
    "aten::_flash_attention_backward", "aten::_flash_attention_forward", random_state=("rng_state",), packed=True,
    renamed={"cum_seq_q": "cu_seq_q", "cum_seq_k": "cu_seq_k"},
)  # fmt: skip

BACKENDS = (FLASH, EFFICIENT, CUDNN, FLASH_CPU, VARLEN, FLASH_PACKED)
_BY_NAME = {name: backend for backend in BACKENDS for name in (backend.backward, backend.forward)}

_KEPT = (  # backward, forward
    (_SDPA + "fused_attention_overrideable_backward", _SDPA + "fused_attention_overrideable", Reason.UNSUPPORTED_OP),
    ("aten::_efficient_attention_backward", "aten::_efficient_attention_forward", Reason.VARLEN),
    ("aten::_cudnn_attention_backward", "aten::_cudnn_attention_forward", Reason.VARLEN),
    ("flex_attention_backward", "flex_attention", Reason.FLEX_ATTENTION),
)
KEPT = {name: reason for backward, forward, reason in _KEPT for name in (backward, forward)}
"""The reasons why known operators, backwards and forwards, are kept."""

_OURS = "dash_inductor::attention_backward"
"""The beginning of the names of our own backwards, which may read a forward that stays."""

_BACKWARDS = frozenset((*(backend.backward for backend in BACKENDS), *(backward for backward, _, _ in _KEPT)))
_FORWARDS = frozenset((*(backend.forward for backend in BACKENDS), *(forward for _, forward, _ in _KEPT)))


def backend_of(node: Node) -> Backend | None:
    """The operator that a node calls, by its backward or its forward; None if it cannot be replaced."""
    return _BY_NAME.get(op_name(node))


def is_attention_backward(node: Node) -> bool:
    """Whether the node is an attention backward that ends as a record."""
    return op_name(node) in _BACKWARDS


def is_lone_forward(node: Node) -> bool:
    """Whether the node is an attention forward whose results no attention backward of its graph reads."""
    return op_name(node) in _FORWARDS and not any(map(_leads_to_backward, node.users))


def _leads_to_backward(node: Node) -> bool:
    """Whether a result of a forward, or a view of one, is read by an attention backward."""
    if is_attention_backward(node) or op_name(node).startswith(_OURS):
        return True
    shows = node.target is operator.getitem or viewed(node) is not None
    return shows and any(map(_leads_to_backward, node.users))
