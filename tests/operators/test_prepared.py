"""Calls that are prepared once for tensors of the same layouts: what tells layouts apart, and who runs when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.config import config
from dash_inductor.eager import planned
from dash_inductor.kernels.common.layouts import in_orders
from dash_inductor.model import AttentionSpec, Band, Mask, Plan, Site, Tiles
from dash_inductor.model.components import Operand, Segments, VarlenLayout
from dash_inductor.operators import prepared
from dash_inductor.operators.prepared import Texts

TEXTS = "spec", "plan", "site"


class Recorded:
    """What prepares calls, and notes what it is asked."""

    def __init__(self) -> None:
        self.made: list[Texts] = []
        self.call = prepared.prepared(self.make, 2)

    def make(self, tensors: Sequence[Tensor], extras: Sequence[Tensor], texts: Texts) -> Any:
        self.made.append(texts)
        return lambda args: (texts[2], len(args[2]))


def tensors() -> list[Any]:
    return [torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)]


def test_a_layout_is_prepared_once() -> None:
    seen = Recorded()
    for _ in range(3):
        assert seen.call(*tensors(), [torch.zeros(5)], *TEXTS) == ("site", 1)
    assert seen.made == [TEXTS]


def _with(place: int, tensor: Tensor) -> Callable[[list[Any]], None]:
    return lambda args: args.__setitem__(place, tensor)


OTHERS: dict[str, Callable[[list[Any]], None]] = {
    "spec": lambda args: args.__setitem__(3, "another"),
    "plan": lambda args: args.__setitem__(4, "another"),
    "site": lambda args: args.__setitem__(5, "another"),
    "shape": _with(1, torch.zeros(2, 3, 5)),
    "strides": _with(0, torch.zeros(2, 4, 3).mT),
    "strides of the second": _with(1, torch.zeros(2, 4, 3).mT),
    "dtype": _with(0, torch.zeros(2, 3, 4, dtype=torch.float16)),
    "dtype of the second": _with(1, torch.zeros(2, 3, 4, dtype=torch.float16)),
    "device": _with(0, torch.zeros(2, 3, 4, device="meta")),
    "device of the second": _with(1, torch.zeros(2, 3, 4, device="meta")),
    "device of an extra": lambda args: args.__setitem__(2, [torch.zeros(5, device="meta")]),
    "no extras": lambda args: args.__setitem__(2, []),
    "shape of an extra": lambda args: args.__setitem__(2, [torch.zeros(6)]),
    "dtype of an extra": lambda args: args.__setitem__(2, [torch.zeros(5, dtype=torch.int32)]),
    "strides of an extra": lambda args: args.__setitem__(2, [torch.zeros(1).expand(5)]),
}


@pytest.mark.parametrize("change", OTHERS)
def test_what_tells_calls_apart(change: str) -> None:
    seen = Recorded()
    args = [*tensors(), [torch.zeros(5)], *TEXTS]
    seen.call(*args)
    OTHERS[change](args)
    assert seen.call(*args) == (args[5], len(args[2]))
    assert len(seen.made) == 2


def test_layouts_that_are_told_are_not_asked() -> None:
    seen = Recorded()
    for layouts in ("first", "first", "second"):
        assert seen.call(*tensors(), [torch.zeros(5)], *TEXTS, layouts) == ("site", 1)
    assert seen.made == [TEXTS] * 2
    seen.call(*tensors(), [torch.zeros(5)], *TEXTS)
    assert len(seen.made) == 3  # nobody knows that they are the same
    with config.patch(profile=True):
        seen.call(*tensors(), [torch.zeros(5)], *TEXTS, "first")
    assert len(seen.made) == 4


def test_times_within_kernels_are_another_call() -> None:
    seen = Recorded()
    seen.call(*tensors(), [], *TEXTS)
    with config.patch(profile=True):
        seen.call(*tensors(), [], *TEXTS)
    assert len(seen.made) == 2


def test_the_number_of_layouts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_KEPT", 4)
    seen = Recorded()
    for length in [*range(1, 7), 6, 1]:
        seen.call(torch.zeros(length), torch.zeros(1), [], *TEXTS)
    assert len(seen.made) == 7  # the fifth of six made room, so the first one is made again


def layouts_of(spec: AttentionSpec, out: Tensor) -> tuple[Tensor, ...]:
    """The results of a `Run` of a forward that returns this output."""
    results: tuple[Tensor, ...] = in_orders(lambda args: (out, torch.zeros(1)), spec)(())
    return results


def test_results_have_the_orders_of_the_call() -> None:
    """They are copied only if they are laid out otherwise; packed ones have the shapes of tokens."""
    out = torch.randn(2, 4, 6, 8)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)):
        found, _ = layouts_of(AttentionSpec(Mask(Band()), 0.1, (order,)), out)
        assert torch.equal(found, out)
        assert found.permute(order).is_contiguous()
        assert (found is out) == (order == (0, 1, 2, 3))
    mask = Mask(Band(), segments=Segments(Operand(0), Operand(0), VarlenLayout(Operand(1), Operand(2))))
    found, _ = layouts_of(AttentionSpec(mask, 0.1, ((0, 1, 2, 3),)), tokens := torch.randn(6, 4, 8))
    assert torch.equal(found, tokens)
    assert found.transpose(0, 1).is_contiguous()


def test_a_profile_names_the_site_of_a_call_that_is_not_compiled() -> None:
    query = torch.randn(1, 2, 16, 16)
    tiles = Tiles(16, 32, 1, 1)
    spec = AttentionSpec(Mask(Band()), 0.1)
    plan = Plan("reference", "two_pass", "reference", tiles, tiles, forward_tiles=tiles)
    site = Site("cpu", "float32", 1, 2, 2, 16, 16, 16, 16, spec)
    run = planned.forward_of(planned.Planned(site, plan, "cpu"), (query, query, query), "a site")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(query, query, query)
    assert [event.count for event in profile.key_averages() if event.key == "dash_inductor a site"] == [1]
