"""Real programs: what becomes of the attention of other packages' models, compiled as they do it."""

from __future__ import annotations

import re

import pytest

from ..support.cases import some
from ..support.fakecuda import compiler
from ..test_locks import versions
from . import sources
from .programs import PACKAGES, PROGRAMS, Program, golden, h100_lines

pytest.importorskip("transformers", reason="the models come from the extra 'hf'")

SOON = [program for program in PROGRAMS if str(program) == "transformers GptOss flex"]
"""The program that is compiled in every run of the tests: windows and sinks around FlexAttention."""


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
@some(PROGRAMS, SOON, "program")
def test_program(program: Program) -> None:
    if program.package == "megatron-core":
        pytest.importorskip("megatron.core", reason="megatron-core is for Linux")
    lacking = [name for name in (program.package, program.needs) if not sources.fetched(name)]
    if lacking:
        pytest.skip(f"{lacking[0]} is not fetched: make .programs/.ready does so where there is a network")
    if program.package not in (*sources.SOURCES, "transformers", "megatron-core") and not PACKAGES.exists():
        pytest.skip(f"{program.package} is not installed: make .programs/.ready does so")
    assert h100_lines([str(program)]) == {str(program): golden()["lines"][str(program)]}


KEPT = {
    "transformers DeepSeek-V4 by hand": "unsupported_op",
    "timm XCiT, 784 patches SDPA": "head_dim",
    "megatron-core GPT its DotProductAttention": "unsupported_op",
}
"""Programs with attention that is not replaced, and the reason; docs/replaced.md explains each above its table."""


def test_all_other_attention_of_all_programs_is_replaced() -> None:
    lines = golden()["lines"]
    assert list(lines) == list(map(str, PROGRAMS))
    kept = {name: re.findall(r"not replaced: (\w+)", line) for name, line in lines.items() if "not replaced" in line}
    assert kept == {name: [reason] for name, reason in KEPT.items()}
    assert not [line for line in lines.values() if "record" in line or line == "no call"]


def test_the_table_is_made_with_what_is_locked() -> None:
    locked = versions("torch2.13", "3.11") | versions("programs", "3.11") | sources.versions()
    found = golden()["versions"]
    assert found == {name: locked[name] for name in found}
    assert found.keys() == {"torch", *(program.package for program in PROGRAMS)}
