"""Triton kernels for the hash of Note [Fingerprints]: for many tensors at once, and for one in a CUDA graph."""

from __future__ import annotations

import triton
import triton.language as tl

from . import hashing

CHUNK = 16384
"""Words that one program hashes."""

TOGETHER = 4
"""Tensors of equal size whose words are hashed with the same keys, at most."""

_BLOCK = tl.constexpr(1024)
_SMALL = tl.constexpr(512)  # of several tensors at once, so that all lanes stay in registers
_CHUNK = tl.constexpr(CHUNK)
_SEED_0, _SEED_1 = (tl.constexpr(seed) for seed in hashing.SEEDS)
_STEP, _FIRST, _SECOND = (tl.constexpr(n) for n in (hashing.STEP, hashing.FIRST, hashing.SECOND))


@triton.jit
def hash_many(pointers, sizes, firsts, rows, sets, chunks, results, UNIT: tl.constexpr, TOGETHER: tl.constexpr):
    """Add the lanes of many tensors to rows of `results`; one program for each chunk of each set of tensors.

    The tensors of a set have the same size and the same keys; computing keys is most of the work, and is done once for
    all of them.

    pointers, rows: int64 [sets, TOGETHER], address and row of `results` of each tensor.
    sizes, firsts: int64 [sets], the size in units of UNIT bytes, and the number of the first word.
    sets, chunks: int32 [programs], the set of each program and the chunk of it.
    results: int64 [rows, 2].
    UNIT: the bytes of one load, 1, 2, 4 or 8, which divides every pointer and every size in bytes.
    TOGETHER: the number of tensors in each set, from 1 to `TOGETHER`.
    """
    program = tl.program_id(0)
    of = tl.load(sets + program).to(tl.int64)
    _hash_chunk(
        pointers + of * TOGETHER,
        tl.load(sizes + of),
        tl.load(firsts + of),
        tl.load(chunks + program),
        results,
        rows + of * TOGETHER,
        UNIT,
        TOGETHER,
    )


@triton.jit(do_not_specialize=["address", "size"])
def hash_one(address, size, result, UNIT: tl.constexpr):
    """Add the hash of the tensor at `address` to `result`, int64 [2]: the two lanes of Note [Fingerprints].

    Launch one program for each CHUNK words of 8 bytes.  size: in units of UNIT bytes.  UNIT: the bytes of one load, 1,
    2, 4 or 8, which divides the address and the size.
    """
    lane_0 = tl.zeros([_BLOCK], tl.uint64)
    lane_1 = tl.zeros([_BLOCK], tl.uint64)
    units, begin, words = _extent(size.to(tl.int64), tl.program_id(0), UNIT)
    for start in range(0, words, _BLOCK):
        place = begin + start + tl.arange(0, _BLOCK)
        key_0, key_1 = _keys(place)
        lane_0, lane_1 = _added(lane_0, lane_1, address.to(tl.int64), place, units, key_0, key_1, UNIT)
    _add(result, lane_0, lane_1)


@triton.jit(do_not_specialize=["name", "capacity"])
def append(journal, scratch, name, capacity):
    """Append (name, fingerprint) to a journal, and clear the fingerprint in `scratch`.

    journal: int64 [1 + 3 * capacity]: the number of appended entries, then the entries (name and the two lanes);
    entries beyond `capacity` are counted but not stored.  scratch: int64 [2], the two 64-bit lanes of the fingerprint.
    Launch one program, always on the same stream.
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
def _hash_chunk(pointers, size, first, chunk, results, rows, UNIT: tl.constexpr, TOGETHER: tl.constexpr):
    units, begin, words = _extent(size, chunk, UNIT)
    # Lanes of the tensors of a set; those beyond TOGETHER stay zero, and the compiler drops them.
    a_0 = tl.zeros([_SMALL], tl.uint64)
    a_1, b_0, b_1, c_0, c_1, d_0, d_1 = a_0, a_0, a_0, a_0, a_0, a_0, a_0
    a = tl.load(pointers)
    b = tl.load(pointers + min(1, TOGETHER - 1))
    c = tl.load(pointers + min(2, TOGETHER - 1))
    d = tl.load(pointers + min(3, TOGETHER - 1))
    for start in range(0, words, _SMALL):
        place = begin + start + tl.arange(0, _SMALL)
        key_0, key_1 = _keys(first + place)
        a_0, a_1 = _added(a_0, a_1, a, place, units, key_0, key_1, UNIT)
        if TOGETHER > 1:
            b_0, b_1 = _added(b_0, b_1, b, place, units, key_0, key_1, UNIT)
        if TOGETHER > 2:
            c_0, c_1 = _added(c_0, c_1, c, place, units, key_0, key_1, UNIT)
        if TOGETHER > 3:
            d_0, d_1 = _added(d_0, d_1, d, place, units, key_0, key_1, UNIT)
    _add(results + 2 * tl.load(rows), a_0, a_1)
    if TOGETHER > 1:
        _add(results + 2 * tl.load(rows + 1), b_0, b_1)
    if TOGETHER > 2:
        _add(results + 2 * tl.load(rows + 2), c_0, c_1)
    if TOGETHER > 3:
        _add(results + 2 * tl.load(rows + 3), d_0, d_1)


@triton.jit
def _extent(size, chunk, UNIT: tl.constexpr):
    """Units of a tensor; the first word of a chunk; the words that are left from there, at most a chunk."""
    units: tl.constexpr = 8 // UNIT  # of a word
    begin = chunk.to(tl.int64) * _CHUNK
    return size, begin, min((size + units - 1) // units - begin, _CHUNK)


@triton.jit
def _keys(place):
    count = (place + 1).to(tl.uint64)
    return _splitmix(count, _SEED_0), _splitmix(count, _SEED_1)


@triton.jit
def _added(lane_0, lane_1, address, place, size, key_0, key_1, UNIT: tl.constexpr):
    """Two lanes with the words at some places added, as far as there are any."""
    units: tl.constexpr = 8 // UNIT
    word = tl.zeros([place.shape[0]], tl.uint64)
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
    lane_0 += tl.where(there, _product(low, high, key_0), 0)
    lane_1 += tl.where(there, _product(low, high, key_1), 0)
    return lane_0, lane_1


@triton.jit
def _add(result, lane_0, lane_1):
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
