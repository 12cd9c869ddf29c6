"""The two halves of mask recognition on their own: exact algebra against enumeration, windows against whole tensors."""

from __future__ import annotations

from itertools import product

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_inductor.masks import real_values
from dash_inductor.masks.index_expr import Algebra, Branch, Value
from dash_inductor.masks.real_values import RealValues

from ..support.mask_graphs import trace_mask
from .test_recognition import CAUSAL, packed_sequence_chain, symmetric, window, window_additive

coefficients = st.integers(-3, 3)
extents = st.integers(2, 5)


def at(value: Value, point: dict[sympy.Expr, int]) -> object:
    """A value at a position, as the tree says."""
    if isinstance(value, Branch):
        return at(value.then if value.cond.subs(point) >= 0 else value.other, point)
    return value if isinstance(value, bool) else value.subs(point)


@settings(max_examples=60)
@given(a=coefficients, b=coefficients, c=st.integers(-9, 9), n=extents, m=extents, strict=st.booleans())
def test_conditions_agree_with_enumeration(a, b, c, n, m, strict) -> None:
    algebra = Algebra(None)
    q, kv = algebra.index("q", sympy.Integer(n)), algebra.index("kv", sympy.Integer(m))
    expr = a * q + b * kv + c
    points = [{q: i, kv: j} for i, j in product(range(n), range(m))]
    values = [expr.subs(p) for p in points]
    assert (algebra.lower(expr), algebra.upper(expr)) == (min(values), max(values))
    truth = algebra.at_least_zero(expr, strict)
    assert [at(truth, p) for p in points] == [bool(v > 0 if strict else v >= 0) for v in values]
    assert isinstance(truth, bool) == (len({at(truth, p) for p in points}) == 1)
    zero = algebra.equal_zero(expr)
    assert [at(zero, p) for p in points] == [bool(v == 0) for v in values]


@settings(max_examples=60)
@given(a=st.integers(0, 6), b=coefficients, c=st.integers(0, 9), n=extents, m=extents, divisor=st.integers(1, 6))
def test_division_agrees_with_enumeration(a, b, c, n, m, divisor) -> None:
    algebra = Algebra(None)
    q, kv = algebra.index("q", sympy.Integer(n)), algebra.index("kv", sympy.Integer(m))
    quotient, remainder = algebra.floor_divide(a * q + divisor * b * kv + c, sympy.Integer(divisor))
    for i, j in product(range(n), range(m)):
        expected = divmod(a * i + divisor * b * j + c, divisor)
        assert (quotient.subs({q: i, kv: j}), remainder.subs({q: i, kv: j})) == expected


@settings(max_examples=40)
@given(
    conditions=st.lists(st.tuples(coefficients, coefficients, st.integers(-4, 4)), min_size=3, max_size=3),
    n=extents,
    m=extents,
)
def test_nested_choices_agree_with_enumeration(conditions, n, m) -> None:
    """Branches that vanish because both sides agree, or because an outer condition decides, change no value."""
    algebra = Algebra(None)
    q, kv = algebra.index("q", sympy.Integer(n)), algebra.index("kv", sympy.Integer(m))
    first, second, third = (algebra.at_least_zero(a * q + b * kv + c) for a, b, c in conditions)
    inner = algebra.choose(second, q - kv, algebra.choose(third, q, sympy.S.Zero))
    value = algebra.lift(lambda x, y: x + y, algebra.choose(first, inner, q), algebra.choose(third, kv, -q))
    for i, j in product(range(n), range(m)):
        one, two, three = (a * i + b * j + c >= 0 for a, b, c in conditions)
        inner_value = i - j if two else i if three else 0
        assert at(value, {q: i, kv: j}) == (inner_value if one else i) + (j if three else -i)


def packed_sequences(q, k):
    return packed_sequence_chain(q, k)


@pytest.mark.parametrize("decomposed", [True, False], ids=["decomposed", "plain"])
def test_windows_are_cut_from_the_whole(decomposed, monkeypatch) -> None:
    """With nothing small enough to be evaluated whole, the windows of every mask are what the whole mask has there."""
    for make in (*CAUSAL, window, window_additive, symmetric, packed_sequences):
        module = trace_mask(make, decomposed=decomposed)
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        whole = RealValues({}).whole(output.args[0])
        monkeypatch.setattr(real_values, "SMALL", 0)
        values = RealValues({})
        for rows, columns in (((0, 3), (0, 20)), ((7, 9), (0, 20)), ((17, 20), (4, 11))):
            outer = [(0, 1), (whole.shape[1] - 1, whole.shape[1])] if whole.dim() == 4 else []
            cut = (*outer[: whole.dim() - 2], rows, columns)
            expected = whole[tuple(slice(*r) for r in cut)]
            assert torch.equal(values.window(output.args[0], cut), expected), make.__name__
        monkeypatch.undo()
