"""Plans: pinned texts and numerics keys, purity, overrides, errors.  ``EXPECTTEST_ACCEPT=1`` pins them anew."""

from __future__ import annotations

import itertools
from dataclasses import replace

import expecttest
import pytest

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.families import FAMILIES
from dash_inductor.kernels.hopper.kernel_configs import CANDIDATES as HOPPER
from dash_inductor.kernels.portable.family import CANDIDATES as PORTABLE
from dash_inductor.kernels.portable.family import LIMIT, LIMIT_OF_16_BITS
from dash_inductor.model.architectures import WORKERS
from dash_inductor.model.attention_spec import AttentionSpec
from dash_inductor.model.components import Dense, Operand
from dash_inductor.model.mask import Band, Mask
from dash_inductor.model.operands import Bias
from dash_inductor.model.plan import Plan
from dash_inductor.model.site import BITS, Site
from dash_inductor.planning.nominal import critical_path
from dash_inductor.planning.planner import plan
from dash_inductor.schedule.schedules import LEAST, NAMES, supports
from dash_inductor.schedule.table_tile_schedule import Tables
from dash_inductor.schedule.tile_schedule import ClosedForm, Problem
from dash_inductor.schedule.visibility import EMPTY, FULL
from tests.support.calls import spec_of
from tests.support.processes import run_python

from ..support.distribution import ROOT

CAUSAL, BOTTOM = Band(0, None), Band(0, None, "bottom_right")


def site(
    q_heads: int, kv_heads: int, length: int | None, dim: int, mask: Band, scale: float | None = None, **changes: object
) -> Site:
    """A bfloat16 self-attention site of batch 2 on CUDA, with fields changed by name."""
    base = Site(
        "cuda",
        "bfloat16",
        2,
        q_heads,
        kv_heads,
        length,
        length,
        dim,
        dim,
        spec_of(mask, dim**-0.5 if scale is None else scale),
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # the names are Site's


SHAPES: dict[str, tuple[Site, str]] = {
    "Llama 3 8B": (site(32, 8, 8192, 128, CAUSAL), "sm_90"),
    "Llama 3 8B, dynamic": (site(32, 8, None, 128, CAUSAL, batch=None), "sm_90"),
    "Llama 3 8B on A100": (site(32, 8, 8192, 128, CAUSAL), "sm_80"),
    "Llama 3 8B on L4": (site(32, 8, 4096, 128, CAUSAL), "sm_89"),
    "Llama 3 8B on B200": (site(32, 8, 8192, 128, CAUSAL), "sm_100"),
    "Llama 3.2 1B": (site(32, 8, 4096, 64, CAUSAL), "sm_90"),
    "Qwen 3 0.6B": (site(16, 8, 4096, 128, CAUSAL), "sm_90"),
    "Mistral 7B, window": (site(32, 8, 8192, 128, Band(0, 4095)), "sm_90"),
    "Mistral 7B, window, dynamic": (site(32, 8, None, 128, Band(0, 4095)), "sm_90"),
    "window of 1024": (site(8, 4, 8192, 128, Band(0, 1023)), "sm_90"),
    "GPT-2": (site(12, 12, 1024, 64, CAUSAL), "sm_90"),
    "BERT base": (site(12, 12, 512, 64, Band()), "sm_90"),
    "ViT-B/16": (site(12, 12, 197, 64, Band()), "sm_80"),
    "ViT-H": (site(16, 16, 257, 80, Band()), "sm_90"),
    "ModernBERT, local layers": (site(12, 12, 8192, 64, Band(-64, 64)), "sm_90"),
    "DiT cross-attention": (site(24, 24, 4096, 64, Band(), kv_len=77), "sm_90"),
    "chunked prefill": (site(32, 8, 1024, 128, BOTTOM, kv_len=8192), "sm_90"),
    "fp32 causal": (site(8, 8, 2048, 64, CAUSAL, dtype="float32"), "sm_90"),
    "fp32 causal, tf32 allowed": (site(8, 8, 2048, 32, CAUSAL, dtype="float32", allow_tf32=True), "sm_80"),
    "tiny Llama on a CPU": (site(4, 2, 128, 32, CAUSAL, dtype="float32", device="cpu"), "cpu"),
}


class PinnedPlans(expecttest.TestCase):
    def test_plans_of_real_shapes(self) -> None:
        lines = []
        for name, (facts, arch) in SHAPES.items():
            p = plan(facts, arch)
            lines += [name, f"  {p}", f"  {p.numerics_key}", f"  critical path {p.critical_path:g}"]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
Llama 3 8B
  hopper/bent_fold/dkdv=64x128w8s2/head_chunk=2/forward=hopper/fwd=128x128w8s2
  v17/hopper/bent_fold/dkdv=64x128w8/bfloat16/d128/causal/group4/sm_90/forward=hopper:128x128w8
  critical path 164.5
Llama 3 8B, dynamic
  hopper/bent_fold/dkdv=64x128w8s2/head_chunk=8/forward=hopper/fwd=128x128w8s2
  v17/hopper/bent_fold/dkdv=64x128w8/bfloat16/d128/causal/group4/sm_90/forward=hopper:128x128w8
  critical path 164.5
Llama 3 8B on A100
  portable/two_pass/dkdv=64x64w4s2/dq=64x64w4s2/head_chunk=4/forward=portable/fwd=128x64w8s3
  v17/portable/two_pass/dkdv=64x64w4/dq=64x64w4/bfloat16/d128/causal/group4/sm_80/forward=portable:128x64w8
  critical path 225.5
Llama 3 8B on L4
  portable/two_pass/dkdv=32x64w4s2/dq=64x32w4s2/head_chunk=4/forward=portable/fwd=128x64w8s2
  v17/portable/two_pass/dkdv=32x64w4/dq=64x32w4/bfloat16/d128/causal/group4/sm_89/forward=portable:128x64w8
  critical path 173.2
Llama 3 8B on B200
  portable/two_pass/dkdv=64x64w4s2/dq=128x64w8s2/head_chunk=4/forward=portable/fwd=128x64w8s3
  v17/portable/two_pass/dkdv=64x64w4/dq=128x64w8/bfloat16/d128/causal/group4/sm_100/forward=portable:128x64w8
  critical path 171.8
Llama 3.2 1B
  hopper/bent_fold/dkdv=128x128w8s2/head_chunk=8/forward=hopper/fwd=192x128w12s4
  v17/hopper/bent_fold/dkdv=128x128w8/bfloat16/d64/causal/group4/sm_90/forward=hopper:192x128w12
  critical path 179.2
Qwen 3 0.6B
  hopper/bent_fold/dkdv=64x128w8s2/head_chunk=4/forward=hopper/fwd=128x128w8s2
  v17/hopper/bent_fold/dkdv=64x128w8/bfloat16/d128/causal/group2/sm_90/forward=hopper:128x128w8
  critical path 164.5
Mistral 7B, window
  hopper/spt/dkdv=64x128w8s2/head_chunk=4/forward=hopper/fwd=128x128w8s2
  v17/hopper/spt/dkdv=64x128w8/bfloat16/d128/band(0,4095)/group4/sm_90/forward=hopper:128x128w8
  critical path 164.5
Mistral 7B, window, dynamic
  hopper/spt/dkdv=64x128w8s2/head_chunk=8/forward=hopper/fwd=128x128w8s2
  v17/hopper/spt/dkdv=64x128w8/bfloat16/d128/band(0,4095)/group4/sm_90/forward=hopper:128x128w8
  critical path 164.5
window of 1024
  hopper/spt/dkdv=64x128w8s2/head_chunk=4/forward=hopper/fwd=128x128w8s2
  v17/hopper/spt/dkdv=64x128w8/bfloat16/d128/band(0,1023)/group2/sm_90/forward=hopper:128x128w8
  critical path 128.13
GPT-2
  hopper/bent_fold/dkdv=128x128w8s2/head_chunk=16/forward=hopper/fwd=192x128w12s4
  v17/hopper/bent_fold/dkdv=128x128w8/bfloat16/d64/causal/group1/sm_90/forward=hopper:192x128w12
  critical path 179.2
BERT base
  hopper/ascending/dkdv=128x128w8s2/head_chunk=16/forward=hopper/fwd=192x128w12s4
  v17/hopper/ascending/dkdv=128x128w8/bfloat16/d64/full/group1/sm_90/forward=hopper:192x128w12
  critical path 326
ViT-B/16
  portable/two_pass/dkdv=64x128w8s2/dq=128x64w8s2/head_chunk=1/forward=portable/fwd=128x64w4s3
  v17/portable/two_pass/dkdv=64x128w8/dq=128x64w8/bfloat16/d64/full/group1/sm_80/forward=portable:128x64w4
  critical path 425.6
ViT-H
  hopper/ascending/dkdv=64x128w8s2/head_chunk=32/forward=hopper/fwd=128x128w8s2
  v17/hopper/ascending/dkdv=64x128w8/bfloat16/d80/full/group1/sm_90/forward=hopper:128x128w8
  critical path 300.26
ModernBERT, local layers
  portable/two_pass/dkdv=64x64w4s3/dq=64x64w4s3/head_chunk=4/forward=hopper/fwd=192x128w12s4
  v17/portable/two_pass/dkdv=64x64w4/dq=64x64w4/bfloat16/d64/band(-64,64)/group1/sm_90/forward=hopper:192x128w12
  critical path 32.55
DiT cross-attention
  hopper/ascending/dkdv=128x128w8s2/head_chunk=8/forward=hopper/fwd=192x128w12s4
  v17/hopper/ascending/dkdv=128x128w8/bfloat16/d64/full/group1/sm_90/forward=hopper:192x128w12
  critical path 326
chunked prefill
  hopper/bent_fold/dkdv=64x128w8s2/head_chunk=2/forward=hopper/fwd=128x128w8s2
  v17/hopper/bent_fold/dkdv=64x128w8/bfloat16/d128/causal:bottom_right/group4/sm_90/forward=hopper:128x128w8
  critical path 164.5
fp32 causal
  portable/two_pass/dkdv=32x64w4s1/dq=64x32w4s1/head_chunk=4/forward=portable/fwd=64x64w4s2
  v17/portable/two_pass/dkdv=32x64w4/dq=64x32w4/float32/d64/causal/group1/sm_90/forward=portable:64x64w4
  critical path 185.95
fp32 causal, tf32 allowed
  portable/two_pass/dkdv=32x32w8s1/dq=32x32w8s1/head_chunk=4/forward=portable/fwd=32x32w8s1/tf32
  v17/portable/two_pass/dkdv=32x32w8/dq=32x32w8/float32+tf32/d32/causal/group1/sm_80/forward=portable:32x32w8
  critical path 218.588
tiny Llama on a CPU
  reference/two_pass/dkdv=64x64w1s1/dq=64x64w1s1/head_chunk=4/forward=reference/fwd=64x64w1s1
  v17/reference/two_pass/dkdv=64x64w1/dq=64x64w1/float32/d32/causal/group2/cpu/forward=reference:64x64w1
  critical path 23654.4""",
        )


@pytest.mark.parametrize("name", SHAPES)
def test_batch_and_lengths_never_change_bits(name: str) -> None:
    facts, arch = SHAPES[name]
    expected = plan(facts, arch)
    for batch in (None, 1, 7, 64):
        assert replace(plan(replace(facts, batch=batch), arch), head_chunk=expected.head_chunk) == expected
    for q_len, kv_len in ((None, None), (1, 1), (17, 100_000), (100_000, 3)):
        other = plan(replace(facts, q_len=q_len, kv_len=kv_len), arch)
        assert replace(other, head_chunk=expected.head_chunk) == expected
        assert other.numerics_key == expected.numerics_key


def test_the_compiler_s_settings_are_part_of_the_key() -> None:
    facts = site(8, 8, 512, 64, CAUSAL)
    plain, other = plan(facts, "sm_90"), plan(facts, "sm_90", compiler="DISABLE_LLVM_OPT=1")
    assert other.numerics_key == f"{plain.numerics_key}/DISABLE_LLVM_OPT=1"
    assert str(other) == str(plain)


def test_same_plans_in_a_fresh_process() -> None:
    code = (
        "from tests.planning.test_plan import SHAPES, plan\n"
        "print([(str(p), p.numerics_key, p.critical_path) for p in (plan(s, a) for s, a in SHAPES.values())])"
    )
    here = [(str(p), p.numerics_key, p.critical_path) for p in (plan(s, a) for s, a in SHAPES.values())]
    assert run_python(code, path=ROOT, PYTHONHASHSEED="77").stdout.strip() == str(here)


def test_head_chunk_changes_with_length_but_not_the_key() -> None:
    short, long = (plan(site(32, 32, n, 128, CAUSAL), "sm_90", schedule="spt") for n in (512, 65536))
    assert short.head_chunk > long.head_chunk >= 1
    assert short.numerics_key == long.numerics_key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask", [Band(), CAUSAL, Band(0, 100)])
def test_override(name: str, mask: Band) -> None:
    facts = site(8, 2, 1024, 128, mask)
    if supports(name, mask) is not None:
        with pytest.raises(ArgumentError, match=f"schedule='{name}'.*{name} needs"):
            plan(facts, "sm_90", schedule=name)
        return
    p = plan(facts, "sm_90", schedule=name)
    assert p.schedule == name
    assert (p.dq is not None) == (name == "two_pass")
    assert f"/{name}/" in p.numerics_key
    assert p.critical_path > 0
    assert str(Plan.parse(str(p))) == str(p)


@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_the_choice_is_the_shortest_critical_path_without_co_residency(arch: str) -> None:
    """The shortest path among the candidates of one kernel family."""
    of_family = {"sm_90": (HOPPER[64, 64],), "sm_80": PORTABLE["sm_80", 16, 64]}
    for mask in (Band(), CAUSAL, Band(0, 255)):
        p = plan(site(8, 8, 512, 64, mask), arch)
        for candidate in of_family[arch]:
            for name in ("ascending", "spt", "bent_fold", "two_pass"):
                if supports(name, mask) is None and (name == "two_pass") == (candidate.dq is not None):
                    assert critical_path(name, candidate, mask, arch) >= p.critical_path


def test_every_architecture_has_candidates_for_all_head_dims_of_the_templates() -> None:
    for arch in WORKERS:
        limits = {dtype: LIMIT_OF_16_BITS if bits == 16 else LIMIT for dtype, bits in BITS.items()}
        for dtype, dim in ((dtype, dim) for dtype, limit in limits.items() for dim in (1, *range(8, limit + 1, 8))):
            facts = site(8, 8, 512, dim, Band(), dtype=dtype, device="cpu" if arch == "cpu" else "cuda")
            covering = [f for f in FAMILIES if f.covers(facts, arch)]
            assert {c.dq is None for f in covering for c in f.candidates(facts, arch)} == {True, False}


@pytest.mark.parametrize(("head_dim", "value_dim"), [(136, 136), (192, 128), (256, 256)])
@pytest.mark.parametrize("mask", [Band(), CAUSAL, Band(-64, 64)])
def test_large_head_dims_have_the_hopper_kernel(head_dim: int, value_dim: int, mask: Band) -> None:
    assert plan(site(8, 8, 512, head_dim, mask, value_dim=value_dim), "sm_90").kernel == "hopper"


ERRORS = [
    (site(8, 8, 64, 64, Band()), "sm_75", None, "arch='sm_75'"),
    (site(8, 8, 64, 64, Band()), "cpu", None, "arch='cpu'"),
    (site(8, 8, 64, 64, Band()), "sm_90", "diagonal", "schedule='diagonal'"),
    (site(8, 8, 64, 136, Band(), dtype="float32"), "sm_80", None, r"head_dim, value_dim=\(136, 136\)"),
    (site(8, 8, 64, 520, Band()), "sm_90", None, r"head_dim, value_dim=\(520, 520\)"),
    (site(8, 8, 64, 0, Band(), scale=1.0), "sm_90", None, "head_dim=0"),
    (site(8, 8, 64, 64, Band(), value_dim=-8), "sm_90", None, "value_dim=-8"),
    (site(8, 8, 64, 64, Band(), value_dim=520), "sm_90", None, r"head_dim, value_dim=\(64, 520\)"),
    (site(8, 8, 64, 576, Band(), value_dim=512), "sm_90", None, r"head_dim, value_dim=\(576, 512\)"),
    (site(8, 3, 64, 64, Band()), "sm_90", None, "q_heads=8"),
    (site(8, 8, 2**30, 64, Band()), "sm_90", None, "q_len=1073741824 is not allowed: expected at most 1073741823"),
    (site(8, 8, 64, 64, Band(), kv_len=2**31), "sm_90", None, "kv_len=2147483648"),
    (site(8, 8, 64, 64, Band(), dtype="float64"), "sm_90", None, "dtype='float64'"),
]


@pytest.mark.parametrize(("facts", "arch", "schedule", "message"), ERRORS)
def test_bad_input_is_named(facts: Site, arch: str, schedule: str | None, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        plan(facts, arch, schedule)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kind", ["dense", "bias"])
def test_what_pairs_decide(arch: str, kind: str) -> None:
    """Portable kernels read dense masks and biases; sm_90's kernels dense masks alone, at larger head dims too."""
    plain = site(8, 8, 4096, 64, CAUSAL)
    dense = Dense(Operand(0)) if kind == "dense" else None
    bias = Bias(Operand(0), gradient=True) if kind == "bias" else None
    found = replace(plain, spec=AttentionSpec(Mask(CAUSAL, dense=dense), plain.scale, bias=bias))
    chosen = plan(found, arch)
    on_hopper = (arch, kind) == ("sm_90", "dense")
    assert chosen.kernel == chosen.forward == ("hopper" if on_hopper else "portable")
    assert f"/{'causal & dense(0)' if kind == 'dense' else 'causal + bias'}/group1/" in chosen.numerics_key
    for large in (replace(found, head_dim=256, value_dim=256), replace(found, head_dim=192, value_dim=128)):
        assert plan(large, arch).kernel == ("hopper" if on_hopper else "portable")


@pytest.mark.parametrize("heads", ["1", "h"])
def test_a_dense_mask_is_planned_as_a_causal_one(heads: str) -> None:
    """It may be causal, and then has the tile schedules of a causal mask; for other bands, and beside them, nothing
    changes.
    """

    def schedule(mask: str, arch: str = "sm_90") -> str:
        spec = AttentionSpec(Mask.parse(mask), 0.125)
        facts = Site("cuda", "bfloat16", 2, 16, 16, 4096, 4096, 128, 128, spec)
        return plan(facts, arch).schedule

    assert schedule("dense(0)") == schedule("causal & dense(0)") == schedule("causal") == "bent_fold"
    assert schedule("full") == schedule("keys(0)") == "ascending"
    assert schedule("dense(0)", "sm_80") == schedule("full", "sm_80")
    for n_q, name in itertools.product((LEAST - 1, LEAST, LEAST + 1, 2 * LEAST + 1), ("bent_fold", "spt")):
        n_kv = (n_q + 1) // 2
        problem = Problem(Band(), n_q * 64, n_kv * 128, 64, 128, 2, 4, head_chunk=2)
        shown = [[EMPTY if 128 * kv > 64 * q + 63 else FULL for kv in range(n_kv)] for q in range(n_q)]
        tables = Tables(name, problem, [shown] * (2 if heads == "1" else 8))
        causal = ClosedForm(name, replace(problem, band=Band(0)))
        for head, kv in itertools.product(range(8), range(n_kv)):
            tile_schedule = [causal.q_tile(head, kv, step) for step in range(causal.visits(head, kv))]
            assert tables.tile_schedule(head, kv) == tile_schedule
            assert [tables.rank(head, q, kv) for q in tile_schedule] == [
                causal.rank(head, q, kv) for q in tile_schedule
            ]
        assert [tables.launch(t) for t in range(tables.work_ids)] == [causal.launch(t) for t in range(causal.work_ids)]
