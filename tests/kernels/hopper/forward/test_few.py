"""Few queries against many keys: which calls, the parts, the kernels in Triton's interpreter and compiled for sm_90."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dash_inductor.kernels.common import call_launches, launcher
from dash_inductor.kernels.common.arguments import flat
from dash_inductor.kernels.hopper.forward import build, few, launch
from dash_inductor.kernels.hopper.kernel_configs import MOST_PARTS, PART, part_of, suits_parts
from dash_inductor.model import AttentionSpec, Band, Dropout, Mask, Operand, Plan, Site
from dash_inductor.planning import plan, planner
from dash_inductor.planning.prediction import predicted_forward_us
from dash_inductor.upstream import compat

from ....support import sass
from ....support.call_launches import packing
from ....support.forks import interpreted_results

BSHD = (0, 2, 1, 3)
PLAIN = AttentionSpec(Mask(Band()), 0.1, (BSHD,))


def test_in_the_interpreter() -> None:
    """Close to fp64, with the bits of a head alone, whatever lies beside the operands."""
    lines = [line.split() for line in interpreted_results("few_queries")]
    assert [int(line[0]) for line in lines] == [5, 3, 17]
    assert all(float(out) < 1e-3 and float(lse) < 1e-6 for *_, out, lse in lines), lines


def test_parts_follow_from_the_number_of_keys() -> None:
    lengths = [1, 512, 513, 4096, 32768, 32769, 65536, 65537, 131072, 1 << 24]
    assert [part_of(n) // PART for n in lengths] == [1, 1, 1, 1, 1, 2, 2, 4, 4, 512]
    assert all(-(-n // part_of(n)) <= MOST_PARTS for n in lengths)


@pytest.mark.parametrize(
    ("spec", "q_len", "kv_len", "group", "expected"),
    [
        (PLAIN, 1, 1025, 1, True),
        (PLAIN, 16, 4096, 4, True),
        (PLAIN, 1, 4096, 64, True),
        (PLAIN, 1, 1024, 1, False),
        (PLAIN, 17, 4096, 1, False),
        (PLAIN, 16, 4096, 8, False),
        (replace(PLAIN, mask=Mask(Band(0))), 1, 4096, 1, False),
        (replace(PLAIN, mask=Mask(Band(None, 5))), 1, 4096, 1, False),
        (replace(PLAIN, softcap=50.0), 1, 4096, 1, False),
        (replace(PLAIN, dropout=Dropout(0.5, Operand(0))), 1, 4096, 1, False),
    ],
)
def test_which_calls(spec: AttentionSpec, q_len: int, kv_len: int, group: int, expected: bool) -> None:
    """The answer is the same for states, and for sites: their kernels are compiled ahead, and no time is predicted."""
    assert suits_parts(spec.traits, q_len, kv_len, group) == expected
    site = Site("cuda", "bfloat16", 2, 2 * group, 2, q_len, kv_len, 64, 64, spec)
    if kv_len > 2 * PART:
        assert (few.of_site(site, 0) is not None) == expected
        assert (build.nominal_q_lens(site, 1024) == (q_len,)) == expected
    if expected:
        assert predicted_forward_us(plan(site, "sm_90"), site, "sm_90", "H200") is None


@pytest.mark.parametrize(
    ("dims", "rows", "dtype"),
    [
        ((64, 64), 16, "bfloat16"),
        ((128, 128), 64, "float16"),
        pytest.param((256, 256), 64, "bfloat16", marks=pytest.mark.full),
        pytest.param((192, 128), 16, "float16", marks=pytest.mark.full),
        pytest.param((72, 40), 32, "bfloat16", marks=pytest.mark.full),
    ],
)
def test_compiled(dims: tuple[int, int], rows: int, dtype: Any) -> None:
    """Nothing is spilled, loads run ahead, and a loop has one kind of matmul."""
    built = few.Kernels(few.Specialisation(dtype, *dims, rows))
    attend, report = sass.compile_with_report(lambda: built.attend)
    text = attend.asm["ttgir"]
    assert (report.spill_stores, report.serialised) == (0, ())
    assert ("warp_group_dot" in text) == (rows == 64)
    assert ("tt.dot " in text) == (rows < 64)
    assert text.count("async_copy_global_to_local") >= 4
    assert attend.metadata.shared <= 227 << 10
    assert not attend.metadata.launch_pdl  # it reads what the kernel before has written
    combine, report = sass.compile_with_report(lambda: built.combine)
    assert report.spill_stores == 0
    assert combine.metadata.launch_pdl
    ptx = combine.asm["ptx"]
    assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")


@pytest.mark.parametrize("band", [Band(), Band(0)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 4096), (4096, 4096), (None, None)], ids=str)
def test_the_setting_that_keeps_keys_whole(lengths: tuple[int | None, int | None], band: Band) -> None:
    """Where keys may be split, the plan and its key say so, whatever is known of lengths; elsewhere nothing changes."""
    site = Site("cuda", "bfloat16", 2, 8, 2, *lengths, 64, 64, replace(PLAIN, mask=Mask(band)))
    split, whole = (plan(site, "sm_90", split_kv=split_kv) for split_kv in (True, False))
    assert (split.split_kv, whole.split_kv) == (True, not band.is_full)
    assert whole.numerics_key == split.numerics_key + (",split_kv=off" if band.is_full else "")
    assert (str(whole) == str(split)) == whole.split_kv
    assert Plan.parse(str(whole)).split_kv == whole.split_kv
    assert planner.keeping(whole, "an operator") == planner.keeping(split, "an operator")
    too_many_rows = replace(site, q_heads=130)
    assert plan(too_many_rows, "sm_90", split_kv=False) == plan(too_many_rows, "sm_90")


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for each part of each kv head, and a row: with the arguments that the kernels have."""
    seen: list[Any] = []

    def kernel(compiled: Any, grid: int, descriptors: Any = ()) -> Any:
        return SimpleNamespace(pack=lambda stream, addresses, *given: ((compiled, grid, given),))

    monkeypatch.setattr(launcher, "KernelLauncher", kernel)
    packing(monkeypatch, seen.extend)
    monkeypatch.setattr(call_launches, "raw_stream", lambda device: 7)
    monkeypatch.setattr(
        compat, "empty_cuda", lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    )
    q = torch.randn(3, 2, 8, 64).bfloat16().transpose(1, 2)
    k, v = (torch.randn(3, 2, 4097, d).bfloat16() for d in (64, 40))
    run = launch._launches(PLAIN, 5, (q, k, v), ())
    out, lse = run([q.data_ptr(), k.data_ptr(), v.data_ptr()])
    assert (out.shape, out.stride(), lse.shape) == ((3, 8, 2, 40), (640, 40, 320, 1), (3, 8, 2))
    (attend, programs, given), (combine, rows, given_combine) = seen
    assert (programs, rows) == (3 * 2 * 9, 3 * 8 * 2)
    assert given[:3] == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert given[4] - given[3] == 4 * programs * 16 * 64
    for compiled, values in ((attend, given), (combine, given_combine)):
        types = [t for t in flat(compiled.src.signature.values()) if t != "constexpr"]
        assert len(list(flat(values))) == len(types)
        assert all(
            isinstance(value, float) == (kind == "fp32") for value, kind in zip(flat(values), types, strict=True)
        )
