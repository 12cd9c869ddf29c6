"""Graph breaks of Dynamo, for the checks of `dash_inductor.doctor`.  Imports Dynamo."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from torch._dynamo.utils import graph_break_reasons

_TWICE = "duplicate tensor input"


def twice_in_one_call() -> list[str]:
    """The source lines of graph breaks caused by passing one tensor twice to an autograd function, each line once."""
    return list(dict.fromkeys(_line(found.user_stack) for found in graph_break_reasons if _TWICE in found.reason))


def _line(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost source line outside of flash-attn, whose functions call the autograd function for the program."""
    frames = [f"{frame.filename}:{frame.lineno}" for frame in stack if "flash_attn" not in frame.filename]
    return frames[-1] if frames else "an unknown line"
