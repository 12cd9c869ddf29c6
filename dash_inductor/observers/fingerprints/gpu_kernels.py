"""The hash of Note [Fingerprints] on GPUs: of many tensors in one launch, and of one tensor inside a CUDA graph."""

from __future__ import annotations

import triton
import triton.language as tl

from . import hashing

CHUNK = 16384
"""Words that one program hashes."""

_BLOCK = tl.constexpr(1024)
_CHUNK = tl.constexpr(CHUNK)
_SEED_0, _SEED_1 = (tl.constexpr(seed) for seed in hashing.SEEDS)
_STEP, _FIRST, _SECOND = (tl.constexpr(n) for n in (hashing.STEP, hashing.FIRST, hashing.SECOND))


@triton.jit
def hash_many(pointers, sizes, rows, tensors, chunks, results, UNIT: tl.constexpr):
    """Add the lanes of many tensors to rows of `results`, one chunk of one tensor for each program.

    pointers, sizes (in units), rows: int64, one of each tensor; tensors, chunks: int32, the tensor and the chunk of it
    of each program; results: int64 [rows, 2]; UNIT: bytes that are loaded at once, 1, 2, 4 or 8, which divides every
    pointer and every size in bytes.
    """
    program = tl.program_id(0)
    tensor = tl.load(tensors + program)
    _hash_chunk(
        tl.load(pointers + tensor),
        tl.load(sizes + tensor),
        tl.load(chunks + program),
        results + 2 * tl.load(rows + tensor),
        UNIT,
    )


@triton.jit(do_not_specialize=["address", "size"])
def hash_one(address, size, result, UNIT: tl.constexpr):
    """Add the lanes of one tensor to `result`, int64 [2]; the other arguments are as in `hash_many`."""
    _hash_chunk(address.to(tl.int64), size.to(tl.int64), tl.program_id(0), result, UNIT)


@triton.jit(do_not_specialize=["name", "capacity"])
def append(journal, scratch, name, capacity):
    """Append (name, lanes) to a journal, and clear the lanes.

    journal: int64 [1 + 3 * capacity], the number of entries that were appended, then the entries; further ones are
    counted but not kept.  scratch: int64 [2].  One program, on one stream.
    """
    entries = tl.load(journal)
    place = journal + 1 + 3 * entries
    kept = entries < capacity
    tl.store(place, name.to(tl.int64), mask=kept)
    tl.store(place + 1, tl.load(scratch), mask=kept)
    tl.store(place + 2, tl.load(scratch + 1), mask=kept)
    tl.store(journal, entries + 1)
    tl.store(scratch, tl.zeros([], tl.int64))
    tl.store(scratch + 1, tl.zeros([], tl.int64))


@triton.jit
def _hash_chunk(address, size, chunk, result, UNIT: tl.constexpr):
    units: tl.constexpr = 8 // UNIT  # of a word
    first = chunk.to(tl.int64) * _CHUNK
    words_left = (size + units - 1) // units - first
    lane_0 = tl.zeros([_BLOCK], tl.uint64)
    lane_1 = tl.zeros([_BLOCK], tl.uint64)
    for start in range(0, min(words_left, _CHUNK), _BLOCK):
        place = first + start + tl.arange(0, _BLOCK)
        word = tl.zeros([_BLOCK], tl.uint64)
        for unit in tl.static_range(units):
            index = place * units + unit
            if UNIT == 8:
                part = tl.load(address.to(tl.pointer_type(tl.uint64)) + index, mask=index < size, other=0)
            elif UNIT == 4:
                part = tl.load(address.to(tl.pointer_type(tl.uint32)) + index, mask=index < size, other=0)
            elif UNIT == 2:
                part = tl.load(address.to(tl.pointer_type(tl.uint16)) + index, mask=index < size, other=0)
            else:
                part = tl.load(address.to(tl.pointer_type(tl.uint8)) + index, mask=index < size, other=0)
            word |= part.to(tl.uint64) << (8 * UNIT * unit)
        low, high = word.to(tl.uint32), (word >> 32).to(tl.uint32)
        there = place * units < size
        count = (place + 1).to(tl.uint64)
        lane_0 += tl.where(there, _product(low, high, _splitmix(count, _SEED_0)), 0)
        lane_1 += tl.where(there, _product(low, high, _splitmix(count, _SEED_1)), 0)
    # Additions modulo 2^64: their order changes nothing.
    tl.atomic_add(result, tl.sum(lane_0, 0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(result + 1, tl.sum(lane_1, 0).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _product(low, high, key):
    return (low + key.to(tl.uint32)).to(tl.uint64) * (high + (key >> 32).to(tl.uint32)).to(tl.uint64)


@triton.jit
def _splitmix(count, SEED: tl.constexpr):
    z = count * _STEP + SEED
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)
