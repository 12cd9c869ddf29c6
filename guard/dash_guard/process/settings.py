"""Settings of a guard: a program gives arguments, everybody else a text such as ``replay=10,on_verdict=raise``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

from dash_inductor import arguments as _arguments
from dash_inductor.errors import ArgumentError

OnVerdict = Literal["warn", "raise"]

VARIABLE = "DASH_GUARD_SETTINGS"
"""Has settings of a program that does not give them itself."""

DEFAULTS = {"every": 1, "rest": 1, "roll_call": 100, "replay": 0, "doors": 1}
"""Numbers, see `guard.guard`."""

_ON_VERDICT = ("warn", "raise")


def check(numbers: Mapping[str, object], on_verdict: object) -> None:
    """
    Raises:
        ArgumentError: a setting that is not allowed.
    """
    for name, value in numbers.items():
        _arguments.whole(name, value, int(name == "every"), 100 if name == "replay" else 1 << 31)
    if on_verdict not in _ON_VERDICT:
        raise ArgumentError("on_verdict", on_verdict, _ON_VERDICT)


def parse(text: str) -> tuple[dict[str, int], OnVerdict]:
    """Numbers, and what a verdict does; what the text does not name has its default.

    Raises:
        ArgumentError: a setting that there is not, or that is not allowed.
    """
    given: dict[str, object] = {**DEFAULTS, "on_verdict": "warn"}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in given:
            raise ArgumentError(VARIABLE, part, f"NAME=VALUE of {', '.join(given)}, parted by commas")
        given[name] = int(value) if value.isdecimal() and len(value) < 12 else value
    on_verdict = given.pop("on_verdict")
    check(given, on_verdict)
    return cast("dict[str, int]", given), cast("OnVerdict", on_verdict)
