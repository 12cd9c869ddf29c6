"""A bias of scores that become a finite number: read apart from the mask if it is proved to stay above the number."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import SiteRecord, sites

from ..support.by_hand import HEADS, LENGTH, QKV, order
from ..support.graphs import assert_as_exact, capture, step, tensors

pytestmark = pytest.mark.usefixtures("deterministic")
Bias = Callable[[Tensor], Tensor]


def positions(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2], device=q.device)


def slopes(q: Tensor) -> Tensor:
    return torch.exp2(-8 / HEADS * torch.arange(1, HEADS + 1, device=q.device)).view(HEADS, 1, 1)


BIASES: dict[str, Bias] = {
    "of keys": lambda q: slopes(q) * (positions(q) - q.shape[2] + 1),
    "of distances": lambda q: -slopes(q) * (positions(q)[:, None] - positions(q)).abs(),
    "reciprocals": lambda q: 1.0 / (positions(q) + 1.0),
    "quotients": lambda q: positions(q)[:, None] / -(positions(q) + 4.0),
    "joined heads": lambda q: torch.cat([slopes(q)[::2], slopes(q)[1::2]]) * -positions(q),
    "a part of more": lambda q: (slopes(q) * -torch.arange(100, device=q.device))[..., 3 : 3 + q.shape[2]],
    "powers": lambda q: -(1.01 ** positions(q).float()),
    "exponentials": lambda q: torch.exp(-0.1 * positions(q)).minimum(torch.full((), 0.5, device=q.device)),
}


OF_KNOWN_LENGTHS = ("of keys", "quotients", "a part of more", "powers")
"""Biases that are proved to stay above the number for static lengths alone."""


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, fill: float, seen: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25 + bias.to(q.dtype)
    return scores.masked_fill(~seen, fill).softmax(-1) @ v


def only_record() -> SiteRecord:
    (record,) = sites()
    return record


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BIASES)
def test_biases_of_positions(name: str, dynamic: bool) -> None:
    draw = random.Random(name)
    group, dtype = draw.choice([1, 2]), draw.choice([torch.float32, torch.bfloat16])
    fill = draw.choice([torch.finfo(dtype).min, -1e9])
    window, head_dim = draw.choice([None, 9]), draw.choice([20, 16])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = order(q) if window is None else order(q) & ~order(q).tril(-window)
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        return attend(q, k, v, BIASES[name](q), fill, seen)

    shapes = [(2, HEADS // n, LENGTH, head_dim) for n in (1, group, group)]
    inputs = tensors(*shapes, dtype=dtype)
    with capture(LENGTH) as graphs:
        results = step(graphs.compile(function, dynamic=dynamic), inputs)
    record = only_record()
    if dynamic and name in OF_KNOWN_LENGTHS:
        assert record.reason not in (None, Reason.INTERNAL_ERROR), record.detail
        return
    assert record.status == "replaced", record.detail
    assert record.mask == ("causal" if window is None else f"band(0,{window - 1})") + " + bias"
    assert_as_exact(function, inputs, results)
    if name == "of keys":
        assert not graphs.planes, "the mask stands apart, and the bias has no queries"


LOWEST = torch.finfo(torch.float32).min


def hidden_rows(q: Tensor) -> Tensor:
    return order(q) & (positions(q)[:, None] > 4)


KEPT: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    # an input may be a mask itself, by which a query sees nothing but what is hidden
    "an input": (lambda q, k, v, bias: attend(q, k, v, bias, LOWEST, order(q)), ((LENGTH,),)),
    "near the number": (lambda q, k, v: attend(q, k, v, -positions(q) * 2e7, -1e9, order(q)), ()),
    "the number": (
        lambda q, k, v: attend(q, k, v, torch.where(positions(q) < 3, LOWEST, 0.0), LOWEST, order(q)), ()
    ),
    "rows that see nothing": (
        lambda q, k, v: attend(q, k, v, slopes(q) * -positions(q), LOWEST, hidden_rows(q)), ()
    ),
    "a sum behind the number": (
        lambda q, k, v: ((q @ k.mT).masked_fill(~order(q), LOWEST) + slopes(q) * -positions(q)).softmax(-1) @ v, ()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_not_proved_is_kept(name: str) -> None:
    function, more = KEPT[name]
    inputs = tensors(*QKV, *more)
    with capture() as graphs:
        results = step(graphs.compile(function), inputs)
    record = only_record()
    assert record.status == "fallback", record
    assert "finite" in record.detail
    assert_as_exact(function, inputs, results)


def test_zeros_are_no_bias() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, torch.zeros(LENGTH), LOWEST, order(q))

    with capture(LENGTH) as graphs:
        step(graphs.compile(function), tensors(*QKV))
    assert (only_record().status, only_record().mask) == ("replaced", "causal")
