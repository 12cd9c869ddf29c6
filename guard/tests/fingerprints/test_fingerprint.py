"""Fingerprints depend on dtype, shape and every bit of every element, and on nothing else."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dash_guard.fingerprints import hashing
from dash_guard.fingerprints.fingerprint import add_lanes, description, digest, fingerprint
from dash_inductor.errors import ArgumentError

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def values(dtype: torch.dtype, count: int) -> Tensor:
    numbers = torch.randint(-100, 100, (count,), generator=torch.Generator().manual_seed(0))
    return (numbers > 0) if dtype == torch.bool else numbers.to(torch.float32).to(dtype)


def by_definition(data: bytes) -> list[int]:
    """Note [Fingerprints], word by word, in Python's integers."""
    data += bytes(-len(data) % 8)
    totals = []
    for seed in (0x243F6A8885A308D3, 0x13198A2E03707344):
        total, state = 0, seed
        for start in range(0, len(data), 8):
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
            key = z ^ (z >> 31)
            low, high = (int.from_bytes(data[start + half : start + half + 4], "little") for half in (0, 4))
            total += ((low + key % 2**32) % 2**32) * ((high + (key >> 32)) % 2**32)
        totals.append(total % 2**64)
    return totals


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 8 * 65536 + 12])
def test_lanes_are_those_of_the_definition(size: int) -> None:
    data = random.Random(size).randbytes(size)
    found = hashing.lanes_of(torch.frombuffer(bytearray(data), dtype=torch.uint8) if size else torch.empty(0))
    assert [lane % 2**64 for lane in found.tolist()] == by_definition(data)


def test_words_begin_anywhere() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    assert all(torch.equal(hashing.lanes_of(data[n:]), hashing.lanes_of(data[n:].clone())) for n in range(9))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    plain = values(dtype, 120).view(4, 5, 6)
    wanted = fingerprint(plain.clone())
    transposed = plain.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    room = plain.new_zeros(9, 5, 13)
    room[1::2, :, 1::2] = plain
    assert transposed.stride() != plain.stride()
    assert fingerprint(transposed) == fingerprint(room[1::2, :, 1::2]) == wanted
    assert fingerprint(plain[:1, :1].expand(4, 5, 6)) == fingerprint(plain[:1, :1].expand(4, 5, 6).clone())


def test_conjugates_and_negatives_are_what_they_stand_for() -> None:
    numbers = torch.view_as_complex(torch.arange(8.0).view(4, 2))
    assert fingerprint(numbers.conj()) == fingerprint(numbers.conj().resolve_conj()) != fingerprint(numbers)
    assert fingerprint(numbers.conj().imag) == fingerprint(-numbers.imag)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool], ids=str)
def test_every_bit_matters(dtype: torch.dtype) -> None:
    plain = values(dtype, 9)
    bytes_ = plain.view(torch.uint8)
    seen = {fingerprint(plain)}
    for place in range(len(bytes_)):
        for bit in range(8):
            bytes_[place] ^= 1 << bit
            seen.add(fingerprint(plain))
            bytes_[place] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(bytes_)


def test_positions_matter() -> None:
    plain = torch.arange(40.0)
    seen = {fingerprint(plain)}
    for first in range(40):
        for second in range(first):
            swapped = plain.clone()
            swapped[[first, second]] = swapped[[second, first]]
            seen.add(fingerprint(swapped))
    assert len(seen) == 1 + 40 * 39 // 2


def test_values_that_compare_equal_differ() -> None:
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    quiet, payload = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert fingerprint(quiet) != fingerprint(payload)
    assert fingerprint(quiet) == fingerprint(quiet.clone())


def test_sign_flips_do_not_cancel() -> None:
    """Hashes that are linear modulo 2^64 let flips of two highest bits cancel."""
    plain = torch.ones(16)
    seen = set()
    for first in range(16):
        for second in range(first):
            flipped = plain.clone()
            flipped[[first, second]] *= -1
            seen.add(fingerprint(flipped))
    assert len(seen) == 16 * 15 // 2
    assert fingerprint(plain) not in seen


def test_dtype_and_shape_are_part() -> None:
    plain = torch.zeros(2, 6)
    others = [plain.view(torch.int32), plain.view(3, 4), plain.view(12), plain[:0], torch.zeros(0), torch.zeros(0, 6)]
    others += [torch.zeros(0, dtype=torch.int64), torch.zeros(()), torch.zeros(1), plain.to(torch.bfloat16)]
    described = {description(t) for t in (plain, *others)}
    assert len({fingerprint(t) for t in (plain, *others)}) == len(described) == 10


def test_parts_add_up_to_the_whole() -> None:
    """Of one tensor at a time, and of many together; rows may repeat."""
    whole = values(torch.bfloat16, 4 * 300_000)
    wanted = hashing.lanes_of(whole.view(torch.uint8))
    cuts = [0, 4, 40, 1000, 600_000, len(whole)]
    parts = [whole[a:b] for a, b in itertools.pairwise(cuts)]
    found = torch.zeros(2, 2, dtype=torch.int64)
    add_lanes(parts, found, [1] * len(parts), [cut // 4 for cut in cuts[:-1]])
    assert torch.equal(found[1], wanted)
    assert found[0].tolist() == [0, 0]


def test_what_has_no_bytes_is_refused() -> None:
    nested = torch.nested.as_nested_tensor([torch.zeros(2)], layout=torch.jagged)
    for tensor in (torch.zeros(3).to_sparse(), torch.zeros(3, device="meta"), nested):
        with pytest.raises(ArgumentError, match="a dense tensor with data"):
            fingerprint(tensor)


def test_a_digest_is_pinned() -> None:
    assert fingerprint(torch.arange(10, dtype=torch.int32)) == PINNED
    results = torch.zeros(2, 2, dtype=torch.int64)
    add_lanes([torch.arange(10, dtype=torch.int32)], results, [1])
    assert digest(*results[1].tolist(), "int32 [10]").hex() == PINNED
    assert results[0].tolist() == [0, 0]


PINNED = "d41c7ad4c4a825fb26571e53ee2bbc6a"

IN_THE_INTERPRETER = """
import torch
from dash_guard.fingerprints import gpu_kernels, hashing

bytes_ = torch.randint(0, 256, (gpu_kernels.CHUNK * 8 + 64,), dtype=torch.uint8)
tensors = [bytes_[:8], bytes_, bytes_[8:264], bytes_[4:260], bytes_[2:258], bytes_[3:260]]
for unit in (8, 4, 2, 1):
    group = [t for t in tensors if t.data_ptr() % unit == 0 and t.numel() % unit == 0]
    chunks = [-(-t.numel() // (8 * gpu_kernels.CHUNK)) for t in group]
    one = torch.zeros(len(group), 2, dtype=torch.int64)
    for t, programs, row in zip(group, chunks, one):
        gpu_kernels.hash_one[(programs,)](t.data_ptr(), t.numel() // unit, row, UNIT=unit)
    wanted = torch.stack([hashing.lanes_of(t) for t in group])
    assert torch.equal(one, wanted), unit
    of = [(n, chunk) for n, programs in enumerate(chunks) for chunk in range(programs)]
    which, chunk = (torch.tensor(each, dtype=torch.int32) for each in zip(*of))
    for together in (1, 2, 3, 4) if unit == 8 else (1, 4):
        sets = [[t.roll(n) if n else t for n in range(together)] for t in group]
        pointers = torch.tensor([[t.data_ptr() for t in each] for each in sets])
        sizes = torch.tensor([t.numel() // unit for t in group])
        firsts = torch.arange(len(group)) * 1000
        many = torch.zeros(len(group) * together + 1, 2, dtype=torch.int64)
        rows = torch.arange(1, len(many)).flip(0)
        gpu_kernels.hash_many[(len(of),)](
            pointers, sizes, firsts, rows, which, chunk, many, UNIT=unit, TOGETHER=together
        )
        wanted = [hashing.lanes_of(t, first) for each, first in zip(sets, firsts.tolist()) for t in each]
        assert torch.equal(many[rows], torch.stack(wanted)), (unit, together)
    print(unit, len(group))

journal, scratch = torch.zeros(1 + 3 * 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
for name in (7, 8, 9):
    scratch += torch.tensor([name * 10, -name])
    gpu_kernels.append[(1,)](journal, scratch, name, 2)
    assert scratch.tolist() == [0, 0]
assert journal.tolist() == [3, 7, 70, -7, 8, 80, -8], journal
"""


def test_kernels_compute_the_same_lanes() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["8", "3", "4", "4", "2", "5", "1", "6"]


def compiled(name: str, signature: dict[str, str], constants: dict[str, int]) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dash_guard.fingerprints import gpu_kernels

    kernel: Callable[..., object] = getattr(gpu_kernels, name)
    source = ASTSource(kernel, signature, constexprs=constants)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])


def test_kernels_compile_and_add_atomically() -> None:
    longs = dict.fromkeys(("pointers", "sizes", "firsts", "rows"), "*i64")
    many = {**longs, "sets": "*i32", "chunks": "*i32", "results": "*i64"}
    for unit, together in ((8, 4), (8, 1), (1, 2)):
        ptx = compiled("hash_many", many, {"UNIT": unit, "TOGETHER": together})
        assert f"ld.global.b{8 * unit}" in ptx
        assert ptx.count("atom.global.gpu.relaxed.add.u64") == 2 * together
    compiled("hash_one", {"address": "i64", "size": "i32", "result": "*i64"}, {"UNIT": 8})
    compiled("append", {"journal": "*i64", "scratch": "*i64", "name": "i32", "capacity": "i32"}, {})
