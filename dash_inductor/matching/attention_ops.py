"""The attention operators of PyTorch, by name: which backwards are replaced, and which are known but kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..model.reasons import Reason


@dataclass(frozen=True)
class Backend:
    """One backward operator that can be replaced, and its forward.

    Attributes:
        backward, forward: qualified names.
        grad_out: the backward's argument that holds the gradient of the output.
        mask: the argument that holds an additive or boolean mask; None if the operator takes none.
        random_state: the arguments that tell the backward which random numbers its forward drew for dropout.
    """

    backward: str
    forward: str
    grad_out: str = "grad_out"
    mask: str | None = None
    random_state: tuple[str, ...] = ("philox_seed", "philox_offset")


_SDPA = "aten::_scaled_dot_product_"
FLASH = Backend(_SDPA + "flash_attention_backward", _SDPA + "flash_attention")
EFFICIENT = Backend(
    _SDPA + "efficient_attention_backward", _SDPA + "efficient_attention", grad_out="grad_out_", mask="attn_bias"
)
CUDNN = Backend(_SDPA + "cudnn_attention_backward", _SDPA + "cudnn_attention", mask="attn_bias")
FLASH_CPU = Backend(
    _SDPA + "flash_attention_for_cpu_backward", _SDPA + "flash_attention_for_cpu", mask="attn_mask", random_state=()
)

BACKENDS = {backend.backward: backend for backend in (FLASH, EFFICIENT, CUDNN, FLASH_CPU)}

KEPT = {
    _SDPA + "fused_attention_overrideable_backward": Reason.UNSUPPORTED_OP,
    "aten::_flash_attention_backward": Reason.VARLEN,
    "aten::_efficient_attention_backward": Reason.VARLEN,
    "aten::_cudnn_attention_backward": Reason.VARLEN,
    "torch_attn::_varlen_attn_backward": Reason.VARLEN,
    "flex_attention_backward": Reason.FLEX_ATTENTION,
}


def op_name(node: Node) -> str:
    """``namespace::name`` of the operator that a node calls (higher-order: ``name``), "" for other nodes."""
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return str(node.target.name())
    return ""


def is_attention_backward(node: Node) -> bool:
    """Whether the node is an attention backward that ends as a record."""
    name = op_name(node)
    return name in BACKENDS or name in KEPT


def bind(node: Node) -> dict[str, Any]:
    """The node's arguments by their names in the operator's schema, defaults included: nodes or Python values."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    bound.update(zip((argument.name for argument in schema), node.args, strict=False))  # the rest is in kwargs
    bound.update(node.kwargs)
    return bound
