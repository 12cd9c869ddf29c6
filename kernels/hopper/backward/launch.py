"""The host side of the Hopper backward: checks tensors, lays out the workspace, launches prepare, main and finish.

Everything that depends only on tensor layouts is computed once.  A call allocates four tensors and launches three
kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....config import config
from ....errors import ArgumentError
from ....model.attention_spec import AttentionSpec
from ....model.plan import Plan
from ....schedule.tile_schedule import ClosedForm, Problem
from ...common import launcher, score
from ...common.call_launches import CallLaunch, CallLaunches, named_arguments
from ...common.layouts import are_rows_dense, heads_first, in_orders, kernel_strides, of_operator
from ...execution import Gradients, Run
from ..shared import operands
from ..shared.arguments import target_values
from ..shared.device.operations import DQ_ROW
from ..shared.prepared import Launch, for_any_addresses, numbered, used_extras
from ..shared.tensors import SeenRows, describe, problem_of, seen, site_of
from . import arguments
from .build import FINISH_ROWS, Specialisation, kernels
from .call_profiles import NOTHING as NO_STAMPS
from .call_profiles import CallProfiles
from .data import Arguments, BackwardData
from .device.entry import hopper_backward
from .device.finish import finish
from .device.prepare import prepare as prepare_rows

_READ = 5
"""How many of a call's tensors TMA reads, or is assumed to read: all but the log-sum-exp, which is the last."""
_ALIGNMENT = 128  # bytes between the parts of the workspace


def prepare(
    tensors: Sequence[Tensor], extras: Sequence[Tensor], spec: AttentionSpec, plan: Plan, site: str = ""
) -> Run:
    """Returns a `Run`: a function of one sequence (grad_out, query, key, value, out, logsumexp, extras, ...) -> [dq,
    dk, dv, and delta if `spec.delta`].

    The function serves every call whose tensors have these dtypes, shapes, strides and device.  Its results are bitwise
    reproducible.  It records profiles if `config.profile` is set when `prepare` is called.

    Delta, the row sums of out * grad_out minus grad_logsumexp, is fp32 [batch, q heads, q_len], contiguous, and zero in
    rows that see no key.  It may be a view of the workspace, which it then keeps alive.

    Args:
        tensors: grad_out, query, key, value, out and logsumexp.  All but the last are fp16 or bf16 [batch, heads,
            length, head dim], any strides; a tensor that TMA cannot read (unaligned, or a strided last dimension) is
            copied in every call.  logsumexp: fp32 [batch, q heads, >= q_len], natural log, any strides.
        extras: the operands of the call, then the tables of the mask, see `BackwardData.places`.  Under a mask that is
            data, the log-sum-exp of a query that sees no key is -inf.  With a packed mask it has padded rows, and the
            other tensors have the shapes of `layouts`.
        spec: the attention spec, with the dimension orders of dq, dk and dv; these are copied in every call if the last
            dimension of an order is not the fourth.
        plan: a plan of the Hopper kernel.
        site: the name of the call in profiles, if `config.profile` is set.

    Raises:
        ArgumentError: the plan is for another family; the tensors do not fit the call; or the schedule needs more
            co-resident CTAs than the GPU has SMs.
    """
    make = partial(_launches, spec, plan, site, config.profile)
    used = used_extras(BackwardData.places(spec, len(extras)), spec)
    run = for_any_addresses(tensors, extras, _READ, used, 0, make)
    return run if are_rows_dense(spec) else in_orders(run, spec)


class _Workspace(NamedTuple):
    """The parts of a call's workspace, by byte offset; their elements have 4 bytes.

    Attributes:
        accumulator, lse, delta, group_sums: fp32, see `device.entry` and `arguments.WORKSPACE`.
        semaphores, group_semaphores, work_id: int32, one after the other.
        end: the number of bytes.
        counters: the number of semaphores and work ids.
        rows: the number of rows of all q tiles.
    """

    accumulator: int
    lse: int
    delta: int
    group_sums: int
    semaphores: int
    group_semaphores: int
    work_id: int
    end: int
    counters: int
    rows: int

    @staticmethod
    def of(work: Problem, kv_heads: int, columns: int, value_columns: int) -> _Workspace:
        """Returns the layout of the workspace of a problem.

        kv_heads: the number of kv heads of a batch element.  columns, value_columns: the columns of tiles of q and k,
        and of v.
        """
        q_tiles = work.batch * work.heads * work.n_q
        kv_tiles = work.batch * kv_heads * work.n_kv if kv_heads < work.heads else 0
        rows, counters = q_tiles * work.block_q, q_tiles + kv_tiles + 1
        elements = rows * columns, rows, rows, kv_tiles * work.block_kv * (columns + value_columns), counters
        *offsets, end = accumulate((-(-4 * n // _ALIGNMENT) * _ALIGNMENT for n in elements), initial=0)
        accumulator, lse, delta, group_sums, semaphores = offsets
        after = semaphores + 4 * q_tiles, semaphores + 4 * (q_tiles + kv_tiles)
        return _Workspace(accumulator, lse, delta, group_sums, semaphores, *after, end, counters, rows)


def _launches(
    spec: AttentionSpec, plan: Plan, name: str, stamped: bool, tensors: Sequence[Tensor], extras: Sequence[Tensor]
) -> Launch:
    """Prepares the launches for tensors that TMA can read; `name` is the site's, and `stamped` is `config.profile`."""
    grad_out, query, key, value, out = heads_first(tensors[:_READ], spec)
    logsumexp = tensors[_READ]
    site, device = site_of(query, key, value, spec, extras), query.device
    of = Specialisation.of_site(site, plan, stamped)
    built = kernels(of, device.index)
    work = problem_of(site, plan.dkdv.block_q, plan.dkdv.block_kv, plan.head_chunk)
    tile_schedule = ClosedForm(plan.schedule, work)
    lo, hi = work.bounds
    operands.check(spec, extras, (*query.shape[:3], key.shape[2]), device)

    parts = _Workspace.of(work, site.kv_heads, built.columns, built.value_columns)
    if parts.rows >= 1 << 31:
        raise ArgumentError("query", tuple(query.shape), "fewer than 2**31 rows: TMA counts them in 32 bits")
    shapes = [(*tensor.shape,) for tensor in (query, key, value)]
    strides = [kernel_strides(*each) for each in zip(shapes, spec.orders, strict=True)]
    allocated = [
        (of_operator(shape, spec), of_operator(steps, spec), query.dtype)
        for shape, steps in zip(shapes, strides, strict=True)
    ]
    dq_strides, dk_strides, dv_strides = strides

    places = BackwardData.places(spec, len(extras))
    known, of_extras, others = numbered(len(tensors), used_extras(places, spec), 2 * stamped + 4)
    (do, q, k, v, o, lse), (*stamps, dq, dk, dv, workspace) = known, others
    accumulator, lse2, delta = (workspace + offset for offset in (parts.accumulator, parts.lse, parts.delta))
    semaphores = workspace + parts.semaphores
    about_data = dict.fromkeys(("data", "contributions", "varlen_layout"))
    data = BackwardData.of(spec, extras)
    if data is not None and places is not None:
        about_data = Arguments.of(spec, data, tile_schedule, device).of_call(places, of_extras)
    varlen_layout = about_data["varlen_layout"]
    targets: tuple[tuple[Any, ...] | None, ...] = (None, None)
    if spec.mask.varlen_layout is not None:
        targets = target_values(dk, dk_strides, site.head_dim), target_values(dv, dv_strides, site.value_dim)

    queries, keys = seen(tile_schedule, spec, query.shape[2])
    read = [
        SeenRows.of(query, *queries), SeenRows.of(key, *keys), SeenRows.of(value, *keys),
        SeenRows.of(grad_out, *queries),
    ]  # fmt: skip
    rows = [start + each.skipped for start, each in zip((q, k, v, do), read, strict=True)]
    row = DQ_ROW.value
    descriptors = [
        *(each.descriptor for each in read), describe(key.shape, dk_strides), describe(value.shape, dv_strides),
        ([parts.rows * built.columns // row, row], [row, 1]), ([parts.rows], [1]), ([parts.rows], [1]),
    ]  # fmt: skip
    shared = arguments.WORKSPACE.values(
        semaphores=semaphores, work_id_ptr=workspace + parts.work_id, group_sums=workspace + parts.group_sums,
        group_semaphores=workspace + parts.group_semaphores,
    )  # fmt: skip
    problem = arguments.PROBLEM.values(
        work_ids=tile_schedule.work_ids, batch=work.batch, q_heads=work.heads, q_len=work.q_len, kv_len=work.kv_len,
        lo=lo, hi=hi, head_chunk=plan.head_chunk, scale=spec.scale, scale_log2=score.factor(spec),
    )  # fmt: skip
    first_row, end_row = tile_schedule.seen_rows
    of_prepare = named_arguments(
        prepare_rows, out_ptr=o, do_ptr=do, lse_ptr=lse, lse2_ptr=lse2, delta_ptr=delta, counters_ptr=semaphores,
        counters=parts.counters, out_strides=out.stride()[:3], do_strides=grad_out.stride()[:3],
        lse_strides=logsumexp.stride()[:3], q_heads=work.heads, first_row=first_row, end_row=end_row, n_q=work.n_q,
        varlen_layout=varlen_layout, **operands.values(arguments.PREPARE_OPERANDS, spec, extras, of_extras),
    )  # fmt: skip
    of_main = named_arguments(
        hopper_backward, workspace=shared, problem=problem, data=about_data["data"], varlen_layout=varlen_layout,
        targets=targets, stamped=tuple(stamps) or None, bound=score.bound_values(spec),
        **operands.values(arguments.OPERANDS, spec, extras, of_extras),
    )  # fmt: skip
    of_finish = named_arguments(
        finish, accumulator=accumulator, semaphores=semaphores, dq_ptr=dq, dq_strides=dq_strides[:3],
        q_heads=work.heads, q_len=work.q_len, kv_len=work.kv_len, lo=lo, hi=hi, n_q=work.n_q, scale=spec.scale,
        data=about_data["contributions"], varlen_layout=varlen_layout,
    )  # fmt: skip
    main = launcher.KernelLauncher(built.main, _ctas(tile_schedule, plan.schedule, device), descriptors)
    q_tiles = work.batch * work.heads * work.n_q
    asked = [
        CallLaunch(launcher.KernelLauncher(built.prepare, q_tiles), (), of_prepare),
        CallLaunch(main, (*rows, dk, dv, accumulator, lse2, delta), of_main),
        CallLaunch(launcher.KernelLauncher(built.finish, q_tiles * (work.block_q // FINISH_ROWS)), (), of_finish),
    ]
    launches = CallLaunches(asked, [*allocated, ((parts.end,), (1,), torch.uint8)], 3 + spec.delta, device.index)
    launch: Launch = launches.run
    if stamped:
        profiles = CallProfiles.of(spec, plan, site, tile_schedule, device)
        launch = partial(_profiled, launches, profiles, name, device)
    if spec.delta:
        of_tiles = work.batch, work.heads, work.n_q * work.block_q
        launch = partial(_with_delta, launch, parts.delta, of_tiles, work.q_len)
    return launch


def _profiled(
    launches: CallLaunches, profiles: CallProfiles, site: str, device: torch.device, addresses: list[int]
) -> Gradients:
    """Launches with timestamps, if the call is profiled."""
    # Before the kernels, so that nothing comes between two of them that overlap.
    profile = profiles.begin(site, device)
    addresses.extend(NO_STAMPS if profile is None else (profile.table.data_ptr(), profile.heads))
    results = launches.run(addresses)
    if profile is not None:
        profile.end()
    return results


def _with_delta(
    launch: Launch, offset: int, shape: tuple[int, int, int], q_len: int, addresses: list[int]
) -> Gradients:
    """Launches, and returns the part of the workspace that `prepare` has filled with delta instead of the workspace.

    Args:
        offset: its first byte.
        shape: batch, q heads, and rows of all tiles of a head.
        q_len: the number of rows that exist.
    """
    *gradients, workspace = launch(addresses)
    delta = workspace[offset:][: 4 * math.prod(shape)].view(torch.float32).view(shape)
    return *gradients, delta[:, :, :q_len].contiguous()


def _ctas(tile_schedule: ClosedForm, schedule: str, device: torch.device) -> int:
    """Returns the number of CTAs: the smaller of SMs and work ids, or one per work id if they must be co-resident."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if tile_schedule.co_resident and tile_schedule.work_ids > sms:
        raise ArgumentError(
            "schedule", schedule,
            f"one that needs no co-residency: {tile_schedule.work_ids} CTAs do not fit {sms} SMs at once",
        )  # fmt: skip
    return min(tile_schedule.work_ids, sms)
