"""Dynamo: its frames and errors, the sizes that it has seen, and what it asks of a GPU.  Imports Dynamo."""

from __future__ import annotations

from types import CodeType

from torch._dynamo import eval_frame, pgo
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.exc import ShortenTraceback

from . import compat

__all__ = ["CudaInterface", "ShortenTraceback", "eval_frame", "pgo", "skip_code"]


def skip_code(code: CodeType) -> None:
    """Let Dynamo compile no call of this code on its own; into what it compiles the code is inlined."""
    compat.resolve("torch._dynamo.decorators", "skip_code")(code)
