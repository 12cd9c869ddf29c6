"""Reports of racecheck, as the test of the Hopper kernel reads them."""

from __future__ import annotations

import inspect

import pytest

from dash_inductor.kernels.hopper.shared.device import told

from ..support.racecheck import races

SUMMARY = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"


def line_of(function: str) -> int:
    """The last line of a function of `told`."""
    lines, first = inspect.getsourcelines(getattr(told, function).fn)
    return first + len(lines) - 1


def reported(first: str, *others: str) -> list[str]:
    lines = [f"========= Error: Race reported between Write access at hopper_backward+0xf80 in {first}"]
    lines += [f"=========     and Read access at hopper_backward+0x2040 in {other} [12 hazards]" for other in others]
    return [*lines, "========= "]


def test_functions_of_accesses() -> None:
    tell, read = (f"told.py:{line_of(name)}" for name in ("tell", "told"))
    pair = frozenset({"told.py tell", "told.py told"})
    assert races([*reported(tell, read, read), *reported(read, tell), "done", SUMMARY]) == {pair}
    assert races([*reported(tell, tell), SUMMARY]) == {frozenset({"told.py tell"})}
    assert races([*reported(tell, "core.py:7"), SUMMARY]) == {frozenset({"told.py tell", "core.py 7"})}


def test_no_races() -> None:
    assert races(["tma 0x7f 0x8f", "done", SUMMARY]) == set()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["done"], "RACECHECK SUMMARY"),
        ([*reported("told.py:40"), SUMMARY], "should come before it"),
        ([*reported("told.py:40"), *reported("told.py:40", "told.py:40"), SUMMARY], "should come before it"),
        (["========= Error: Race reported between accesses", SUMMARY], "name an access"),
        (["=========     and Read access at f+0x20 in told.py:40 [12 hazards]", SUMMARY], "follows one"),
    ],
)
def test_other_forms_are_refused(lines: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        races(lines)
