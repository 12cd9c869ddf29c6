"""A recording ends only when no thread of a process group holds a tensor that was exchanged."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dash_guard
from dash_guard.observation import exchange
from dash_guard.observation.exchange import Exchange

GROUP: Any = None
"""`Lender` asks for none."""


class Lender:
    """Stands for a process group of two ranks with equal lanes; C++ holds the lanes until `let_go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._holder: Tensor | None = None
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        monkeypatch.setattr(dist, "all_gather", self._all_gather)

    def _all_gather(self, everyone: list[Tensor], lanes: Tensor, group: object) -> None:
        for other in everyone:
            other.copy_(lanes)
        self._holder = torch.empty_like(lanes)
        self._holder.grad = lanes

    def let_go(self) -> None:
        self._holder = None


def gather(lender: Lender) -> Exchange:
    made = Exchange()
    gathered = made.gather(torch.arange(6.0).view(3, 2), GROUP)
    assert gathered.shape == (2, 3, 2)
    assert torch.equal(gathered[0], gathered[1])
    return made


def test_close_waits_until_nobody_else_holds_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    lender = Lender(monkeypatch)
    made = gather(lender)
    closed = threading.Event()

    def close() -> None:
        made.close()
        closed.set()

    thread = threading.Thread(target=close)
    thread.start()
    assert not closed.wait(0.2)
    lender.let_go()
    assert closed.wait(60)
    thread.join()


def test_close_gives_up_in_words(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(exchange, "_PATIENCE", 0.05)
    made = gather(Lender(monkeypatch))
    with caplog.at_level("WARNING", logger="dash_guard"):
        made.close()
    assert "0.05 seconds later a process group still holds tensors of this exchange (1 of them)" in caplog.text


def test_close_waits_for_nothing_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_PATIENCE", 0.0)
    lender = Lender(monkeypatch)
    made = Exchange()
    for _ in range(3):
        made.gather(torch.zeros(3, 2), GROUP)
    lender.let_go()
    made.gather(torch.zeros(3, 2), GROUP)
    assert len(made._lent) == 1, "only the last lanes are held"


@pytest.mark.parametrize("failing", [None, "_flush", "close"])
def test_every_recording_closes_its_exchange(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose last part, or whose end, cannot be written."""
    closed: list[Exchange] = []
    monkeypatch.setattr(Exchange, "close", lambda exchange: closed.append(exchange))
    parameter = torch.ones(2, requires_grad=True)
    expected = contextlib.nullcontext() if failing != "close" else pytest.raises(OSError, match="no space left")
    with expected, dash_guard.record(tmp_path / "run") as recorder:
        parameter.sum().backward()
        torch.optim.SGD([parameter]).step()
        if failing is not None:
            failing_object = recorder if failing == "_flush" else recorder._writer
            monkeypatch.setattr(failing_object, failing, Mock(side_effect=OSError("no space left")))
    assert len(closed) == 1
