"""Zeros that take no memory, on pages of the CPU: tests/gpu/test_zero_pages.py is for those of a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dash_inductor.upstream import zero_pages

from ..support.distribution import ROOT
from ..support.mapped_memory import CpuPage

CPU = torch.device("cpu")


class Small(CpuPage):
    """Counts what it is asked for, and refuses to map more than 8 MiB."""

    asked: list[int]

    def mapped(self, size: int) -> tuple[int, int]:
        self.asked.append(size)
        if size > 8 << 20:
            raise OSError("too much")
        return super().mapped(size)


@pytest.fixture(autouse=True)
def pages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(Small, "asked", asked := list[int](), raising=False)
    monkeypatch.setattr(zero_pages, "LEAST", 1 << 16)
    monkeypatch.setattr(zero_pages, "_DEVICES", {})
    monkeypatch.setattr(zero_pages, "_RANGES", [])
    monkeypatch.setitem(zero_pages.PAGES, "cpu", Small)
    return asked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64])
def test_zeros(dtype: torch.dtype) -> None:
    found = zero_pages.zeros((3, 1000, 77), dtype, CPU)
    assert found is not None
    assert torch.equal(found, torch.zeros(3, 1000, 77, dtype=dtype))
    assert found.is_contiguous()
    assert not found.requires_grad
    assert zero_pages.is_read_only(found)
    assert zero_pages.is_read_only(found[1:, 5:].transpose(0, 1))
    assert not zero_pages.is_read_only(found.clone())
    assert not zero_pages.is_read_only(torch.zeros(3))
    assert not zero_pages.is_read_only(torch.zeros(3).to_sparse())


def test_a_few_zeros_are_written() -> None:
    assert zero_pages.zeros((1 << 13,), torch.float32, CPU) is None
    assert zero_pages.zeros((1 << 14,), torch.float32, CPU) is not None
    assert zero_pages.zeros((0, 1 << 14), torch.float32, CPU) is None


def test_devices_without_pages() -> None:
    assert zero_pages.zeros((1 << 20,), torch.float32, torch.device("meta")) is None


def test_more_zeros_are_other_addresses(pages: list[int]) -> None:
    """Those that somebody may still read stay."""
    first = zero_pages.zeros((1 << 20,), torch.uint8, CPU)
    again = zero_pages.zeros((1 << 19,), torch.int8, CPU)
    assert pages == [1 << 20]
    more = zero_pages.zeros(((1 << 20) + 1,), torch.uint8, CPU)
    assert pages == [1 << 20, 1 << 21]
    assert first is not None
    assert again is not None
    assert more is not None
    assert first.data_ptr() == again.data_ptr() != more.data_ptr()
    assert not first.any()
    assert all(map(zero_pages.is_read_only, (first, again, more)))


def test_what_the_driver_refuses_takes_memory_from_then_on(pages: list[int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dash_inductor")
    before = zero_pages.zeros((1 << 20,), torch.uint8, CPU)
    assert zero_pages.zeros((9 << 20,), torch.uint8, CPU) is None
    assert zero_pages.zeros((1 << 21,), torch.uint8, CPU) is None
    assert pages == [1 << 20, 9 << 20]
    after = zero_pages.zeros((1 << 20,), torch.uint8, CPU)
    assert before is not None
    assert after is not None
    assert before.data_ptr() == after.data_ptr()
    assert caplog.messages == ["zeros on cpu take memory: too much"]


def test_without_a_driver() -> None:
    device = torch.device("cuda", 0)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU with its driver")
    with pytest.raises(OSError, match="libcuda"):
        zero_pages.PAGES["cuda"](device.index)


WRITES = """
import torch
from dash_inductor.upstream import zero_pages
from tests.support.mapped_memory import CpuPage
zero_pages.PAGES["cpu"] = CpuPage
found = zero_pages.zeros((1 << 24,), torch.uint8, torch.device("cpu"))
print(found.sum().item(), flush=True)
found[-1] = 1
print("written")
"""


def test_the_pages_of_these_tests_cannot_be_written() -> None:
    """Otherwise tests with them would show nothing."""
    ended = subprocess.run([sys.executable, "-c", WRITES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout == "0\n", ended.stderr
    assert ended.returncode < 0
