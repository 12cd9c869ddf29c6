"""Finds the line of the user's program that a node, or a call that is not compiled, comes from."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.fx import Node

from ..installed import is_installed

_NOT_OF_THE_MODEL = re.compile(
    r"/(torch/(nn/attention|nested/_internal|distributed/tensor/experimental/_context_parallel)|dash_inductor/doctor)/\w+\.py$"
    r"|/flash_attn\w*/([\w/]*/)?\w*interface\.py$"
)
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (str(Path(torch.__file__).parent) + os.sep, _PACKAGE, contextlib.__file__)

_OF_MODULES = ("forward", "__call__")
"""Functions of an installed package in which its models call attention; what they call are helpers of the package."""

_ROOT = re.compile(r"""^[LG](\[('[^']*'|"[^"]*"|\d+)\])+\.?""")
"""Dynamo's name of the root module: L['self'], G['model'], or L['args'][0] if a wrapper passes it on."""


def model_line(nodes: Iterable[Node]) -> tuple[str, str]:
    """Return ``file:line`` and the module path of the first of these nodes with a stack trace; "" for what is unknown.

    The line is the innermost one of the model's stack, ignoring functions of PyTorch, of flash-attn and of this package
    that call an attention operator, and functions of installed packages that are no forward of a module, such as
    ``sdpa_attention_forward`` of transformers.  If the stack has lines of this package alone, as in graphs of attention
    in programs that are not compiled, the line is that of the call under which the graph is compiled.
    """
    for node in nodes:
        frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
        while len(frames) > 1 and _is_helper(*frames[-1]):
            frames.pop()
        if frames:
            file, line, _ = frames[-1]
            if file.startswith(_PACKAGE) and (called := line_of_program()):
                return called, _module_path(node)
            return f"{file}:{line}", _module_path(node)
    return "", ""


def line_of_program() -> str:
    """Return the ``file:line`` of the innermost frame outside of PyTorch and this package; "" on an autograd thread."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(("<", *_LIBRARIES)):
        frame = frame.f_back  # type: ignore[assignment]  # None behind the outermost
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_helper(file: str, line: str, function: str) -> bool:
    if _NOT_OF_THE_MODEL.search(file):
        return True
    return function not in _OF_MODULES and is_installed(file)


def site_text(node: Node) -> str:
    """Return the name of an attention's site in graphs and profiles: "node in module.path".

    The text is an argument of the operators that replace the attention.  It is "node" if the module is not known.
    """
    module = model_line([node, *node.users])[1]
    return f"{node.name} in {module}" if module else str(node.name)


def _module_path(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    return _ROOT.sub("", path) or getattr(kind, "__name__", str(kind))
