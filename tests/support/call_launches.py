"""Launches of calls where nothing is launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dash_inductor.kernels.common.call_launches import CallLaunches


def packing(monkeypatch: pytest.MonkeyPatch, launch: Callable[[tuple[Any, ...]], None]) -> None:
    """Let every call pack its launches anew, by the `pack` of whatever is in the place of `KernelLauncher`."""

    def run(self: CallLaunches, stream: int, addresses: Sequence[int]) -> None:
        launch(self.packed(stream, addresses))

    monkeypatch.setattr(CallLaunches, "launch", run)
