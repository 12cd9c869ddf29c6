"""The demo's training: its data, its comparison of runs, and that the comparison sees a single bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from examples import training
from examples.training import Run, batch_of, build_model, differences, digest, read_tokens

TINY = replace(training.CPU, hidden=32, heads=2, kv_heads=1, layers=1, length=32, batch=1, steps=2)


def run() -> Run:
    generator = torch.Generator().manual_seed(0)
    losses = [torch.tensor(value) for value in (5.5, 0.0)]
    parameters = {name: torch.randn(3, 5, generator=generator).to(torch.bfloat16) for name in ("embedding", "head")}
    return Run(losses, parameters)


def flip_lowest_bit(value: Tensor) -> Tensor:
    flipped = value.clone()
    flipped.view(torch.int16).view(-1)[7] ^= 1
    return flipped


def test_text_is_plain_and_long_enough_for_the_largest_model() -> None:
    tokens = read_tokens()
    assert tokens.max() < 128
    assert tokens.numel() > 4 * training.GPU.length


def test_batches_follow_the_step_alone() -> None:
    tokens = read_tokens()
    first = batch_of(tokens, TINY, 1)
    torch.rand(1)  # the global generator does not matter
    assert first.shape == (TINY.batch, TINY.length)
    assert torch.equal(first, batch_of(tokens, TINY, 1))
    assert not torch.equal(first, batch_of(tokens, TINY, 2))


def test_models_start_equal() -> None:
    first, second = build_model(TINY), build_model(TINY)
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


def test_equal_runs() -> None:
    assert differences(run(), run()) == []
    assert digest(run()) == digest(run())


def one_parameter(other: Run) -> None:
    other.parameters["head"] = flip_lowest_bit(other.parameters["head"])


def one_loss(other: Run) -> None:
    other.losses[0] = torch.nextafter(other.losses[0], torch.tensor(6.0))


def sign_of_zero(other: Run) -> None:
    other.losses[1] = torch.tensor(-0.0)


def a_step_less(other: Run) -> None:
    other.losses.pop()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (one_parameter, "head"),
        (one_loss, "loss of step 1"),
        (sign_of_zero, "loss of step 2"),
        (a_step_less, "number of losses or names of parameters"),
    ],
)
def test_one_bit_is_seen(change: Callable[[Run], None], named: str) -> None:
    other = run()
    change(other)
    assert differences(run(), other) == [named]
    assert digest(run()) != digest(other)


def test_nan_proves_nothing() -> None:
    diverged = run()
    diverged.losses[0] = torch.tensor(float("nan"))
    assert differences(diverged, diverged) == ["loss of step 1"]
