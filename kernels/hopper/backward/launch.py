"""The host side of the Hopper kernel: checks tensors, lays out the workspace, launches prepare, main and finish.

Everything that depends on shapes and strides alone is computed once per combination (`_State`).  A call allocates four
tensors and launches three kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....config import config
from ....errors import ArgumentError
from ....model.call import Call
from ....model.plan import Plan
from ....schedule.tile_schedule import ClosedForm, Problem
from ....upstream import compat
from ....upstream.cuda import current_device, raw_stream
from ...common import launcher, score
from ...common.call_launches import CallLaunch, CallLaunches, unknown_addresses
from ...common.strides import dense_strides
from ...execution import Gradients, ReadyBackward
from ..family import FAMILY
from ..shared.arguments import target_values
from ..shared.device.operations import DQ_ROW
from ..shared.tensors import (
    DTYPES,
    DropoutArguments,
    SeenRows,
    addresses_at,
    check_tokens,
    describe,
    has_readable_strides,
    readable,
)  # fmt: skip
from . import arguments
from .build import FINISH_ROWS, Specialisation, kernels
from .call_profiles import NOTHING as NO_STAMPS
from .call_profiles import CallProfiles
from .data import Arguments, BackwardData, DescribedData

_Strides = tuple[int, ...]
_Operands = tuple[int, int, int, int, int]
"""Addresses of query, key, value, grad_out and out."""
_Drops = tuple[int, float]
"""(threshold, rescale) of a `DropoutArguments`."""
_FIXED = 14
"""Number of addresses that every call has (0 for absent tensors); those of `BackwardData` follow."""
_ALIGNMENT = 128  # bytes between the parts of the workspace


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    call: Call, plan: Plan, data: BackwardData | None = None, dropout: DropoutArguments | None = None, site: str = "",
    grad_logsumexp: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Computes dq, dk and dv of attention, bitwise reproducibly, and delta if the call asks for it (`Call.results`).

    Delta is contiguous, and zero in rows that see no key.  It is a view of the workspace, which it keeps alive, or a
    copy if rows do not fill their tiles.

    Args:
        query, key, value, grad_out, out: fp16 or bf16 [batch, heads, length, head dim], any strides; a tensor that TMA
            cannot read (unaligned, or a strided last dimension) is copied first.
        logsumexp: fp32 [batch, q heads, >= q_len], natural log, any strides.
        call: the call, with the dimension orders of dq, dk and dv; an order whose last dimension is not the fourth is
            replaced by the default order.
        plan: a plan of the Hopper kernel.
        data: the tensors of a mask that is data; None for a band alone.  With data, the log-sum-exp of a query that
            sees no key is -inf.  With a varlen layout it has padded rows, and all other tensors have tokens.
        dropout: dropout, with the seed on the device of query; None for none.
        grad_logsumexp: fp32 [batch, q heads, q_len] on the device of query, any strides: the gradient of the
            log-sum-exp, if the call has one; with a varlen layout, of tokens.
        site: the name of the call in profiles, if `config.profile` is set.

    Raises:
        ArgumentError: the plan is for another family; data, dropout or grad_logsumexp do not fit the call; or the
            schedule needs more co-resident CTAs than the GPU has SMs.
    """
    device = query.device.index
    if current_device() != device:
        with torch.cuda.device(device):
            return backward(
                grad_out, query, key, value, out, logsumexp, call, plan, data, dropout, site, grad_logsumexp
            )
    if dropout is not None or call.dropout is not None:
        _check_dropout(call, dropout, query.device)
    if grad_logsumexp is not None or call.grad_logsumexp is not None:
        _check_gradient(call, grad_logsumexp, query)
    state = _state(
        call, plan, query.dtype, device,
        query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(), grad_out.stride(),
        out.stride(), logsumexp.stride(), None if data is None else data.described(), None if data is None else
        data.rows, config.profile, None if grad_logsumexp is None else grad_logsumexp.stride(),
        None if dropout is None else dropout[1:],
    )  # fmt: skip
    operands = query.data_ptr(), key.data_ptr(), value.data_ptr(), grad_out.data_ptr(), out.data_ptr()
    q, k, v, do, o = operands
    if state is not None and not (q | k | v | do | o) % 16:
        return state.run(
            operands, logsumexp.data_ptr(), None if data is None else data.addresses(),
            None if dropout is None else dropout[0].data_ptr(), site,
            None if grad_logsumexp is None else grad_logsumexp.data_ptr(),
        )  # fmt: skip
    if not query.shape[3] % 8 == value.shape[3] % 8 == 0:  # not even copies could be read
        raise ArgumentError("head dims", (query.shape[3], value.shape[3]), "multiples of 8")
    query, key, value, grad_out, out = map(readable, (query, key, value, grad_out, out))
    return backward(grad_out, query, key, value, out, logsumexp, call, plan, data, dropout, site, grad_logsumexp)


def ready(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    extras: Sequence[Tensor], call: Call, plan: Plan, site: str = "",
) -> ReadyBackward | None:  # fmt: skip
    """Returns a cached launch plan of `backward` for tensors with these dtypes, shapes, strides and device.

    The plan holds for the present value of `config.profile`.  It is None if `backward` would copy tensors first.  The
    returned function checks only addresses and the current device, to save host time; if these do not fit it launches
    nothing and returns None, and the caller runs `backward`.

    Args:
        extras: the operator's extras, see `BackwardData.places`.

    Raises:
        ArgumentError: as `backward`.
    """
    device, places = query.device.index, BackwardData.places(call, len(extras))
    data, dropout = BackwardData.of(call, extras), DropoutArguments.of(call.dropout, extras)
    of_gradient = None if call.grad_logsumexp is None else call.grad_logsumexp.index
    gradient = None if of_gradient is None else extras[of_gradient]
    if dropout is not None:
        _check_dropout(call, dropout, query.device)
    if gradient is not None:
        _check_gradient(call, gradient, query)
    with torch.cuda.device(device):
        state = _state(
            call, plan, query.dtype, device, query.shape, query.stride(), key.shape, key.stride(), value.shape,
            value.stride(), grad_out.stride(), out.stride(), logsumexp.stride(),
            None if data is None else data.described(), None if data is None else data.rows, config.profile,
            None if gradient is None else gradient.stride(), None if dropout is None else dropout[1:],
        )  # fmt: skip
    if state is None:
        return None
    launch = state.run
    seed = None if call.dropout is None else call.dropout.seed.index

    def run(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        extras: Sequence[Tensor],
    ) -> Gradients | None:  # fmt: skip
        operands = q, k, v, do, o = (
            query.data_ptr(), key.data_ptr(), value.data_ptr(), grad_out.data_ptr(), out.data_ptr()
        )  # fmt: skip
        if (q | k | v | do | o) % 16 or current_device() != device:
            return None
        return launch(
            operands, logsumexp.data_ptr(), None if places is None else addresses_at(extras, places),
            None if seed is None else extras[seed].data_ptr(), site,
            None if of_gradient is None else extras[of_gradient].data_ptr(),
        )  # fmt: skip

    return run


def _check_gradient(call: Call, gradient: Tensor | None, query: Tensor) -> None:
    """Raises ArgumentError unless the gradient of the log-sum-exp is given exactly if the call has one, and is
    readable.
    """
    if gradient is None or call.grad_logsumexp is None:
        raise ArgumentError("grad_logsumexp", gradient, f"given if the call has one: {call}")
    found, wanted = ((t.dtype, tuple(t.shape), t.device) for t in (gradient, query[..., 0]))
    if found != (torch.float32, *wanted[1:]):
        raise ArgumentError("grad_logsumexp", found, f"float32 {wanted[1]} on {wanted[2]}")


def _check_dropout(call: Call, dropout: DropoutArguments | None, device: torch.device) -> None:
    """Raises ArgumentError unless dropout is given exactly if the call has it, with a readable seed and 16-bit
    threshold.
    """
    if dropout is None or call.dropout is None:
        raise ArgumentError("dropout", dropout, f"given if the call has dropout: {call}")
    seed, threshold, _rescale = dropout
    if (seed.dtype, tuple(seed.shape), seed.device) != (torch.int64, (1,), device):
        raise ArgumentError("dropout", (seed.dtype, tuple(seed.shape), seed.device), f"an int64 seed [1] on {device}")
    if not 0 <= threshold < 1 << 16:
        raise ArgumentError("dropout", threshold, "a threshold of at least 0 and less than 2**16")


@functools.lru_cache(maxsize=1024)
def _state(*facts: Any) -> _State | None:
    """Returns the cached `_State` of its arguments, or None if TMA cannot read tensors with these strides."""
    _call, _plan, _dtype, _device, q_shape, q, k_shape, k, v_shape, v, do, out, *_ = facts
    values = (*q_shape[:3], v_shape[3])
    operands = (q_shape, q), (k_shape, k), (v_shape, v), (values, do), (values, out)
    return _State(*facts) if all(has_readable_strides(*operand) for operand in operands) else None


class _State:
    """The cached launches for one combination of plan, mask, shapes and strides on one device."""

    def __init__(
        self, call: Call, plan: Plan, dtype: torch.dtype, device: int, q_shape: torch.Size, q: _Strides,
        k_shape: torch.Size, k: _Strides, v_shape: torch.Size, v: _Strides, do: _Strides, out: _Strides, lse: _Strides,
        data: DescribedData | None, rows: int | None, stamped: bool, grad_lse: _Strides | None, drops: _Drops | None,
    ) -> None:  # fmt: skip
        if plan.kernel != FAMILY.name:
            raise ArgumentError("plan", str(plan), "a plan of the hopper kernel")
        if (data is None) != (not call.mask.operands):
            raise ArgumentError("data", data, f"{'tensors' if data is None else None}, for the mask {call.mask}")
        self.batch, self.q_heads, self.q_len, head_dim = q_shape
        _, self.kv_heads, self.kv_len, value_dim = v_shape
        if rows is not None:
            check_tokens(q_shape, k_shape)
            self.q_len = self.kv_len = rows
        band, scale, tiles = call.mask.band, call.scale, plan.dkdv
        orders = [order if order[-1] == 3 else (0, 1, 2, 3) for order in call.orders]
        group = self.q_heads // self.kv_heads
        dims = head_dim, value_dim
        of = Specialisation.of(call.traits, plan, DTYPES[dtype], dims, group, self.kv_len, stamped)
        self.kernels = kernels(of, device)
        work = Problem(
            band, self.q_len, self.kv_len, tiles.block_q, tiles.block_kv, self.batch, self.q_heads,
            head_chunk=plan.head_chunk,
        )  # fmt: skip
        tile_schedule = ClosedForm(plan.schedule, work)
        lo, hi = work.bounds
        queries, keys = tile_schedule.seen_rows, tile_schedule.seen_keys
        if rows is not None:  # every token sees itself
            queries = keys = 0, q_shape[2]
        self.device, self.index = torch.device("cuda", device), device
        self.shapes = (q_shape, k_shape, v_shape)
        self.strides = [dense_strides(shape, order) for shape, order in zip(self.shapes, orders, strict=True)]
        self.dq, self.dk, self.dv = (
            (tuple(shape), stride, dtype) for shape, stride in zip(self.shapes, self.strides, strict=True)
        )
        built = self.kernels
        q_tiles = self.batch * self.q_heads * work.n_q
        self.tile_rows = tile_rows = q_tiles * tiles.block_q
        if tile_rows >= 1 << 31:
            raise ArgumentError("query", tuple(q_shape), "fewer than 2**31 rows: TMA counts them in 32 bits")
        kv_tiles = self.batch * self.kv_heads * work.n_kv if group > 1 else 0
        counters = q_tiles + kv_tiles + 1
        accumulator = tile_rows * built.columns
        sums = kv_tiles * tiles.block_kv * (built.columns + built.value_columns)
        self._lay_out_workspace(accumulator, tile_rows, tile_rows, sums, counters)
        self.after_semaphores = 4 * q_tiles, 4 * (q_tiles + kv_tiles)
        operands = [
            SeenRows.of(q_shape, q, *queries), SeenRows.of(k_shape, k, *keys), SeenRows.of(v_shape, v, *keys),
            SeenRows.of((*q_shape[:3], value_dim), do, *queries),
        ]  # fmt: skip
        self.skipped = [operand.skipped for operand in operands]
        row = DQ_ROW.value
        descriptors = [
            *(operand.descriptor for operand in operands), describe(k_shape, self.strides[1]),
            describe(v_shape, self.strides[2]), ([accumulator // row, row], [row, 1]), ([tile_rows], [1]),
            ([tile_rows], [1]),
        ]  # fmt: skip
        self.prepare_sizes = (counters, out[:3], do[:3], lse[:3], self.q_heads, *tile_schedule.seen_rows, work.n_q)
        self.problem = arguments.PROBLEM.values(
            work_ids=tile_schedule.work_ids, batch=self.batch, q_heads=self.q_heads, q_len=self.q_len,
            kv_len=self.kv_len,
            lo=lo, hi=hi, head_chunk=plan.head_chunk, scale=scale, scale_log2=score.factor(call),
        )  # fmt: skip
        self.finish_sizes = (self.strides[0][:3], self.q_heads, self.q_len, self.kv_len, lo, hi, work.n_q, scale)
        self.dims = head_dim, value_dim
        self.grad_lse, self.drops, self.returns_delta = grad_lse, drops, call.delta
        self.profiles = None
        if stamped:
            self.profiles = CallProfiles.of(call, plan, DTYPES[dtype], tile_schedule, self.kv_heads, dims, self.device)
        self.varlen, self.bound = rows is not None, score.bound_values(call)
        self.about_data = None if data is None else Arguments.of(call, data, tile_schedule, self.device)
        ctas = self._ctas(tile_schedule)
        finish_programs = q_tiles * (tiles.block_q // FINISH_ROWS)
        self.prepare = launcher.KernelLauncher(built.prepare, q_tiles)
        self.main = launcher.KernelLauncher(built.main, ctas, descriptors)
        self.finish = launcher.KernelLauncher(built.finish, finish_programs)
        self.launches = CallLaunches(self._launches_of_call())

    def _lay_out_workspace(self, *elements: int) -> None:
        """Computes byte offsets of dq accumulator, lse, delta, group sums and counters, whose elements have 4 bytes."""
        self.offsets, end = [], 0
        for count in elements:
            self.offsets.append(end)
            end += -(-4 * count // _ALIGNMENT) * _ALIGNMENT
        self.workspace = (end,), (1,), torch.uint8

    def _ctas(self, tile_schedule: ClosedForm) -> int:
        """Returns the number of CTAs: the smaller of SMs and work ids, or one per work id if they must be
        co-resident.
        """
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        if tile_schedule.co_resident and tile_schedule.work_ids > sms:
            raise ArgumentError(
                "schedule", self.kernels.of.schedule,
                f"one that needs no co-residency: {tile_schedule.work_ids} CTAs do not fit {sms} SMs at once",
            )  # fmt: skip
        return min(tile_schedule.work_ids, sms)

    def run(
        self, operands: _Operands, logsumexp: int, data: tuple[int, ...] | None, seed: int | None, site: str,
        grad_logsumexp: int | None,
    ) -> Gradients:  # fmt: skip
        """Launches the kernels from addresses; returns the results of the call."""
        empty = compat.empty_cuda
        dq, dk, dv = empty(*self.dq), empty(*self.dk), empty(*self.dv)
        workspace = empty(*self.workspace)
        # Before the kernels, so that nothing comes between two of them that overlap.
        profile = None if self.profiles is None else self.profiles.begin(site, self.device)
        stamps = NO_STAMPS if profile is None else (profile.table.data_ptr(), profile.heads)
        self.launches.run(
            raw_stream(self.index),
            (
                *operands, logsumexp, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), workspace.data_ptr(), seed or 0,
                *stamps, grad_logsumexp or 0, *(data or ()),
            ),
        )  # fmt: skip
        if profile is not None:
            profile.end()
        return (dq, dk, dv, self._delta(workspace)) if self.returns_delta else (dq, dk, dv)

    def _delta(self, workspace: Tensor) -> Tensor:
        """Returns the part of the workspace that `prepare` has filled with delta, [batch, q heads, q_len]."""
        heads, rows = self.batch * self.q_heads, self.tile_rows
        delta = workspace[self.offsets[2] :][: 4 * rows].view(torch.float32)
        delta = delta.view(self.batch, self.q_heads, rows // heads if heads else 0)
        return delta[:, :, : self.q_len].contiguous()

    def _launches_of_call(self) -> tuple[CallLaunch, ...]:
        """Returns the three launches; addresses are numbered in the order of `run`, including the timestamp buffer."""
        *operands, logsumexp, dq, dk, dv, workspace, seed, table, heads, grad_lse = unknown_addresses(_FIXED)
        *_, do, out = operands
        accumulator, lse2, delta, sums, semaphores = [workspace + offset for offset in self.offsets]
        group_semaphores, work_id = [semaphores + offset for offset in self.after_semaphores]
        shared = arguments.WORKSPACE.values(
            semaphores=semaphores, work_id_ptr=work_id, group_sums=sums, group_semaphores=group_semaphores
        )
        main_data = finish_data = of_varlen_layout = None
        targets: tuple[tuple[Any, ...] | None, ...] = (None, None)
        if self.about_data is not None:
            data = unknown_addresses(_FIXED + len(BackwardData._fields))[_FIXED:]
            main_data, finish_data = self.about_data.of_call(data)
            if self.varlen:
                of_varlen_layout = tuple(data[-2:])
                targets = tuple(map(target_values, (dk, dv), self.strides[1:], self.dims))
        drops = None if self.drops is None else (seed, *self.drops)
        stamps = None if self.profiles is None else (table, heads)  # a number among addresses
        rows = [start + skipped for start, skipped in zip(operands, self.skipped, strict=False)]
        return (
            CallLaunch(
                self.prepare, (),
                (
                    out, do, logsumexp, lse2, delta, semaphores, *self.prepare_sizes, of_varlen_layout,
                    None if self.grad_lse is None else (grad_lse, *self.grad_lse),
                ),
            ),
            CallLaunch(
                self.main, (*rows, dk, dv, accumulator, lse2, delta),
                (shared, self.problem, main_data, drops, of_varlen_layout, targets, stamps, self.bound),
            ),
            CallLaunch(
                self.finish, (), (accumulator, semaphores, dq, *self.finish_sizes, finish_data, of_varlen_layout)
            ),
        )  # fmt: skip
