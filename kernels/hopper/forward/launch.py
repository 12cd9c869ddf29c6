"""The host side of the Hopper forward: checks tensors, allocates out, log-sum-exp and a counter, launches two kernels.

Everything that depends on shapes and strides alone is computed once per combination (`_State`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import ArgumentError
from ....model.call import Call
from ....model.mask import ROW_BLOCK
from ....schedule.table_tile_schedule import seen_words
from ....schedule.tile_schedule import ClosedForm, Problem
from ....upstream import compat
from ....upstream.cuda import current_device, raw_stream
from ...common import launcher, score
from ...common.call_launches import CallLaunch, CallLaunches, unknown_addresses
from ...common.strides import dense_strides
from ...execution import ReadyForward
from ..kernel_configs import suits_parts
from ..shared.arguments import target_values
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
from . import arguments, few
from .build import Specialisation, kernels
from .data import ForwardData
from .device.tile_work import ROWS

_Strides = tuple[int, ...]
_Results = tuple[Tensor, Tensor]
_FIXED = 8
"""Number of addresses that every call has (0 for absent tensors); those of `ForwardData` follow."""

LAST_TILES = 512
"""Least number of tiles of the last head chunk: enough for every CTA of any Hopper GPU."""

_COUNTER = (1,), (1,), torch.int32

_LEAST = 2.0**-149


def forward(
    query: Tensor, key: Tensor, value: Tensor, call: Call, data: ForwardData | None = None,
    dropout: DropoutArguments | None = None, sinks: Tensor | None = None, *, ctas: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes (out, log-sum-exp) of attention.

    The bits of a (batch element, query head) depend only on its operands and mask, and with dropout on its index and
    the seed.  A row that sees no key gets zeros and -inf (with a sink: the sink), whatever its query contains; keys
    that no row sees may contain anything.

    Args:
        query: fp16 or bf16 [batch, q heads, q_len, head dim], any strides; it is copied first if TMA cannot read it
            (unaligned, or a strided last dimension).
        key, value: [batch, kv heads, kv_len, head dim or value dim], in the dtype of `query`.  q heads are a multiple
            of kv heads; query head ``h`` reads kv head ``h // (q heads // kv heads)``.
        call: the call, with the dimension order of out; an order whose last dimension is not the fourth is replaced by
            the default order.  The product of scale and log2(e) must be finite in fp32.
        data: the tensors of a mask that is data; None for a band alone.
        dropout: which probabilities are dropped; None for none.
        sinks: attention sinks, fp32 [batch or 1, q heads or 1, q_len or 1] on the device of `query`, any strides; None
            for none.  With a varlen layout they must be the same for all tokens.
        ctas: number of CTAs, by default at most one per SM.  It changes speed, never bits.  The split-KV kernels
            (`few`) ignore it.

    Returns:
        out: [batch, q heads, q_len, value dim], in the dtype of `query`; log-sum-exp: fp32 [batch, q heads, q_len],
            natural
        log, contiguous.

    Raises:
        ArgumentError: shapes, dtypes, devices or the scale are not allowed, or data, dropout or sinks do not fit the
            call.
    """
    if not query.ndim == key.ndim == value.ndim == 4:
        shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
        raise ArgumentError("query, key, value", shapes, "[batch, heads, length, head dim]")
    if not call.scale > _LEAST:
        query, scale = _with_positive_scale(query, call.scale)
        call = replace(call, scale=scale)
    device = query.device
    if device.type != "cuda":
        raise ArgumentError("device of query", str(device), "a CUDA device")
    if current_device() != device.index:
        with torch.cuda.device(device):
            return forward(query, key, value, call, data, dropout, sinks, ctas=ctas)
    state = _state(
        call, ctas, query.dtype, key.dtype, value.dtype, device, key.device, value.device,
        query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(),
        None if data is None else _DescribedData.of(data), None if dropout is None else _DescribedDropout.of(dropout),
        None if sinks is None else _describe(sinks),
    )  # fmt: skip
    operands = query.data_ptr(), key.data_ptr(), value.data_ptr()
    q, k, v = operands
    if state is not None and not (q | k | v) % 16:
        return state.run(
            operands, None if data is None else data.addresses(), None if dropout is None else dropout.seed.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
    if not query.shape[3] % 8 == value.shape[3] % 8 == 0:  # not even copies could be read
        raise ArgumentError("head dims", (query.shape[3], value.shape[3]), "multiples of 8")
    query, key, value = readable(query), readable(key), readable(value)
    return forward(query, key, value, call, data, dropout, sinks, ctas=ctas)


def ready(
    query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor], call: Call
) -> ReadyForward | None:  # fmt: skip
    """Returns a cached launch plan of `forward` for tensors with these dtypes, shapes, strides and device.

    It is None if `forward` would copy tensors first.  The returned function checks only addresses and the current
    device, to save host time; if these do not fit it launches nothing and returns None, and the caller runs `forward`.

    Args:
        extras: the operator's extras, see `ForwardData.places`.

    Raises:
        ArgumentError: as `forward`.
    """
    if not call.scale > _LEAST:
        return None
    places, seed = ForwardData.places(call, len(extras)), None if call.dropout is None else call.dropout.seed.index
    sinks = None if call.sinks is None else call.sinks.index
    data, dropout = ForwardData.of(call, extras), DropoutArguments.of(call.dropout, extras)
    with torch.cuda.device(query.device):  # into which kernels are loaded
        state = _state(
            call, None, query.dtype, key.dtype, value.dtype, query.device, key.device, value.device,
            query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(),
            None if data is None else _DescribedData.of(data),
            None if dropout is None else _DescribedDropout.of(dropout),
            None if sinks is None else _describe(extras[sinks]),
        )  # fmt: skip
    if state is None:
        return None
    launch, device = state.run, query.device.index

    def run(query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor]) -> _Results | None:
        q, k, v = operands = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if (q | k | v) % 16 or current_device() != device:
            return None
        return launch(operands)

    def run_with_extras(query: Tensor, key: Tensor, value: Tensor, extras: Sequence[Tensor]) -> _Results | None:
        q, k, v = operands = query.data_ptr(), key.data_ptr(), value.data_ptr()
        data = None if places is None else addresses_at(extras, places)
        if (q | k | v) % 16 or current_device() != device or (data and any(address % 16 for address in data)):
            return None
        return launch(
            operands, data, None if seed is None else extras[seed].data_ptr(),
            None if sinks is None else extras[sinks].data_ptr(),
        )  # fmt: skip

    return run if places is None and seed is None and sinks is None else run_with_extras


def _with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Returns a query and a positive scale that give the same scores.

    The kernel scales the maximum of a row after taking it, so the scale must be positive.  A negative scale is moved to
    the sign of the query, which is exact.  With a zero or denormal scale all scores are zero, as those of a zero query.
    """
    if math.isnan(scale):
        raise ArgumentError("scale", scale, _SCALES)
    if scale < -_LEAST:
        return -query, -scale
    return torch.zeros_like(query), 1.0


class _DescribedTensor(NamedTuple):
    """The facts about a tensor that a cached launch depends on."""

    shape: torch.Size
    strides: _Strides
    dtype: torch.dtype
    device: torch.device
    plain: bool  # contiguous and aligned


class _DescribedData(NamedTuple):
    """The facts about the tensors of a `ForwardData`."""

    q_vectors: _DescribedTensor | None
    kv_vectors: _DescribedTensor | None
    keys_seen: _DescribedTensor | None
    counts: _DescribedTensor | None
    steps: _DescribedTensor | None
    seen_bits: _DescribedTensor | None
    token_offsets: _DescribedTensor | None
    token_counts: _DescribedTensor | None

    @staticmethod
    def of(data: ForwardData) -> _DescribedData:
        return _DescribedData(*(None if t is None else _describe(t) for t in data))

    @property
    def rows(self) -> int | None:
        """As `ForwardData.rows`."""
        return None if self.token_offsets is None else ROW_BLOCK * self.token_offsets.shape[0]


class _DescribedDropout(NamedTuple):
    """The facts about a `DropoutArguments`."""

    seed: _DescribedTensor
    threshold: int
    rescale: float

    @staticmethod
    def of(dropout: DropoutArguments) -> _DescribedDropout:
        return _DescribedDropout(_describe(dropout.seed), dropout.threshold, dropout.rescale)


def _describe(tensor: Tensor) -> _DescribedTensor:
    plain = tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
    return _DescribedTensor(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, plain)


_SCALES = f"a number whose product with log2(e) is at most {score.LARGEST:.8g} in magnitude"


@functools.lru_cache(maxsize=1024)
def _state(*facts: Any) -> _State | few.State | None:
    """Returns the cached `_State` of its arguments, or None if TMA cannot read tensors with these strides."""
    q_shape, q, k_shape, k, v_shape, v, *_ = facts[8:]
    operands = (q_shape, q), (k_shape, k), (v_shape, v)
    if not all(has_readable_strides(*operand) for operand in operands):
        return None
    call, _ctas, *types = facts[:8]
    _check(call, types[:3], types[3:], (q_shape, k_shape, v_shape), *facts[14:])
    if suits_parts(call.traits, q_shape[2], k_shape[2], q_shape[1] // k_shape[1]):
        return few.State(call.scale, call.orders[0], types[0], types[3], q_shape, q, k, v_shape, v)
    return _State(*facts)


class _State:
    """The cached launches for one combination of mask, scale, shapes and strides on one device."""

    def __init__(
        self, call: Call, ctas: int | None,
        q_dtype: torch.dtype, k_dtype: torch.dtype, v_dtype: torch.dtype,
        q_device: torch.device, k_device: torch.device, v_device: torch.device,
        q_shape: torch.Size, q: _Strides, k_shape: torch.Size, k: _Strides, v_shape: torch.Size, v: _Strides,
        data: _DescribedData | None = None, drops: _DescribedDropout | None = None,
        sinks: _DescribedTensor | None = None,
    ) -> None:  # fmt: skip
        shapes = q_shape, k_shape, v_shape
        _check(call, (q_dtype, k_dtype, v_dtype), (q_device, k_device, v_device), shapes, data, drops, sinks)
        band, order = call.mask.band, call.orders[0]
        batch, q_heads, tokens, head_dim = q_shape
        _, kv_heads, kv_len, value_dim = v_shape
        q_len, rows = tokens, None if data is None else data.rows
        if rows is not None:
            check_tokens(q_shape, k_shape)
            q_len = kv_len = rows
        of = Specialisation.of(call.traits, DTYPES[q_dtype], (head_dim, value_dim), q_len, kv_len)
        config = of.config
        self.tables = 0 if data is None else _check_data(data, (batch, q_heads, q_len, kv_len), of, q_device)
        self.drops = None if drops is None else _check_dropout(drops, q_device)
        self.sinks = None if sinks is None else _check_sinks(sinks, (batch, q_heads, tokens), rows, q_device)
        work = Problem(band, q_len, kv_len, config.rows, config.block_kv, batch, q_heads)
        tile_schedule = ClosedForm("two_pass", work)
        lo, hi = work.bounds
        seen_rows, seen_keys = tile_schedule.seen_rows, tile_schedule.seen_keys
        if rows is not None:  # every token sees itself
            seen_rows = seen_keys = 0, tokens
        self.device, self.index, self.traits = q_device, q_device.index, call.traits
        shape = (*q_shape[:3], value_dim)
        self.out = shape, dense_strides(shape, order if order[-1] == 3 else (0, 1, 2, 3)), q_dtype
        sums = batch, q_heads, q_len
        self.lse = sums, dense_strides(sums, (0, 1, 2)), torch.float32
        operands = [
            SeenRows.of(q_shape, q, *seen_rows), SeenRows.of(k_shape, k, *seen_keys),
            SeenRows.of(v_shape, v, *seen_keys),
        ]  # fmt: skip
        self.skipped = [operand.skipped for operand in operands]
        descriptors = [*(operand.descriptor for operand in operands), describe(*self.out[:2])]
        self.value_dim = value_dim
        tiles = batch * q_heads * work.n_q
        if tiles >= 1 << 30:
            raise ArgumentError("query", tuple(q_shape), f"fewer than 2**30 tiles of {config.rows} rows")
        group = q_heads // kv_heads
        keys_in_l2 = (config.head_chunk_mib << 20) // (2 * (head_dim + value_dim))
        head_chunks = _head_chunks(work, keys_in_l2, group, of.has_dense)
        head_chunk, last_head_chunk = head_chunks
        self.problem = arguments.PROBLEM.values(
            batch_heads=batch * q_heads, q_heads=q_heads, group=group, q_len=q_len, kv_len=kv_len, lo=lo, hi=hi,
            head_chunk=head_chunk, last_head_chunk=last_head_chunk, scale_log2=score.factor(call),
        )  # fmt: skip
        self.bound = score.bound_values(call)
        built = kernels(of, self.device.index)
        available = torch.cuda.get_device_properties(self.device).multi_processor_count
        grid = min(tiles, available if ctas is None else ctas)
        if grid < 1:
            raise ArgumentError("ctas", ctas, "None or an integer >= 1")
        self.prepare = launcher.KernelLauncher(built.prepare, 1)
        self.main = launcher.KernelLauncher(built.main, grid, descriptors)
        self.launches = CallLaunches(self._launches_of_call(data is not None))

    def run(
        self, operands: tuple[int, int, int], data: tuple[int, ...] | None = None, seed: int | None = None,
        sinks: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Returns (out, log-sum-exp), from the addresses of query, key and value, data, seed and sinks."""
        empty = compat.empty_cuda
        out, lse, counter = empty(*self.out), empty(*self.lse), empty(*_COUNTER)
        self.launches.run(
            raw_stream(self.index),
            (*operands, out.data_ptr(), lse.data_ptr(), counter.data_ptr(), seed or 0, sinks or 0, *(data or ())),
        )
        return out, lse

    def _launches_of_call(self, has_data: bool) -> tuple[CallLaunch, ...]:
        """Returns the two launches; addresses are numbered in the order of `run`."""
        *operands, out, lse, counter, seed, sinks = unknown_addresses(_FIXED)
        rows = [start + skipped for start, skipped in zip(operands, self.skipped, strict=True)]
        about_data = of_varlen_layout = target = drops = of_sinks = None
        if has_data:
            data = unknown_addresses(_FIXED + len(ForwardData._fields))[_FIXED:]
            q_vectors, kv_vectors, keys_seen, counts, steps, seen_bits, *of_mask = data
            about_data = arguments.DATA.values(
                counts_ptr=counts, steps_ptr=steps, tables=self.tables, q_vectors=q_vectors, kv_vectors=kv_vectors,
                seen_bits_ptr=seen_bits, keys_seen_ptr=keys_seen,
            )  # fmt: skip
            if self.traits.varlen:
                of_varlen_layout, target = tuple(of_mask), target_values(out, self.out[1], self.value_dim)
        if self.drops is not None:
            threshold, rescale = self.drops
            drops = arguments.DROPOUT.values(seed=seed, threshold=threshold, rescale=rescale)
        if self.sinks is not None:
            of_sinks = arguments.SINKS.values(ptr=sinks, **self.sinks)
        return (
            CallLaunch(self.prepare, (), (counter,)),
            CallLaunch(
                self.main, (*rows, out),
                (lse, counter, self.problem, about_data, drops, of_varlen_layout, target, self.bound, of_sinks),
            ),
        )  # fmt: skip


def _check(
    call: Call, dtypes: Sequence[torch.dtype], devices: Sequence[torch.device], shapes: Sequence[torch.Size],
    data: _DescribedData | None, drops: _DescribedDropout | None, sinks: _DescribedTensor | None,
) -> None:  # fmt: skip
    """Raises ArgumentError unless query, key and value fit one another, and data, dropout and sinks fit the call."""
    _check_shapes(*shapes)
    _check_types(dtypes, devices)
    _check_given(call, data, drops, sinks)
    if call.scale * score.LOG2E > score.LARGEST:
        raise ArgumentError("scale", call.scale, _SCALES)


def _check_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> None:
    if q[0] != k[0] or q[3] != k[3]:
        raise ArgumentError("key", tuple(k), f"[{q[0]}, kv heads, kv_len, {q[3]}], as query has it")
    if k[:3] != v[:3]:
        raise ArgumentError("value", tuple(v), f"{[*k[:3]]} and the value dim, as key has it")
    if not k[1] or q[1] % k[1]:
        raise ArgumentError("query", tuple(q), f"a multiple of the {k[1]} heads of key")


def _check_given(
    call: Call, data: _DescribedData | None, drops: _DescribedDropout | None, sinks: _DescribedTensor | None
) -> None:
    """Raises ArgumentError unless data, dropout and sinks are given exactly if the call has them."""
    traits = call.traits
    if (data is None) != (not traits.components) or (
        data is not None and (data.token_offsets is None) == traits.varlen
    ):
        raise ArgumentError("data", data, f"what the mask of {call} reads")
    if data is not None and (data.seen_bits is None) == traits.of_pairs:
        raise ArgumentError("data.seen_bits", data.seen_bits, f"bits if the mask has a dense one: {call}")
    if (drops is None) == traits.reads("dropout"):
        raise ArgumentError("dropout", drops, f"given if the call has dropout: {call}")
    if (sinks is None) == traits.reads("sinks"):
        raise ArgumentError("sinks", sinks, f"given if the call has sinks: {call}")


def _check_types(dtypes: Sequence[torch.dtype], devices: Sequence[torch.device]) -> None:
    if dtypes[0] not in (torch.float16, torch.bfloat16) or len({*dtypes}) > 1:
        raise ArgumentError("dtypes of query, key, value", tuple(dtypes), "float16 or bfloat16, the same for all")
    if len({*devices}) > 1:
        raise ArgumentError("devices of query, key, value", tuple(map(str, devices)), "the same for all")


def _check_data(
    data: _DescribedData, plane: tuple[int, int, int, int], of: Specialisation, device: torch.device
) -> int:
    """Checks the data and returns the number of tables per batch element; plane: batch, q heads, q_len, kv_len of the
    mask.
    """
    batch, q_heads, q_len, kv_len = plane
    config, layout = of.config, of.layout
    wanted = {"q_vectors": (layout.QUERIES, q_len), "kv_vectors": (layout.KEYS, kv_len)}
    if any((getattr(data, name) is None) != (not count) for name, (count, _) in wanted.items()):
        given = [name for name, fact in data._asdict().items() if fact is not None]
        raise ArgumentError("data", given, f"{[name for name, (count, _) in wanted.items() if count]} of the vectors")
    assert data.counts is not None
    by_head = data.seen_bits is not None and data.counts.shape[:1] == (batch * q_heads,)
    tables = q_heads if by_head else 1
    kv_tiles = -(-kv_len // config.block_kv)
    if kv_tiles > 1 << 16:
        raise ArgumentError("key", (kv_len,), f"at most 2**16 tiles of {config.block_kv} keys where the mask is data")
    rows = batch * tables, -(-q_len // config.rows)
    for name, (count, length) in wanted.items():
        _check_plain(name, getattr(data, name), (batch, count, length), device)
    _check_plain("keys_seen", data.keys_seen, (batch, tables, kv_len), device, torch.bool)
    _check_plain("counts", data.counts, rows, device)
    _check_plain("steps", data.steps, (*rows, kv_tiles), device)
    row = int(ROWS.value)
    bits = batch * tables, -(-q_len // row), kv_tiles, 2 * row, seen_words(config.block_kv)
    _check_plain("seen_bits", data.seen_bits, bits, device)
    for name, fact in (("token_offsets", data.token_offsets), ("token_counts", data.token_counts)):
        if (fact is None) != (data.token_offsets is None):
            raise ArgumentError(f"data.{name}", fact, "token_offsets and token_counts, or neither")
        _check_plain(name, fact, (q_len // ROW_BLOCK,), device)
    return tables


def _check_plain(
    name: str,
    fact: _DescribedTensor | None,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.int32,
) -> None:
    if fact is None:
        return
    if not fact.plain or (fact.dtype, tuple(fact.shape), fact.device) != (dtype, shape, device):
        allowed = f"{dtype}, contiguous and aligned, of shape {shape} on {device}"
        raise ArgumentError(f"data.{name}", (fact.dtype, tuple(fact.shape), fact.strides, str(fact.device)), allowed)


def _check_dropout(drops: _DescribedDropout, device: torch.device) -> tuple[int, float]:
    """Checks dropout and returns the main kernel's dropout arguments other than the seed."""
    seed = drops.seed
    if (seed.dtype, tuple(seed.shape), seed.device) != (torch.int64, (1,), device):
        given = seed.dtype, tuple(seed.shape), str(seed.device)
        raise ArgumentError("dropout.seed", given, f"int64, of shape (1,) on {device}")
    if not 0 <= drops.threshold < 1 << 16:
        raise ArgumentError("dropout.threshold", drops.threshold, "at least 0 and less than 2**16")
    if not 0 < drops.rescale <= score.LARGEST:
        raise ArgumentError("dropout.rescale", drops.rescale, "positive and finite in fp32")
    return drops.threshold, drops.rescale


def _check_sinks(
    sinks: _DescribedTensor, sizes: tuple[int, int, int], rows: int | None, device: torch.device
) -> dict[str, int]:
    """Checks sinks and returns their strides by argument name; rows: padded rows of a varlen layout, else None."""
    shape = sinks.shape if len(sinks.shape) == 3 else (0, 0, 0)
    fits = all(size in (1, wanted) for size, wanted in zip(shape, sizes, strict=True))
    if not fits or (rows is not None and shape[2] != 1) or (sinks.dtype, sinks.device) != (torch.float32, device):
        allowed = f"float32 that broadcasts to {sizes} on {device}, of size 1 for the tokens of a mask of rows"
        raise ArgumentError("sinks", (sinks.dtype, tuple(sinks.shape), str(sinks.device)), allowed)
    strides = (0 if size == 1 else stride for size, stride in zip(shape, sinks.strides, strict=True))
    return dict(zip(("b", "h", "row"), strides, strict=True))


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
