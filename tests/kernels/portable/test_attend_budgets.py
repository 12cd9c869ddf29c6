"""The budgets of the portable forward on each architecture, compiled without a GPU, and what its bits rest on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from itertools import product

import pytest

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.portable import standalone
from dash_inductor.kernels.portable.family import LIMIT, LIMIT_OF_16_BITS, forward_tiles
from dash_inductor.model import AttentionSpec, Band, Bias, Dense, Keys, Mask, Operand, Plan, Segments, Site, Tiles
from dash_inductor.model.architectures import SAME_AS, SHARED_BYTES
from dash_inductor.planning import plan

from ...support.portable_builds import built as compiled
from ...support.portable_builds import stages
from ...support.portable_plans import portable_plan
from ...support.triton_version import TRITON

CASES = [
    ("sm_80", "bfloat16", (64, 64), Band(0), False),
    ("sm_80", "bfloat16", (128, 128), Band(0), True),
    ("sm_80", "float16", (256, 256), Band(), False),
    ("sm_90", "float32", (128, 128), Band(0), False),
    ("sm_89", "bfloat16", (128, 128), Band(0), False),
    ("sm_89", "bfloat16", (192, 128), Band(0), True),
    ("sm_90", "bfloat16", (64, 64), Band(0, 1023), True),
    ("sm_90", "bfloat16", (128, 128), Band(), False),
    ("sm_90", "float16", (192, 128), Band(0), False),
    ("sm_90", "bfloat16", (256, 256), Band(0), False),
    ("sm_90", "bfloat16", (512, 512), Band(0), True),
    ("sm_89", "float16", (512, 64), Band(0), False),
    ("sm_100", "bfloat16", (64, 64), Band(0), False),
    ("sm_100", "bfloat16", (128, 128), Band(), True),
]
"""Architecture, dtype, head dims of q and k and of v, mask, whether there is a vector of valid keys."""


def rendered(
    arch: str, dtype: str, dims: tuple[int, int], mask: Band, has_keys: bool, length: int = 4001, *, bias: bool = False
) -> standalone.Rendered:
    spec = AttentionSpec(
        Mask(mask, Keys(Operand(0)) if has_keys else None), 0.125, bias=Bias(Operand(1)) if bias else None
    )
    site = Site("cuda", dtype, 2, 16, 4, length, length, *dims, spec)  # type: ignore[arg-type]  # a name
    tiles = forward_tiles(arch, 32 if dtype == "float32" else 16, *dims)
    facts = Plan("portable", "two_pass", "portable", tiles, tiles, head_chunk=4, forward_tiles=tiles)
    return standalone.render_forward(facts, site)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_fits_the_architecture(case: tuple[str, str, tuple[int, int], Band, bool]) -> None:
    """Lengths that fill no tile: at least as much of everything.  Tiles are loaded ahead where a plan says so."""
    arch, dtype, dims, *_ = case
    kernel = rendered(*case)
    # the one ragged tile stands behind the loop, where the compiler loads all of it at once
    ragged = 3000 if TRITON >= (3, 9) else 700  # from 3.9 on, the assembler gives this kernel half of the registers
    limit = ragged if (arch, dtype, dims) == ("sm_80", "float16", (256, 256)) else 192 if dtype == "float32" else 128
    asm, used = compiled(kernel, arch)
    assert used.shared_memory <= SHARED_BYTES[arch], used
    assert max(used.spill_stores, used.spill_loads) <= limit, used
    assert ("cp.async" in asm["ptx"]) == (kernel.tiles.num_stages > 1)
    assert not re.search(r"\b(red|atom)\.global", asm["ptx"]), "nothing is accumulated in memory"


def with_runtime_lengths(kernel: standalone.Rendered) -> standalone.Rendered:
    """The kernel that Inductor would make for dynamic lengths: they are not known when it is compiled."""
    text, count = re.subn(
        r"^    (q_len|kv_len) = (\d+)$", r"    \1 = tl.load(LSE).to(tl.int32)", kernel.text, flags=re.M
    )
    assert count == 2
    return dataclasses.replace(kernel, text=re.sub(r"(EVEN_\w+: tl.constexpr = )True", r"\1False", text))


def layouts(ttgir: str) -> dict[str, set[str]]:
    """The types of what is reduced and of the results of matmuls, with their layouts spelled out."""
    names = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    for _ in range(2):  # a layout may name another one
        ttgir = re.sub(r"#\w+\b", lambda match: names.get(match[0], match[0]), ttgir)
    reduced = re.findall(r"^\s*\}\) : \((tensor<.*>)\) -> tensor", ttgir, re.MULTILINE)
    matmuls = re.findall(r"(?:tt\.dot|ttng\.warp_group_dot) .* -> (tensor<.*>)", ttgir)
    assert reduced
    assert matmuls
    return {"reductions": set(reduced), "matmuls": set(matmuls)}


def arithmetic(ptx: str) -> dict[str, int]:
    """How often each instruction on fp32 numbers that rounds occurs, and each exchange between threads."""
    found = re.findall(
        r"^\s+(?:@%p\d+ )?((?:fma|mul|add|sub|ex2|lg2|div|mma|wgmma|shfl\.sync\.bfly)[.\w:]*)", ptx, re.M
    )
    kinds = [name for name in found if re.search(r"f32|bfly", name)]
    return {name: kinds.count(name) for name in set(kinds)}


SAME = [
    ("sm_80", "float16", (128, 128)),
    ("sm_89", "bfloat16", (64, 64)),
    ("sm_90", "bfloat16", (128, 128)),
    ("sm_90", "float32", (64, 64)),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id="-".join(map(str, c)), marks=pytest.mark.full if c[0] == "sm_89" else []) for c in SAME],
)
def test_masked_and_full_tiles_have_the_same_arithmetic(case: tuple[str, str, tuple[int, int]]) -> None:
    """Note [Bits of the forward]: a full mask without and with knowledge of lengths, a causal one, and keys.

    Rows are summed in layouts that are the same in all loops of all kernels, and every loop has the same instructions:
    the kernel of dynamic lengths has one loop more than the kernel of even ones.
    """
    arch, dtype, dims = case
    even = rendered(arch, dtype, dims, Band(), False, 4096)
    keyed, causal = (rendered(arch, dtype, dims, *kind, 4096) for kind in ((Band(), True), (Band(0), False)))
    assert "EVEN_KV: tl.constexpr = True" in even.text
    asm = [stages(kernel, arch, "ptx") for kernel in (even, keyed, with_runtime_lengths(even), causal)]
    expected = layouts(asm[0]["ttgir"])
    for other in asm[1:]:
        assert layouts(other["ttgir"]) == expected
    one, with_keys, dynamic, two = (arithmetic(a["ptx"]) for a in asm)
    assert with_keys == one
    assert dynamic == two, "a loop for full tiles and one for others"
    assert all(one[name] <= two[name] <= 2 * one[name] for name in one)
    assert two.keys() == one.keys()


@pytest.mark.parametrize("length", [4096, pytest.param(4008, marks=pytest.mark.full), 4001])
@pytest.mark.parametrize("case", SAME, ids=lambda c: "-".join(map(str, c)))
def test_rows_with_a_bias_are_summed_in_the_same_order_in_any_layout(
    case: tuple[str, str, tuple[int, int]], length: int
) -> None:
    """Note [Bits of the forward], 4: two numbers at a time, whatever the alignment of the bias makes of layouts."""
    kernel = rendered(*case, Band(), False, length, bias=True)
    for known in (kernel, with_runtime_lengths(kernel)):
        ttgir = stages(known, case[0], "ttgir")["ttgir"]
        reductions = re.findall(
            r'"tt\.reduce".*?axis = (\d).*?(arith\.\w+) .*?\}\) : \(tensor<([\dx]+)xf32', ttgir, re.DOTALL
        )
        sums = [shape.split("x")[int(axis)] for axis, kind, shape in reductions if kind == "arith.addf"]
        assert {kind for _, kind, _ in reductions} == {"arith.addf", "arith.maxnumf"}
        assert len(sums) >= 6
        assert set(sums) == {"2"}


@pytest.mark.parametrize("has_keys", [False, True])
def test_compiles_with_64_bit_indices(has_keys: bool) -> None:
    """As Inductor renders it for tensors of 2**31 elements."""
    kernel = rendered("sm_90", "bfloat16", (64, 64), Band(0, 99), has_keys, 1 << 21)
    text = kernel.text.replace("INDEX_DTYPE: tl.constexpr = tl.int32", "INDEX_DTYPE: tl.constexpr = tl.int64")
    names = "batch|heads|q_heads|q_len|kv_len"
    text = re.sub(rf"^    ({names}) = (\d+)$", r"    \1 = tl.full([], \2, dtype=INDEX_DTYPE)", text, flags=re.M)
    assert text.count("tl.full([], ") >= 2
    standalone.build(dataclasses.replace(kernel, text=text), "sm_90")


@pytest.mark.parametrize(
    ("arch", "schedule", "dim"), [("sm_80", "two_pass", 128), ("sm_90", "two_pass", 128), ("sm_80", "spt", 64)]
)
def test_the_backward_with_keys_fits(arch: str, schedule: str, dim: int) -> None:
    spec = AttentionSpec(Mask(Band(0), Keys(Operand(0))), 0.125)
    facts = Site("cuda", "bfloat16", 2, 16, 4, 4001, 4001, dim, dim, spec)
    kernels = standalone.render(plan(facts, arch, schedule), facts)
    for kernel in kernels:
        _, used = compiled(kernel, arch)
        assert used.shared_memory <= SHARED_BYTES[arch], used
        assert max(used.spill_stores, used.spill_loads) <= 640, used
    assert [k.names.count("KEYS") for k in kernels] == ([1, 1] if schedule == "two_pass" else [0, 1])


def of_segments(arch: str, dim: int, *, keys: bool = False) -> Site:
    """A causal site with documents, of lengths that fill no tile."""
    mask = Mask(Band(0), Keys(Operand(2)) if keys else None, Segments(Operand(0), Operand(1)))
    return Site("cuda", "bfloat16", 2, 16, 4, 4001, 4001, dim, dim, AttentionSpec(mask, 0.125))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("keys", [False, True], ids=["", "keys"])
def test_the_forward_with_segments_fits(arch: str, keys: bool) -> None:
    """It loads tiles ahead, keys and values, although a vector says which of them are read."""
    tiles = forward_tiles(arch, 16, 128, 128)
    facts = Plan("portable", "two_pass", "portable", tiles, tiles, head_chunk=4, forward_tiles=tiles)
    kernel = standalone.render_forward(facts, of_segments(arch, 128, keys=keys))
    asm, used = compiled(kernel, arch)
    assert used.shared_memory <= SHARED_BYTES[arch], used
    assert max(used.spill_stores, used.spill_loads) <= 160, used
    stage = (tiles.block_kv * 128 * 2) * 2  # bytes of a tile of keys and one of values
    assert used.shared_memory >= (tiles.num_stages - 1) * stage
    assert "cp.async" in asm["ptx"]
    assert kernel.names == ("Q", "K", "V", "LSE", "SEGMENTS_Q", "SEGMENTS_KV", "KEYS", "OUT")


@pytest.mark.parametrize(
    ("arch", "schedule", "dim"), [("sm_80", "two_pass", 128), ("sm_90", "two_pass", 128), ("sm_80", "spt", 64)]
)
def test_the_backward_with_segments_fits(arch: str, schedule: str, dim: int) -> None:
    """The dk/dv kernel of two passes adds up rows alone: it needs no vector that says which keys a row sees."""
    facts = of_segments(arch, dim)
    kernels = standalone.render(plan(facts, arch, schedule), facts)
    for kernel in kernels:
        _, used = compiled(kernel, arch)
        assert used.shared_memory <= SHARED_BYTES[arch], used
        assert max(used.spill_stores, used.spill_loads) <= 640, used
    assert [k.names.count("SEGMENTS_Q") for k in kernels] == ([1, 1] if schedule == "two_pass" else [0, 1])
    assert [k.names.count("KEYS") for k in kernels] == ([1, 0] if schedule == "two_pass" else [0, 1])


@pytest.mark.parametrize(
    ("arch", "dim"),
    [
        pytest.param("sm_80", 64, marks=pytest.mark.full), pytest.param("sm_90", 64, marks=pytest.mark.full),
        ("sm_90", 128),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["dense", "bias"])
def test_a_tile_of_pairs_fits(arch: str, dim: int, kind: str) -> None:
    """A dense mask, and a bias with its gradient."""
    if kind == "dense":
        spec = AttentionSpec(Mask(Band(0), dense=Dense(Operand(0))), 0.125)
    else:
        spec = AttentionSpec(Mask(Band()), 0.125, bias=Bias(Operand(0), gradient=True))
    facts = Site("cuda", "bfloat16", 2, 16, 4, 4001, 4001, dim, dim, spec)
    tiles = forward_tiles(arch, 16, dim, dim)
    forward = Plan("portable", "two_pass", "portable", tiles, tiles, head_chunk=4, forward_tiles=tiles)
    kernels = [*standalone.render(portable_plan(facts, arch), facts), standalone.render_forward(forward, facts)]
    assert len(kernels) == (3 if kind == "dense" else 4)
    for kernel in kernels:
        _, used = compiled(kernel, arch)
        assert used.shared_memory <= SHARED_BYTES[arch], used
        assert max(used.spill_stores, used.spill_loads) <= 1000, used
        assert used.registers > 128, "where the assembler runs out of registers, it gives a kernel 32"
        assert ("BIAS" in kernel.names) == (kind == "bias")
        assert ("DENSE_SHOWN" in kernel.names) == (kind == "dense")


def test_a_bias_is_loaded_ahead() -> None:
    """On sm_90, for lengths that fill tiles: what the kernels of a backward with a bias's gradient are built for."""
    spec = AttentionSpec(Mask(Band()), 0.125, bias=Bias(Operand(0), gradient=True))
    facts = Site("cuda", "bfloat16", 2, 16, 16, 4096, 4096, 128, 128, spec)
    dq, dkdv, apart = standalone.render(portable_plan(facts, "sm_90"), facts)
    for kernel in (dq, dkdv, apart):
        asm, used = compiled(kernel, "sm_90")
        assert not re.search(r"\b(red|atom)\.global", asm["ptx"]), "sums belong to one program"
        assert max(used.spill_stores, used.spill_loads) <= 64, used
        assert re.search(r"async_copy_global_to_local.*x!tt.ptr<bf16>.*-> <\d+x(32|64)xbf16", asm["ttgir"]), "the bias"
        assert ("prefetch.global.L2" in asm["ptx"]) == (kernel is not apart)
    assert "SUMS" in dq.names
    assert re.search(r"async_copy_global_to_local.*-> <4096xf32", compiled(dq, "sm_90")[0]["ttgir"]), "the sums"
    assert 2 * (compiled(dkdv, "sm_90")[1].shared_memory + 1024) <= 228 * 1024, "two CTAs of an SM hide each other"


def test_every_class_has_tiles() -> None:
    limits = {16: LIMIT_OF_16_BITS, 32: LIMIT}
    every = product(SHARED_BYTES, limits, range(8, LIMIT_OF_16_BITS + 1, 8), (8, 72, 128, 136, 256, 512))
    for arch, bits, dim, value_dim in every:
        if max(dim, value_dim) > limits[bits]:
            continue
        tiles = forward_tiles(arch, bits, dim, value_dim)
        assert min(tiles.block_q, tiles.block_kv) >= 16
        assert all(x & (x - 1) == 0 for x in (tiles.block_q, tiles.block_kv, tiles.num_warps))
    for arch, same_as in SAME_AS.items():
        assert forward_tiles(arch, 16, 64, 64) == forward_tiles(same_as, 16, 64, 64)


REFUSED: list[tuple[Callable[[], Tiles], str]] = [
    (lambda: forward_tiles("sm_70", 16, 64, 64), "arch='sm_70'"),
    (lambda: forward_tiles("sm_90", 8, 64, 64), "bits=8"),
    (lambda: forward_tiles("sm_90", 16, 520, 64), "head_dim=520"),
    (lambda: forward_tiles("sm_90", 32, 64, 136), "value_dim=136"),
    (lambda: forward_tiles("sm_90", 16, 64, 0), "value_dim=0"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_has_no_tiles(call: Callable[[], Tiles], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        call()
