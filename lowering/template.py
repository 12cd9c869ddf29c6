"""Adds Triton templates with a single choice each to Inductor's graph; shared by forward and backward.

There is never more than one choice: Inductor would benchmark several, which is not deterministic and would replay a
kernel on semaphores that were zeroed once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from ..kernels.common.strides import dense_strides
from ..model.attention_spec import AttentionSpec
from ..model.plan import Tiles
from ..upstream import compat, toolchain
from ..upstream.inductor import BaseView, ExternKernel, FixedLayout, SymbolicGridFn, TensorBox, empty_strided, lowerings

aten = torch.ops.aten


@functools.cache
def _compiled_template(name: str, text: str, grid: Callable[..., Any]) -> Any:
    return compat.make_template(name=name, grid=SymbolicGridFn(grid), source=text)


def template(
    name: str,
    text: str,
    grid: Callable[..., Any],
    inputs: list[TensorBox],
    layout: FixedLayout,
    *,
    mutated: list[TensorBox],
    call_sizes: list[Any],
    tiles: Tiles,
    constants: dict[str, Any],
    cooperative: bool = False,
    **extra: Any,
) -> TensorBox:
    """Adds a kernel to Inductor's graph, with one template as its only choice, and returns its output buffer.

    Args:
        name, text, grid: the template's name, source and grid function.
        layout: the layout of the output.
        mutated: those of `inputs` that the kernel writes, too.
        call_sizes: the sizes that are passed to `grid`.
        cooperative: whether the launch is cooperative: all CTAs are resident.
    """
    choices: list[Any] = []
    error = _compiled_template(name, text, grid).maybe_append_choice(
        choices,
        input_nodes=inputs,
        layout=layout,
        mutated_inputs=mutated,
        call_sizes=call_sizes,
        num_stages=tiles.num_stages,
        num_warps=tiles.num_warps,
        triton_meta={**toolchain.OPTIONS, **({"launch_cooperative_grid": True} if cooperative else {})},
        **constants,
        **extra,
    )
    if error is not None:
        raise error
    output: TensorBox = compat.autotune_select(name, choices, inputs, layout)
    return output


def q_grid(
    batch: Any, heads: Any, q_len: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]
) -> tuple[Any, int, int]:
    """Returns the grid (x, y, z) of a kernel with one program per q tile of every query head."""
    return batch * heads * cdiv(q_len, meta["BLOCK_Q"]), 1, 1


def heads_first(tensors: Sequence[TensorBox], spec: AttentionSpec) -> Sequence[TensorBox]:
    """Returns the operator's tensors as [batch, heads, length, head dim]; packed ones get batch size 1, others stay."""
    if spec.mask.varlen_layout is None:
        return tensors
    return [lowerings[aten.permute](lowerings[aten.unsqueeze](x, 0), [0, 2, 1, 3]) for x in tensors]


def as_given(results: Sequence[TensorBox], spec: AttentionSpec) -> Sequence[TensorBox]:
    """Returns results [batch, heads, length, head dim] in the operator's shapes: the inverse of `heads_first`."""
    if spec.mask.varlen_layout is None:
        return results
    return [lowerings[aten.squeeze](lowerings[aten.permute](x, [0, 2, 1, 3]), 0) for x in results]


def realized(x: TensorBox) -> TensorBox:
    """Returns `x` as a buffer with frozen strides, because a template reads memory with the strides in its source.

    Otherwise Inductor chooses the strides of its own buffers later, from the strides of their sources.
    """
    x.realize()
    base: Any = x.data
    if not isinstance(base, BaseView):
        base.freeze_layout()
        return x
    base.unwrap_view().freeze_layout()
    return TensorBox(ExternKernel.realize_input(base))  # with strides of its own


def strides(size: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Returns the strides of a dense buffer, in elements, as sympy integers.

    Args:
        order: the dimensions, from the largest stride to the smallest.
    """
    return [sympy.sympify(stride) for stride in dense_strides(size, order)]


def empty(size: Sequence[Any], order: Sequence[int], dtype: torch.dtype, device: torch.device) -> TensorBox:
    """Returns an uninitialised dense buffer for a result; `order` lists its dimensions, largest stride first."""
    buffer: TensorBox = empty_strided(list(size), strides(size, order), dtype=dtype, device=device)
    return buffer
