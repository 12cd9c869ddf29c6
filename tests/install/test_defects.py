"""Silent errors of PyTorch's compiler: they show without dash_inductor, and not with it.

``DASH_TEST_CASES`` says how many random programs of attention are compared.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.fx_passes import fuse_attention
from torch._inductor.pattern_matcher import fwd_only

import dash_inductor
from dash_inductor.doctor.machine import pytorch_defects
from dash_inductor.records.records import all_records, clear_sites
from dash_inductor.upstream import defects

from ..support.forks import FAKE_GPU, run_forked
from .joint_passes import compiled

CASES = int(os.environ.get("DASH_TEST_CASES", "12"))
Attention = Callable[..., Tensor]

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    clear_sites()
    counters.clear()
    yield
    clear_sites()


def defects_met() -> list[str]:
    return [str(record.facts["defect"]) for record in all_records() if record.rewrite == "defects"]  # type: ignore[union-attr]


def worst(function: Attention, tensors: list[Tensor], dynamic: bool, gradients: bool) -> float:
    """The largest difference between compiled and eager results."""
    results = []
    for run in (compiled(function, dynamic), function):
        leaves = [tensor.detach().requires_grad_(gradients) for tensor in tensors]
        out = run(*leaves)
        weight = torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()
        results.append([out.detach(), *(torch.autograd.grad(out, leaves, weight) if gradients else ())])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


def attention(dim: int, permuted: bool, scale: float | None = 2.0, divides: bool = True) -> Attention:
    """An attention as programs write it, whose softmax is over a dimension, or whose keys are permuted."""

    def program(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        s = q @ (k.permute(0, 2, 3, 1) if permuted else k.mT)
        if scale is not None:
            s = s / scale if divides else s * scale
        return torch.softmax(s + mask[0] if mask else s, dim) @ v

    return program


def tensors_of(sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(sizes) for _ in range(3)]


@pytest.mark.parametrize("seed", range(CASES))
def test_attention_over_any_dimension(seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    permuted, dim = rng.random() < 0.3, rng.choice((-1, -2, -3, -4, 0, 1, 2, 3))
    function = attention(dim, permuted, rng.choice((None, 0.5, 2.0, 2.0)), rng.random() < 0.6)
    sizes = (rng.choice((1, 4)), 4, 4, 4) if permuted else rng.choice(((2, 3, 12, 8), (1, 4, 6, 6), (3, 3, 3, 3)))
    tensors = tensors_of(sizes)
    if rng.random() < 0.3:
        tensors.append(torch.randn(sizes[2], sizes[2]))
    gradients, dynamic = rng.random() < 0.4, rng.random() < 0.3
    assert worst(function, tensors, dynamic, gradients) < 1e-5


@pytest.mark.skipif(not defects.UNCHECKED_ATTENTION.applies, reason="PyTorch has mended it")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("dim", "permuted"), [(-2, False), (1, False), (-1, True)])
def test_the_defect_shows_without_the_product(dim: int, permuted: bool, gradients: bool) -> None:
    torch.manual_seed(0)
    function, tensors = attention(dim, permuted), tensors_of((1, 4, 4, 4))
    with dash_inductor.disabled():
        assert worst(function, tensors, False, gradients) > 1e-2
    assert not defects_met()
    assert worst(function, tensors, False, gradients) < 1e-5
    assert defects_met() == ["unchecked_attention"]


def test_attention_in_order_leaves_no_record() -> None:
    assert worst(attention(-1, False), tensors_of((2, 3, 12, 8)), False, True) < 1e-5
    assert counters["inductor"]["fuse_attention"] > 0
    assert not defects_met()


def fused(function: Callable[..., Tensor], inputs: list[object], trains: bool, dynamic: bool) -> int:
    """How many attentions PyTorch fuses."""
    counters.clear()
    with contextlib.nullcontext() if trains else torch.no_grad():
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
        compiled(function, dynamic)(*leaves)
    return counters["inductor"]["fuse_attention"]


def patterns() -> dict[str, tuple[Callable[..., Tensor], list[object], bool]]:
    """What PyTorch fuses: function, example inputs, and whether with gradients."""
    found = {}
    for name, about in fuse_attention._get_sfdp_patterns(torch.device("cpu")):
        if "half" not in name:
            names, examples = inspect.signature(about["search_fn"]).parameters, iter(about["example_inputs"])
            known = about["scalar_workaround"]
            inputs = [known[each] if each in known else next(examples) for each in names]
            found[name] = about["search_fn"], inputs, about["trace_fn"] is not fwd_only
    return found


NAMES = sorted(patterns())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES if "DASH_TEST_CASES" in os.environ else NAMES[::9])
def test_what_is_fused_stays_fused(name: str, dynamic: bool) -> None:
    function, inputs, trains = patterns()[name]
    with dash_inductor.disabled():
        theirs = fused(function, inputs, trains, dynamic)
    assert fused(function, inputs, trains, dynamic) == theirs
    assert not defects_met()


NORMS = """
import re
import torch, torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
import dash_inductor
from dash_inductor.install import defects
from dash_inductor.lowering import ahead
from tests.support import generated
ahead.compile_kernels = lambda *args, **kwargs: None
torch.use_deterministic_algorithms(True)
N, W = 8192, 1024

def table(x, table, w):
    shift1, scale1, shift2, scale2 = table.chunk(4, dim=0)
    h = F.linear(F.layer_norm(x, (W,)) * (1 + scale1) + shift1, w)
    return (F.layer_norm(h, (W,)) * (1 + scale2) + shift2).square().mean()

def rows(x, table, w):
    a, b, c, d = table.unbind(0)
    return (F.linear(F.rms_norm(x, (W,)) * a + b, w) * c + d).square().mean()

def own(x, both, w):
    return F.linear(F.layer_norm(x, (W,), both[0], both[1]), w).square().mean()

plain = defects._Compile
met = []
def compile_():
    met.append(plain())
    return met[-1]
defects._Compile = compile_
for case, step, shape in (("table", table, (4, W)), ("rows", rows, (4, W)), ("own", own, (2, W))):
    for on in (False, True):
        (dash_inductor.enable if on else dash_inductor.disable)()
        met.clear()
        with FakeTensorMode(allow_non_fake_inputs=True):
            tensors = [torch.empty(s, device="cuda", requires_grad=True) for s in ((N, W), shape, (W, W))]
            _, code = generated.codes(step, *tensors)
        call = code[code.find("def call"):]
        sums = re.findall(r"^ *(buf\\d+) = workspace_\\w+\\[.*sum\\(dim=0\\)", call, re.MULTILINE)
        after = {name: call.split(f"{name} = workspace")[-1].split("\\n", 1)[1] for name in sums}
        lost = [name for name, rest in after.items() if not re.search(rf"(?m)^(?! *del ).*\\b{name}\\b", rest)]
        print("RESULT", case, on, len(sums), len(lost), sum(len(each.met) for each in met), flush=True)
"""


def test_sums_in_parts_of_another_tensor() -> None:
    """In the code of a fake H100: no sum is lost, and those that PyTorch keeps are as many with the product."""
    lines = [line.split() for line in run_forked(FAKE_GPU, NORMS).stdout.splitlines() if line.startswith("RESULT")]
    found = {(case, on): tuple(map(int, numbers)) for _, case, on, *numbers in lines}
    assert len(found) == 6
    for case in ("table", "rows", "own"):
        (theirs, lost, met), (ours, still_lost, met_by_us) = found[case, "False"], found[case, "True"]
        assert met == still_lost == 0
        assert bool(lost) is bool(met_by_us)
        assert ours == theirs or lost
    if defects.MIXED_ORDER.applies:
        assert found["table", "False"][1] > 0
    assert found["own", "True"][0] > 0


def test_the_doctor_names_what_applies() -> None:
    said = [what for _, what, _ in pytorch_defects()]
    for defect in defects.DEFECTS:
        assert any(f"pytorch#{defect.reports[0]}" in what for what in said) is defect.applies
        first, last = defect.versions
        assert (2, 10) <= first <= last
        assert math.prod(defect.reports) > 0
