"""Internals of Dynamo: frames, errors, profiles of the sizes seen (pgo), queries of GPU properties.  Imports Dynamo."""

from __future__ import annotations

from types import CodeType

from torch._dynamo import eval_frame, pgo
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.exc import ShortenTraceback, Unsupported
from torch._dynamo.variables import TensorVariable, UserFunctionVariable

from . import compat

__all__ = [
    "CudaInterface", "ShortenTraceback", "TensorVariable", "Unsupported", "UserFunctionVariable", "eval_frame", "pgo",
    "skip_code",
]  # fmt: skip


def skip_code(code: CodeType) -> None:
    """Keeps Dynamo from compiling calls of this code by themselves; compiled functions still inline it."""
    compat.resolve("torch._dynamo.decorators", "skip_code")(code)
