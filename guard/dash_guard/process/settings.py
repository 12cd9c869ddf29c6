"""Settings of a guard: arguments of `guard`, or a text such as ``same_rank_recompute=10,on_confirmed=raise``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

from dash_inductor import arguments as _arguments
from dash_inductor.errors import ArgumentError

OnConfirmed = Literal["warn", "raise"]

VARIABLE = "DASH_GUARD_SETTINGS"
"""The environment variable with the settings of a program that does not give them itself."""

DEFAULTS = {"every": 1, "at_rest": 1, "cross_rank_recompute": 100, "same_rank_recompute": 0, "collectives": 1}
"""The defaults of the numeric settings, see `guard.guard`."""

_ON_CONFIRMED = ("warn", "raise")


def check(numbers: Mapping[str, object], on_confirmed: object) -> None:
    """Check that settings of a guard have allowed values.

    Raises:
        ArgumentError: the value of a setting is not allowed.
    """
    for name, value in numbers.items():
        _arguments.whole(name, value, int(name == "every"), 100 if name == "same_rank_recompute" else 1 << 31)
    if on_confirmed not in _ON_CONFIRMED:
        raise ArgumentError("on_confirmed", on_confirmed, _ON_CONFIRMED)


def parse(text: str, name: str = VARIABLE) -> tuple[dict[str, int], OnConfirmed]:
    """Parse a text of settings, ``NAME=VALUE`` separated by commas; settings that it does not name get their defaults.

    Args:
        text: the settings.
        name: what gives them, for errors.

    Returns:
        The numeric settings, and `on_confirmed`.

    Raises:
        ArgumentError: a setting that does not exist, or whose value is not allowed.
    """
    given: dict[str, object] = {**DEFAULTS, "on_confirmed": "warn"}
    typed: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        setting, _, value = part.partition("=")
        if setting not in given:
            raise ArgumentError(name, part, f"NAME=VALUE of {', '.join(given)}, separated by commas")
        typed[setting] = part
        given[setting] = int(value) if value.isdecimal() and len(value) < 12 else value
    on_confirmed = given.pop("on_confirmed")
    try:
        check(given, on_confirmed)
    except ArgumentError as error:
        raise ArgumentError(name, typed[error.name], error.allowed) from error
    return cast("dict[str, int]", given), cast("OnConfirmed", on_confirmed)
