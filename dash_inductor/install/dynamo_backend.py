"""`torch.compile(backend="dash")`: Inductor with dash_inductor on for that compile."""

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
    """Compile with Inductor, also where `disable()` was called.  `mode` and `options` are those of `torch.compile`.

    DASH_INDUCTOR=0 is stronger, and deterministic algorithms must be on: else this is Inductor and nothing more.
    """
    inductor = InductorBackend(mode, options, dynamic=None)
    with _switch.override(True):
        compiled: Callable[..., Any] = inductor(gm, example_inputs)
    return compiled
