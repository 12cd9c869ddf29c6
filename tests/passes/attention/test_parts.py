"""The small parts of matching: arguments by name, layouts, intersections of masks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_inductor.frontends import sdpa, varlen
from dash_inductor.frontends.all import attentions
from dash_inductor.frontends.attention import NotReadable
from dash_inductor.graph import nodes, sizes
from dash_inductor.model.mask import Band
from dash_inductor.passes.attention.reading import intersect

from ...support.graphs import efficient, joint_graph

aten = torch.ops.aten


def overload(name: str) -> torch._ops.OpOverload:
    namespace, _, short = name.partition("::")
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), short).default
    return operator


def test_arguments_are_bound_by_name() -> None:
    for pair in (*sdpa.PAIRS, *varlen.PAIRS):
        backward, forward = (
            {argument.name for argument in overload(name)._schema.arguments} for name in (pair.backward, pair.forward)
        )
        shared = ["query", "key", "value", "is_causal", "scale"]
        shared += ["cu_seq_q", "cu_seq_k"] if pair in varlen.PAIRS else ["dropout_p"]
        own = {pair.renamed.get(name, name) for name in shared} | ({pair.mask} if pair.mask else set())
        assert own <= forward
        of_backward = ("out", "logsumexp", pair.grad_out, *pair.random_state)
        assert own | {pair.renamed.get(name, name) for name in of_backward} <= backward
    (found,) = attentions(joint_graph(efficient).graph)
    bound = nodes.bind(found.node)
    assert (bound["attn_bias"], bound["scale"], bound["grad_input_mask"]) == (None, None, [True, True, True, False])


@given(st.permutations(range(4)), st.tuples(*[st.integers(1, 4)] * 4))
def test_order_of_a_dense_tensor_reproduces_its_strides(order: list[int], size: tuple[int, ...]) -> None:
    tensor = torch.empty_permuted(size, order)
    found = sizes.dense_order(tensor.shape, tensor.stride())
    assert found is not None
    assert torch.empty_permuted(size, found).stride() == tensor.stride()


@pytest.mark.parametrize("stride", [(0, 12, 4, 1), (48, 12, 4, 2), (24, 12, 4, 4), (96, 24, 4, 1)])
def test_tensors_that_are_not_dense_have_no_order(stride: tuple[int, ...]) -> None:
    assert sizes.dense_order((2, 4, 3, 4), stride) is None


def test_dimension_of_size_one_may_have_any_stride() -> None:
    assert sizes.dense_order((1, 4, 3, 4), (999, 12, 4, 1)) is not None


bound = st.none() | st.integers(-6, 6)
bands = st.builds(
    lambda lo, hi, anchor: Band(*((lo, hi) if None in (lo, hi) or lo <= hi else (hi, lo)), anchor),
    bound,
    bound,
    st.sampled_from(["top_left", "bottom_right"]),
)


@given(bands, bands, st.integers(1, 5), st.integers(1, 5))
def test_intersection_shows_what_both_show(a: Band, b: Band, q_len: int, kv_len: int) -> None:
    cells = list(itertools.product(range(q_len), range(kv_len)))
    both = [cell for cell in cells if a.visible(*cell, q_len, kv_len) and b.visible(*cell, q_len, kv_len)]
    try:
        band = intersect([a, b], q_len, kv_len)
    except NotReadable:
        band = None
    assert [cell for cell in cells if band is not None and band.visible(*cell, q_len, kv_len)] == both


def test_intersection_with_dynamic_lengths() -> None:
    assert intersect([Band(0, None), Band(None, 7)], None, None) == Band(0, 7)
    assert intersect([Band(), Band(0, None, "bottom_right")], None, None) == Band(0, None, "bottom_right")
    with pytest.raises(NotReadable):
        intersect([Band(0, None), Band(None, 7, "bottom_right")], None, None)
