"""Which recording is on in this process.  Imports nothing, because compilations ask it whether one is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .recorder import Recorder

recorder: Recorder | None = None
