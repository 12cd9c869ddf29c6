"""Fingerprints of tensors: 128 bits that depend on dtype, shape and every bit of every element, and on nothing else.

Strides, device and storage do not matter.  Note [Fingerprints] in `hashing` defines the hash and bounds collisions.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...upstream.tensors import is_functorch_wrapped
from . import hashing
from .sizes import DIGEST, LANES

_FEW = 4  # tensors that get a launch each; for more, one launch reads a table, which has to be allocated


def fingerprint(tensor: Tensor) -> str:
    """The fingerprint of a dense tensor, 32 hexadecimal digits.  Waits for the device.

    Args:
        tensor: any dtype, shape and strides.

    Raises:
        ArgumentError: its elements have no bytes of their own (sparse, quantized, meta, or a subclass of Tensor).
    """
    reason = why_unseen(tensor)
    if reason:
        raise ArgumentError("tensor", type(tensor).__name__, f"a dense tensor with data: this is {reason}")
    results = torch.zeros(1, LANES, dtype=torch.int64, device=tensor.device)
    add_lanes([tensor], results, [0])
    low, high = results[0].tolist()
    return digest(low, high, description(tensor)).hex()


def why_unseen(tensor: Tensor) -> str:
    """Why a tensor has no fingerprint, in words; "" if it has one."""
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


def description(tensor: Tensor) -> str:
    """Dtype and shape, which are part of the digest: ``bfloat16 [2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def digest(low: int, high: int, description: str) -> bytes:
    """The fingerprint of a tensor with these lanes (int64), dtype and shape."""
    lanes = low.to_bytes(8, "little", signed=True) + high.to_bytes(8, "little", signed=True)
    return hashlib.blake2b(lanes + description.encode(), digest_size=DIGEST).digest()


def add_lanes(tensors: Sequence[Tensor], results: Tensor, rows: Sequence[int]) -> None:
    """Add the lanes of tensors to rows of `results`, without waiting for the device.

    Args:
        tensors: all on the device of `results`, none of which `why_unseen` complains about.
        results: int64 [rows, 2], contiguous.
        rows: a row for each tensor.
    """
    with torch.no_grad():
        plain = [plain_view(tensor) for tensor in tensors]
        if results.is_cuda:
            with torch.cuda.device(results.device):
                _add_on_gpu([tensor for tensor in plain if tensor.numel()], results,
                            [row for tensor, row in zip(plain, rows, strict=True) if tensor.numel()])  # fmt: skip
            return
        for tensor, row in zip(plain, rows, strict=True):
            results[row] += hashing.lanes_of(tensor.view(torch.uint8))


def plain_view(tensor: Tensor) -> Tensor:
    """The elements one after the other, in the order of their indices; a copy where they do not lie so."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _add_on_gpu(tensors: Sequence[Tensor], results: Tensor, rows: Sequence[int]) -> None:
    by_unit: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_unit.setdefault(unit_of(tensor), []).append(number)
    for unit, numbers in by_unit.items():
        group = [tensors[number] for number in numbers]
        if len(group) <= _FEW:
            for number in numbers:
                add_one(tensors[number], results[rows[number]])
        else:
            _add_many(group, results, tuple(rows[number] for number in numbers), unit)


def add_one(tensor: Tensor, result: Tensor) -> None:
    """Add the lanes of one tensor to `result`, int64 [2], by one launch that a CUDA graph can hold.

    Args:
        tensor: one dimension, contiguous, on a GPU, not empty.
    """
    from .gpu_kernels import hash_one

    unit, size = unit_of(tensor), tensor.numel() * tensor.element_size()
    hash_one[(_programs(size),)](tensor.data_ptr(), size // unit, result, UNIT=unit)


def unit_of(tensor: Tensor) -> int:
    """Bytes that a kernel may load at once: the largest power of two up to 8 that divides address and size."""
    return math.gcd(tensor.data_ptr(), tensor.numel() * tensor.element_size(), hashing.WORD)


def _programs(size: int) -> int:
    from .gpu_kernels import CHUNK

    return -(-size // (CHUNK * hashing.WORD))


def _add_many(tensors: Sequence[Tensor], results: Tensor, rows: tuple[int, ...], unit: int) -> None:
    from .gpu_kernels import hash_many

    sizes = tuple(tensor.numel() * tensor.element_size() for tensor in tensors)
    work = _work(sizes, rows, unit, results.device)
    pointers = _on_device(tuple(tensor.data_ptr() for tensor in tensors), torch.int64, results.device)
    hash_many[(work[2].numel(),)](pointers, *work, results, UNIT=unit)


@functools.lru_cache(maxsize=64)
def _work(sizes: tuple[int, ...], rows: tuple[int, ...], unit: int, device: torch.device) -> tuple[Tensor, ...]:
    """Sizes and rows of the tensors, then the tensor and the chunk of every program, on the device."""
    programs = torch.tensor([_programs(size) for size in sizes])
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), programs)
    chunks = torch.arange(len(tensors)) - torch.repeat_interleave(programs.cumsum(0) - programs, programs)
    return (
        _on_device(tuple(size // unit for size in sizes), torch.int64, device),
        _on_device(rows, torch.int64, device),
        tensors.int().pin_memory().to(device, non_blocking=True),
        chunks.int().pin_memory().to(device, non_blocking=True),
    )


@functools.lru_cache(maxsize=256)  # parameters stay where they are, and gradients mostly come back to where they were
def _on_device(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).pin_memory().to(device, non_blocking=True)
