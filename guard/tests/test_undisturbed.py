"""What a program trains is the same under all checks of the guard: bits, gradients as objects, versions and errors."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from dash_guard.recompute.saved_state import SavedState

from .support import undisturbed
from .support.undisturbed import KINDS

QUICK = (
    "modules that write parameters", "modules that write data of parameters", "modules that write: global",
    "modules that write: object", "modules that write: file", "modules that write: numpy array",
    "modules that write: iterator", "compiled modules that write: global",
    "ddp views kept", "ddp static", "unused parameters", "sums of gradients of ddp", "modules with state of their own",
    "copies of the model", "two models", "uneven inputs", "recomputes with unused parameters in views",
)  # fmt: skip
CONTROLS = {"gradient": "seen", "random": "random", "version": "versions"}
NOT_RUN_AGAIN = (
    "uneven inputs", "reentrant checkpoints of a static graph", "optimizers in the backward",
    "modules that write parameters", "modules that write parameters in ddp", "modules that write: file",
    "modules that write: open file", "modules that write: iterator",
    "modules that write: numpy generator",
    "recomputes of reentrant checkpoints",
)  # fmt: skip
"""Kinds of which nothing is run again, for a reason that the coverage has."""

GATHERED = "FSDP2 has gathered parameters, as between a forward and its backward"
QUICK_CONTROL = "gradient"
DDP = "ddp views kept"
MATRIX = [name for name in KINDS if name.split()[0] in ("ddp", "replicate", "unused", "recomputes")]
OWN = [name for name in KINDS if name.startswith("recomputes")]
"""Programs that run cross-rank recomputes of their own: four in each step, of which the first finds no model."""
TRACES = (
    "recomputes of ddp",
    "recomputes of ddp views static",
    "recomputes with unused parameters",
)


def test_a_tensor_that_is_too_large_to_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = undisturbed.modules.Writes("global tensor")
    assert SavedState(model).why_not_again() == ""
    monkeypatch.setattr("dash_guard.recompute.saved_state._BYTES", 3)
    assert "the tensor COUNTER, which is too large" in SavedState(model).why_not_again()


@pytest.mark.parametrize("value", [numpy.zeros(9), bytearray(72), array.array("d", [0.0] * 9)])
def test_an_array_that_is_too_large_to_copy_is_refused(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a container or an attribute of a module has it."""
    model = torch.nn.Linear(2, 2)
    model.__class__ = type("Linear", (torch.nn.Linear,), {"__module__": "program"})
    model.table = [value]
    assert SavedState(model).why_not_again() == ""
    monkeypatch.setattr("dash_guard.recompute.saved_state._BYTES", 71)
    assert f"a {type(value).__name__} that is too large" in SavedState(model).why_not_again()


def marked(names: Any, quick: Any) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.full) for name in names]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """All kinds that are wanted, of one set of three processes: with another number DDP rounds as it divides."""
    items: Any = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]

    def wanted(test: Callable[..., None], name: str) -> list[str]:
        return [item.callspec.params[name] for item in items if item.originalname == test.__name__]

    names = wanted(test_a_training_is_the_same_with_the_guard, "name")
    names += [f"{DDP}/{control}" for control in wanted(test_a_check_that_leaves_something_behind_is_seen, "control")]
    traces = wanted(test_a_backward_of_a_function_that_reaches_ddp_is_seen, "name")
    names += [f"{name}/{undisturbed.TRACES}" for name in traces]
    return undisturbed.run(names, tmp_path_factory.mktemp("undisturbed"), world=3, seconds=900)


def undisturbed_in(rows: list[Any], name: str) -> None:
    for rank, row in enumerate(rows):
        assert row["differ"] == [], f"{name}, rank {rank}: step, what, without and with the guard"
        assert row["errors"] == [], f"{name} does not even train without a guard"
        assert "switched off in step" not in str(row["coverage"]), row["coverage"]
        again = row["coverage"]["cross_rank_recompute"]
        assert bool(again["counts"].get("calls")) == (name not in NOT_RUN_AGAIN), again
        assert again["counts"].get("calls") or again["unseen"]
        if name in OWN and name not in NOT_RUN_AGAIN:
            assert again["unseen"].pop("no model has run yet") == 1
            gathered = again["unseen"].pop(GATHERED, 0)
            assert gathered == ("fsdp" in name) * undisturbed.STEPS
            assert (again["counts"]["calls"], again["unseen"]) == (5 * undisturbed.STEPS - 1 - gathered, {})


@pytest.mark.parametrize("name", marked(KINDS, QUICK))
def test_a_training_is_the_same_with_the_guard(results: dict[str, list[Any]], name: str) -> None:
    undisturbed_in(results[name], name)


@pytest.mark.parametrize("control", marked(CONTROLS, (QUICK_CONTROL,)))
def test_a_check_that_leaves_something_behind_is_seen(results: dict[str, list[Any]], control: str) -> None:
    for row in results[f"{DDP}/{control}"]:
        assert CONTROLS[control] in {what for _, what, *_ in row["differ"]}


@pytest.mark.full
@pytest.mark.parametrize("name", TRACES)
def test_a_backward_of_a_function_that_reaches_ddp_is_seen(results: dict[str, list[Any]], name: str) -> None:
    assert all(row["differ"] for row in results[f"{name}/{undisturbed.TRACES}"])


@pytest.mark.full
def test_ddp_of_two_ranks_is_the_same_with_the_guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, rows in undisturbed.run(MATRIX, tmp_path_factory.mktemp("pair"), world=2, seconds=600).items():
        undisturbed_in(rows, name)
