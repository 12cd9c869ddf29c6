"""Kernels of the hub as the package `kernels` loads them for transformers, without that package and without a network.

They compute by exact math, and differ from each other as those of the hub do in what Dynamo can trace:

- "kernels-community/flash-attn2" has operators with shape functions.
- "kernels-community/vllm-flash-attn3" calls the operators of its extension, which have no shape functions.
- "kernels-community/flash-attn4" has no operators; Dynamo cannot trace what compiles its kernels.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .flash_attn import _backward, _forward

FLASH_ATTN2, FLASH_ATTN3, FLASH_ATTN4 = (
    f"kernels-community/{name}" for name in ("flash-attn2", "vllm-flash-attn3", "flash-attn4")
)

_SOURCE = """
import torch

{imports}


def _flash_attn_forward(q, k, v, softmax_scale, causal, window_size):
    {forward}


def _flash_attn_backward(tensors, softmax_scale, causal, window_size, deterministic):
    {backward}


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal, window_size, deterministic):
        if softmax_scale is None:
            softmax_scale = q.shape[-1] ** (-0.5)
        out, softmax_lse, *rest = _flash_attn_forward(q, k, v, softmax_scale, causal, window_size)
        ctx.save_for_backward(q, k, v, out, softmax_lse)
        ctx.softmax_scale, ctx.causal = softmax_scale, causal
        ctx.window_size, ctx.deterministic = window_size, deterministic
        return out, softmax_lse

    @staticmethod
    def backward(ctx, dout, *args):
        q, k, v, out, softmax_lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        facts = ctx.softmax_scale, ctx.causal, ctx.window_size, ctx.deterministic
        _flash_attn_backward((dout, q, k, v, out, softmax_lse, dq, dk, dv), *facts)
        return dq, dk, dv, None, None, None, None


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False):
    return FlashAttnFunc.apply(q, k, v, softmax_scale, causal, window_size, deterministic)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None):
    raise NotImplementedError
"""
"""A module of a kernel; its functions have the parts of the hub's signatures that transformers asks for."""

_BODIES = {
    FLASH_ATTN2: (
        "return OPS._flash_attn_forward(q, k, v, 0.0, softmax_scale, causal, *window_size, 0.0, None, False)",
        "OPS._flash_attn_backward(*tensors, 0.0, softmax_scale, causal, *window_size, 0.0, None, deterministic)",
        "OPS = torch.ops.flash_attn",
    ),
    FLASH_ATTN3: (
        "return OPS.fwd(q, k, v, softmax_scale, causal, *window_size)",
        "OPS.bwd(*tensors, softmax_scale, causal, *window_size, deterministic)",
        "OPS = torch.ops._vllm_flash_attn3_0a1b2c3",
    ),
    FLASH_ATTN4: (
        "return launched(forward, q, k, v, softmax_scale, causal, *window_size)",
        "launched(backward, *tensors, softmax_scale, causal, *window_size, deterministic)",
        "from tests.support.hub_kernels import backward, forward, launched",
    ),
}
"""The bodies of the forward and the backward of each kernel, and what its module imports."""


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, right: int) -> list[Tensor]:
    return [*_forward(q, k, v, None, scale, causal, (left, right), 0.0)]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    scale: float, causal: bool, left: int, right: int, deterministic: bool,
) -> list[Tensor]:  # fmt: skip
    for into, found in zip(
        (dq, dk, dv), _backward(dout, q, k, v, None, scale, causal, (left, right), 0.0), strict=True
    ):
        into.copy_(found)
    return []


def launched(kernel: Callable[..., Any], *args: Any) -> Any:
    """Stands for the compiler of FlashAttention-4's kernels, which Dynamo cannot trace."""
    torch._dynamo.graph_break()
    return torch.compiler.disable(kernel)(*args)


_OPERATORS = torch.library.Library("_vllm_flash_attn3_0a1b2c3", "DEF")
_OPERATORS.define(
    "fwd(Tensor q, Tensor k, Tensor v, float? softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right) -> Tensor[]"
)
_OPERATORS.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!) dq, Tensor(b!) dk, "
    "Tensor(c!) dv, float? softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "bool deterministic) -> Tensor[]"
)
for _name, _function in (("fwd", forward), ("bwd", backward)):
    _OPERATORS.impl(_name, torch.compiler.disable(_function), "CPU")


def get_kernel(repository: str, **settings: Any) -> ModuleType:
    """`kernels.get_kernel`: imports a file under a name that tells its build, once."""
    name = f"_{repository.partition('/')[2].replace('-', '_')}_cuda_0a1b2c3"
    if name not in sys.modules:
        file = Path(tempfile.mkdtemp(prefix="hub-kernels-"), "__init__.py")
        forward, backward, imports = _BODIES[repository]
        source = _SOURCE.format(forward=forward, backward=backward, imports=imports)
        file.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@contextmanager
def hub() -> Iterator[None]:
    """Transformers finds the package `kernels`, whose `get_kernel` is the function above."""
    from transformers.integrations import hub_kernels

    found = {"is_kernels_available": lambda: True, "get_kernel_hub": get_kernel}
    with mock.patch.multiple(hub_kernels, create=True, **found):
        yield
