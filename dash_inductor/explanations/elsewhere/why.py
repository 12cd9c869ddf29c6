"""Puts into words why the outcome on a GPU that is not present is unknown; the texts are ends of sentences."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from ...errors import DashError
from ...records.records import GraphRecord
from ...upstream.fake import DataDependentOutputException
from .stand_in import with_gpus

_LIBRARIES = tuple(str(Path(str(module.__file__)).parent) for module in (torch, sys.modules["dash_inductor"]))

_TRACE = r"from user code:|Original traceback:"
"""What precedes the stack of the program in errors of Dynamo and of a graph's interpreter."""


def unknown(error: BaseException) -> str:
    """Returns why the outcome is unknown, as the end of a sentence, given the error that ended the tracing."""
    return with_gpus(_unknown(error))


def _unknown(error: BaseException) -> str:
    chain = [error]
    while (behind := _behind(chain[-1])) is not None:
        chain.append(behind)
    ours = [link for link in chain if isinstance(link, DashError)]
    if ours:
        return str(ours[-1])
    told = next((link for link in chain if not hasattr(link, "inner_exception")), error)
    text = " ".join(str(told).split("\n\n")[0].partition("Hint: ")[0].split())
    _, _, raised = text.rpartition(": got ")  # raised by an operator; Dynamo prints its arguments first
    line = _line_of_the_program(told)
    if isinstance(told, DataDependentOutputException):
        text = "the program reads the value of a tensor in Python, and a fake one has none"
    else:
        text = f"{type(told).__name__}: {(raised or text)[:300]}".removesuffix(": ")
    return f"{text}, at {line}" if line else text


def _line_of_the_program(error: BaseException) -> str:
    """The ``file:line`` of the program at which an error was raised or traced; "" if it is not known."""
    traced = re.findall(r'File "([^"]+)", line (\d+)', "".join(re.split(_TRACE, str(error), maxsplit=1)[1:]))
    run = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    for file, line in [*reversed(traced), *reversed(run)]:
        if not file.startswith(("<", *_LIBRARIES)):
            return f"{file}:{line}"
    return ""


def _behind(error: BaseException) -> BaseException | None:
    """The error that caused an error, or None."""
    inner: BaseException | None = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return inner


def left_on_the_cpu(graphs: Sequence[GraphRecord]) -> str:
    """Returns why the outcome is unknown if the program computes attention on the CPU; "" if it does not."""
    for site in (site for graph in graphs for site in graph.sites):
        if site.tensors is not None and not site.tensors.device.startswith("cuda"):
            return f"the attention at {site.line or site.name} runs on {site.tensors.device}, not on a GPU"
    return ""
