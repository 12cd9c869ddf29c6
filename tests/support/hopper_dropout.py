"""The random bits of the Hopper backward without a GPU: the source of `shared/device/dropout` runs on numpy arrays.

Stand-ins take the place of Gluon; a layout says nothing here, since no result depends on one.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from dash_inductor.kernels.hopper.backward.arguments import DROPOUT
from dash_inductor.kernels.hopper.shared.device import dropout
from dash_inductor.model import dropout as definition

from . import compared
from .hopper_glue import AGGREGATES, as_arguments


class Array(np.ndarray[Any, Any]):
    """An array with the methods of a tensor in Gluon."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else self.astype(dtype)

    def permute(self, order: Sequence[int]) -> Any:
        return self.transpose(order)


def number(value: int, dtype: Any = np.int32) -> Any:
    """A scalar, as an array that broadcasts."""
    return np.full((1, 1), value, dtype).view(Array)


def _same(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _functions(warps: int) -> dict[str, Any]:
    """The names that the module defines."""
    gl = SimpleNamespace(
        tensor=None, constexpr=_same, uint16=np.uint16, int32=np.int32, uint32=np.uint32, uint64=np.uint64,
        float32=np.float32, num_warps=lambda: warps, static_range=range, load=_same, convert_layout=_same,
        where=lambda c, a, b: np.where(c, a, b).view(Array), minimum=min, expand_dims=np.expand_dims,  # type: ignore[attr-defined]
        SliceLayout=lambda *_: None,
        DistributedLinearLayout=lambda *facts: facts, join=lambda a, b: np.stack([a, b], -1).view(Array),
        arange=lambda first, end, _: np.arange(first, end, dtype=np.int32).view(Array),
    )  # fmt: skip
    namespace: dict[str, Any] = {
        "gl": gl, "gluon": SimpleNamespace(jit=_same, constexpr_function=_same), **AGGREGATES, "here": _same,
        "HeadWork": None, "definition": definition, "__name__": __name__,
    }  # fmt: skip
    tree = ast.parse(inspect.getsource(dropout))
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(tree, dropout.__file__, "exec"), namespace)
    namespace["negative_where_dropped"] = _negative_where_dropped
    return namespace


def _negative_where_dropped(p: Any, bits: Any, bound: Any, threshold: int) -> Any:
    dropped, _ = compared.below(bits.astype(np.uint32), bound)
    return np.where(dropped ^ (threshold > 1 << 15), -p, p)


def bound_of(threshold: int) -> Any:
    """The bound with which random bits are compared, a word."""
    return _functions(8)["bound_of"](threshold)


def marked(
    probabilities: Any, *, seed: int, threshold: int, batch: int, q_head: int, q_tile: int, kv_tile: int, piece: int,
    block_q: int, warps: int = 8,
) -> Any:  # fmt: skip
    """P [keys, queries] of a piece of a q tile, as the consumers mark it."""
    work = SimpleNamespace(
        BLOCK_Q=block_q, BLOCK_KV=probabilities.shape[0], batch=number(batch), q_head=lambda: number(q_head)
    )  # fmt: skip
    with np.errstate(over="ignore"):
        arguments = as_arguments(DROPOUT, (number(seed, np.int64), threshold, 1.0))
        drops = _functions(warps)["DropoutSigns"](work, arguments)
        return drops.marked(probabilities.astype(np.float32).view(Array), q_tile, kv_tile, piece)


def gradient(p: Any, dp: Any, delta: Any, rescale: float) -> Any:
    """The gradient that the consumers compute from signed P, dP and delta, before it is rounded."""
    arguments = as_arguments(DROPOUT, (None, 0, np.float32(rescale)))
    return _functions(8)["DropoutSigns"](None, arguments).gradient(p, dp, delta)


def block_layout(shape: Sequence[int], warps: int) -> Any:
    """Bases of registers, lanes and warps, and the shape, of the layout of the blocks of scores of `shape`."""
    registers, lanes, of_warps, _, blocks = _functions(warps)["block_layout"](shape, warps)
    return registers, lanes, of_warps, blocks
