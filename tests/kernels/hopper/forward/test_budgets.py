"""The budget of the Hopper forward, compiled without a GPU, and what its machine code must and must not have."""

from __future__ import annotations

import re
from collections import Counter

import expecttest
import pytest

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.hopper.forward import build
from dash_inductor.kernels.hopper.kernel_configs import ForwardConfig
from dash_inductor.model import Band
from dash_inductor.model.traits import Traits
from dash_inductor.upstream import compat

from ....support import sass
from ....support.hopper_forward_builds import Case, built, steps
from ....support.triton_version import PINNED, TRITON

FULL, CAUSAL, WINDOW, LOOK_AHEAD = Band(), Band(0), Band(0, 1023), Band(None, 10)
HALF = "float16"

# All configs with the masks that add code; dtypes and ragged lengths spread over them.
SOON = [
    Case((64, 64), FULL),
    Case((64, 64), WINDOW, HALF, even_kv=False),
    Case((128, 128), FULL),
    Case((128, 128), FULL, HALF, even_kv=False),
    Case((128, 128), CAUSAL),
    Case((128, 128), WINDOW),
    Case((128, 128), LOOK_AHEAD, even_kv=False),
    Case((192, 128), WINDOW, HALF),
    Case((256, 256), WINDOW, even_kv=False),
    Case((64, 64), WINDOW, even_kv=False, short=True),
    Case((64, 64), FULL, segment_ids=True),
    Case((64, 64), WINDOW, HALF, even_kv=False, segment_ids=True),
    Case((128, 128), FULL, segment_ids=True),
    Case((128, 128), WINDOW, HALF, even_kv=False, segment_ids=True),
    Case((192, 128), WINDOW, even_kv=False, segment_ids=True),
    Case((256, 256), WINDOW, even_kv=False, segment_ids=True),
    Case((64, 64), WINDOW, dense=True),
    Case((128, 128), FULL, dense=True),
    Case((192, 128), CAUSAL, HALF, dense=True),
    Case((256, 256), FULL, dense=True),
]
# If all tests are run: the kernels with less code than those above, in the other dtype or for other lengths.
LATER = [
    Case((64, 64), FULL, HALF, even_kv=False),
    Case((64, 64), CAUSAL),
    Case((64, 64), LOOK_AHEAD),
    Case((64, 64), FULL, HALF, short=True),
    Case((64, 64), CAUSAL, short=True),
    Case((128, 128), CAUSAL, HALF, even_kv=False),
    Case((192, 128), FULL),
    Case((192, 128), CAUSAL, even_kv=False),
    Case((256, 256), FULL),
    Case((256, 256), CAUSAL, HALF),
    Case((128, 128), FULL, HALF, even_kv=False, segment_ids=True),
    Case((128, 128), CAUSAL, segment_ids=True),
    Case((192, 128), CAUSAL, HALF, segment_ids=True),
    Case((256, 256), FULL, HALF, segment_ids=True),
    Case((64, 64), FULL, HALF, dense=True),
    Case((128, 128), WINDOW, HALF, dense=True),
]
CASES = [*SOON, *LATER]


def marks(*cases: Case) -> list[pytest.MarkDecorator]:
    """The marks of a test that compiles these cases."""
    return [pytest.mark.full] * any(case in LATER for case in cases)


cases = pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=marks(case)) for case in CASES])

SHARED_BYTES = 227 << 10
"""Shared memory that one CTA may have on sm_90."""

REGISTER_FILE = 65536
PRODUCER_WARPS = 4
"""Warps are launched in groups of four, and the producer is one."""


def config(case: Case) -> ForwardConfig:
    return case.problem().config


@cases
def test_fits(case: Case) -> None:
    """Shared memory, registers, no matrix instruction made to wait, and scalars alone that leave their registers."""
    used = built(case)
    assert used.shared_memory <= SHARED_BYTES
    warps = config(case).consumers * build.CONSUMER_WARPS + PRODUCER_WARPS
    assert used.report.registers * 32 * warps <= REGISTER_FILE
    assert not used.report.serialised
    assert max(used.report.spill_stores, used.report.spill_loads) <= spilled_bytes(case), str(used)


def spilled_bytes(case: Case) -> int:
    """Per thread, outside the steps: scalars, once per tile, where the accumulators leave no room for them.

    A producer, which has few registers, spills while it clears rows that take no part.
    """
    if case.segment_ids:
        return 72 if case.mask.is_full and case.dims == (64, 64) else 132
    if case.dense:
        return 80 if case.dims == (256, 256) else 56
    return 0 if case.mask.is_full else 28 if TRITON >= (3, 9) and case.dims == (256, 256) else 16


@cases
def test_a_step_is_what_it_was_written_as(case: Case) -> None:
    """Per consumer a loop for each kind of tile; in a step both products, and the sums where matmuls make them, and
    nothing that spills or repacks P.

    Where the mask is data the kinds are tiles whose scores are tested one by one, and tiles that are seen whole.

    Barriers among the warps of a consumer: when K and V are left, and before the wait for K (Triton's own, one more
    from Triton 3.9 on).
    """
    used, v = built(case), config(case)
    kinds = 2 if case.data else 1 + (case.mask.lo is not None) + (case.mask.hi is not None)
    assert len(used.steps) == kinds * v.consumers, str(used)
    head_dim, _value_dim = build.tile_dims(*case.dims)
    for step in used.steps:
        assert not step.spills
        products = 2 if case.problem().sums_by_matmul else 1
        assert step.operations["HGMMA"] == head_dim // 16 + products * v.block_kv // 16
        assert step.operations["MUFU"] == v.block_kv // 2 + 2  # a probability per score, a factor per row
        assert step.operations["F2FP"] == v.block_kv // 4  # two probabilities each
        assert step.operations["PRMT"] <= 1
        assert step.operations["BAR"] <= 3 + compat.waits_meet()


@cases
def test_warps_meet_before_a_tile_is_given_back(case: Case) -> None:
    """Whoever arrives at a barrier of the ring, all warps of a consumer have read the tile."""
    last = ""
    met = []
    for line in built(case).ptx.splitlines():
        if "mbarrier.arrive.shared" in line:
            met.append(last == "meet")
        elif re.search(r"\bbar(rier)?(\.warp)?\.sync", line):
            last = "meet"
        elif re.search(r"wgmma\.(mma_async|wait)|ld\.shared", line):
            last = "read"
    assert met
    assert all(met)


@PINNED
def test_pinned() -> None:
    expecttest.assert_expected_inline(
        "\n".join(f"{case}: {built(case)}" for case in SOON),
        """\
64/64 full bfloat16: registers 128, spilled 0/0, shared 207516, steps 371..371
64/64 band(0,1023) float16 ragged: registers 128, spilled 0/0, shared 207532, steps 367..593
128/128 full bfloat16: registers 168, spilled 0/0, shared 229912, steps 474..476
128/128 full float16 ragged: registers 168, spilled 0/0, shared 229912, steps 474..476
128/128 causal bfloat16: registers 168, spilled 4/4, shared 229928, steps 476..642
128/128 band(0,1023) bfloat16: registers 168, spilled 8/8, shared 229928, steps 477..702
128/128 band(none,10) bfloat16 ragged: registers 168, spilled 4/4, shared 229928, steps 477..677
192/128 band(0,1023) float16: registers 168, spilled 0/0, shared 213504, steps 504..735
256/256 band(0,1023) bfloat16 ragged: registers 168, spilled 12/16, shared 197088, steps 424..541
64/64 band(0,1023) bfloat16 ragged short: registers 168, spilled 0/0, shared 182904, steps 390..614
64/64 full bfloat16 segments: registers 128, spilled 64/72, shared 207628, steps 372..525
64/64 band(0,1023) float16 ragged segments: registers 128, spilled 132/132, shared 207644, steps 372..824
128/128 full bfloat16 segments: registers 168, spilled 24/40, shared 230008, steps 488..644
128/128 band(0,1023) float16 ragged segments: registers 168, spilled 24/40, shared 230024, steps 482..939
192/128 band(0,1023) bfloat16 ragged segments: registers 168, spilled 28/56, shared 213600, steps 518..1009
256/256 band(0,1023) bfloat16 ragged segments: registers 168, spilled 56/92, shared 197168, steps 418..681
64/64 band(0,1023) bfloat16 dense: registers 128, spilled 8/32, shared 207628, steps 385..465
128/128 full bfloat16 dense: registers 168, spilled 28/52, shared 230008, steps 484..575
192/128 causal float16 dense: registers 168, spilled 8/16, shared 213584, steps 516..611
256/256 full bfloat16 dense: registers 168, spilled 36/64, shared 197152, steps 423..486""",
    )


@PINNED
@pytest.mark.full
def test_others_are_pinned() -> None:
    expecttest.assert_expected_inline(
        "\n".join(f"{case}: {built(case)}" for case in LATER),
        """\
64/64 full float16 ragged: registers 128, spilled 0/0, shared 207516, steps 371..371
64/64 causal bfloat16: registers 128, spilled 0/0, shared 207532, steps 367..527
64/64 band(none,10) bfloat16: registers 128, spilled 0/0, shared 207532, steps 367..565
64/64 full float16 short: registers 168, spilled 0/0, shared 182888, steps 371..371
64/64 causal bfloat16 short: registers 168, spilled 0/0, shared 182904, steps 368..531
128/128 causal float16 ragged: registers 168, spilled 4/4, shared 229928, steps 476..642
192/128 full bfloat16: registers 168, spilled 0/0, shared 213504, steps 505..506
192/128 causal bfloat16 ragged: registers 168, spilled 8/8, shared 213504, steps 510..676
256/256 full bfloat16: registers 168, spilled 0/0, shared 197072, steps 437..438
256/256 causal float16: registers 168, spilled 12/16, shared 197072, steps 411..505
128/128 full float16 ragged segments: registers 168, spilled 36/72, shared 230008, steps 482..814
128/128 causal bfloat16 segments: registers 168, spilled 32/48, shared 230008, steps 486..806
192/128 causal float16 segments: registers 168, spilled 24/40, shared 213600, steps 518..840
256/256 full float16 segments: registers 168, spilled 32/52, shared 197168, steps 419..518
64/64 full float16 dense: registers 128, spilled 8/32, shared 207628, steps 385..465
128/128 band(0,1023) float16 dense: registers 168, spilled 28/52, shared 230008, steps 484..575""",
    )


@cases
def test_warps_trade_registers(case: Case) -> None:
    """The producer gets fewer registers than it was launched with, the consumers more."""
    ptx, v = built(case).ptx, config(case)
    counts = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
    launched = REGISTER_FILE // (32 * (v.consumers * build.CONSUMER_WARPS + PRODUCER_WARPS)) // 8 * 8
    left = launched * (v.consumers + 1) - v.registers * (v.consumers - 1) - v.producer_registers
    assert counts >= {v.producer_registers, v.registers, left}  # others while the roles wait to begin
    assert left >= v.registers


@cases
def test_kernels_overlap_in_order(case: Case) -> None:
    """The producer waits for `prepare` before every draw, and lets nobody start early: what follows uses out."""
    used = built(case)
    assert re.findall(r"griddepcontrol\.(\w+) ?;", used.ptx) == ["wait"]
    assert used.starts_early
    body = used.ptx.splitlines()
    (wait,) = (i for i, line in enumerate(body) if "griddepcontrol.wait" in line)
    (draw,) = (i for i, line in enumerate(body) if re.search(r"atom\.global\S*\.add\.u32", line))
    assert wait < draw
    assert not any(re.search(r"\$L__BB\w+:|\bbra\b", line) for line in body[wait:draw]), "one without the other"


def test_prepare() -> None:
    kernel, report = sass.compile_with_report(lambda: build.Kernels(Case((64, 64), FULL).problem()).prepare)
    assert max(report.spill_stores, report.spill_loads) == 0
    assert re.findall(r"griddepcontrol\.(\w+) ?;", kernel.asm["ptx"]) == ["launch_dependents"]
    assert not kernel.metadata.launch_pdl  # the operands of the main kernel were written before it


def float_operations(ptx: str) -> Counter[str]:
    """Arithmetic on fp32: what could round otherwise in another build."""
    return Counter(re.findall(r"^\s*(?:@%p\d+ )?((?:fma|mul|add|sub|max|ex2|cvt)\.\S*f(?:32|16)\S*)\s", ptx, re.M))


def with_and_without_segment_ids() -> list[tuple[Case, Case]]:
    """Each case whose mask is data, behind one with the same band whose mask is not; the dtype adds no instruction."""
    bands = [case for case in CASES if not case.data]
    found = [(next(b for b in bands if (b.dims, b.mask) == (c.dims, c.mask)), c) for c in CASES if c.segment_ids]
    assert {segment_ids.dims for _, segment_ids in found} == set(build.FORWARD_CONFIGS)
    return found


@pytest.mark.parametrize(
    ("band", "segment_ids"),
    [pytest.param(*pair, id=str(pair[1]), marks=marks(*pair)) for pair in with_and_without_segment_ids()],
)
def test_a_full_step_of_a_mask_that_is_data_costs_what_it_does_without(band: Case, segment_ids: Case) -> None:
    """Its shortest loop, which tests no score, is at most 4 % longer than a band's, and loads nothing.

    5 % with Triton 3.9, which sums with fewer instructions in a band's.
    """
    most = 1.05 if TRITON >= (3, 9) else 1.04
    full = min(built(segment_ids).steps, key=lambda step: step.instructions)
    assert full.instructions <= most * min(step.instructions for step in built(band).steps)
    assert full.operations["LDG"] == 0


@pytest.mark.parametrize("case", [pytest.param(c, id=str(c), marks=marks(c)) for c in CASES if c.dense])
def test_a_dense_mask_costs_one_load(case: Case) -> None:
    """Every score has a selection; a step with a mask has a few more to get the bits out, a step without it none."""
    number, steps = config(case).block_kv // 2, built(case).steps
    for masked, full in zip(steps[::2], steps[1::2], strict=True):
        assert (masked.operations["LDG"], full.operations["LDG"]) == (1, 0)
        assert (masked.operations["FSEL"], full.operations["FSEL"]) == (number, 0)
        assert number < masked.instructions - full.instructions <= 1.7 * number


def test_masks_add_no_rounding() -> None:
    """A step with a mask has the operations of one without: a row has the same bits in either."""
    full, causal = (float_operations(built(Case((128, 128), mask)).ptx) for mask in (FULL, CAUSAL))
    for name in full:
        per_step = {"ex2": 66, "fma": 66}.get(name.split(".")[0])
        if per_step is not None:
            assert causal[name] == full[name] + 2 * per_step, name  # one more loop in each of two consumers


def test_all_settings_have_cases() -> None:
    assert (
        {case.dims for case in SOON} == {case.dims for case in SOON if case.segment_ids} == set(build.FORWARD_CONFIGS)
    )


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dims"),
    [(8, 8, (64, 64)), (64, 72, (128, 128)), (96, 96, (128, 128)), (136, 128, (192, 128)), (192, 136, (256, 256))],
)
def test_smaller_head_dims_are_filled_up(head_dim: int, value_dim: int, dims: tuple[int, int]) -> None:
    assert build.tile_dims(head_dim, value_dim) == dims


@pytest.mark.parametrize("dims", [(264, 64), (64, 264), (12, 16), (16, 12)])
def test_other_head_dims_are_refused(dims: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match="head_dim, value_dim"):
        build.Specialisation("bfloat16", *dims, Traits(), True)


def test_other_problems_are_refused() -> None:
    with pytest.raises(ArgumentError, match="dtype='float32'"):
        build.Specialisation("float32", 64, 64, Traits(), True)  # type: ignore[arg-type]  # on purpose


def test_what_a_step_must_not_have_is_seen() -> None:
    """Spills and missing matrix instructions in the loops over kv tiles, and none of what lies outside them."""
    case = Case((128, 128), CAUSAL)
    text = sass.disassemble(build.Kernels(case.problem()).main.asm["cubin"])
    spilled = steps(re.sub(r"MUFU\.EX2 [^;]*;", "STL [R1], R0 ;", text))
    assert len(spilled) == len(steps(text)) == 2 * config(case).consumers
    assert all(step.spills == step.operations["STL"] == 66 for step in spilled)
    assert all(step.spills == 0 for step in steps(re.sub(r"MUFU\.RCP [^;]*;", "STL [R1], R0 ;", text)))
    fewer = steps(re.sub(r"HGMMA[^;]*tnspB[^;]*;", "NOP ;", text))
    assert all(step.operations["HGMMA"] == 128 // 16 for step in fewer)
