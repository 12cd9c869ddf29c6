"""Launches that are made again from addresses, with an allocator and a driver that note what they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.common import call_launches, launch_list
from dash_inductor.kernels.common.launch_list import LaunchLists, Notes, key_of

from ...support.call_launches import packing

CPU = torch.device("cpu")


class Kernel:
    """In the place of a `KernelLauncher`: packs what it is given."""

    def pack(self, stream: int, addresses: Sequence[int], *arguments: int) -> tuple[tuple[int, ...], ...]:
        assert not addresses
        return ((stream, *arguments),)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    packing(monkeypatch, found.extend)
    monkeypatch.setattr(call_launches, "raw_stream", lambda index: 7)
    monkeypatch.setattr(launch_list, "current_device", lambda: None)  # the index of the CPU
    monkeypatch.setattr(launch_list.compat, "empty_cuda", lambda *what: torch.empty_strided(*what[:2], dtype=what[2]))
    return found


class Call:
    """Allocates two tensors, and launches two kernels with views and numbers; counts how often it is made at first."""

    def __init__(self) -> None:
        self.lists, self.made, self.refuses = LaunchLists(most=2), 0, False

    def __call__(self, *operands: Tensor, key: int = 0) -> list[Tensor]:
        def first(notes: Notes) -> list[Tensor]:
            self.made += 1
            a = notes.allocate((2, 4), (4, 1), torch.int32)
            nothing = notes.allocate((0,), (1,), torch.int32)
            notes.launched(Kernel(), (operands[0], a, a[1], 5))  # type: ignore[arg-type]
            b = notes.allocate((3,), (1,), torch.int64)
            notes.launched(Kernel(), (b, operands[-1][1:], nothing, -1))  # type: ignore[arg-type]
            if self.refuses:
                notes.launched(None, ())
            return [b, a]

        return self.lists.call(key, operands, first)


def test_the_second_call_launches_with_its_own_addresses(launched: list[Any]) -> None:
    call, x, y = Call(), torch.zeros(8), torch.zeros(8, dtype=torch.int64)
    call(x, y)
    assert launched == []
    others = torch.ones(8), torch.ones(8, dtype=torch.int64)
    b, a = call(*others)
    assert call.made == 1
    assert (a.shape, a.dtype, b.shape, b.dtype) == ((2, 4), torch.int32, (3,), torch.int64)
    assert launched == [
        (7, others[0].data_ptr(), a.data_ptr(), a.data_ptr() + 16, 5),
        (7, b.data_ptr(), others[1].data_ptr() + 8, 0, -1),
    ]


def test_what_makes_another_call(launched: list[Any]) -> None:
    """Shapes, strides, dtypes, alignment, shared memory, the key; and lists are dropped where there are too many."""
    call, x = Call(), torch.zeros(64)
    both = x[:8], x[8:16]
    for operands in (both, both, (x[:8], x[12:20]), (x[:8], x[9:17]), (x[:16:2], x[8:16]), (x[:8], torch.zeros(8)),
                     (x[:8], x[8:15]), (x[:8].int(), x[8:16])):  # fmt: skip
        call(*operands)
    assert call.made == 7
    call(*both, key=1)
    call(*both)
    assert call.made == 9


def test_a_call_that_does_something_else_is_always_made(launched: list[Any]) -> None:
    call, x = Call(), torch.zeros(8)
    call.refuses = True
    for _ in range(3):
        call(x)
    assert call.made == 3
    notes = Notes([x])
    notes.launched(Kernel(), (torch.zeros(3),))  # type: ignore[arg-type]
    assert notes.recorded([], 0) is None, "a tensor that is neither given nor allocated"
    assert Notes([x]).recorded([x], 0) is None, "a result that is not allocated"


def test_operands_that_share_memory() -> None:
    x = torch.zeros(8)
    assert key_of([x, x]) == key_of([y := torch.ones(8), y]) != key_of([x, torch.zeros(8)])
    assert key_of([x, x[4:]]) != key_of([x[:4], x[4:]])


@pytest.mark.parametrize("views", [False, True])
def test_devices_are_a_part_of_the_key(views: bool) -> None:
    assert key_of([torch.zeros(0)], views) != key_of([torch.zeros(0, device="meta")], views)


def test_what_is_not_returned_shares_an_allocation(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    memory = [torch.zeros(2, 4, dtype=torch.int32), torch.zeros(1024, dtype=torch.uint8)]

    def first(notes: Notes) -> list[Tensor]:
        a = notes.allocate((3, 5), (8, 1), torch.int64)  # 21 elements
        result = notes.allocate((2, 4), (4, 1), torch.int32)
        b = notes.allocate((7,), (1,), torch.float32)
        notes.launched(Kernel(), (a, b, b[2:], result, x))  # type: ignore[arg-type]
        return [result]

    def again(*what: Any) -> Tensor:
        asked.append(what)
        return memory[(len(asked) - 1) % 2]

    x, lists = torch.zeros(8), LaunchLists(views=False)
    lists.call(0, [x], first)
    monkeypatch.setattr(launch_list.compat, "empty_cuda", again)
    for _ in range(2):
        assert lists.call(0, [x], first) == memory[:1]
    assert asked == 2 * [((2, 4), (4, 1), torch.int32), ((256 + 128,), (1,), torch.uint8)]
    start = memory[1].data_ptr()
    arguments = start, start + 256, start + 256 + 8, memory[0].data_ptr(), x.data_ptr()
    assert launched == 2 * [(7, *arguments)]


def test_views_of_operands_where_none_are_expected(launched: list[Any]) -> None:
    x = torch.zeros(8)
    notes = Notes([x], views=False)
    notes.launched(Kernel(), (x[1:],))  # type: ignore[arg-type]
    assert notes.recorded([], 0) is None
    assert key_of([x, x], views=False) == key_of([x, torch.zeros(8)], views=False)
    assert key_of([x, x], views=False) != key_of([x, x[:4]], views=False)
