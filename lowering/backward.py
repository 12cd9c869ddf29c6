"""Inductor lowering of the attention backward: one Triton template per kernel, or a call of the operator.

`kernels.registry` knows which families have templates; Gluon kernels are launched by the operator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from ..kernels import registry
from ..kernels.portable import templates
from ..model.attention_spec import AttentionSpec
from ..model.plan import Plan, Tiles
from ..model.site import NOMINAL_BATCH, NOMINAL_HEADS, NOMINAL_LEN
from ..operators import attention as ops
from ..schedule import schedules
from ..upstream import compat
from ..upstream.inductor import (
    ExternKernel,
    FixedLayout,
    IRNode,
    TensorBox,
    V,
    WorkspaceArg,
    WorkspaceZeroMode,
    lowerings,
    register_lowering,
)
from ..upstream.symbolic import CeilDiv
from . import ahead
from .operator_call import operator_call
from .template import as_given, empty, heads_first, q_grid, realized, strides, template
from .vectors import Vectors, dense_of_heads, sizes_of

ENOUGH_PROGRAMS = 88
"""Number of programs, two thirds of an H100's SMs, from which the dq kernel that also computes the bias gradient is
faster than two separate kernels, which compute scores and dP twice."""

log = logging.getLogger("dash_inductor")
aten, prims = torch.ops.aten, torch.ops.prims


def register() -> None:
    register_lowering(ops.attention_backward, type_promotion_kind=None)(attention_backward)


def attention_backward(
    grad_out: TensorBox,
    query: TensorBox,
    key: TensorBox,
    value: TensorBox,
    out: TensorBox,
    logsumexp: TensorBox,
    extras: Sequence[TensorBox],
    spec: str,
    plan: str,
    site: str,
) -> Sequence[TensorBox]:
    """Lowers the operator `attention_backward`; returns the gradients of one attention, with shapes as in `ops`.

    They are dq, dk, dv and the others that `AttentionSpec.results` names.  The arguments are those of the operator;
    `spec`, `plan` and `site` are texts.
    """
    parsed = Plan.parse(plan)
    if not registry.execution(parsed.kernel).templates:
        args = (grad_out, query, key, value, out, logsumexp, extras, spec, plan, site)
        return operator_call(ops.attention_backward, *args)
    log.debug("lowering %s: spec=%s plan=%s", site, spec, plan)
    described = AttentionSpec.parse(spec)
    query, key, value, grad_out, out = heads_first((query, key, value, grad_out, out), described)
    sizes = sizes_of(described, extras, query, key, value)
    described, extras = dense_of_heads(described, extras, [*query.get_size()[:2], sizes.q_len, sizes.kv_len])
    tensors = [realized(x) for x in (query, key, value, logsumexp, grad_out, out)]
    kernels = _Kernels(parsed, described, *tensors, extras=extras)
    found = kernels.two_pass() if parsed.dq else kernels.one_pass()
    results = [found[name] for name in described.results]
    return [*as_given(results[:3], described), *results[3:]]


class _Kernels:
    """The template calls of one site's backward, and the tensors and facts that they share."""

    def __init__(
        self,
        plan: Plan,
        spec: AttentionSpec,
        query: TensorBox,
        key: TensorBox,
        value: TensorBox,
        logsumexp: TensorBox,
        grad_out: TensorBox,
        out: TensorBox,
        *,
        extras: Sequence[TensorBox],
    ) -> None:
        self.plan, self.spec, self.traits = plan, spec, spec.traits
        self.dq_order, self.dk_order, self.dv_order = spec.orders
        self.query, self.key, self.value = query, key, value
        self.logsumexp, self.grad_out, self.out = logsumexp, grad_out, out
        device = query.get_device()
        assert device is not None
        self.device = device
        self.batch, self.q_heads = query.get_size()[:2]
        self.heads = key.get_size()[1]
        self.sizes = sizes_of(spec, extras, query, key, value)
        self.q_len, self.kv_len = self.sizes.q_len, self.sizes.kv_len
        self.extras = extras
        self.has_dbias = "dbias" in spec.results
        self.summed = () if spec.bias is None else spec.bias.summed
        self.bias_size = ops.bias_gradient_size(query.get_size(), self.kv_len, self.summed)
        self.vectors = Vectors(spec, extras, (self.batch, self.q_heads, self.q_len, self.kv_len), self.heads)

    def two_pass(self) -> dict[str, TensorBox]:
        """Lowers the backward of a two-pass plan; returns its results by name: dq, delta, dk, dv and, if wanted, dbias.

        The dq kernel also writes delta, which the dk/dv kernel reads.  The bias gradient comes from the dq kernel or a
        separate one with equal bits.  With a dense mask the two kernels give different bits (seen on an H200), so there
        the dq kernel is always used.
        """
        if not self.has_dbias:
            dq, delta = self._dq()
            return {"dq": dq, "delta": delta} | self._dkdv(delta, None)
        is_one = V.graph.sizevars.statically_known_equals
        summed = [dim for dim in self.summed if not is_one(self.query.get_size()[dim], 1)]
        has_few = not fills_gpu(self.bias_size, templates.dq_bias_tiles(self.plan).block_q)
        if summed and has_few and not self.traits.has("dense"):
            dq, delta = self._dq()
            gradient = self._bias_gradient(delta, summed)
        else:
            dq, delta, gradient = self._dq_bias(summed)
        return {"dq": dq, "delta": delta} | self._dkdv(delta, None) | {"dbias": gradient}

    def one_pass(self) -> dict[str, TensorBox]:
        """Lowers the backward of a one-pass plan; returns its results by name: delta, dq, dk, dv and, if wanted, dbias.

        One kernel computes delta; the main kernel computes dk and dv, and adds to an fp32 dq accumulator in a fixed
        order.  dq is then scaled and cast to the dtype of query.  A separate kernel computes the bias gradient.
        """
        delta = self._delta()
        found = {"delta": delta} | self._one_pass(delta)
        return found | ({"dbias": self._bias_gradient(delta, self.summed)} if self.has_dbias else {})

    def _dq(self) -> tuple[TensorBox, TensorBox]:
        """Returns dq and delta, both from the dq kernel."""
        assert self.plan.dq is not None
        delta = self._empty_delta()
        tensors = [
            self.query,
            self.key,
            self.value,
            self.logsumexp,
            delta,
            self.grad_out,
            self.out,
            *self.vectors.of_rows,
        ]
        dq = template(
            f"dash_dq_{self.traits}",
            templates.dq_template(self.traits),
            q_grid,
            [*tensors, *self.vectors.arguments(sums_keys=True)],
            self._layout(self.query, self.dq_order),
            mutated=[delta],
            call_sizes=[self.batch, self.q_heads, self.q_len],
            tiles=self.plan.dq,
            constants=self._constants(self.plan.dq, sums_keys=True) | templates.dq_constants(),
        )
        return dq, delta

    def _dq_bias(self, summed: Sequence[int]) -> tuple[TensorBox, TensorBox, TensorBox]:
        """Returns dq, delta and the bias gradient, from one kernel."""
        delta, tiles, size = self._empty_delta(), templates.dq_bias_tiles(self.plan), self.bias_size
        gradient = empty(size, (0, 1, 2, 3), self._bias_dtype(), self.device)
        written = [gradient]
        if summed:
            q_tiles, kv_tiles = (
                CeilDiv(length, sympy.Integer(block))
                for length, block in ((self.q_len, tiles.block_q), (self.kv_len, tiles.block_kv))
            )
            pairs = [size[0] * size[1], q_tiles, kv_tiles, tiles.block_q * tiles.block_kv]
            written.append(empty(pairs, (0, 1, 2, 3), torch.float32, self.device))
        tensors = [self.query, self.key, self.value, self.logsumexp, delta, self.grad_out, self.out, *written]
        tensors += self.vectors.of_rows
        dq = template(
            f"dash_dq_dbias_{'sum_' if summed else ''}{self.traits}",
            templates.dq_bias_template(self.traits, adds=bool(summed)),
            q_grid,
            [*tensors, *self.vectors.arguments(sums_keys=True)],
            self._layout(self.query, self.dq_order),
            mutated=[delta, *written],
            call_sizes=size[:3],
            tiles=tiles,
            constants=self._constants(tiles, sums_keys=True) | templates.dq_constants(summed),
        )
        return dq, delta, gradient

    def _empty_delta(self) -> TensorBox:
        return empty([self.batch, self.q_heads, self.q_len], (0, 1, 2), torch.float32, self.device)

    def _bias_dtype(self) -> torch.dtype:
        assert self.spec.bias is not None
        dtype: torch.dtype = self.extras[self.spec.bias.operand.index].get_dtype()
        return dtype

    def _delta(self) -> TensorBox:
        """Returns delta, from a separate kernel."""
        ahead.check_settings(self.plan)
        rows = [self.batch, self.q_heads, self.q_len]
        kinds = {"varlen": self.traits.varlen, "grad_logsumexp": self.traits.reads("grad_logsumexp")}
        return template(
            "_".join(["dash_delta", *(name for name, has in kinds.items() if has)]),
            templates.delta_template(**kinds),
            q_grid,
            [self.grad_out, self.out, *self.vectors.of_rows, *self.vectors.varlen_layout],
            FixedLayout(self.device, torch.float32, rows, stride=strides(rows, (0, 1, 2))),
            mutated=[],
            call_sizes=rows,
            tiles=self.plan.dkdv,
            constants=self._constants(self.plan.dkdv, sums_keys=False),
        )

    def _one_pass(self, delta: TensorBox) -> dict[str, TensorBox]:
        size = list(self.query.get_size())
        zeros = realized(lowerings[aten.full](size, 0.0, dtype=torch.float32, device=self.device))
        # exactly: Inductor may pad the strides of a buffer whose layout it chooses, and the kernel adds to dense rows
        accumulator = _box(ExternKernel.require_exact_strides(zeros, strides(size, (0, 1, 2, 3))))
        of_keys = self._dkdv(delta, accumulator)
        dq = _to(lowerings[aten.mul](accumulator, self.spec.scale), self.query.get_dtype())
        wanted = self._layout(self.query, self.dq_order).stride
        return {"dq": _box(ExternKernel.require_exact_strides(dq, wanted))} | of_keys

    def _bias_gradient(self, delta: TensorBox, summed: Sequence[int]) -> TensorBox:
        """Returns the bias gradient, from a separate kernel."""
        tiles, size = templates.bias_gradient_tiles(self.plan, self.traits), self.bias_size
        return template(
            f"dash_dbias_{self.traits}",
            templates.bias_gradient_template(self.traits),
            _pairs_grid,
            [
                self.query, self.key, self.value, self.logsumexp, delta, self.grad_out,
                *self.vectors.arguments(sums_keys=True),
            ],
            FixedLayout(self.device, self._bias_dtype(), size, stride=strides(size, (0, 1, 2, 3))),
            mutated=[],
            call_sizes=size,
            tiles=tiles,
            constants=self._constants(tiles, sums_keys=True) | templates.bias_gradient_constants(summed),
        )  # fmt: skip

    def _dkdv(self, delta: TensorBox, accumulator: TensorBox | None) -> dict[str, TensorBox]:
        tiles, ordered = self.plan.dkdv, accumulator is not None
        schedule = schedules.define(self.plan.schedule, self.spec.mask.band)
        dv = empty(self.value.get_size(), self.dv_order, self.value.get_dtype(), self.device)
        inputs = [self.query, self.key, self.value, self.logsumexp, delta, self.grad_out, dv]
        extra: dict[str, Any] = {}
        if accumulator is not None:
            inputs.append(accumulator)
            q_tiles = CeilDiv(self.q_len, sympy.Integer(tiles.block_q))
            extra["workspace_arg"] = WorkspaceArg(
                count=4 * (1 + self.batch * self.q_heads * q_tiles),  # the work id, then a semaphore per q tile
                zero_mode=WorkspaceZeroMode.ZERO_ON_CALL,
                device=self.device,
                outer_name=WorkspaceArg.unique_name(),
                inner_name="ws_ptr",
                dtype=torch.uint8,
            )
            if schedule.resident is not None:
                extra["cooperative"] = True
        dk = template(
            f"dash_dkdv_{self.plan.schedule}_{self.traits}",
            templates.dkdv_template(self.plan.schedule, self.traits),
            _dkdv_grid,
            [*inputs, *self.vectors.arguments(sums_keys=ordered)],
            self._layout(self.key, self.dk_order),
            mutated=inputs[6:],
            call_sizes=[self.batch, self.heads, self.kv_len],
            tiles=tiles,
            constants=self._constants(tiles, schedule.parts, sums_keys=ordered)
            | {"ORDERED": ordered, "PARTS": schedule.parts},
            **extra,
        )
        return {"dk": dk, "dv": dv}

    def _constants(self, tiles: Tiles, parts: int = 1, *, sums_keys: bool) -> dict[str, Any]:
        """Returns the compile-time values; a work id's second kv tile (`parts`) may be missing, so kv is not even."""
        multiple = V.graph.sizevars.statically_known_multiple_of
        even = multiple(self.q_len, tiles.block_q), multiple(self.kv_len, tiles.block_kv) and parts == 1
        return templates.compile_time_values(
            self.plan, tiles, self.spec, self.sizes, even=even, interpret=compat.interpreting(), sums_keys=sums_keys
        )

    def _layout(self, like: TensorBox, order: Sequence[int]) -> FixedLayout:
        size = list(like.get_size())
        return FixedLayout(self.device, like.get_dtype(), size, stride=strides(size, order))


def fills_gpu(size: Sequence[Any], block_q: int) -> bool:
    """Returns whether a bias gradient has enough q tiles for a kernel with one program per q tile to fill the GPU.

    Each program sums over the batch elements and heads that share the bias.  Nominal sizes replace dynamic ones; the
    choice affects only speed.

    Args:
        size: the shape of the bias gradient, [batch, heads, q_len, kv_len], with 1 where it is summed; integers or
            sympy expressions.
        block_q: rows of a q tile.
    """
    nominal = NOMINAL_BATCH, NOMINAL_HEADS, NOMINAL_LEN
    batch, heads, q_len = (
        int(x) if sympy.sympify(x).is_number else other for x, other in zip(size[:3], nominal, strict=True)
    )
    return batch * heads * -(-q_len // block_q) >= ENOUGH_PROGRAMS


def _dkdv_grid(
    batch: Any, heads: Any, kv_len: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]
) -> tuple[Any, int, int]:
    return batch * heads * cdiv(cdiv(kv_len, meta["BLOCK_KV"]), meta["PARTS"]), 1, 1


def _pairs_grid(
    batch: Any, heads: Any, q_len: Any, kv_len: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]
) -> tuple[Any, int, int]:
    """Returns a grid of one program per tile pair."""
    return batch * heads * cdiv(q_len, meta["BLOCK_Q"]) * cdiv(kv_len, meta["BLOCK_KV"]), 1, 1


def _to(x: TensorBox, dtype: torch.dtype) -> TensorBox:
    converted: TensorBox = lowerings[prims.convert_element_type](x, dtype)
    return converted


def _box(x: IRNode) -> TensorBox:
    assert isinstance(x, TensorBox)
    return x
