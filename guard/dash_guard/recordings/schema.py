"""Checks completely what a JSON frame of a recording may contain: fields, types, ranges and counts.

The types of frames and their fields:

environment  rank, world_size, every; versions, gpu, cpu, settings, environment   the first frame, and only that
facts        numerics_keys
names        names: phase, tensor and description of each
state        step, values: by name                          those that have changed since the state before
loss         step, value                                    a part of the loss of a step; see `losses`
unseen       name, reason
finding      step, phase, tensor, groups, minority, differing                     see `agreement.find`
end                                                                               the last frame
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dash_inductor.observers import phases
from dash_inductor.untrusted import Refused, parse_json, shortened

from .limits import FACT, FACTS, NAMES, RANKS, STEPS, TEXT, VALUES

Check = Callable[[str, Any], None]
"""Raises `Refused` if the field with this name may not have this value."""


def read(content: bytes) -> dict[str, Any]:
    """Parse and check a JSON frame; returns its object, including its "type".

    Raises:
        Refused: the content is none of the frames listed above.
    """
    found = parse_json(content, VALUES)
    if not isinstance(found, dict):
        raise Refused(f"{shortened(found)}, which is no object")
    kind = found.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise Refused(f"a frame of type {shortened(kind)}")
    needed, possible = _KINDS[kind]
    for name, check in needed.items():
        if name not in found:
            raise Refused(f"a frame of type {kind!r} without {name}")
        check(name, found[name])
    for name in found.keys() - needed.keys() - {"type"}:
        if name not in possible:
            raise Refused(f"a frame of type {kind!r} with {shortened(name)}")
        possible[name](name, found[name])
    if kind == "environment" and found["rank"] >= found["world_size"]:
        raise Refused(f"rank {found['rank']} of {found['world_size']} ranks")
    if kind == "finding":
        _agree(found["groups"], found["minority"])
    return found


def _whole(least: int, most: int) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not int or not least <= value <= most:
            raise Refused(f"{name}={shortened(value)}, where an integer from {least} to {most} is allowed")

    return check


def _text(length: int) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, str):
            raise Refused(f"{name}={shortened(value)}, where a text is allowed")
        if len(value) > length:
            raise Refused(f"{name}={shortened(value)} of {len(value)} characters, where {length} are allowed")

    return check


def _list(each: Check, least: int, most: int) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, list):
            raise Refused(f"{name}={shortened(value)}, where a list is allowed")
        if not least <= len(value) <= most:
            raise Refused(f"{name} of {len(value)} elements, where {least} to {most} are allowed")
        for element in value:
            each(f"an element of {name}", element)

    return check


def _phase(name: str, value: Any) -> None:
    if not isinstance(value, str) or value not in phases.STAGES:
        raise Refused(f"{name}={shortened(value)}, where one of {', '.join(phases.STAGES)} is allowed")


def _name(name: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) != 3:
        raise Refused(f"{name}={shortened(value)}, where phase, tensor and description are allowed")
    phase, tensor, description = value
    _phase("phase", phase)
    _LABEL("tensor", tensor)
    _LABEL("description", description)


def _scalars(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise Refused(f"{name}={shortened(value)}, where an object is allowed")
    if len(value) > FACTS:
        raise Refused(f"{name} of {len(value)} facts, where {FACTS} are allowed")
    for key, fact in value.items():
        _LABEL(f"a name in {name}", key)
        if isinstance(fact, str):
            _text(FACT)(shortened(key), fact)
        elif isinstance(fact, (dict, list)):
            raise Refused(f"{shortened(key)}={shortened(fact)}, where a text, a number, true, false or null is allowed")


def _number(name: str, value: Any) -> None:
    if type(value) not in (int, float) and value not in ("nan", "inf", "-inf"):
        raise Refused(f"{name}={shortened(value)}, where a number, 'nan', 'inf' or '-inf' is allowed")


def _agree(groups: list[list[int]], minority: list[int]) -> None:
    """Check that groups of ranks are disjoint, and that a minority is outside of the first of them."""
    ranks = [rank for group in groups for rank in group]
    if len(set(ranks)) != len(ranks):
        raise Refused(f"groups={shortened(groups)}, where each rank is allowed once")
    if minority and sorted(minority) != sorted(ranks[len(groups[0]) :]):
        raise Refused(
            f"minority={shortened(minority)}, where the ranks outside of the first group are allowed, or none"
        )


_LABEL = _text(TEXT)
_STEP = _whole(1, STEPS)
_RANK = _whole(0, RANKS - 1)
_KINDS: Mapping[str, tuple[Mapping[str, Check], Mapping[str, Check]]] = {
    "environment": (
        {"rank": _RANK, "world_size": _whole(1, RANKS), "every": _STEP},
        dict.fromkeys(("versions", "gpu", "cpu", "settings", "environment"), _scalars),
    ),
    "facts": ({"numerics_keys": _list(_text(FACT), 0, FACTS)}, {}),
    "names": ({"names": _list(_name, 1, NAMES)}, {}),
    "state": ({"step": _STEP, "values": _scalars}, {}),
    "loss": ({"step": _STEP, "value": _number}, {}),
    "unseen": ({"name": _text(2 * TEXT), "reason": _LABEL}, {}),
    "finding": (
        {
            "step": _STEP,
            "phase": _phase,
            "tensor": _LABEL,
            "groups": _list(_list(_RANK, 1, RANKS), 2, RANKS),
            "minority": _list(_RANK, 0, RANKS),
            "differing": _whole(1, 2 * NAMES),
        },
        {},
    ),
    "end": ({}, {}),
}
"""The fields that a frame must have and those that it can have, by its type."""
