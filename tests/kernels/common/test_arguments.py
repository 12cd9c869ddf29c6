"""Groups of arguments: names, types and values in one order, flat where a launch needs them."""

from __future__ import annotations

from collections import namedtuple

import pytest

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.common import arguments
from dash_inductor.kernels.common.arguments import Group

GROUP = Group({"visits": "*i32", "stride": "i64"} | arguments.integers("count"), {"visits": 1})


def test_a_group_has_one_order() -> None:
    signature = GROUP.signature()
    assert GROUP.names == signature._fields  # type: ignore[attr-defined]  # a named tuple
    assert tuple(signature) == ("*i32", "i64", "i32")
    assert GROUP.values(count=3, visits=1, stride=2) == (1, 2, 3)


def test_a_parameter_may_be_several_groups() -> None:
    """They are told apart by name, each may be absent, and arguments come in the order of the groups."""
    several = {"first": None, "second": GROUP}
    signature = arguments.signature(several)
    assert (signature.first, signature.second.count) == ("constexpr", "i32")
    assert arguments.groups((7,), several) == [((7, 0), None), ((7, 1), GROUP)]
    assert arguments.groups((7,), GROUP) == [((7,), GROUP)]
    assert [*arguments.flat([signature])] == ["constexpr", "*i32", "i64", "i32"]


@pytest.mark.parametrize("values", [{"visits": 1}, {"visits": 1, "stride": 2, "count": 3, "more": 4}])
def test_other_names_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="values"):
        GROUP.values(**values)


def test_constants_are_no_arguments_of_a_launch() -> None:
    form = namedtuple("Form", ("BLOCK", "STAGES"))(64, 2)  # type: ignore[call-arg]
    assert arguments.constants(form) == ("constexpr", "constexpr")
    assert [*arguments.flat(["fp32", GROUP.signature(), "constexpr"])] == ["fp32", "*i32", "i64", "i32", "constexpr"]
