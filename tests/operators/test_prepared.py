"""Calls that are prepared once for tensors of the same layouts: what tells layouts apart, and who runs when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.config import config
from dash_inductor.model import Band, Call, Mask, Plan, Tiles
from dash_inductor.model.components import Operand, Segments, VarlenLayout
from dash_inductor.operators import attention, prepared
from dash_inductor.operators.prepared import Prepared, Texts

TEXTS = "call", "plan", "site"


class Recorded:
    """An implementation and a maker that note what they are asked."""

    def __init__(self) -> None:
        self.made: list[Texts] = []
        self.ran: list[str] = []
        self.refuses = self.is_missing = False
        self.prepared = Prepared(self.implementation, 2, self.make)

    def implementation(self, a: Tensor, b: Tensor, extras: Sequence[Tensor], *texts: str) -> tuple[str, int]:
        self.ran.append("implementation")
        return texts[2], len(extras)

    def make(self, tensors: Sequence[Tensor], extras: Sequence[Tensor], texts: Texts) -> Any:
        self.made.append(texts)

        def ready(a: Tensor, b: Tensor, extras: Sequence[Tensor]) -> tuple[str, int] | None:
            if self.refuses:
                return None
            self.ran.append("ready")
            return texts[2], len(extras)

        return None if self.is_missing else ready


def tensors() -> list[Any]:
    return [torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)]


def test_a_layout_is_prepared_once() -> None:
    seen = Recorded()
    for _ in range(3):
        assert seen.prepared.call(*tensors(), [torch.zeros(5)], *TEXTS) == ("site", 1)
    assert seen.made == [TEXTS]
    assert seen.ran == ["ready"] * 3


def _with(place: int, tensor: Tensor) -> Callable[[list[Any]], None]:
    return lambda args: args.__setitem__(place, tensor)


OTHERS: dict[str, Callable[[list[Any]], None]] = {
    "call": lambda args: args.__setitem__(3, "another"),
    "plan": lambda args: args.__setitem__(4, "another"),
    "site": lambda args: args.__setitem__(5, "another"),
    "shape": _with(1, torch.zeros(2, 3, 5)),
    "strides": _with(0, torch.zeros(2, 4, 3).mT),
    "strides of the second": _with(1, torch.zeros(2, 4, 3).mT),
    "dtype": _with(0, torch.zeros(2, 3, 4, dtype=torch.float16)),
    "dtype of the second": _with(1, torch.zeros(2, 3, 4, dtype=torch.float16)),
    "device": _with(0, torch.zeros(2, 3, 4, device="meta")),
    "no extras": lambda args: args.__setitem__(2, []),
    "shape of an extra": lambda args: args.__setitem__(2, [torch.zeros(6)]),
    "dtype of an extra": lambda args: args.__setitem__(2, [torch.zeros(5, dtype=torch.int32)]),
    "strides of an extra": lambda args: args.__setitem__(2, [torch.zeros(1).expand(5)]),
}


@pytest.mark.parametrize("change", OTHERS)
def test_what_tells_calls_apart(change: str) -> None:
    seen = Recorded()
    args = [*tensors(), [torch.zeros(5)], *TEXTS]
    seen.prepared.call(*args)
    OTHERS[change](args)
    assert seen.prepared.call(*args) == (args[5], len(args[2]))
    assert len(seen.made) == 2


def test_layouts_that_are_told_are_not_asked() -> None:
    seen = Recorded()
    for layouts in ("first", "first", "second"):
        assert seen.prepared.call(*tensors(), [torch.zeros(5)], *TEXTS, layouts) == ("site", 1)
    assert seen.made == [TEXTS] * 2
    seen.prepared.call(*tensors(), [torch.zeros(5)], *TEXTS)
    assert len(seen.made) == 3  # nobody knows that they are the same
    with config.patch(profile=True):
        seen.prepared.call(*tensors(), [torch.zeros(5)], *TEXTS, "first")
    assert len(seen.made) == 4


def test_times_within_kernels_are_another_call() -> None:
    seen = Recorded()
    seen.prepared.call(*tensors(), [], *TEXTS)
    with config.patch(profile=True):
        seen.prepared.call(*tensors(), [], *TEXTS)
    assert len(seen.made) == 2


@pytest.mark.parametrize("which", ["refuses", "is_missing"])
def test_the_implementation_runs_where_nothing_else_can(which: str) -> None:
    seen = Recorded()
    setattr(seen, which, True)
    for _ in range(2):
        assert seen.prepared.call(*tensors(), [torch.zeros(5)], *TEXTS) == ("site", 1)
    assert seen.ran == ["implementation"] * 2
    assert len(seen.made) == 1


def test_the_number_of_layouts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_KEPT", 4)
    seen = Recorded()
    for length in [*range(1, 7), 6, 1]:
        seen.prepared.call(torch.zeros(length), torch.zeros(1), [], *TEXTS)
    assert len(seen.made) == 7  # the fifth of six made room, so the first one is made again


def ready_of(monkeypatch: pytest.MonkeyPatch, call: Call) -> Any:
    """The function for the forward of a call, where the kernels' function gives back a tensor as they would."""
    out = torch.zeros(1, 4, 6, 8)
    monkeypatch.setattr("dash_inductor.kernels.registry.ready_forward", lambda *asked: lambda *args: (out, args[0]))
    monkeypatch.setattr(Plan, "parse", lambda text: text)
    return attention._ready_forward([torch.zeros(6, 4, 8)] * 3, [torch.zeros(2)] * 4, (str(call), "plan", "site"))


def test_results_of_packed_tokens_are_shaped_as_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = Mask(Band(), segments=Segments(Operand(0), Operand(0), VarlenLayout(Operand(1), Operand(2))))
    run = ready_of(monkeypatch, Call(mask, 0.1, ((0, 1, 2, 3),)))
    assert run(torch.zeros(6, 4, 8), None, None, [])[0].shape == (6, 4, 8)


def test_results_that_kernels_cannot_lay_out_are_copied_by_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ready_of(monkeypatch, Call(Mask(Band()), 0.1, ((0, 1, 2, 3),))) is not None
    assert ready_of(monkeypatch, Call(Mask(Band()), 0.1, ((0, 1, 3, 2),))) is None


def test_a_profile_names_the_site_of_a_call_that_only_the_implementation_can_run() -> None:
    """As programs that are not compiled call it on the CPU."""
    query = torch.randn(1, 2, 16, 16)
    tiles = Tiles(16, 32, 1, 1)
    texts = (
        str(Call(Mask(Band()), 0.1, ((0, 1, 2, 3),))),
        str(Plan("reference", "two_pass", "reference", tiles, tiles, forward_tiles=tiles)),
        "a site",
    )
    run = attention.PREPARED_FORWARD.of([query] * 3, (), texts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(query, query, query, ())
    assert [event.count for event in profile.key_averages() if event.key == "dash_inductor a site"] == [1]
