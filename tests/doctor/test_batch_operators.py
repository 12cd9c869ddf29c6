"""What operators depend on besides a row: the tables, what PyTorch says of its operators, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from dash_inductor.doctor import batch_operators as tables
from dash_inductor.doctor.batch_operators import Depends, depends
from dash_inductor.upstream.dispatch import OpOverload

aten, prims, dash = torch.ops.aten, torch.ops.prims, torch.ops.dash_inductor
ROWS, COLUMNS = 5, 64  # no vector of a CPU's kernel has elements of two rows
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def overloads(*namespaces: str) -> Iterator[OpOverload]:
    """All operators of these namespaces that Python can call."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        found = getattr(getattr(torch.ops, namespace), packet, None) if namespace in namespaces else None
        if found is not None and (overload or "default") in found.overloads():
            yield getattr(found, overload or "default")


OPERATORS = [*overloads("aten", "prims")]
POINTWISE = [operator for operator in OPERATORS if torch.Tag.pointwise in operator.tags]
TABLES = (
    tables.PRODUCTS, tables.SUMS, tables.CHOICES, tables.COMPARISONS, tables.OF_ROWS, tables.OVER_ROWS,
    tables.ACCUMULATING, tables.RANDOM, tables.COPIES, tables.FIXED,
)  # fmt: skip


def called(operator: OpOverload, args: Iterable[Any], kwargs: dict[str, Any], result: Tensor) -> Node:
    """A node that calls an operator; tensors among the arguments become inputs with these values."""
    graph = Graph()

    def node(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = graph.placeholder("x")
        made.meta["val"] = value
        return made

    found = graph.call_function(operator, tuple(map(node, args)), {name: node(value) for name, value in kwargs.items()})
    found.meta["val"] = result
    return found


def plainly(operator: OpOverload) -> Node:
    """A call of an operator on square matrices, with numbers for what has no default value."""
    given = [one for one in operator._schema.arguments if not one.has_default_value()]
    square = torch.zeros(4, 4)
    values = {one.name: square if str(one.type) == "Tensor" else [1] if "[]" in str(one.type) else 1 for one in given}
    kwargs = {one.name: values.pop(one.name) for one in given if one.kwarg_only}
    return called(operator, values.values(), kwargs, square)


# What PyTorch says of its operators.


def test_every_name_exists_and_is_in_one_table() -> None:
    names = [name for table in TABLES for name in table]
    assert len(names) == len(set(names))
    existing = {operator._schema.name.partition("::")[2].removesuffix("_") for operator in OPERATORS}
    absent = {*names} - existing
    assert {name for name in absent if not hasattr(dash, name)} <= NEWER


NEWER = {"_scaled_mm_v2", "_scaled_grouped_mm_v2", "fma", "inductor_rand_eager_offset", "inductor_rand_eager_offsets"}
"""Operators that the oldest supported versions of PyTorch do not have."""


def test_tags() -> None:
    """What PyTorch says is elementwise or a view is batch invariant, and what draws random numbers is not."""
    for operator in OPERATORS:
        name, found = operator._schema.name.partition("::")[2].removesuffix("_"), depends(plainly(operator))
        if found is None:
            assert not any("Tensor" in str(result.type) for result in operator._schema.returns), operator
        elif torch.Tag.nondeterministic_seeded in operator.tags:
            assert found is (Depends.NOTHING if name in tables.COPIES else found), operator
            assert found in (Depends.RANDOM, Depends.ATTENTION, Depends.NOTHING), operator
        elif name == "equal":  # which compares whole tensors
            assert found is Depends.BATCH
        elif torch.Tag.pointwise in operator.tags or operator.is_view:
            assert found is Depends.NOTHING, operator


def test_core_operators_are_known() -> None:
    """Of the operators to which PyTorch decomposes all others, those that are not known."""
    core = [operator for operator in OPERATORS if torch.Tag.core in operator.tags]
    unknown = {
        operator._schema.name.partition("::")[2] for operator in core if depends(plainly(operator)) is Depends.UNKNOWN
    }
    assert unknown == {
        "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d", "_embedding_bag", "_fft_c2r",
        "_fft_r2c", "_pdist_forward", "adaptive_avg_pool1d", "avg_pool1d", "avg_pool2d", "avg_pool2d_backward",
        "avg_pool3d", "col2im", "grid_sampler_2d", "max_pool2d_with_indices_backward", "resize_", "upsample_bilinear2d",
    }  # fmt: skip


# What batch-invariant operators compute.


def drawn(dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    values = torch.rand(ROWS, COLUMNS, generator=generator) * 0.8 + 0.1
    return values < 0.5 if dtype == torch.bool else (values if dtype.is_floating_point else values * 6).to(dtype)


def arguments(operator: OpOverload, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a dtype; conditions are truth values, and one of two bounds is enough."""
    generator = torch.Generator().manual_seed(0)
    args, kwargs = list[Any](), dict[str, Any]()
    for one in operator._schema.arguments:
        kind, value = str(one.type), one.default_value
        if kind == "Tensor":
            value = drawn(torch.bool if one.name in ("condition", "mask") else dtype, generator)
        elif not one.has_default_value() or one.name == "min":
            values = {"number": 0.5 if dtype.is_floating_point else 2, "int": 1, "bool": True, "Device": "cpu"}
            values |= {"float": 0.5, "ScalarType": torch.float32}
            values |= {f"Optional[{name}]": known for name, known in values.items()}
            values |= {"Optional[Tensor]": drawn(dtype, generator), "Optional[str]": None}
            value = values[kind]
        if one.kwarg_only:
            kwargs[one.name] = value
        else:
            args.append(value)
    return args, kwargs


def alike(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> list[bool]:
    """For each result, whether the rows that a function makes of each row alone are those that it makes of all."""

    def run(rows: slice) -> list[Tensor]:
        cut = [arg[rows] if isinstance(arg, Tensor) and arg.dim() and len(arg) == ROWS else arg for arg in args]
        found = function(*cut, **kwargs)
        return list(found) if isinstance(found, (tuple, list)) else [found]

    whole, parts = run(slice(None)), [run(slice(row, row + 1)) for row in range(ROWS)]
    together = [
        torch.cat([part.reshape(1, *part.shape[1:]) if part.dim() else part[None] for part in of])
        for of in zip(*parts, strict=True)
    ]
    return [same_bits(a, b) for a, b in zip(whole, together, strict=True)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def test_elementwise_operators_compute_rows_alone() -> None:
    ran, refused = set[str](), set[str]()
    for operator in POINTWISE:
        if operator._schema.is_mutable or depends(plainly(operator)) is not Depends.NOTHING:
            continue
        for dtype in DTYPES:
            args, kwargs = arguments(operator, dtype)
            try:
                operator(*args, **kwargs)
            except (RuntimeError, TypeError, NotImplementedError):
                refused.add(str(operator))
                continue
            assert all(alike(operator, args, kwargs)), (operator, dtype)
            ran.add(str(operator))
    assert refused - ran <= {"prims.conj_physical.default"}  # of complex numbers
    assert len(ran) > 200


def test_a_dependence_would_be_seen() -> None:
    x = drawn(torch.float32, torch.Generator().manual_seed(0))
    assert alike(lambda x: x - x.mean(0), [x], {}) == [False]
    assert alike(lambda x: (x + 1, x - x.amax(0)), [x], {}) == [True, False]


WHOLE = {
    "nonzero": "its results have places of rows in the batch",
    "masked_select": "its result has no rows",
    "as_strided_scatter": "its arguments are places in memory",
    **dict.fromkeys(
        ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"), "memory"
    ),
    **dict.fromkeys(("full", "zeros", "ones", "scalar_tensor", "arange", "iota"), "it reads no tensor"),
    **dict.fromkeys(
        ("inductor_seed", "inductor_seeds", "inductor_lookup_seed", "inductor_rand_eager_offsets"), "seeds"
    ),
    **dict.fromkeys(("mask_tables", "document_tiles", "document_tiles_of_mask"), "tables of integers"),
    "_low_memory_max_pool_offsets_to_indices": "it reads what _low_memory_max_pool_with_offsets makes",
}
"""Why operators that copy, or compute rows alone, have no call below."""

X, IDS, PLACES = torch.randn(ROWS, 8, 8), torch.randint(8, (ROWS, 8, 8)), torch.tensor([3, 1, 1])
SOURCE, IMAGE, VIDEO = torch.randn(ROWS, 8, 8), torch.randn(ROWS, 3, 8, 8), torch.randn(ROWS, 3, 4, 8, 8)
TABLE, MASK, KINDS = torch.randn(8, 8), IDS < 4, torch.randn(3)

CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "copy": lambda: (aten.copy.default, X, SOURCE),
    "fill": lambda: (aten.fill.Scalar, X, 2.0),
    "embedding": lambda: (aten.embedding.default, TABLE, IDS),
    "gather": lambda: (aten.gather.default, X, 1, IDS),
    "index": lambda: (aten.index.Tensor, X, [None, PLACES]),
    "_unsafe_index": lambda: (aten._unsafe_index.Tensor, X, [None, PLACES]),
    "_unsafe_masked_index": lambda: (aten._unsafe_masked_index.default, X, MASK[:, :3], [None, PLACES], 0.0),
    "index_select": lambda: (aten.index_select.default, X, 1, PLACES),
    "take": lambda: (aten.take.default, TABLE, IDS),
    "cat": lambda: (lambda x, y: aten.cat([x, y], 1), X, SOURCE),
    "repeat": lambda: (aten.repeat.default, X, [1, 2, 1]),
    "roll": lambda: (aten.roll.default, X, [3], [1]),
    "flip": lambda: (aten.flip.default, X, [1, 2]),
    "rev": lambda: (prims.rev.default, X, [1]),
    "tril": lambda: (aten.tril.default, X),
    "triu": lambda: (aten.triu.default, X, 1),
    "im2col": lambda: (aten.im2col.default, IMAGE, [2, 2], [1, 1], [0, 0], [1, 1]),
    "constant_pad_nd": lambda: (aten.constant_pad_nd.default, X, [1, 2], 3.0),
    "scatter": lambda: (aten.scatter.value, X, 1, IDS, 2.0),
    "index_copy": lambda: (aten.index_copy.default, X, 1, PLACES[:2], SOURCE[:, :2]),
    "index_fill": lambda: (aten.index_fill.int_Scalar, X, 1, PLACES, 2.0),
    "masked_scatter": lambda: (aten.masked_scatter.default, X, torch.ones_like(MASK), SOURCE),
    "slice_scatter": lambda: (aten.slice_scatter.default, X, SOURCE[:, :4], 1, 0, 4),
    "select_scatter": lambda: (aten.select_scatter.default, X, SOURCE[:, 0], 1, 2),
    "diagonal_scatter": lambda: (aten.diagonal_scatter.default, X, SOURCE[:, 0], 0, 1, 2),
    "diag_embed": lambda: (aten.diag_embed.default, X),
    "new_full": lambda: (lambda x: aten.new_full(x, x.shape, 2.0), X),
    "new_zeros": lambda: (lambda x: aten.new_zeros(x, x.shape), X),
    "new_ones": lambda: (lambda x: aten.new_ones(x, x.shape), X),
    "full_like": lambda: (aten.full_like.default, X, 2.0),
    "inductor_force_stride_order": lambda: (lambda x: prims.inductor_force_stride_order(x, x.mT.stride()), X),
    "put_distinct": lambda: (lambda i, x: dash.put_distinct(i, x, 9, 1, 0.0), IDS.argsort(1), X),
    "_native_batch_norm_legit_no_training": lambda: (
        lambda x: aten._native_batch_norm_legit_no_training(x, KINDS, KINDS, KINDS, KINDS.abs(), 0.1, 1e-5)[0], IMAGE,
    ),
    "fma": lambda: (lambda x, y: prims.fma(x, y, x), X, SOURCE),
    "searchsorted": lambda: (aten.searchsorted.Tensor, TABLE[0].sort()[0], X),
    "bucketize": lambda: (aten.bucketize.Tensor, X, TABLE[0].sort()[0]),
    "isin": lambda: (aten.isin.Tensor_Tensor, IDS, PLACES),
    "max_pool2d_with_indices": lambda: (aten.max_pool2d_with_indices.default, IMAGE, [2, 2]),
    "max_pool3d_with_indices": lambda: (aten.max_pool3d_with_indices.default, VIDEO, [2, 2, 2]),
    "_low_memory_max_pool_with_offsets": lambda: (
        lambda x: prims._low_memory_max_pool_with_offsets(x, [2, 2], [2, 2], [0, 0], [1, 1], False), IMAGE,
    ),
    "short_sum": lambda: (lambda x: dash.short_sum(x, 1), X),
    **{name: lambda name=name: (getattr(aten, name).default, X) for name in ("zeros_like", "ones_like", "zero")},
    **{
        f"{kind}_pad{n}d": lambda kind=kind, n=n: (
            getattr(aten, f"{kind}_pad{n}d").default, (X, IMAGE, VIDEO)[n - 1], [1, 2] * n,
        )
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    },
    **{
        f"upsample_nearest{n}d": lambda n=n: (
            getattr(aten, f"upsample_nearest{n}d").default, (X, IMAGE, VIDEO)[n - 1], [11] * n,
        )
        for n in (1, 2, 3)
    },
    **{name: lambda name=name: (getattr(aten, name).default, X, [1]) for name in ("amax", "amin")},
    **{
        name: lambda name=name: (getattr(aten, name).default, X, 1)
        for name in ("argmax", "argmin", "cummax", "cummin")
    },
    **{name: lambda name=name: (getattr(aten, name).dim, X, 1) for name in ("max", "min", "any", "all")},
    "aminmax": lambda: (lambda x: aten.aminmax(x, dim=1), X),
    "count_nonzero": lambda: (aten.count_nonzero.dim_IntList, IDS, [1]),
}  # fmt: skip
"""A call of each operator of the tables that is batch invariant, on tensors whose first dimension is the batch."""


def test_every_operator_has_a_call() -> None:
    assert CALLS.keys() | WHOLE.keys() == tables.COPIES | tables.FIXED | tables.COMPARISONS


@pytest.mark.parametrize("name", sorted(CALLS))
def test_copies_compute_rows_alone(name: str) -> None:
    if not any(hasattr(namespace, name) for namespace in (aten, prims, dash)):
        assert name in NEWER
        return
    function, *args = CALLS[name]()
    assert all(alike(function, args, {})), name
    if isinstance(function, OpOverload):
        assert depends(called(function, args, {}, X)) is Depends.NOTHING
