"""Reports of racecheck, as the test of the Hopper kernel reads them."""

from __future__ import annotations

import inspect

import pytest

from dash_inductor.kernels.hopper.shared.device import packed_tiles

from ..support.racecheck import races

SUMMARY = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"


def line_of(function: str) -> int:
    """The last line of a function of `packed_tiles`."""
    lines, first = inspect.getsourcelines(getattr(packed_tiles, function).fn)
    return first + len(lines) - 1


def reported(first: str, *others: str) -> list[str]:
    lines = [f"========= Error: Race reported between Write access at hopper_backward+0xf80 in {first}"]
    lines += [f"=========     and Read access at hopper_backward+0x2040 in {other} [12 hazards]" for other in others]
    return [*lines, "========= "]


def test_functions_of_accesses() -> None:
    put, read = (f"packed_tiles.py:{line_of(name)}" for name in ("put_int32", "read_int32"))
    pair = frozenset({"packed_tiles.py put_int32", "packed_tiles.py read_int32"})
    assert races([*reported(put, read, read), *reported(read, put), "done", SUMMARY]) == {pair}
    assert races([*reported(put, put), SUMMARY]) == {frozenset({"packed_tiles.py put_int32"})}
    assert races([*reported(put, "core.py:7"), SUMMARY]) == {frozenset({"packed_tiles.py put_int32", "core.py 7"})}


def test_no_races() -> None:
    assert races(["tma 0x7f 0x8f", "done", SUMMARY]) == set()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["done"], "RACECHECK SUMMARY"),
        ([*reported("packed_tiles.py:40"), SUMMARY], "should come before it"),
        (
            [*reported("packed_tiles.py:40"), *reported("packed_tiles.py:40", "packed_tiles.py:40"), SUMMARY],
            "should come before it",
        ),
        (["========= Error: Race reported between accesses", SUMMARY], "name an access"),
        (["=========     and Read access at f+0x20 in packed_tiles.py:40 [12 hazards]", SUMMARY], "follows one"),
    ],
)
def test_other_forms_are_refused(lines: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        races(lines)
