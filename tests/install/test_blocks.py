"""The rule for blocks of generated kernels, beside times on a GPU, and in generated code."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dash_inductor.install.blocks import Kernel, choose

from ..support.distribution import ROOT
from ..support.fakecuda import compiler
from ..support.forks import FAKE_GPU, run_forked

RESULTS = sorted(Path(ROOT, "benchmarks", "results").glob("reductions*.json"))


def kernel_of(row: dict[str, Any]) -> Kernel:
    """The kernel of a row of the results, whose sizes are powers of two."""
    facts = row["facts"]
    return Kernel(
        kind={"persistent": "persistent_reduction"}.get(row["kind"], row["kind"]),
        sizes=row["hints"],
        hint=facts.get("reduction_hint", "").removeprefix("ReductionHint."),
        scores=ast.literal_eval(facts.get("tiling_scores", "{}")),
        loads=int(facts["num_load"]),
        stores=int(facts["num_store"]),
        reductions=int(facts["num_reduction"]),
    )


def text_of(blocks: dict[str, int]) -> str:
    """Blocks as the benchmark writes them."""
    sizes = [f"{name.removesuffix('BLOCK').strip('_')}{size}" for name, size in blocks.items() if "BLOCK" in name]
    return " ".join([*sizes, f"w{blocks['num_warps']}"])


def rows() -> Iterator[tuple[dict[str, Any], str]]:
    """The rows for whose kernels the rule chooses, with what it chooses."""
    for row in [row for file in RESULTS for row in json.loads(file.read_text())["rows"]]:
        chosen = choose(kernel_of(row)) if "RSPLIT_SIZE" not in row["facts"] else None
        if chosen:
            yield row, text_of(chosen)


def test_the_rule_is_as_good_as_timing_and_better_than_the_deterministic_mode() -> None:
    """On average over the kernels that were timed, of which no two weigh more than one; none gets much slower."""
    found = [*rows()]
    assert len(found) >= 18
    against_default, against_pinned = [], []
    for row, text in found:
        us = row["us"]
        default = min(us[other] for other in row["default"] if other in us)
        against_default.append(us[text] / default)
        against_pinned.append(us[text] / us[row["pinned"]])
        assert us[text] <= 1.08 * us[row["pinned"]], (row["case"], text)

    def mean(ratios: list[float]) -> float:
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    assert mean(against_default) <= 0.97
    assert mean(against_pinned) <= 0.85


def test_kernels_that_are_left_to_inductor() -> None:
    def kernel(kind: str, hint: str = "", loads: int = 3, scores: dict[str, int] | None = None, **sizes: int) -> Kernel:
        return Kernel(kind, sizes, hint, scores or {}, loads, stores=1, reductions=2)

    assert choose(kernel("pointwise", x=1 << 25)) is None
    assert choose(kernel("pointwise", x=512, y=512)) is None  # small
    assert choose(kernel("pointwise", x=4096, y=8192, loads=1)) is None  # a copy: Inductor's tiles are for that
    assert choose(kernel("pointwise", x=8, y=1 << 20)) is None
    assert choose(kernel("reduction", "INNER", x=8192, r0_=50257)) is None
    assert choose(kernel("reduction", "INNER", loads=8, x=8192, r0_=50257)) is not None  # registers may be few
    assert choose(kernel("reduction", "INNER", x=1, r0_=2000)) is None
    assert choose(kernel("reduction", "DEFAULT", scores={"x": 10, "r0_": 90}, x=1 << 16, r0_=256)) is None
    assert choose(kernel("reduction", "OUTER", scores={"x": 100}, x=1 << 16, r0_=256)) is None
    assert choose(kernel("persistent_reduction", "INNER", x=8192, r0_=1024)) is None
    assert choose(kernel("persistent_reduction", x=1 << 16, r0_=2048, y=4)) is None
    both = {"x": 100, "y": 100, "r0_": 90}
    for sizes, few in (({"x": 1 << 16}, {"x": 8}), ({"x": 64, "y": 64}, {"x": 8, "y": 2})):
        assert choose(kernel("reduction", "DEFAULT", scores=both, r0_=1 << 20, **sizes)) is not None
        assert choose(kernel("reduction", "DEFAULT", scores=both, r0_=1 << 20, **few)) is None
    assert choose(Kernel("reduction", {"x": 64, "y": 64, "r0_": 64}, "", {}, 3, 1, reductions=0)) is None  # a scan


@pytest.mark.parametrize("sizes", [(1, 1 << 22, 1), (1 << 20, 5, 17), (24, 1 << 19, 64), (64, 98304, 128)])
@pytest.mark.parametrize("kind", ["reduction", "persistent_reduction"])
def test_blocks_in_three_dimensions_are_no_larger_than_sizes(kind: str, sizes: tuple[int, int, int]) -> None:
    assert choose(Kernel(kind, {"x": 8, "y": 32, "r0_": 16}, "", {}, 4, 1, 1)) is None  # few
    for along in (0, 1, 100):
        scores = {"x": 100, "y": 101, "r0_": along}
        blocks = choose(Kernel(kind, dict(zip(("x", "y", "r0_"), sizes, strict=True)), "", scores, 4, 1, 1))
        assert blocks is not None
        for name, size in zip("XY", sizes, strict=False):
            assert blocks[f"{name}BLOCK"] < 2 * size
        assert blocks["XBLOCK"] * blocks["YBLOCK"] * blocks.get("R0_BLOCK", sizes[2]) <= 2048


PROGRAM = """
    import contextlib, json, re, sys

    import torch
    import torch._inductor.config
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    import dash_inductor

    codes = []
    GraphLowering.save_output_code = staticmethod(codes.append)
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.joint_graph_constant_folding = False
    torch.use_deterministic_algorithms(True)

    def across(x):
        return x.float().square().sum(1)

    def along(x):
        return torch.softmax(x.flatten(0, 1), -1)

    def found(function, *sizes, dynamic=False):
        torch._dynamo.reset()
        with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(Exception):
            torch.compile(function, dynamic=dynamic)(torch.empty(sizes, device="cuda"))
        code = codes.pop()
        names = re.findall(r"'triton_(...)_fused", code)
        return re.findall(r"triton_heuristics.(\\w+)\\(\\s*(config=\\{[^}]*\\})?", code) + sorted({*names})

    def broadcast(x):
        return (x[:, :, None] * x.mT[:, None]).sum(-1) * x.mT + x

    results = [found(across, 64, 1024, 1024), found(across, 64, 32, 1024), found(along, 64, 1024, 2048)]
    results.append(found(broadcast, 64, 64, 64))
    results.append(found(across, 64, 1024, 1024, dynamic=True))
    with dash_inductor.disabled():
        results.append(found(across, 64, 1024, 1024))
    torch._inductor.config.max_autotune_pointwise = True
    results.append(found(across, 64, 1024, 1024))
    print(json.dumps(results))
"""


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_generated_code() -> None:
    output = run_forked(FAKE_GPU, PROGRAM).stdout
    across, short, along, broadcast, *others = json.loads(output.splitlines()[-1])
    assert across == [["fixed_config", "config={'XBLOCK': 64, 'R0_BLOCK': 8, 'num_warps': 4, 'num_stages': 1}"], "red"]
    assert short == [["fixed_config", "config={'XBLOCK': 64, 'num_warps': 4, 'num_stages': 1}"], "per"]
    assert along == [["fixed_config", "config={'XBLOCK': 1, 'R0_BLOCK': 2048, 'num_warps': 4, 'num_stages': 1}"], "red"]
    assert broadcast == [["fixed_config", "config={'XBLOCK': 8, 'YBLOCK': 4, 'num_warps': 4, 'num_stages': 1}"], "per"]
    assert others == [[["reduction", ""], "red"]] * 3
