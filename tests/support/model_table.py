"""The fate of the attention of every family of models, for every kind of inputs: one line of text per cell.

``python -m tests.support.model_table`` writes tests/golden/models.json anew, on a machine without a GPU, and prints
what changed; ``--only Bert T5`` does so for some families.  The lines of CUDA are for an H100, found by compiling
with fake tensors up to the joint graph.  ``--other`` writes down the lines of another version of transformers, where
they differ; ``make model-table`` does all of this for all versions (tests/models/versions.py), and lets
tools/model_tables.py write the tables of docs/replaced.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dash_inductor import explain
from dash_inductor.frontends.decomposed.frontend import OP
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import FORWARD_ONLY, SiteRecord, clear_sites, sites

from .hf_models import FAMILIES, build, inputs_of
from .processes import run_python

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "models.json"
Lines = dict[str, dict[str, str]]
"""The texts of `line`, by device and cell."""
OTHERS = "other versions of transformers"
MATH = f"not replaced: {Reason.MATH_PATH.value}"
UNKNOWN = "unknown: "
"""The beginning of a line of `explained_line` that says why there is none."""


@dataclass(frozen=True)
class Cell:
    """A family, a kind of inputs, and whether dropout is as its configuration has it by default, or off."""

    family: str
    kind: str
    dropout: bool

    def __str__(self) -> str:
        return f"{self.family} {self.kind}" + (" dropout" if self.dropout else "")

    def model(self, head_dim: int = 16) -> nn.Module:
        return build(self.family, head_dim=head_dim).train(self.dropout)


def cells(families: Iterable[str] = FAMILIES, device: str = "cpu") -> list[Cell]:
    """All cells of some families; for CUDA one mask stands for all, as to a graph they are the same."""
    return [
        Cell(name, kind, dropout)
        for name in families
        for dropout in ((False, True) if FAMILIES[name].dropout else (False,))
        for kind in FAMILIES[name].kinds
        if device == "cpu" or kind not in ("ones", "left")
    ]


class CountedCalls(TorchFunctionMode):
    """Counts the calls of `scaled_dot_product_attention` in eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is F.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


def calls_of(cell: Cell) -> int:
    """How often the eager model calls `scaled_dot_product_attention`, on the CPU."""
    with CountedCalls() as counted:
        cell.model()(**inputs_of(cell.family, cell.kind))
    return counted.count


class InDouble(TorchFunctionMode):
    """What a program computes in float32 is computed in float64, as is all else in double precision.

    A mask holds the smallest number of float64 then, minus infinity in float32, where rows without keys would be NaN.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: self._wide(value) for name, value in (kwargs or {}).items()}
        if function is Tensor.float:
            return Tensor.double(*args, **kwargs)
        return function(*map(self._wide, args), **kwargs)

    @staticmethod
    def _wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value


def line(records: Iterable[SiteRecord], calls: int) -> str:
    """The fate of the calls, and of attention that a model computes by hand: how often which mask was replaced, or why
    sites were not replaced.
    """
    records = list(records)
    calls += sum(record.op == OP for record in records)
    counts = Counter(
        f"not replaced: {record.reason.value}"
        if record.reason
        else record.mask + (" with the forward not replaced" if record.forward.startswith("not replaced") else "")
        for record in records
    )
    if calls != counts.total():
        counts["without a record"] = calls - counts.total()
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "no call"


def gradients(model: nn.Module, run: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of all parameters that have one, and the loss, for one fixed seed of the dropout."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = run(**inputs).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def check(cell: Cell, device: str, compile_model: Callable[[nn.Module], Callable[..., Any]]) -> None:
    """Two compiled training steps of a cell have the same bits, its records are the expected ones, and it is accurate.

    On CUDA the model is in bf16, with heads that the kernels for sm_90 read.
    """
    on_cuda = device == "cuda"
    dtype, head_dim = (torch.bfloat16, FAMILIES[cell.family].cuda_head_dim) if on_cuda else (torch.float32, 16)
    model = cell.model(head_dim).to(device, dtype)
    inputs = _moved(inputs_of(cell.family, cell.kind), device, dtype)
    calls = calls_of(cell)
    clear_sites()
    run = compile_model(model)
    first = gradients(model, run, inputs)
    assert_line(line(sites(), calls), device, cell)
    second = gradients(model, run, inputs)  # it may compile again, for which there are records too
    assert all(tensor.isfinite().all() for tensor in first.values())
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    if not on_cuda and all(record.status == "replaced" for record in sites()):
        check_scoring(run, first["loss"], inputs)
    if sites() and not cell.dropout:
        check_accuracy(model, run, first, inputs)


def check_scoring(run: Any, trained: Tensor, inputs: dict[str, Any]) -> None:
    """The loss without gradients is the training loss bit for bit, where all attention is replaced in both.

    On a CPU, where graphs run as they are: how Inductor fuses the rest of a model may differ between the two.
    """
    seen = len(sites())
    torch.manual_seed(1)
    with torch.no_grad():
        scored = run(**inputs).loss
    alone = sites()[seen:]
    assert {(record.status, record.kind) for record in alone} <= {("replaced", FORWARD_ONLY)}
    assert torch.equal(scored, trained)


def fates(text: str) -> Counter[str]:
    """The numbers that `line` has counted, by the fate of the calls."""
    parts = [part.split(" ", 1) for part in re.split(r", (?=-?\d)", text) if part != "no call"]
    return Counter({fate: int(count) for count, fate in parts})


def agree(found: str, expected: str) -> bool:
    """Whether a line is the expected one or, with another version of transformers, may be what became of its calls.

    Other versions make other masks, and call where this one does not: Gemma 2 by an implementation without softcap.
    So which masks were replaced is open, but nothing else is:

    - PyTorch's math implementation computes at most as many calls as are of full masks here, or of the math
      implementation too: encoders of other versions expand such a mask along the keys, and it takes those.
    - Nothing else is left unreplaced for another reason.
    - Calls without a record are at most as many as records.  Where others break a graph at every layer, as BART does
      for its layerdrop, the two layers that a model has of a kind share a graph, and so its record.
    - There is a record: a line of calls without one says nothing, and neither does one without calls.

    `explain` for a GPU that is not there may not know: BART 5.17 decides by a random number whether to compute a layer.
    """
    import transformers

    if found == expected or transformers.__version__ == golden()["versions"]["transformers"]:
        return found == expected
    if found.startswith(UNKNOWN):
        return found.startswith(f"{UNKNOWN}the program reads the value of a tensor in Python")
    ours, theirs = fates(expected), fates(found)
    without = theirs.pop("without a record", 0)
    records = theirs.total()
    by_math = theirs.pop(MATH, 0)
    full = sum(count for fate, count in ours.items() if fate.split()[0] == "full")
    fallback = any(fate.startswith("not replaced: ") for fate in theirs)
    return not fallback and by_math <= full + ours[MATH] and max(without, 1) <= records


def check_accuracy(model: nn.Module, run: Any, ours: dict[str, Tensor], inputs: dict[str, Any]) -> None:
    """The gradients are at most twice as far from double precision's as the eager ones of the same dtype.

    The floor is for gradients that are zero in exact arithmetic, as for the biases of keys, and for models that compute
    parts in float32 whatever their dtype is.  One rounding may decide much: eager code may round the two numbers of a
    small gradient well by chance, and a ReLU passes a gradient or does not.  A gradient that is beyond the limit is
    judged by the errors under `DRAWS` other values of the parameters.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)  # not everything in eager code has a deterministic kernel
    errors = _errors(model, ours, inputs)
    beyond = [name for name, error in errors.items() if not error.is_small()]
    if not beyond:
        return
    draws = []
    for seed in range(DRAWS):
        _draw_again(model, seed)
        draws.append(_errors(model, gradients(model, run, inputs), inputs))
    for name in beyond:
        assert sum((draw[name] for draw in draws), GradientError()).is_small(), name


DRAWS = 8


@dataclass(frozen=True)
class GradientError:
    """Squared distances from double precision, of ours and of eager code, and of what is allowed beside that."""

    ours: float = 0.0
    eager: float = 0.0
    floor: float = 0.0

    def __add__(self, other: GradientError) -> GradientError:
        return GradientError(self.ours + other.ours, self.eager + other.eager, self.floor + other.floor)

    def is_small(self) -> bool:
        return self.ours**0.5 <= 2 * self.eager**0.5 + self.floor**0.5


def _errors(model: nn.Module, ours: dict[str, Tensor], inputs: dict[str, Any]) -> dict[str, GradientError]:
    """The errors of all gradients."""
    eager = gradients(model, model, inputs)
    device, dtype = next((p.device.type, p.dtype) for p in model.parameters())
    double: Any = copy.deepcopy(model).double()
    double.set_experts_implementation("eager")  # the others know no double precision
    with InDouble():
        exact = gradients(double, double, _moved(inputs, device, torch.float64))
    assert ours.keys() == eager.keys() == exact.keys()
    largest = max(float(true.norm()) for true in exact.values())
    relative = 1e-3 if dtype == torch.bfloat16 else 1e-5
    return {
        name: GradientError(
            float((ours[name] - true).norm()) ** 2,
            float((eager[name] - true).norm()) ** 2,
            (relative * max(float(true.norm()), 0.1 * largest)) ** 2,
        )
        for name, true in exact.items()
    }


def _draw_again(model: nn.Module, seed: int) -> None:
    """Change all parameters by about a hundredth: another draw of all roundings."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))


def _moved(inputs: dict[str, Any], device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The inputs on a device, floating point numbers in a dtype."""
    return {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }


def golden() -> dict[str, Any]:
    """The versions that the table was made with, the expected lines by device and cell, and other versions' lines."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def assert_line(found: str, device: str, cell: Cell) -> None:
    """A line is the one that the installed version of transformers has in the table.

    Where the table does not know the version, and on CUDA, where only a fake device has seen other versions than the
    table's, the line may also be one that agrees with the table's version.
    """
    import transformers

    lines = golden()
    of_the_table = lines[device][str(cell)]
    known = {lines["versions"]["transformers"]: {}, **lines[OTHERS]}
    own = known.get(transformers.__version__, {}).get(device, {}).get(str(cell), of_the_table)
    exact = device == "cpu" and transformers.__version__ in known
    assert found == own or (not exact and agree(found, of_the_table)), f"{found}, expected {own}"


def cpu_lines(families: Iterable[str]) -> dict[str, str]:
    """The lines of all cells of some families on the CPU, with the reference executor."""
    from .graphs import capture

    torch.use_deterministic_algorithms(True)
    found = {}
    for cell in cells(families):
        calls = calls_of(cell)
        with capture() as graphs:
            graphs.compile(cell.model())(**inputs_of(cell.family, cell.kind))
            found[str(cell)] = line(sites(), calls)
    return found


_ON_H100 = """
    import json
    import sys

    from tests.support import fakecuda, mockgpu

    mockgpu.install_driver()
    fakecuda.install()
    from tests.support.model_table import lines_of_h100

    mockgpu.install_torch()
    json.dump(lines_of_h100(sys.argv[1:]), sys.stdout)
"""


def h100_lines(names: Iterable[str]) -> dict[str, str]:
    """The lines of some cells, and of all cells of some families, for an H100, in a process of its own."""
    found: dict[str, str] = json.loads(run_python(_ON_H100, *names, path=ROOT).stdout.splitlines()[-1])
    return found


def lines_of_h100(names: Sequence[str]) -> dict[str, str]:
    """As `h100_lines`, in a process whose CUDA device is a fake one; no kernel is compiled."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import PreTrainedModel

    import dash_inductor.lowering

    from .attention_masks import compile_joint_graph

    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.bfloat16)
    found = {}
    for cell in cells(device="cuda"):
        if cell.family not in names and str(cell) not in names:
            continue
        calls = calls_of(cell)
        clear_sites()
        with (
            mock.patch.object(dash_inductor.lowering, "compile_kernels"),
            mock.patch.object(PreTrainedModel, "initialize_weights"),  # there are no values to draw
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.device("cuda"),
        ):
            compile_joint_graph(cell.model(FAMILIES[cell.family].cuda_head_dim), **inputs_of(cell.family, cell.kind))
        found[str(cell)] = line(sites(), calls)
    return found


def explained_line(cell: Cell, **settings: Any) -> str:
    """The line of a cell by `explain` from a model on the CPU in bf16, or why it is not known.

    Args:
        cell: the cell.
        settings: further arguments of the model's call.
    """
    model = cell.model(FAMILIES[cell.family].cuda_head_dim).to(torch.bfloat16)
    inputs = _moved(inputs_of(cell.family, cell.kind), "cpu", torch.bfloat16)
    explanation = explain(model, **inputs, **settings, arch="sm_90")
    if explanation.unknown:
        return UNKNOWN + explanation.unknown
    return line([site.record for site in explanation.sites], calls_of(cell))


def merged(before: dict[str, Any], found: Lines, versions: dict[str, str], other: bool) -> dict[str, Any]:
    """The table with new lines.

    Args:
        before: the table, or nothing.
        found: the new lines, by device and cell.
        versions: of torch and transformers, with which they were found.
        other: whether that transformers is another one than the table's, of which only what differs is stored.
    """
    version = versions["transformers"]
    others = {name: lines for name, lines in before.get(OTHERS, {}).items() if name != version}
    known = before.get(OTHERS, {}).get(version, {}) if other else before
    after = {device: known.get(device, {}) | lines for device, lines in found.items()}
    if other:
        after = {device: dict(lines.items() - before[device].items()) for device, lines in after.items()}
    after = {device: {str(c): lines[str(c)] for c in cells() if str(c) in lines} for device, lines in after.items()}
    if other:
        return before | {OTHERS: dict(sorted((others | {version: after}).items()))}
    return {"versions": versions, **after, OTHERS: others}


def _h100_lines_if_traced(family: str, other: bool) -> dict[str, str]:
    """As `h100_lines`; none where another version of transformers creates tensors that a fake device cannot have."""
    try:
        return h100_lines([family])
    except AssertionError:
        if not other:
            raise
        print(f"cuda: {family} cannot be traced with fake tensors of this version", flush=True)
        return {}


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--other", action="store_true", help="the lines of another version of transformers")
    arguments = parser.parse_args()
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    for family in arguments.only:
        before = golden() if GOLDEN.exists() else {}
        found = {"cpu": cpu_lines([family]), "cuda": _h100_lines_if_traced(family, arguments.other)}
        table = merged(before, found, versions, arguments.other)
        GOLDEN.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        for device, lines in found.items():
            for name, text in lines.items():
                known = before.get(OTHERS, {}).get(transformers.__version__, {}).get(device, {})
                if (before.get(device, {}) | known).get(name) != text:
                    print(f"{transformers.__version__}, {device}: {name}: {text}", flush=True)


if __name__ == "__main__":
    main()
