"""The choice of `scaled_dot_product_attention` between its implementations, by PyTorch's rules, for any architecture.

PyTorch itself asks the device on which it runs.  These rules follow transformers/cuda/sdp_utils.cpp of torch 2.11 to
2.15 for CUDA builds, as far as they matter under deterministic algorithms, which exclude cuDNN.
tests/gpu/test_elsewhere.py compares them with a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...upstream import compat, devices
from ...upstream.patches import replaced
from . import Untraceable
from .stand_in import stands_for_a_gpu

HALF = (torch.float16, torch.bfloat16)

FLASH, EFFICIENT, MATH, CUDNN = "flash", "efficient", "math", "cudnn"

_BY_NUMBER = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}
"""The values of ``at::SDPBackend``."""


@dataclass(frozen=True)
class Call:
    """The arguments of a `scaled_dot_product_attention` call."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False


def choose(call: Call, arch: str) -> str:
    """Returns the implementation that PyTorch chooses for a call on an architecture: FLASH, EFFICIENT or MATH.

    Raises:
        Untraceable: the choice depends on something that is not known here.
        RuntimeError: as in PyTorch, if the program has disabled all implementations that could run.
    """
    chosen = _first(call, arch)
    if chosen == EFFICIENT and compat.TORCH < (2, 14) and not _aligned(call):
        raise Untraceable("PyTorch may refuse query, key or value for the address at which they begin")
    if chosen == MATH:
        _be_certain(call, arch)
    return chosen


def _first(call: Call, arch: str) -> str:
    on = torch.backends.cuda
    able: dict[str, Callable[[], bool]] = {
        FLASH: lambda: can_use_flash(call, arch),
        EFFICIENT: lambda: can_use_efficient(call, arch),
        MATH: on.math_sdp_enabled,
    }
    for number in devices.priority_order():
        name = _BY_NUMBER.get(number, CUDNN)
        if name in able and able[name]():
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


def _be_certain(call: Call, arch: str) -> None:
    """Raises Untraceable if a newer PyTorch, or cuDNN, may run a call for which the rules here choose MATH."""
    heads = {tensor.shape[-3] for tensor in (call.query, call.key, call.value) if tensor.dim() > 2}
    if compat.TORCH >= (2, 14) and (call.query.dim() == 3 or len(heads) > 1):
        raise Untraceable(f"torch {torch.__version__} may have a fused kernel for grouped heads or for 3 dimensions")
    warned = torch.is_deterministic_algorithms_warn_only_enabled() and torch.backends.cuda.cudnn_sdp_enabled()
    if warned and call.query.dtype in HALF and call.query.dim() == 4 and _number(arch) >= 80:
        raise Untraceable("under warn_only=True PyTorch may take cuDNN, which depends on its version")


def can_use_flash(call: Call, arch: str) -> bool:
    """Whether PyTorch's FlashAttention supports a call on the architecture `arch`."""
    query, key, value = call.query, call.key, call.value
    sm = _number(arch)
    return bool(
        torch.backends.cuda.flash_sdp_enabled()
        and query.dim() == key.dim() == value.dim() == 4
        and call.attn_mask is None
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and 80 <= sm <= 121
        and _has_backward(call, sm)
        and (not call.is_causal or _nested(call) or query.shape[-2] == key.shape[-2])
        and query.dtype == key.dtype == value.dtype
        and query.dtype in HALF
        and (_nested(call) or (_heads_fit(call, grouped=True) and _dense_fits(call, any_stride_of_one=True)))
    )


def can_use_efficient(call: Call, arch: str) -> bool:
    """Whether PyTorch's memory-efficient attention supports a call on the architecture `arch`."""
    query, key, value = call.query, call.key, call.value
    sm, half = _number(arch), query.dtype in HALF
    tensor_cores = sm >= 80 or (sm >= 70 and half)
    alignment = max(4 if sm >= 80 else 1, (8 if half else 4) if tensor_cores else 1)
    dtypes = (torch.float32, *HALF) if sm >= 80 else (torch.float32, torch.float16)
    return bool(
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and 50 <= sm <= 121
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[-1] == key.shape[-1]
        and all(size > 0 and size % alignment == 0 for size in (query.shape[-1], value.shape[-1]))
        and (compat.TORCH < (2, 14) or _aligned(call))
        and (_nested(call) or (_dense_fits(call, any_stride_of_one=False) and _heads_fit(call, grouped=False)))
        and query.dtype == key.dtype == value.dtype
        and query.dtype in dtypes
    )


def _number(arch: str) -> int:
    """The number of an architecture: 90 for "sm_90"."""
    return int(arch.removeprefix("sm_"))


def _has_backward(call: Call, sm: int) -> bool:
    """Whether FlashAttention has the backward that a call needs; some GPUs lack it for large head dimensions."""
    if not _needs_gradient(call) or not (86 <= sm <= 89 or 120 <= sm <= 121):
        return True
    return bool(call.query.shape[-1] <= 192 or (call.dropout == 0 and call.query.shape[-1] > 224))


def _needs_gradient(call: Call) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in (call.query, call.key, call.value))


def _nested(call: Call) -> bool:
    return any(tensor.is_nested for tensor in (call.query, call.key, call.value))


def _heads_fit(call: Call, *, grouped: bool) -> bool:
    """Whether batch sizes and heads are equal; with `grouped` and ``enable_gqa``, query heads may be a multiple."""
    query, key, value = call.query, call.key, call.value
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    if grouped and call.enable_gqa:
        return key.shape[-3] == value.shape[-3] and query.shape[-3] % key.shape[-3] == 0
    return query.shape[-3] == key.shape[-3] == value.shape[-3]


def _dense_fits(call: Call, *, any_stride_of_one: bool) -> bool:
    """Whether lengths are not 0 and last dimensions contiguous; `any_stride_of_one` allows any stride for size 1."""
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    contiguous = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    contiguous = contiguous or (any_stride_of_one and query.shape[-1] == 1)
    return query.shape[-2] != 0 and key.shape[-2] != 0 and contiguous and (mask is None or mask.stride(-1) == 1)


def _aligned(call: Call) -> bool:
    """Whether query, key and value start at multiples of 16 bytes in their storages."""
    tensors = (call.query, call.key, call.value)
    return _nested(call) or all(t.storage_offset() * t.element_size() % 16 == 0 for t in tensors)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, arch: str,
) -> Tensor:  # fmt: skip
    """Computes `scaled_dot_product_attention` in a trace with the ATen operators that PyTorch calls on `arch`."""
    _check(query, key, value, attn_mask)
    chosen = choose(Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa), arch)
    if chosen == FLASH:
        size = query.shape[-1]
        padded = (F.pad(t, (0, -size % 8)) if size % 8 else t for t in (query, key, value))
        given = size**-0.5 if scale is None else scale
        out = torch.ops.aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=given)[0]
        return _first_columns(out, size) if size % 8 else out
    bias = _as_bias(attn_mask, query.dtype)
    if chosen == EFFICIENT:
        if bias is not None:
            bias = _padded(bias).expand(*query.shape[:3], key.shape[2])
        saved = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, saved, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]  # an operator
    math = torch.ops.aten._scaled_dot_product_attention_math
    return math(query, key, value, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]  # type: ignore[no-any-return]  # an operator


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raises RuntimeError for arguments for which PyTorch does."""
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}")
    if not query.device == key.device == value.device:
        raise RuntimeError(f"query, key and value are on {query.device}, {key.device} and {value.device}")
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(f"the mask is {mask.dtype}, and the query {query.dtype}")


def _as_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Converts a bool mask to a float bias with -inf for hidden pairs."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device))


def _padded(bias: Tensor) -> Tensor:
    """Pads the bias so that rows start at multiples of 8 elements, as the kernel requires."""
    if bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1]):
        return bias
    size = bias.shape[-1]
    return _first_columns(F.pad(bias, (0, 8 - size % 8)), size)


def _first_columns(tensor: Tensor, size: int) -> Tensor:
    return torch.ops.aten.slice(tensor, -1, 0, size)  # type: ignore[no-any-return]  # an operator


@contextmanager
def chosen_for(arch: str) -> Iterator[None]:
    """A context manager in which traced `scaled_dot_product_attention` calls choose their implementation as on `arch`.

    This applies to tensors on a GPU or on its stand-in.
    """
    operator: Any = torch.ops.aten.scaled_dot_product_attention.default
    key = devices.DispatchKey.CompositeImplicitAutograd

    def traced(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if stands_for_a_gpu(query.device):
            return attention(query, *args, **kwargs, arch=arch)
        return operator._op_dk(key, query, *args, **kwargs)  # type: ignore[no-any-return]  # an operator

    with _kernel(operator, key, traced), _chosen_for_nested(arch):
        yield


@contextmanager
def _kernel(operator: Any, key: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Registers a Python kernel for an operator inside the block, for PyTorch's Python dispatcher."""
    before = dict(operator.py_kernels)
    operator.py_kernels[key] = function
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels.clear()
        operator.py_kernels.update(before)
        operator._dispatch_cache.clear()


@contextmanager
def _chosen_for_nested(arch: str) -> Iterator[None]:
    """Makes nested tensors, whose attention is implemented in Python, choose as on `arch` inside the block."""
    rules: dict[str, Callable[..., bool]] = {
        "can_use_flash_attention": lambda params, debug=False: can_use_flash(_call(params), arch),
        "can_use_efficient_attention": lambda params, debug=False: can_use_efficient(_call(params), arch),
        "can_use_cudnn_attention": lambda params, debug=False: False,
    }
    with replaced(devices.nested_attention(), rules):
        yield


def _call(params: Any) -> Call:
    """Converts ``torch.backends.cuda.SDPAParams``."""
    return Call(**{field.name: getattr(params, field.name) for field in dataclasses.fields(Call)})
