"""Attention in shared libraries that the environment names, called through the C interface of docs/benchmarks.md."""

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

from dash_inductor.model import Band

from .common import NotRun
from .shapes import Shape

Tensors = tuple[Tensor, Tensor, Tensor]

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


class ForwardArguments(ctypes.Structure):
    """The C struct `attention_forward` of the interface."""

    _fields_ = (
        *((name, Strided) for name in ("q", "k", "v", "out")),
        *((name, c_void_p) for name in ("lse", "starts", "workspace", "stream")),
        ("scale", c_double),
        *((name, c_int64) for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")),
        *((name, c_int64) for name in ("tokens", "window_left", "window_right")),
    )


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
        NotRun: there is no such file, or it cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        self.name = Path(path).name
        try:
            self._loaded = ctypes.CDLL(path)
        except OSError as error:
            raise NotRun(f"{self.name} cannot be loaded: {error}") from error
        self.version = "no version"
        if hasattr(self._loaded, "version"):
            self._loaded.version.restype = c_char_p
            self.version = self._loaded.version().decode()

    def _function(self, name: str, arguments: type[ctypes.Structure], result: Any) -> Callable[[Any], int]:
        if not hasattr(self._loaded, name):
            raise NotRun(f"{self.name} has no function {name}; {INTERFACE}")
        found = getattr(self._loaded, name)
        found.argtypes, found.restype = (POINTER(arguments),), result
        return found  # type: ignore[no-any-return]

    def _call(self, name: str, arguments: Callable[[], Any], what: str, device: torch.device) -> Callable[[Any], None]:
        """Returns a function that queues the call of filled arguments, with a workspace of its own in each call.

        Args:
            name: the function's.
            arguments: makes its arguments, as far as all calls share them.
            what: what is computed, for errors.

        Raises:
            NotRun: the library lacks the function, or does not take such a call.
            RuntimeError: from the result, if the library reports an error.
        """
        kind = type(arguments())
        queue, workspace = self._function(name, kind, c_int32), self._function(f"{name}_workspace", kind, c_int64)
        size = workspace(arguments())
        if size < 0:
            raise NotRun(f"{self.name} ({self.version}) takes no {what}")

        def run(filled: Any) -> None:
            memory = torch.empty(size, dtype=torch.uint8, device=device)
            filled.workspace, filled.stream = memory.data_ptr(), torch.cuda.current_stream().cuda_stream
            status = queue(filled)
            if status != 0:
                raise RuntimeError(f"{self.name} ({self.version}): a {what} ended with error {status}")

        return run

    def forward(
        self, tensors: Tensors, mask: Band, scale: float, name: str, starts: Tensor | None = None, longest: int = 0
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """A call that returns out, in the layout of q, and the natural log-sum-exp, in new memory.

        Args:
            tensors: q, k, v in bf16: [batch, heads, length, head dim]; with packed documents the batch size is 1.
            name: what is computed, for errors.
            starts: int32 [documents + 1], where packed documents start and the last one ends; None without documents.
            longest: the tokens of the longest of them.

        Returns:
            From the call: out as q, with the head dim of v; the log-sum-exp, fp32 [batch, heads of q, length].

        Raises:
            NotRun: the library lacks the function, or does not take the call.
            RuntimeError: from the call, if the library reports an error.
        """
        q, k, v = tensors
        batch, q_heads, tokens, head_dim = q.shape
        length = tokens if starts is None else longest

        def arguments() -> ForwardArguments:
            return ForwardArguments(
                *map(Strided.of, (q, k, v)), starts=None if starts is None else starts.data_ptr(), scale=scale,
                batch=batch if starts is None else len(starts) - 1, q_heads=q_heads, kv_heads=k.shape[1],
                q_len=length, kv_len=length, head_dim=head_dim, value_dim=v.shape[3], tokens=tokens,
                window_left=length if mask.hi is None else mask.hi,
                window_right=length if mask.lo is None else -mask.lo,
            )  # fmt: skip

        run = self._call("attention_forward", arguments, f"forward of {name}", q.device)

        def call() -> tuple[Tensor, Tensor]:
            out = q.new_empty(batch, tokens, q_heads, v.shape[3]).transpose(1, 2)
            lse = torch.empty(batch, q_heads, tokens, device=q.device)
            filled = arguments()
            filled.out, filled.lse = Strided.of(out), lse.data_ptr()
            run(filled)
            return out, lse

        return call

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
        run = self._call("attention_backward", arguments, what, q.device)

        def call() -> tuple[Tensor, Tensor, Tensor]:
            dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
            filled = arguments()
            filled.dq, filled.dk, filled.dv = map(Strided.of, (dq, dk, dv))
            run(filled)
            return dq, dk, dv

        return call


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
