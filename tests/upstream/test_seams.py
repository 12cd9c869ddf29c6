"""A seam puts a function of ours in the place of PyTorch's, which ours calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from dash_inductor import failures
from dash_inductor.config import config
from dash_inductor.doctor import machine
from dash_inductor.doctor.findings import Severity
from dash_inductor.upstream.seams import SEAMS, Seam

MODULE = "dash_test_module"


class Owner:
    """A class with the kinds of functions that seams are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def method(self) -> int:
        """The value."""
        return self.value

    @staticmethod
    def static(value: int) -> int:
        return value


class Derived(Owner):
    """Inherits all of them."""


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made: Any = ModuleType(MODULE)
    made.Owner = type("Owner", (), dict(vars(Owner)))
    made.Derived = type("Derived", (made.Owner,), {})
    made.function = lambda value: value
    made.table = [1]
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made  # type: ignore[no-any-return]  # a module with more attributes


def one_more(plain: Callable[..., int]) -> Callable[..., int]:
    return lambda *args: plain(*args) + 1


def test_a_function_of_a_module(module: Any) -> None:
    Seam(MODULE, "function", "a test").wrap(one_more)
    assert module.function(1) == 2
    Seam(MODULE, "function", "a test").wrap(one_more)
    assert module.function(1) == 3


def test_a_method_keeps_its_name(module: Any) -> None:
    Seam(MODULE, "Owner.method", "a test").wrap(one_more)
    assert module.Owner(1).method() == 2
    assert (module.Owner.method.__name__, module.Owner.method.__doc__) == ("method", "The value.")


def test_a_static_method_stays_one(module: Any) -> None:
    Seam(MODULE, "Derived.static", "a test").wrap(one_more)
    assert module.Derived.static(1) == module.Derived(0).static(1) == 2
    assert module.Owner.static(1) == 1


def test_a_constructor_is_probed_by_its_class(module: Any) -> None:
    def around(init: Callable[..., None]) -> Callable[..., None]:
        return lambda self, value: init(self, value + 1)

    seam = Seam(MODULE, "Owner.__init__", "a test")
    seam.wrap(around)
    assert module.Derived(1).value == 2
    assert seam.probed == (MODULE, "Owner", "a test")


def test_a_table() -> None:
    seam = Seam(MODULE, "table", "a test")
    seam.value().append(2)
    assert seam.value() == [1, 2]


@pytest.mark.parametrize("name", ["function", "Derived.static"])
def test_for_a_block(name: str, module: Any) -> None:
    seam = Seam(MODULE, name, "a test")
    with seam.wrapped(one_more):
        assert seam.value()(1) == 2
    assert seam.value()(1) == 1
    assert "static" not in vars(module.Derived)


def test_the_doctor_prints_them() -> None:
    _, (severity, text, _) = machine.hook()
    assert severity is Severity.OK
    assert text == f"takes part in PyTorch at {', '.join(seam.attribute for seam in SEAMS)}"


@pytest.mark.parametrize("when", ["before", "behind", "around"])
def test_an_error_of_ours_leaves_what_pytorch_gives(module: Any, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, told = [], []
    monkeypatch.setattr(failures, "recorders", [lambda what, error: told.append((what, error))])
    module.function = lambda value: calls.append(value) or value

    def around(plain: Callable[..., int]) -> Callable[..., int]:
        if when == "around":
            raise ZeroDivisionError("on purpose")

        def ours(value: int) -> int:
            if when == "behind":
                plain(value)
            raise ZeroDivisionError("on purpose")

        return ours

    Seam(MODULE, "function", "a test").wrap(around)
    assert module.function(3) == 3
    assert calls == [3]
    assert [(what, error.split(" at ")[0]) for what, error in told] == [("a test", "ZeroDivisionError: on purpose")]
    with config.patch(strict=True), pytest.raises(ZeroDivisionError):
        module.function(3)


def test_errors_of_pytorch_are_raised(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "recorders", [])

    def fail(value: int) -> int:
        raise KeyError(value)

    def around(plain: Callable[..., int]) -> Callable[..., int]:
        def ours(value: int) -> int:
            try:
                return plain(value)
            finally:
                raise ZeroDivisionError("on purpose")

        return ours

    module.function = fail
    Seam(MODULE, "function", "a test").wrap(around)
    with pytest.raises(KeyError):
        module.function(3)


def test_errors_that_are_meant(module: Any) -> None:
    def around(plain: Callable[..., int]) -> Callable[..., int]:
        def ours(value: int) -> int:
            raise ZeroDivisionError("meant")

        return ours

    Seam(MODULE, "function", "a test").wrap(around, let_through=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        module.function(3)
