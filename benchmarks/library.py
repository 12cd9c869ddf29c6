"""Attention backwards in shared libraries that the environment names, called through the C interface of
docs/benchmarks.md.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .common import NotRun
from .shapes import Shape

INTERFACE = "docs/benchmarks.md has the interface"


class Strided(ctypes.Structure):
    """A bf16 tensor [batch, length, heads, head dim], with strides in elements; the stride of the head dim is 1."""

    _fields_ = (("data", c_void_p), ("batch", c_int64), ("length", c_int64), ("head", c_int64))

    @classmethod
    def of(cls, tensor: Tensor) -> Strided:
        """Describes a tensor [batch, heads, length, head dim]."""
        batch, head, length, dim = tensor.stride()
        if dim != 1:
            raise NotRun(f"a library wants tensors whose last stride is 1, but one has strides {tensor.stride()}")
        return cls(tensor.data_ptr(), batch, length, head)


class Arguments(ctypes.Structure):
    """The C struct `attention_backward` of the interface."""

    _fields_ = (
        *((name, Strided) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        *((name, c_void_p) for name in ("lse", "workspace", "stream")),
        ("scale", c_double),
        *((name, c_int64) for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")),
        *((name, c_int64) for name in ("window_left", "window_right", "deterministic")),
    )


class Library:
    """The library at a path.

    Raises:
        NotRun: there is no such file, it cannot be loaded, or it lacks a function of the interface.
    """

    def __init__(self, path: str) -> None:
        self.name = Path(path).name
        try:
            loaded = ctypes.CDLL(path)
        except OSError as error:
            raise NotRun(f"{self.name} cannot be loaded: {error}") from error
        self._backward = self._function(loaded, "attention_backward", c_int32)
        self._workspace = self._function(loaded, "attention_backward_workspace", c_int64)
        self.version = "no version"
        if hasattr(loaded, "version"):
            loaded.version.restype = c_char_p
            self.version = loaded.version().decode()

    def _function(self, loaded: ctypes.CDLL, function: str, result: Any) -> Callable[[Any], int]:
        if not hasattr(loaded, function):
            raise NotRun(f"{self.name} has no function {function}; {INTERFACE}")
        found = getattr(loaded, function)
        found.argtypes, found.restype = (POINTER(Arguments),), result
        return found  # type: ignore[no-any-return]

    def backward(
        self, shape: Shape, tensors: tuple[Tensor, ...], out: Tensor, lse: Tensor, *, deterministic: bool
    ) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        """A call that returns dq, dk, dv in new memory, which it takes together with the workspace.

        Args:
            tensors: q, k, v, do in bf16: [batch, heads, length, head dim].
            out: as q, with the head dim of v.
            lse: natural log-sum-exp in fp32: [batch, heads of q, length].

        Raises:
            NotRun: the library does not take the shape.
            RuntimeError: from the call, if the library reports an error.
        """
        q, k, v, do = tensors
        lse = lse.contiguous()
        lo, hi, s = shape.mask.lo, shape.mask.hi, shape.length

        def arguments() -> Arguments:
            return Arguments(
                *map(Strided.of, (q, k, v, out, do)), lse=lse.data_ptr(), scale=shape.scale,
                batch=shape.batch, q_heads=shape.q_heads, kv_heads=shape.kv_heads,
                q_len=s, kv_len=s, head_dim=shape.head_dim, value_dim=shape.value_dim,
                window_left=s if hi is None else hi, window_right=s if lo is None else -lo,
                deterministic=deterministic,
            )  # fmt: skip

        what = f"{'deterministic' if deterministic else 'non-deterministic'} backward of {shape.name}"
        size = self._workspace(arguments())
        if size < 0:
            raise NotRun(f"{self.name} ({self.version}) takes no {what}")

        def run() -> tuple[Tensor, Tensor, Tensor]:
            dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
            workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
            filled = arguments()
            filled.dq, filled.dk, filled.dv = map(Strided.of, (dq, dk, dv))
            filled.workspace, filled.stream = workspace.data_ptr(), torch.cuda.current_stream().cuda_stream
            status = self._backward(filled)
            if status != 0:
                raise RuntimeError(f"{self.name} ({self.version}): a {what} ended with error {status}")
            return dq, dk, dv

        return run


_load = cache(Library)


def named(variable: str) -> Library:
    """The library that an environment variable names.

    Raises:
        NotRun: the variable is not set, or as `Library`.
    """
    path = os.environ.get(variable, "")
    if not path:
        raise NotRun(f"{variable} names no library; {INTERFACE}")
    return _load(path)
