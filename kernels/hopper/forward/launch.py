"""The host side of the Hopper forward: checks tensors, allocates out, log-sum-exp and counters, launches kernels.

Everything that depends only on tensor layouts is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....errors import ArgumentError
from ....model.attention_spec import AttentionSpec
from ....model.mask import ROW_BLOCK
from ....schedule.document_tiles import EVERYWHERE
from ....schedule.tile_schedule import ClosedForm, Problem
from ...common import launcher, score
from ...common.call_launches import Address, CallLaunch, CallLaunches, named_arguments
from ...common.layouts import are_rows_dense, heads_first, in_orders, kernel_strides, of_operator
from ...common.strides import dense_strides
from ...execution import Run
from ..kernel_configs import suits_parts
from ..shared import operands
from ..shared.arguments import target_values
from ..shared.prepared import Launch, for_any_addresses, numbered, used_extras
from ..shared.tensors import SeenRows, describe, problem_of, seen, site_of
from . import arguments, few
from .build import Kernels, Specialisation, kernels
from .data import ForwardData
from .device.entry import hopper_forward
from .device.prepare import prepare as reset

LAST_TILES = 512
"""Least number of tiles of the last head chunk: enough for every CTA of any Hopper GPU."""

_LEAST = 2.0**-149

_COUNTER_BYTES = 4


def prepare(
    tensors: Sequence[Tensor],
    extras: Sequence[Tensor],
    spec: AttentionSpec,
    *,
    ctas: int | None = None,
    split_kv: bool = True,
) -> Run:
    """Returns a function (query, key, value, extras) -> (out, log-sum-exp) that computes attention.

    It runs calls with tensors of these dtypes, shapes, strides and device.  The bits of a (batch element, query head)
    depend only on its operands and mask, and with dropout on its index and the seed.  A row that sees no key gets zeros
    and -inf (with a sink: the sink), whatever its query contains; keys that no row sees may contain anything.

    The results are out, [batch, q heads, q_len, value dim], in the dtype of query, and log-sum-exp, fp32 [batch, q
    heads, q_len], natural log, contiguous.  With a packed mask, the log-sum-exp has padded rows, and the other tensors
    have the shapes of `layouts`.

    Args:
        tensors: query, key and value.  query: fp16 or bf16 [batch, q heads, q_len, head dim], any strides; it is copied
            in every call if TMA cannot read it (unaligned, or a strided last dimension).  key, value: [batch, kv heads,
            kv_len, head dim or value dim], in the dtype of query.  q heads are a multiple of kv heads; query head ``h``
            reads kv head ``h // (q heads // kv heads)``.
        extras: the operands of the call, then what the mask's kernels read, see `ForwardData.places`.
        spec: the attention spec, with the dimension order of out, which is copied in every call if its last dimension
            is not the fourth.  The product of scale and log2(e) must be finite in fp32.
        ctas: number of CTAs, by default at most one per SM.  It changes speed, never bits.  The split-KV kernels
            (`few`) ignore it.
        split_kv: whether the split-KV kernels run the calls that suit them; else the main kernel does, with other bits.

    Raises:
        ArgumentError: shapes, dtypes, devices or the scale are not allowed, or do not fit the call.
    """
    device = tensors[0].device
    if device.type != "cuda":
        raise ArgumentError("device of query", str(device), "a CUDA device")
    if not spec.scale > _LEAST:
        return _with_positive_scale(tensors, extras, spec, ctas, split_kv)
    places = ForwardData.places(spec, len(extras))
    used = used_extras(places, spec)
    aligned = used[: len(used) - len(spec.given)]  # those of the mask
    run = for_any_addresses(tensors, extras, 3, used, len(aligned), partial(_launches, spec, ctas, split_kv=split_kv))
    return run if are_rows_dense(spec) else in_orders(run, spec)


def _with_positive_scale(
    tensors: Sequence[Tensor],
    extras: Sequence[Tensor],
    spec: AttentionSpec,
    ctas: int | None,
    split_kv: bool = True,
) -> Run:
    """As `prepare`, with another query and a positive scale that give the same scores.

    The kernel scales the maximum of a row after taking it, so the scale must be positive.  A negative scale is moved to
    the sign of the query, which is exact.  With a zero or denormal scale all scores are zero, as those of a zero query.
    """
    if math.isnan(spec.scale):
        raise ArgumentError("scale", spec.scale, _SCALES)
    negated = spec.scale < -_LEAST
    other, scale = (torch.neg, -spec.scale) if negated else (torch.zeros_like, 1.0)
    known = prepare((other(tensors[0]), *tensors[1:]), extras, replace(spec, scale=scale), ctas=ctas, split_kv=split_kv)
    return lambda args: known((other(args[0]), *args[1:]))


_SCALES = f"a number whose product with log2(e) is at most {score.LARGEST:.8g} in magnitude"


def _launches(
    spec: AttentionSpec,
    ctas: int | None,
    tensors: Sequence[Tensor],
    extras: Sequence[Tensor],
    *,
    split_kv: bool = True,
) -> Launch:
    """Prepares the launches for tensors that TMA can read."""
    query, key, value = heads_first(tensors, spec)
    if spec.scale * score.LOG2E > score.LARGEST:
        raise ArgumentError("scale", spec.scale, _SCALES)
    site, device = site_of(query, key, value, spec, extras), query.device
    if split_kv and suits_parts(spec.traits, query.shape[2], key.shape[2], site.group):
        return few.launches(site, query, key, value)
    of = Specialisation.of_site(site)
    work = problem_of(site, of.config.rows, of.config.block_kv)
    tiles = work.batch * work.heads * work.n_q
    if tiles >= 1 << 30:
        raise ArgumentError("query", tuple(query.shape), f"fewer than 2**30 tiles of {work.block_q} rows")
    queries = 1 if spec.mask.varlen_layout else work.q_len  # the kernel would read sinks of the rows of a packed mask
    operands.check(spec, extras, (work.batch, work.heads, queries, work.kv_len), device)
    shape = (*query.shape[:3], site.value_dim)
    strides = kernel_strides(shape, spec.orders[0])
    sums = work.batch, work.heads, work.q_len

    places = ForwardData.places(spec, len(extras))
    (q, k, v), of_extras, (out, lse, counter) = numbered(3, used_extras(places, spec), 3)
    data = ForwardData.of(spec, extras)
    about_data = dict[str, tuple[Any, ...] | None](dict.fromkeys(("data", "documents", "elements")))
    if data is not None and places is not None:
        about_data = data.arguments(places, data.check(work, of.layout, device), of_extras)
        of = replace(of, elements=data.elements is not None)
        if of.elements and work.q_len != work.kv_len:
            raise ArgumentError("query, key", (work.q_len, work.kv_len), "equal lengths with a work list of documents")
    layout, padding = spec.mask.varlen_layout, None
    if layout is not None:
        counts = of_extras[layout.token_count.index]
        padding = arguments.PADDING.values(lse_ptr=lse, token_counts_ptr=counts, heads=work.heads, rows=work.q_len)
    seen_of = seen(ClosedForm("two_pass", work), spec, query.shape[2])
    keys_in_l2 = (of.config.head_chunk_mib << 20) // (2 * (site.head_dim + site.value_dim))
    head_chunk = _head_chunks(work, keys_in_l2, site.group, of.has_dense)
    available = torch.cuda.get_device_properties(device).multi_processor_count
    grid = min(tiles, available if ctas is None else ctas)
    if grid < 1:
        raise ArgumentError("ctas", ctas, "None or an integer >= 1")

    built = kernels(of, device.index)

    def main(
        of: Specialisation, built: Kernels, counter: Address, seen_of: Sequence[tuple[int, int]], batch: int,
        head_chunk: tuple[int, int], data: Mapping[str, tuple[Any, ...] | None],
    ) -> CallLaunch:  # fmt: skip
        """A main kernel, which reads the queries and the keys in the ranges `seen_of`."""
        lo, hi = work.bounds
        if of.traits.varlen and work.resolved.band.lo is None:  # the kernel tests it all the same
            lo = EVERYWHERE
        problem = arguments.PROBLEM.values(
            batch_heads=batch * work.heads, q_heads=work.heads, group=site.group, q_len=work.q_len,
            kv_len=work.kv_len, lo=lo, hi=hi, head_chunk=head_chunk[0], last_head_chunk=head_chunk[1],
            scale_log2=score.factor(spec),
        )  # fmt: skip
        rows, keys = seen_of
        read = [SeenRows.of(query, *rows), SeenRows.of(key, *keys), SeenRows.of(value, *keys)]
        descriptors = [*(each.descriptor for each in read), describe(shape, strides)]
        skipped = [start + each.skipped for start, each in zip((q, k, v), read, strict=True)]
        values = named_arguments(
            hopper_forward, lse_ptr=lse, counter_ptr=counter, problem=problem, bound=score.bound_values(spec),
            target=target_values(out, strides, site.value_dim) if of.traits.varlen else None,
            **data, **operands.values(arguments.OPERANDS, spec, extras, of_extras),
        )  # fmt: skip
        kernel = launcher.KernelLauncher(built.main, grid, descriptors)
        return CallLaunch(kernel, (*skipped, out), values)

    asked = [
        CallLaunch(
            launcher.KernelLauncher(built.prepare, 1 if padding is None else work.q_len // ROW_BLOCK),
            (),
            named_arguments(reset, counter_ptr=counter, padding=padding),
        )
    ]
    if of.elements:  # see Note [Documents of a mask]
        every = (0, work.q_len), (0, work.kv_len)
        chunk = _head_chunks(replace(work, batch=1), keys_in_l2, site.group)
        data_of = about_data | {"data": None, "elements": None}
        documents = of.by_documents()
        asked.append(
            main(documents, kernels(documents, device.index), counter + _COUNTER_BYTES, every, 1, chunk, data_of)
        )
        about_data["documents"] = None
        head_chunk = work.heads, work.batch * work.heads  # whole ones, with any number of batch elements
    asked.append(main(of, built, counter, seen_of, work.batch, head_chunk, about_data))
    of_out = of_operator(shape, spec), of_operator(strides, spec), query.dtype
    counters = (1 + of.elements,), (1,), torch.int32
    allocated = of_out, (sums, dense_strides(sums, (0, 1, 2)), torch.float32), counters
    return CallLaunches(asked, allocated, 2, device.index).run


def _head_chunks(work: Problem, keys_in_l2: int, group: int, has_dense: bool = False) -> tuple[int, int]:
    """Returns (query heads per head chunk, first head of the last head chunk); the tiles of a group are launched
    together.

    This changes speed alone.  With a full mask all tiles cost the same: the tiles of one kv head follow one another and
    share its K and V.  With a bounded band, long tiles come first, in groups of as many heads as fit the L2 cache with
    the keys in use; the last group has at least LAST_TILES, so that all CTAs end with its short tiles.

    Args:
        keys_in_l2: number of keys whose K and V fit in L2.
        group: query heads per kv head.
        has_dense: whether there is a dense mask, which is assumed to be causal.
    """
    band = work.resolved.band
    heads = work.batch * work.heads
    if band.is_full and not has_dense:
        return min(group, heads), heads
    in_use = work.kv_len
    if band.lo is not None and band.hi is not None:
        in_use = min(in_use, band.hi - band.lo + work.block_q)
    head_chunk = min(max(1, keys_in_l2 // in_use) * group, heads)
    last = max(head_chunk, -(-LAST_TILES // work.n_q))
    return head_chunk, max(0, heads - last) // head_chunk * head_chunk
