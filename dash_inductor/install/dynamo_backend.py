"""The backend of `torch.compile(backend="dash")`: Inductor with dash_inductor switched on for that compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import _switch
from ..upstream.backend import InductorBackend


def dash(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a graph with Inductor and dash_inductor, even if `disable()` was called.

    With DASH_INDUCTOR=0, or without deterministic algorithms, this is plain Inductor.

    Args:
        gm, example_inputs: the graph and example inputs, as Dynamo passes them to a backend.
        mode, options: as for `torch.compile`.
    """
    inductor = InductorBackend(mode, options, dynamic=None)
    with _switch.override(True):
        compiled: Callable[..., Any] = inductor(gm, example_inputs)
    return compiled
