"""Checks whether dash_inductor's operators support an attention, before its mask is read.

The checks look only at what the frontend found (device, shapes, dtypes, outputs in use); they do not change the graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...config import config
from ...frontends.attention import Attention, Backward, Forward, Found, Gradient, NotReadable, Refusal
from ...frontends.biases import FoundBias
from ...frontends.flex_attention import FLEX
from ...graph import sizes as layout
from ...kernels.registry import has_templates
from ...masks.normal_form import Components
from ...model.plan import Plan
from ...model.reasons import Reason
from ...model.site import DType
from ...upstream import arch
from .factors import check_factors
from .match import device_of

MOST_PAIR_BYTES = 4 << 30
"""The largest dense mask or bias of FlexAttention, in bytes, that is computed into memory."""

DTYPES: dict[torch.dtype, DType] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}


def check(found: Found) -> Attention:
    """Returns `found` itself if dash_inductor's operators support its device, shapes, dtypes and outputs.

    Raises:
        NotReadable: one of these is not supported, or the frontend refused the attention (`Refusal`).
    """
    if isinstance(found, Refusal):
        if not found.everywhere:
            check_device(device_of(found.node))
        raise NotReadable(found.fallback.reason, found.fallback.detail)
    attention, inputs = found, found.inputs
    check_device(device_of(attention.node))
    refusal = attention.refusal()
    if refusal is not None:
        raise NotReadable(refusal.reason, refusal.detail)
    query, key, value = inputs.query.tensor, inputs.key.tensor, inputs.value.tensor
    _check_sizes(query, key, value)
    _check_dtypes(attention)
    check_factors(attention)
    if attention.backward is not None:
        _check_forward_is_ours(attention.backward)
        _check_logsumexp(attention.backward, query)
    elif attention.forward is not None:
        _check_lone_forward(attention.forward)
    return attention


def check_device(device: torch.device) -> None:
    """Raises NotReadable for a device without dash_inductor kernels, and for the CPU under ``config.cpu="off"``."""
    if device.type == "cpu" and config.cpu == "off":
        raise NotReadable(Reason.CPU_OFF)
    if not arch.is_supported(device):
        raise NotReadable(Reason.DEVICE, str(device))


def _check_sizes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.dim() == key.dim() == value.dim() == 4:
        raise NotReadable(Reason.SHAPE, f"{query.dim()}, {key.dim()} and {value.dim()} dimensions")
    shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
    # Symbolic sizes count as equal unless they are known to differ: PyTorch's own operators require equality, too.
    pairs = [
        (query.shape[0], key.shape[0]),
        *zip(key.shape[:3], value.shape[:3], strict=True),
        (query.shape[3], key.shape[3]),
    ]
    if any(layout.differ(a, b) for a, b in pairs) or 0 in map(layout.static, (*query.shape, *key.shape)):
        raise NotReadable(Reason.SHAPE, shapes)


def _check_dtypes(attention: Attention) -> None:
    inputs, backward = attention.inputs, attention.backward
    of_backward = () if backward is None else (backward.out, backward.grad_out)
    views = [view for view in (inputs.query, inputs.key, inputs.value, *of_backward) if view is not None]
    dtypes = [view.node.meta["val"].dtype for view in views]
    if len(set(dtypes)) != 1 or dtypes[0] not in DTYPES:
        named = [f"{view.argument.place}: {dtype}" for view, dtype in zip(views, dtypes, strict=True)]
        raise NotReadable(Reason.DTYPE, ", ".join(named))


def _check_lone_forward(forward: Forward) -> None:
    if config.forward == "keep":
        raise NotReadable(Reason.FORWARD_OFF)
    if forward.order is None:
        raise NotReadable(Reason.LAYOUT, "its output is not dense")


def check_pairs(attention: Attention, components: Components, bias: FoundBias | None, plan: Plan) -> None:
    """Raises NotReadable if FlexAttention, which stores no tensor of all pairs, would be given a large one.

    Such tensors are its dense mask, kv ranges by head for kernels that Inductor lowers from templates, and its bias.  A
    bias with a gradient is stored whatever its size, because FlexAttention adds its gradient in no fixed order.
    Dynamic sizes count as small.
    """
    if attention.forward_op != FLEX.forward:
        return
    tensors = []
    stored = {"dense", "head_interval"} if has_templates(plan.kernel) else {"dense"}
    if attention.inputs.mask is not None and any(component.NAME in stored for component in components.in_order):
        tensors.append(("mask", attention.inputs.mask.value.meta["val"]))
    if bias is not None and bias.gradient is None:
        tensors.append(("bias", bias.tensor.meta["val"]))
    for name, tensor in tensors:
        sizes = [layout.static(size) for size in tensor.shape]
        bytes_ = tensor.dtype.itemsize * math.prod(size or 0 for size in sizes)
        if bytes_ > MOST_PAIR_BYTES:
            large = f"its {name} of all pairs would take {bytes_ / 2**30:.3g} GiB, which FlexAttention does not store"
            raise NotReadable(Reason.FLEX_ATTENTION, f"{large} (at most {MOST_PAIR_BYTES >> 30} GiB are)")


def check_gradient(gradient: Gradient, query: Tensor) -> None:
    """Raises NotReadable unless the gradient of the log-sum-exp is a float tensor [batch, heads, q_len]."""
    value = gradient.argument.value.meta["val"]
    if not value.dtype.is_floating_point or not layout.same_all(value.shape, query.shape[:3]):
        raise NotReadable(Reason.LAYOUT, f"gradient of the log-sum-exp {value.dtype} {tuple(value.shape)}")


def _check_forward_is_ours(backward: Backward) -> None:
    """Raises NotReadable under ``config.forward="keep"`` for a backward that does not read the forward's output.

    It can only be replaced together with its forward.
    """
    if backward.out is None and config.forward == "keep":
        raise NotReadable(Reason.FORWARD_OFF)


def _check_logsumexp(backward: Backward, query: Tensor) -> None:
    """Raises NotReadable unless the saved log-sum-exp is fp32 [batch, heads, >= q_len] or [batch, heads, q_len, 1]."""
    if backward.logsumexp is None:
        return
    logsumexp = backward.logsumexp.value.meta["val"]
    trailing_one = logsumexp.dim() == 4 and layout.static(logsumexp.shape[3]) == 1
    heads_fit = logsumexp.dim() >= 3 and layout.same_all(logsumexp.shape[:2], query.shape[:2])
    if logsumexp.dtype != torch.float32 or not heads_fit or not (logsumexp.dim() == 3 or trailing_one):
        raise NotReadable(Reason.LAYOUT, f"log-sum-exp {logsumexp.dtype} {tuple(logsumexp.shape)}")
