"""Fingerprints of tensors: 128 bits that depend on dtype, shape and every bit of every element, and on nothing else.

Strides, device and storage do not matter.  Note [Fingerprints] in `hashing` defines the hash and bounds collisions.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dash_inductor.errors import ArgumentError
from dash_inductor.upstream.tensors import is_functorch_wrapped

from . import hashing
from .sizes import DIGEST, LANES

_SMALL = 1 << 19  # bytes of tensors on the CPU that are hashed together
_FEW = 4  # tensors that get a launch each; for more, one launch reads a table, which has to be allocated


def fingerprint(tensor: Tensor) -> str:
    """The fingerprint of a dense tensor, 32 hexadecimal digits.  Waits for the device.

    Args:
        tensor: any dtype, shape and strides.

    Raises:
        ArgumentError: the tensor has no elements in memory (sparse, quantized, meta, or a subclass of Tensor).
    """
    reason = why_unseen(tensor)
    if reason:
        raise ArgumentError("tensor", type(tensor).__name__, f"a dense tensor with data: this is {reason}")
    results = torch.zeros(1, LANES, dtype=torch.int64, device=tensor.device)
    add_lanes([tensor], results, [0])
    low, high = results[0].tolist()
    return digest(low, high, description(tensor)).hex()


def why_unseen(tensor: Tensor) -> str:
    """Why a tensor cannot be hashed, such as "a nested tensor"; "" if it can."""
    if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"a {type(tensor).__name__}"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if is_functorch_wrapped(tensor):
        return "a tensor inside a transformation of functions"
    return "a tensor without data" if tensor.device.type == "meta" else ""


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank: the local tensor of a DTensor, and any other tensor itself."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor


def description(tensor: Tensor) -> str:
    """Dtype and shape of a tensor as text, which is part of its digest: ``bfloat16 [2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def digest(low: int, high: int, description: str) -> bytes:
    """The fingerprint (16 bytes) of a tensor, from the two int64 lanes of its hash and its dtype and shape as text."""
    lanes = low.to_bytes(8, "little", signed=True) + high.to_bytes(8, "little", signed=True)
    return hashlib.blake2b(lanes + description.encode(), digest_size=DIGEST).digest()


def add_lanes(
    tensors: Sequence[Tensor], results: Tensor, rows: Sequence[int], firsts: Sequence[int] | None = None
) -> None:
    """Hash tensors, and add their lanes (two 64-bit sums each) to rows of `results`, without waiting for the device.

    Args:
        tensors: hashable tensors (`why_unseen`), all on the device of `results`.
        results: int64 [rows, 2], contiguous.
        rows: the row for each tensor; several tensors may have the same row.
        firsts: the number of 8-byte words before each tensor if it is a part of another (`hashing.lanes_of`); 0 by
            default.
    """
    with torch.no_grad():
        parts = [
            Part(tensor if _is_plain(tensor) else plain_view(tensor), row, first)
            for tensor, row, first in zip(tensors, rows, firsts or itertools.repeat(0), strict=False)
            if tensor.numel()
        ]
        if results.is_cuda:
            with torch.cuda.device(results.device):
                _add_on_gpu(parts, results)
        else:
            _add_by_pytorch(parts, results)


class Part(NamedTuple):
    """A contiguous tensor to hash.

    Attributes:
        tensor: the tensor.
        row: the row of the results to which its lanes are added.
        first: if it is a part of another tensor, the number of 8-byte words before it; else 0.
    """

    tensor: Tensor
    row: int
    first: int

    @property
    def size(self) -> int:
        """The size of the tensor in bytes."""
        return self.tensor.numel() * self.tensor.element_size()


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor in the order of its elements, uint8 [n]; a copy if they do not lie in memory so."""
    return _bytes(tensor if _is_plain(tensor) else plain_view(tensor))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _add_by_pytorch(parts: Sequence[Part], results: Tensor) -> None:
    together: list[Part] = []
    words = 0
    for part in parts:
        if part.size > _SMALL or results.device.type != "cpu":
            results[part.row] += hashing.lanes_of(_bytes(part.tensor), part.first)
            continue
        if words > _SMALL:
            _add_together(together, results)
            together, words = [], 0
        together.append(part)
        words += part.size
    if together:
        _add_together(together, results)


def _add_together(parts: Sequence[Part], results: Tensor) -> None:
    lanes = hashing.lanes_of_many([_bytes(part.tensor) for part in parts], [part.first for part in parts])
    results.index_add_(0, torch.tensor([part.row for part in parts]), lanes)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def plain_view(tensor: Tensor) -> Tensor:
    """The elements of a tensor in index order, [n]; a copy if they do not lie in memory like that."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _add_on_gpu(parts: Sequence[Part], results: Tensor) -> None:
    from .gpu_kernels import TOGETHER

    if len(parts) <= _FEW and not any(part.first for part in parts):
        for part in parts:
            add_one(part.tensor, results[part.row])
        return
    alike: dict[tuple[int, int, int], list[Part]] = {}
    for part in parts:
        alike.setdefault((unit_of(part.tensor), part.size, part.first), []).append(part)
    by_kernel: dict[tuple[int, int], list[list[Part]]] = {}
    for (unit, _, _), group in alike.items():
        for start in range(0, len(group), TOGETHER):
            parts_ = group[start : start + TOGETHER]
            by_kernel.setdefault((unit, len(parts_)), []).append(parts_)
    for (unit, together), sets in by_kernel.items():
        _add_many(sets, results, unit, together)


def add_one(tensor: Tensor, result: Tensor) -> None:
    """Add the two lanes of a tensor's hash to `result`, int64 [2], by a kernel launch that a CUDA graph can capture.

    Args:
        tensor: contiguous, on a GPU, not empty.
        result: on the same GPU.
    """
    from .gpu_kernels import hash_one

    unit, size = unit_of(tensor), tensor.numel() * tensor.element_size()
    hash_one[(_programs(size),)](tensor.data_ptr(), size // unit, result, UNIT=unit)


def unit_of(tensor: Tensor) -> int:
    """The number of bytes a kernel may load at once: the largest power of two up to 8 that divides address and size."""
    return math.gcd(tensor.data_ptr(), tensor.numel() * tensor.element_size(), hashing.WORD)


def _programs(size: int) -> int:
    from .gpu_kernels import CHUNK

    return -(-size // (CHUNK * hashing.WORD))


def _add_many(sets: Sequence[Sequence[Part]], results: Tensor, unit: int, together: int) -> None:
    from .gpu_kernels import hash_many

    sizes = tuple(parts[0].size for parts in sets)
    firsts = tuple(parts[0].first for parts in sets)
    rows = tuple(part.row for parts in sets for part in parts)
    sizes_, firsts_, rows_, which, chunks = _work(sizes, firsts, rows, unit, results.device)
    pointers = _on_device(tuple(p.tensor.data_ptr() for parts in sets for p in parts), torch.int64, results.device)
    hash_many[(chunks.numel(),)](pointers, sizes_, firsts_, rows_, which, chunks, results, UNIT=unit, TOGETHER=together)


@functools.lru_cache(maxsize=64)
def _work(
    sizes: tuple[int, ...], firsts: tuple[int, ...], rows: tuple[int, ...], unit: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Sizes and first words of the sets, rows of all tensors, then the set and the chunk of every program."""
    programs = torch.tensor([_programs(size) for size in sizes])
    sets = torch.repeat_interleave(torch.arange(len(sizes)), programs)
    chunks = torch.arange(len(sets)) - torch.repeat_interleave(programs.cumsum(0) - programs, programs)
    return (
        _on_device(tuple(size // unit for size in sizes), torch.int64, device),
        _on_device(firsts, torch.int64, device),
        _on_device(rows, torch.int64, device),
        sets.int().pin_memory().to(device, non_blocking=True),
        chunks.int().pin_memory().to(device, non_blocking=True),
    )


@functools.lru_cache(maxsize=256)  # parameters stay where they are, and gradients mostly come back to where they were
def _on_device(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).pin_memory().to(device, non_blocking=True)
