"""The host side of the Hopper kernel: checks tensors, lays out the workspace, launches prepare, main and finish.

Everything that depends on shapes and strides alone is computed once per combination (`_State`); a call allocates four
tensors, fills nine TMA descriptors and launches three kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ... import compat
from ...errors import ArgumentError
from ...schedule import codegen
from ...schedule.problem import Band, Plan
from .build import FINISH_ROWS, Kernels, Problem, kernels

LOG2E = math.log2(math.e)
_ALIGNMENT = 128  # bytes between the parts of the workspace


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    mask: str, scale: float, orders: Sequence[Sequence[int]], plan: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of attention, bitwise reproducible.

    Args:
        query, key, value, grad_out, out: fp16 or bf16 [batch, heads, length, head dim], any strides; those that TMA
            cannot read (unaligned, or a strided last dimension) are copied first.
        logsumexp: fp32 [batch, q heads, >= q_len], natural log, any strides.
        orders: of dq, dk, dv: their dimensions from the largest stride to the smallest; the last must be 3.
        plan: ``str`` of a `Plan` of the Hopper kernel.

    Raises:
        ArgumentError: a plan of another kernel; a schedule that needs more co-resident CTAs than the GPU has SMs.
    """
    query, key, value, grad_out, out = map(_readable, (query, key, value, grad_out, out))
    state = _state(
        plan, mask, scale, tuple(map(tuple, orders)), query.dtype, query.device.index,
        tuple((t.shape, t.stride()) for t in (query, key, value, grad_out, out, logsumexp)),
    )  # fmt: skip
    return state.run(query, key, value, grad_out, out, logsumexp)


def _readable(tensor: Tensor) -> Tensor:
    """`tensor`, or a contiguous copy where TMA could not read it: it wants 16-byte aligned rows with unit stride."""
    *outer, last = tensor.stride()
    aligned = last == 1 and not tensor.data_ptr() % 16
    for size, stride in zip(tensor.shape, outer, strict=False):
        aligned = aligned and (size == 1 or (stride > 0 and not stride % 8))
    return tensor if aligned else tensor.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _state(*facts: Any) -> _State:
    return _State(*facts)


class _State:
    """One combination of plan, mask, shapes and strides on one device."""

    def __init__(
        self, plan: str, mask: str, scale: float, orders: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: int,
        layouts: tuple[tuple[torch.Size, tuple[int, ...]], ...],
    ) -> None:  # fmt: skip
        q, k, v, do, out, lse = layouts
        self.batch, self.q_heads, self.q_len, head_dim = q[0]
        _, self.kv_heads, self.kv_len, value_dim = v[0]
        parsed = Plan.parse(plan)
        if parsed.kernel != "hopper":
            raise ArgumentError("plan", plan, "a plan of the hopper kernel")
        band = Band.parse(mask)
        tiles = parsed.dkdv
        problem = Problem(
            "bfloat16" if dtype == torch.bfloat16 else "float16", head_dim, value_dim, self.q_heads // self.kv_heads,
            parsed.schedule, band.lo is not None, band.hi is not None, self.kv_len % tiles.block_kv == 0, tiles,
        )  # fmt: skip
        self.kernels = kernels(problem, device)
        offset = self.kv_len - self.q_len if band.anchor == "bottom_right" else 0
        self.lo, self.hi = (0 if x is None else x - offset for x in (band.lo, band.hi))
        self.dtype, self.device = dtype, torch.device("cuda", device)
        self.n_q = -(-self.q_len // tiles.block_q)
        self.q_tiles = self.batch * self.q_heads * self.n_q
        rows = self.q_tiles * tiles.block_q
        self._lay_out_workspace(rows, self.kernels.block_d)
        shapes = (q[0], k[0], v[0])
        self.strides = [_dense_strides(shape, order) for shape, order in zip(shapes, orders, strict=True)]
        self.shapes = shapes
        descriptor = _descriptor
        self.input_descriptors = [descriptor(*layout) for layout in (q, k, v, do)]
        self.output_descriptors = [descriptor(s, t) for s, t in zip(shapes[1:], self.strides[1:], strict=True)]
        self.accumulator = ([rows * self.kernels.block_d // 32, 32], [32, 1])
        self.rows = ([rows], [1])
        self.scale = scale
        self._grids(band, tiles, parsed.section)
        self.section = parsed.section
        self.out_strides, self.do_strides, self.lse_strides = out[1][:3], do[1][:3], lse[1][:3]

    def _lay_out_workspace(self, rows: int, block_d: int) -> None:
        """Byte offsets: dq accumulator, lse, delta, semaphores, ticket."""
        self.offsets, end = [], 0
        for size in (4 * rows * block_d, 4 * rows, 4 * rows, 4 * self.q_tiles, 4):
            self.offsets.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.workspace_bytes = end

    def _grids(self, band: Band, tiles: Any, section: int) -> None:
        host = codegen.python_functions(self.kernels.problem.schedule, self.kernels.problem.band)
        tail = (self.q_len, self.kv_len, self.lo, self.hi, tiles.block_q, tiles.block_kv)
        self.ctas = self.batch * self.kv_heads * host.dash_slots(*tail)
        if self.kernels.schedule.resident is not None:
            available = torch.cuda.get_device_properties(self.device).multi_processor_count
            if self.ctas > available:
                raise ArgumentError(
                    "schedule", self.kernels.problem.schedule,
                    f"one that needs no co-residency: {self.ctas} CTAs do not fit {available} SMs at once",
                )  # fmt: skip
        self.finish_programs = self.q_tiles * (tiles.block_q // FINISH_ROWS)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (
            torch.empty_strided(shape, stride, dtype=self.dtype, device=self.device)
            for shape, stride in zip(self.shapes, self.strides, strict=True)
        )
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
        start = workspace.data_ptr()
        accumulator, lse2, delta, semaphores, ticket = (start + offset for offset in self.offsets)
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        k = self.kernels
        k.prepare[(self.q_tiles, 1, 1)](
            out, grad_out, logsumexp, lse2, delta, semaphores, ticket, *self.out_strides, *self.do_strides,
            *self.lse_strides, self.q_heads, self.q_len, self.n_q, None, None, None, stream=stream,
        )  # fmt: skip
        inputs = (query, key, value, grad_out)
        k.main[(self.ctas, 1, 1)](
            *(compat.Descriptor(t, *d) for t, d in zip(inputs, self.input_descriptors, strict=True)),
            *(compat.Descriptor(t, *d) for t, d in zip((dk, dv), self.output_descriptors, strict=True)),
            compat.Descriptor(compat.Pointer(accumulator), *self.accumulator),
            compat.Descriptor(compat.Pointer(lse2), *self.rows), compat.Descriptor(compat.Pointer(delta), *self.rows),
            semaphores, ticket,
            self.batch, self.q_heads, self.q_len, self.kv_len, self.lo, self.hi, self.section, self.scale,
            self.scale * LOG2E, *[None] * 21, stream=stream,
        )  # fmt: skip
        k.finish[(self.finish_programs, 1, 1)](
            accumulator, dq, *self.strides[0][:3], self.q_heads, self.q_len, self.kv_len, self.lo, self.hi, self.n_q,
            self.scale, *[None] * 6, stream=stream,
        )  # fmt: skip
        return dq, dk, dv


def _descriptor(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Shape and strides for TMA: the stride of a dimension of size 1 means nothing, but must be a multiple of 16 bytes."""
    return list(shape), [8 if size == 1 else stride for size, stride in zip(shape[:3], strides, strict=False)] + [1]


def _dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)
