"""Descriptors of operands in PTX: what is written anew has the values that it had."""

from __future__ import annotations

import random
import re

import pytest

from dash_inductor.model import Band
from dash_inductor.upstream import compat
from dash_inductor.upstream.assembling import plain_descriptors

from ..support.hopper_builds import Case, built
from ..support.hopper_forward_builds import Case as Forward
from ..support.hopper_forward_builds import built as built_forward

BITS = 4611686293305294848
"""What Triton puts above the address: 64 bytes, strides, the swizzle."""
HIDDEN = (1 << 32) - 1


def kernel(*body: str) -> str:
    lines = [".reg .b64 \t%rd<100>;", "\tmov.b32 \t%r1, global_smem;", *(f"\t{line}" for line in body), "\tret;"]
    return "\n".join(lines) + "\n"


def values(ptx: str, address: int) -> list[list[int]]:
    """The descriptors of every matrix instruction, of a program without branches that is run for an address."""
    registers: dict[str, int] = {"%r1": address}
    found = []

    def value(text: str) -> int:
        return registers[text] if text.startswith("%") else int(text)

    for line in ptx.splitlines():
        if "wgmma.mma_async" in line:
            found.append([registers[name] for name in re.findall(r"%(?:rd|dash_late)\d+", line.partition("}")[2])])
        elif match := re.match(r"\s*([a-z][\w.]*)\s+(%\w+), ([^;]*);", line):
            operation, name = match[1], match[2]
            operands = [value(operand) for operand in match[3].split(", ") if operand != "global_smem"]
            if not operands:
                continue
            registers[name] = {
                "add.s32": lambda a, b: (a + b) & HIDDEN,
                "or.b32": lambda a, b: a | b,
                "and.b32": lambda a, b: a & b,
                "bfe.u32": lambda a, at, many: a >> at & (1 << many) - 1,
                "cvt.u64.u32": lambda a: a,
                "or.b64": lambda a, b: a | b,
                "add.s64": lambda a, b: a + b & (1 << 64) - 1,
            }[operation](*operands)
    return found


def sample(rng: random.Random) -> str:
    """A program of two operands with several slices, of forms that may be written anew and forms that may not."""
    body, number = [], 10
    for operand in range(2):
        base, many = f"%r{number}", rng.choice([14, 15, 16, 20])
        body.append(rng.choice([f"bfe.u32 \t{base}, %r1, 4, {many};", f"and.b32 \t{base}, %r1, {(1 << many) - 1};"]))
        slices = []
        for ahead in rng.sample([0, 2, 128, 32767, 32768, 65535, 67108864, 67108992, 67108864 + 40000], 4):
            number += 1
            operation = rng.choice(["add.s32", "or.b32"])
            address = base
            if ahead:
                address = f"%r{number}"
                body.append(f"{operation} \t{address}, {base}, {ahead};")
            body.append(f"cvt.u64.u32 \t%rd{2 * number}, {address};")
            body.append(f"or.b64 \t%rd{2 * number + 1}, %rd{2 * number}, {BITS + rng.choice([0, 0, 0, 1, 1 << 15])};")
            slices.append(f"%rd{2 * number + 1}")
        number += 1
        body += [f"wgmma.mma_async.sync {{%f{operand}}}, {one}, {slices[0]}, 1;" for one in slices]
    return kernel(*body)


@pytest.mark.parametrize("seed", range(300))
def test_descriptors_keep_their_values(seed: int) -> None:
    rng = random.Random(seed)
    text = sample(rng)
    rewritten = plain_descriptors(text)
    for address in (0, 16, 0x3FFF0, 227 << 10, rng.randrange(1 << 20) & ~15):
        assert values(rewritten, address) == values(text, address)


def test_what_is_known_is_written_anew() -> None:
    text = kernel(
        "bfe.u32 \t%r2, %r1, 4, 14;", "add.s32 \t%r3, %r2, 2;", "cvt.u64.u32 \t%rd1, %r3;",
        f"or.b64 \t%rd2, %rd1, {BITS};", "wgmma.mma_async.sync {%f1}, %rd2, 1;",
    )  # fmt: skip
    rewritten = plain_descriptors(text)
    assert f"add.s64 \t%dash_late0, %dash_base0, {BITS + 2};\n\twgmma" in rewritten
    assert "bfe.u32 \t%dash_low0, %r1, 4, 14;\n\tcvt.u64.u32 \t%dash_base0, %dash_low0;" in rewritten


def test_each_group_computes_the_base_once() -> None:
    slices = []
    for i in range(2):
        slices += [f"add.s32 \t%r{3 + i}, %r2, {2 * i + 2};", f"cvt.u64.u32 \t%rd{i}, %r{3 + i};"]
        slices += [f"or.b64 \t%rd{7 + i}, %rd{i}, {BITS};"]
    group = ["wgmma.fence.sync.aligned;", *(f"wgmma.mma_async.sync {{%f{i}}}, %rd{7 + i}, 1;" for i in range(2))]
    rewritten = plain_descriptors(kernel("bfe.u32 \t%r2, %r1, 4, 14;", *slices, *group, *group)).splitlines()
    copies = [i for i, line in enumerate(rewritten) if "%dash_low" in line and "bfe" in line]
    fences = [i for i, line in enumerate(rewritten) if "wgmma.fence" in line]
    assert copies == [fence + 1 for fence in fences]


def test_a_base_of_a_register_that_changes_is_extended_where_it_is_computed() -> None:
    text = kernel(
        "bfe.u32 \t%r2, %r1, 4, 14;", "add.s32 \t%r3, %r2, 2;", "cvt.u64.u32 \t%rd1, %r3;",
        f"or.b64 \t%rd2, %rd1, {BITS};", "mov.b32 \t%r1, 0;", "wgmma.mma_async.sync {%f1}, %rd2, 1;",
    )  # fmt: skip
    lines = plain_descriptors(text).splitlines()
    assert lines[lines.index("\tbfe.u32 \t%r2, %r1, 4, 14;") + 1] == "\tcvt.u64.u32 \t%dash_base0, %r2;"
    assert not any("%dash_low0," in line for line in lines)


def test_every_instruction_of_a_line_counts() -> None:
    """Triton writes inline assembly with several instructions into one line."""
    text = kernel(
        "bfe.u32 \t%r2, %r1, 4, 14;", "add.s32 \t%r3, %r2, 2;", "cvt.u64.u32 \t%rd1, %r3;",
        f"or.b64 \t%rd2, %rd1, {BITS};", "cp.async.bulk.wait_group.read 0; mov.b32 %r2, %r9;",
        "wgmma.mma_async.sync {%f1}, %rd2, 1;",
    )  # fmt: skip
    assert plain_descriptors(text) == text


def test_a_register_that_is_written_twice_is_not_taken_for_its_first_value() -> None:
    text = kernel(
        "bfe.u32 \t%r2, %r1, 4, 14;", "add.s32 \t%r2, %r2, 2;", "cvt.u64.u32 \t%rd1, %r2;",
        f"or.b64 \t%rd2, %rd1, {BITS};", "wgmma.mma_async.sync {%f1}, %rd2, 1;",
    )  # fmt: skip
    assert plain_descriptors(text) == text


def test_what_does_not_change_in_a_loop_stays_outside_of_it() -> None:
    text = kernel(
        "bfe.u32 \t%r2, %r1, 4, 14;", "add.s32 \t%r3, %r2, 2;", "cvt.u64.u32 \t%rd1, %r3;",
        f"or.b64 \t%rd2, %rd1, {BITS};",
    ).removesuffix("\tret;\n")  # fmt: skip
    text += "$L__BB0_1:\n\twgmma.mma_async.sync {%f1}, %rd2, 1;\n\t@%p1 bra \t$L__BB0_1;\n\tret;\n"
    lines = plain_descriptors(text).splitlines()
    loop = lines.index("$L__BB0_1:")
    assert f"\tadd.s64 \t%rd2, %dash_base0, {BITS + 2};" in lines[:loop]
    assert lines[loop + 1] == "\twgmma.mma_async.sync {%f1}, %rd2, 1;"


@pytest.mark.skipif(not compat.computes_early(), reason="older versions of Triton write them so themselves")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_descriptor_of_a_kernel_is_left(direction: str) -> None:
    """Every one is of a form that is known: another spelling of Triton's is seen here."""
    forward = direction == "forward"
    ptx = built_forward(Forward((128, 128), Band())).ptx if forward else built(Case((64, 64), Band(), "ascending")).ptx
    products = [line for line in ptx.splitlines() if "wgmma.mma_async" in line]
    taken = {name for line in products for name in re.findall(r"%rd\d+", line.partition("}")[2])}
    assert products
    assert not taken & set(re.findall(rf"or\.b64\s+(%rd\d+), %rd\d+, {BITS}", ptx))
