"""The budgets of planned kernels on each architecture, compiled without a GPU, and what makes an order of adds true."""

from __future__ import annotations

import dataclasses
import functools
import re

import expecttest
import pytest

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.portable import standalone
from dash_inductor.model import Band, Plan, Site, Tiles
from dash_inductor.model.architectures import SHARED_BYTES
from dash_inductor.planning import plan
from tests.support.calls import spec_of
from tests.support.triton_version import PINNED

CASES = [
    ("sm_80", "bfloat16", 128, Band(0), None),
    ("sm_80", "bfloat16", 64, Band(), "spt"),
    ("sm_80", "float32", 64, Band(0), None),
    ("sm_89", "bfloat16", 128, Band(0), None),
    ("sm_89", "float16", 64, Band(), None),
    ("sm_90", "bfloat16", 128, Band(0), "two_pass"),
    ("sm_90", "bfloat16", 128, Band(), "two_pass"),
    ("sm_90", "bfloat16", 64, Band(0, 1023), "two_pass"),
    ("sm_90", "float16", 80, Band(0), "two_pass"),
    ("sm_90", "float32", 128, Band(0), None),
    ("sm_90", "bfloat16", 32, Band(0), "spt"),
    ("sm_90", "bfloat16", 16, Band(), "ascending"),
    ("sm_100", "bfloat16", 128, Band(0), None),
    ("sm_100", "bfloat16", 64, Band(), None),
    *((arch, "bfloat16", dim, Band(0), "two_pass") for dim in (256, 512) for arch in SHARED_BYTES),
    *((arch, "bfloat16", 256, Band(0), "spt") for arch in SHARED_BYTES if arch != "sm_90"),
    ("sm_90", "bfloat16", 512, Band(0), "spt"),
]
"""Architecture, dtype, head dim, mask, schedule if it is not the planner's choice."""
ORDERED = [case for case in CASES if case[4] not in (None, "two_pass")]


def site(dtype: str, head_dim: int, mask: Band) -> Site:
    return Site("cuda", dtype, 2, 16, 4, 4096, 4096, head_dim, head_dim, spec_of(mask, head_dim**-0.5))  # type: ignore[arg-type]  # names


@functools.cache
def compiled(
    arch: str, dtype: str, head_dim: int, mask: Band, schedule: str | None
) -> list[tuple[str, str, standalone.Resources]]:
    """(tiles, PTX, resources) of each kernel of the plan."""
    facts = site(dtype, head_dim, mask)
    kernels = standalone.render(plan(facts, arch, schedule), facts)
    built = [(str(k.tiles), *standalone.compile_for(k, arch)) for k in kernels]
    return [(tiles, code.asm["ptx"], used) for tiles, code, used in built]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_fits_the_architecture(case: tuple[str, str, int, Band, str | None]) -> None:
    """Any Triton: shared memory fits, and spills stay a small part of the 1020 bytes of registers of a thread.

    fp32 at head dim 128 has multiply-adds in place of matrix instructions, with operands in registers: more spills.
    """
    arch, dtype, head_dim, _, _ = case
    limit = 700 if (dtype, head_dim) == ("float32", 128) else 320
    for tiles, _, used in compiled(*case):
        assert used.shared_memory <= SHARED_BYTES[arch], (tiles, used)
        assert max(used.spill_stores, used.spill_loads) <= limit, (tiles, used)


@PINNED
def test_pinned() -> None:
    lines = []
    for case in CASES:
        for tiles, _, used in compiled(*case):
            name = " ".join(str(part) for part in case if part is not None)
            spills = f"{used.spill_stores}/{used.spill_loads}"
            lines.append(f"{name} {tiles}: registers {used.registers}, spills {spills}, shared {used.shared_memory}")
    expecttest.assert_expected_inline(
        "\n".join(lines),
        """\
sm_80 bfloat16 128 causal 64x64w4s2: registers 255, spills 36/36, shared 73728
sm_80 bfloat16 128 causal 64x64w4s2: registers 255, spills 36/36, shared 74240
sm_80 bfloat16 64 full spt 64x128w8s2: registers 32, spills 0/0, shared 256
sm_80 bfloat16 64 full spt 64x128w8s2: registers 255, spills 36/36, shared 66048
sm_80 float32 64 causal 32x32w8s1: registers 232, spills 0/0, shared 40960
sm_80 float32 64 causal 32x32w8s1: registers 174, spills 0/0, shared 40960
sm_89 bfloat16 128 causal 64x32w4s2: registers 218, spills 0/0, shared 53248
sm_89 bfloat16 128 causal 32x64w4s2: registers 242, spills 0/0, shared 53504
sm_89 float16 64 full 64x64w4s2: registers 186, spills 0/0, shared 32768
sm_89 float16 64 full 64x64w4s2: registers 242, spills 0/0, shared 33280
sm_90 bfloat16 128 causal two_pass 128x64w8s3: registers 205, spills 0/0, shared 163840
sm_90 bfloat16 128 causal two_pass 64x64w4s2: registers 255, spills 32/32, shared 98816
sm_90 bfloat16 128 full two_pass 128x64w8s3: registers 160, spills 0/0, shared 163840
sm_90 bfloat16 128 full two_pass 64x64w4s2: registers 255, spills 40/44, shared 98816
sm_90 bfloat16 64 band(0,1023) two_pass 64x64w4s3: registers 168, spills 0/0, shared 65536
sm_90 bfloat16 64 band(0,1023) two_pass 64x64w4s3: registers 233, spills 0/0, shared 66560
sm_90 float16 80 causal two_pass 128x64w8s3: registers 205, spills 0/0, shared 163840
sm_90 float16 80 causal two_pass 64x64w4s2: registers 255, spills 72/72, shared 98816
sm_90 float32 128 causal 64x32w8s1: registers 255, spills 172/168, shared 180224
sm_90 float32 128 causal 32x32w8s1: registers 255, spills 20/20, shared 81920
sm_90 bfloat16 32 causal spt 64x128w8s3: registers 20, spills 0/0, shared 256
sm_90 bfloat16 32 causal spt 64x128w8s3: registers 218, spills 0/0, shared 58368
sm_90 bfloat16 16 full ascending 64x128w8s3: registers 16, spills 0/0, shared 256
sm_90 bfloat16 16 full ascending 64x128w8s3: registers 167, spills 0/0, shared 37888
sm_100 bfloat16 128 causal 128x64w8s2: registers 125, spills 0/0, shared 147504
sm_100 bfloat16 128 causal 64x64w4s2: registers 255, spills 204/212, shared 131648
sm_100 bfloat16 64 full 64x64w4s3: registers 94, spills 0/0, shared 73776
sm_100 bfloat16 64 full 64x64w4s3: registers 154, spills 0/0, shared 83008
sm_80 bfloat16 256 causal two_pass 64x32w8s2: registers 170, spills 0/0, shared 102400
sm_80 bfloat16 256 causal two_pass 32x64w8s2: registers 246, spills 0/0, shared 102656
sm_89 bfloat16 256 causal two_pass 32x32w8s1: registers 214, spills 0/0, shared 53248
sm_89 bfloat16 256 causal two_pass 32x32w8s1: registers 140, spills 0/0, shared 81920
sm_90 bfloat16 256 causal two_pass 32x32w4s2: registers 174, spills 0/0, shared 67584
sm_90 bfloat16 256 causal two_pass 32x32w4s2: registers 252, spills 0/0, shared 67840
sm_100 bfloat16 256 causal two_pass 32x32w4s2: registers 174, spills 0/0, shared 67584
sm_100 bfloat16 256 causal two_pass 32x32w4s2: registers 252, spills 0/0, shared 67840
sm_80 bfloat16 512 causal two_pass 16x16w8s1: registers 178, spills 0/0, shared 57344
sm_80 bfloat16 512 causal two_pass 16x16w8s1: registers 128, spills 16/16, shared 81920
sm_89 bfloat16 512 causal two_pass 16x16w8s1: registers 178, spills 0/0, shared 57344
sm_89 bfloat16 512 causal two_pass 16x16w8s1: registers 128, spills 16/16, shared 81920
sm_90 bfloat16 512 causal two_pass 32x32w8s2: registers 178, spills 0/0, shared 133120
sm_90 bfloat16 512 causal two_pass 32x32w8s2: registers 254, spills 0/0, shared 133376
sm_100 bfloat16 512 causal two_pass 16x16w8s1: registers 178, spills 0/0, shared 57344
sm_100 bfloat16 512 causal two_pass 16x16w8s1: registers 128, spills 24/24, shared 81920
sm_80 bfloat16 256 causal spt 32x64w8s2: registers 36, spills 0/0, shared 128
sm_80 bfloat16 256 causal spt 32x64w8s2: registers 255, spills 8/8, shared 114944
sm_89 bfloat16 256 causal spt 32x32w8s1: registers 40, spills 0/0, shared 128
sm_89 bfloat16 256 causal spt 32x32w8s1: registers 178, spills 0/0, shared 81920
sm_100 bfloat16 256 causal spt 32x32w8s2: registers 40, spills 0/0, shared 128
sm_100 bfloat16 256 causal spt 32x32w8s2: registers 174, spills 0/0, shared 82176
sm_90 bfloat16 512 causal spt 32x32w8s1: registers 36, spills 0/0, shared 256
sm_90 bfloat16 512 causal spt 32x32w8s1: registers 255, spills 4/4, shared 163840""",
    )


def instructions(ptx: str, *patterns: str) -> list[str]:
    """The pattern that each instruction of the text matches, in order, for the instructions that match one."""
    lines = (re.sub(r"\s+", " ", line.strip()) for line in ptx.splitlines())
    found = (next((p for p in patterns if re.search(p, line)), None) for line in lines)
    return [p for p in found if p is not None]


@pytest.mark.parametrize("case", ORDERED, ids=lambda c: "-".join(map(str, c)))
def test_ordered_add_is_fenced(case: tuple[str, str, int, Band, str | None]) -> None:
    """Note [Ordered accumulation]: acquire, adds, barrier, release; loads stay pipelined."""
    _, (tiles, ptx, _) = compiled(*case)
    acquire, add, barrier, release = (
        r"ld\.acquire\.gpu",
        r"\b(red|atom)\.global\S*\.add\S*\.f32",
        r"bar\.sync 0;",
        r"red\.release\.gpu",
    )
    order = instructions(ptx, acquire, add, barrier, release)
    start = order.index(acquire)
    adds = [i for i, what in enumerate(order) if what == add]
    released = order.index(release)
    assert order.count(acquire) == order.count(release) == 1
    assert start < adds[0], "an add is before the wait"
    assert adds[-1] < released, "an add is after the release"
    assert barrier in order[adds[-1] : released], "no barrier between the last add and the release"
    assert "cp.async" in ptx or tiles.endswith("s1"), "the loop is not pipelined"


def test_two_passes_have_no_shared_accumulator() -> None:
    for _, ptx, _ in compiled("sm_90", "bfloat16", 128, Band(0), "two_pass"):
        assert not instructions(ptx, r"\b(red|atom)\.global", r"ld\.acquire")
        assert instructions(ptx, r"wgmma\.mma_async")


@pytest.mark.parametrize(
    ("schedule", "head_dim", "mask"),
    [("two_pass", 64, Band(0, 99)), ("spt", 32, Band(0, 99)), ("bent_fold", 32, Band(0))],
)
@pytest.mark.parametrize("wide_sizes", [False, True], ids=["torch-2.11", "torch-2.13"])
def test_compiles_with_64_bit_indices(schedule: str, head_dim: int, mask: Band, wide_sizes: bool) -> None:
    """As Inductor renders it for tensors of 2**31 elements: products of indices need 64 bits, sizes may have them."""
    facts = dataclasses.replace(site("bfloat16", head_dim, mask), q_len=1 << 21, kv_len=1 << 21)
    for kernel in standalone.render(plan(facts, "sm_90", schedule), facts):
        text = kernel.text.replace("INDEX_DTYPE: tl.constexpr = tl.int32", "INDEX_DTYPE: tl.constexpr = tl.int64")
        if wide_sizes:
            names = "batch|heads|q_heads|q_len|kv_len"
            text = re.sub(rf"^    ({names}) = (\d+)$", r"    \1 = tl.full([], \2, dtype=INDEX_DTYPE)", text, flags=re.M)
            assert text.count("tl.full([], ") >= 2
        standalone.build(dataclasses.replace(kernel, text=text), "sm_90")


def test_only_static_portable_plans_are_rendered() -> None:
    tiles = Tiles(16, 16, 4, 1)
    with pytest.raises(ArgumentError, match="portable"):
        standalone.render(Plan("reference", "spt", "cpu", tiles), site("float16", 64, Band()))
    dynamic = Site("cuda", "float16", None, 4, 4, 128, 128, 64, 64, spec_of(Band(), 0.125))
    with pytest.raises(ArgumentError, match="batch"):
        standalone.render(Plan("portable", "spt", "flash", tiles), dynamic)
