"""Compares runs that cannot have equal bits, because their layouts differ: by the sizes of their differences.

Layouts are micro-batches or one batch, eager or compiled code, numbers of ranks, and how parameters are spread over
them. Both recordings have the values of gradients and parameters (``record --values``), which are compared by step and
by name. Differences are measured against what rounding can make of them (`Rounding`).
"""

from __future__ import annotations

import math
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dash_inductor import arguments as _arguments
from dash_inductor.observers import phases

from ..errors import RecordingError
from ..observation.labels import GENERATOR
from .run import Run
from .segments import Segments
from .state import StateDifference, States, sentence

if TYPE_CHECKING:
    from torch import Tensor

Verdict = Literal["within rounding", "beyond rounding", "not comparable"]
EXIT_CODES: dict[Verdict, int] = {"within rounding": 0, "beyond rounding": 1, "not comparable": 2}

UNITS = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
"""The largest relative error of one rounding, by dtype; TF32 stands for products of float32 that round so."""

_FACTOR = 8  # units by which all gradients may be larger or smaller
_TENSOR = 8  # units, times the square root of the number of parameters, by which a gradient may differ
_JUMP = 100  # times the difference of the step before
_UPDATE = 0.1  # by which updates of equal gradients may be larger or smaller
_LISTED = 20


@dataclass(frozen=True)
class Rounding:
    """What rounding can make of a difference between layouts.

    Attributes:
        dtype: the coarsest dtype in which either run computes.
        factor: the largest |f - 1| for a common factor f of all gradients: 8 roundings.
        relative: the largest relative difference of a gradient: 8 roundings, times the square root of the number of
            parameters, because errors of that many operations add up like a random walk.
    """

    dtype: str
    factor: float
    relative: float

    @classmethod
    def of(cls, dtype: str, parameters: int) -> Rounding:
        """The bounds for a dtype and a number of parameters."""
        unit = UNITS[dtype]
        return cls(dtype, _FACTOR * unit, _TENSOR * unit * math.sqrt(max(1, parameters)))


@dataclass(frozen=True)
class Magnitude:
    """How a tensor differs between two runs.

    Attributes:
        tensor: its name.
        relative: the norm of the difference, divided by the norm of the tensor in a.
        largest: the largest difference of an element; infinite if an element is NaN or infinite in one run and not
            the same in the other.
        ulps: the same in units in the last place of the coarser dtype of the two.
        factor: the number by which a must be multiplied to be nearest to b; None if a is zero, or `largest` infinite.
        beyond: whether it is more than rounding explains.
    """

    tensor: str
    relative: float
    largest: float
    ulps: int
    factor: float | None
    beyond: bool = False


@dataclass(frozen=True)
class StepMagnitude:
    """How a step differs between two runs, all gradients and all parameters taken together.

    Attributes:
        step: its number.
        gradients, parameters: the relative differences, as `Magnitude.relative`.
        factor: the common factor of the gradients, as `Magnitude.factor`.
        largest: the largest difference of an element of a parameter.
    """

    step: int
    gradients: float
    factor: float | None
    parameters: float
    largest: float


@dataclass
class LayoutComparison:
    """The result of `compare_layouts`.

    Attributes:
        a, b: the folders.
        verdict: "within rounding", "beyond rounding", or "not comparable" if a tensor or all steps are in one run only.
        conclusion: the verdict with its reason, in words.
        rounding: what rounding explains.
        steps: the differences of every compared step.
        deciding: the step of `tensors`: the first one that is beyond rounding, else the first one.
        tensors: the gradients of this step with the largest relative differences, at most 20, those beyond rounding
            first.
        state: settings and counters that differ in this step.
        reasons: what could not be compared.
    """

    a: str
    b: str
    verdict: Verdict = "within rounding"
    conclusion: str = ""
    rounding: Rounding | None = None
    steps: list[StepMagnitude] = field(default_factory=list)
    deciding: int = 0
    tensors: list[Magnitude] = field(default_factory=list)
    state: list[StateDifference] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The exit status of the command: 0 within rounding, 1 beyond rounding, 2 not comparable."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """The comparison as lists, strings and numbers, for JSON, which has no infinite numbers: they are None."""
        content = vars(self) | {"exit_code": self.exit_code}
        content["rounding"] = None if self.rounding is None else vars(self.rounding)
        for name in ("steps", "tensors", "state"):
            content[name] = [{key: _plain(value) for key, value in vars(each).items()} for each in content[name]]
        return content


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def path_of(folder: Path, rank: int, step: int) -> Path:
    """The file with the values that a rank has gathered in a step."""
    return folder / "values" / f"step{step:010}.rank{rank:05}.pt"


def has_values(folder: Path) -> bool:
    """Whether a recording has values of gradients and parameters."""
    return any((folder / "values").glob("step*.rank*.pt"))


def compare_layouts(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> LayoutComparison:
    """Compare the gradients and parameters of two runs that have different layouts, by their values.

    Args:
        a, b: folders that ``dash_guard.record(..., values=True)`` has filled.

    Raises:
        ArgumentError: a folder is no path, or has no recording.
        RecordingError: a folder has no values, or a file cannot be read.
    """
    folders = _arguments.path("a", a), _arguments.path("b", b)
    result = LayoutComparison(str(folders[0]), str(folders[1]))
    runs = Run(folders[0]), Run(folders[1])
    steps = [_files(folder) for folder in folders]
    common = sorted(steps[0].keys() & steps[1].keys())
    if not common:
        result.verdict, result.conclusion = "not comparable", "No step has values in both recordings."
        return result
    units = [_dtype(run) for run in runs]
    _Layouts(result, max(units, key=UNITS.__getitem__), runs).go(
        (step, _load(steps[0][step]), _load(steps[1][step])) for step in common
    )
    return result


Values = Mapping[str, Mapping[str, "Tensor"]]
"""Whole tensors by phase and name."""


class _Layouts:
    def __init__(self, result: LayoutComparison, dtype: str, runs: tuple[Run, Run]) -> None:
        self.result, self.dtype, self.runs = result, dtype, runs

    def go(self, steps: Iterator[tuple[int, Values, Values]]) -> None:
        result, before = self.result, 0.0
        last: tuple[Values, Values] | None = None
        for number, a, b in steps:
            first = last is None
            names = self._names(a, b, phases.GRADIENT)
            rounding = result.rounding = result.rounding or Rounding.of(self.dtype, len(names))
            start = self._start(a, b) if first else ""
            of_gradients = _together(names, a[phases.GRADIENT], b[phases.GRADIENT])
            parameters = self._names(a, b, phases.PARAMETER)
            of_parameters = _together(parameters, a[phases.PARAMETER], b[phases.PARAMETER])
            result.steps.append(
                StepMagnitude(
                    number, of_gradients.relative, of_gradients.factor, of_parameters.relative, of_parameters.largest
                )
            )
            if result.verdict == "beyond rounding":  # decided before: what follows is measured alone
                continue
            tensors = _gradients(names, a[phases.GRADIENT], b[phases.GRADIENT], rounding)
            if first:
                self._decide(number, tensors)
            why = (
                start
                or _unlike(tensors, "gradients")
                or _why(of_gradients, tensors, rounding, before, first)
                or _unlike([of_parameters], "gradients agree, and parameters")
                or self._updates(a, b, last, parameters)
            )
            before, last = of_gradients.relative, (a, b)
            if why:
                self._decide(number, tensors)
                differing = f" {sentence(result.state)}" if result.state else ""
                result.verdict, result.conclusion = "beyond rounding", f"In step {number}, {why}{differing}"
        if result.verdict != "beyond rounding" and result.reasons:
            result.verdict, result.conclusion = "not comparable", "What both runs have agrees within rounding."
        elif result.verdict == "within rounding":
            result.conclusion = f"Rounding of {self.dtype} explains all differences, and how they grow."

    def _decide(self, step: int, tensors: list[Magnitude]) -> None:
        result = self.result
        result.deciding = step
        order = sorted(tensors, key=lambda each: (not each.beyond, -each.relative))
        result.tensors = [each for each in order if each.relative][:_LISTED]
        result.state = _state(step, *self.runs)

    def _names(self, a: Values, b: Values, phase: str) -> list[str]:
        """The names of tensors that both runs have, with equal shapes; others become reasons."""
        of_a, of_b = a.get(phase, {}), b.get(phase, {})
        names = []
        for name in dict.fromkeys((*of_a, *of_b)):
            if name not in of_a or name not in of_b:
                reason = f"only {'a' if name in of_a else 'b'} has {phase} {name}"
            elif of_a[name].shape != of_b[name].shape:
                shapes = " and ".join(str(list(each[name].shape)) for each in (of_a, of_b))
                reason = f"{phase} {name} has the shapes {shapes}: one of them is a shard that no DTensor describes"
            else:
                names.append(name)
                continue
            if reason not in self.result.reasons and len(self.result.reasons) < _LISTED:
                self.result.reasons.append(reason)
        return names

    def _start(self, a: Values, b: Values) -> str:
        """Why the runs do not begin with the same parameters; "" if they do."""
        assert self.result.rounding is not None
        names = self._names(a, b, phases.INITIAL)
        of_a, of_b = a.get(phases.INITIAL, {}), b.get(phases.INITIAL, {})
        for name in names:
            if (found := _magnitude(name, of_a[name], of_b[name])).relative > 2 * UNITS[self.dtype]:
                return f"the runs start from different parameters: {name} differs by {found.relative:.2g}."
        return ""

    def _updates(self, a: Values, b: Values, last: tuple[Values, Values] | None, names: list[str]) -> str:
        """Whether updates of equal gradients are of different sizes; "" if not."""
        of_last = [phases.PARAMETER if last else phases.INITIAL] * 2
        befores = [(last or (a, b))[which].get(phase, {}) for which, phase in enumerate(of_last)]
        names = [name for name in names if name in befores[0] and name in befores[1]]
        updates = [
            {name: run[phases.PARAMETER][name].double() - before[name].double() for name in names}
            for run, before in zip((a, b), befores, strict=True)
        ]
        found = _together(names, *updates)
        if found.factor is None or abs(found.factor - 1) <= _UPDATE:
            return ""
        return f"gradients agree, and updates of b are {found.factor:.3g} times those of a: optimizers differ."


def _unlike(found: list[Magnitude], what: str) -> str:
    """That one run has values that are not finite, and the other has not the same; "" if not."""
    unlike = [each.tensor for each in found if each.largest == math.inf]
    if not unlike:
        return ""
    where = f", the first one in {unlike[0]}" if unlike[0] else ""
    return f"{what} have elements that are NaN or infinite in one run and not the same in the other{where}."


def _why(all_: Magnitude, tensors: list[Magnitude], rounding: Rounding, before: float, first: bool) -> str:
    """Why gradients of a step are beyond rounding, in words; "" if they are within."""
    beyond = [each for each in tensors if each.beyond]
    factor = all_.factor
    rest = math.inf if factor is None else math.sqrt(max(0.0, all_.relative**2 - (factor - 1) ** 2))
    if factor is not None and abs(factor - 1) > max(rounding.factor, 2 * rest):
        return (
            f"gradients of b are {factor:.3g} times those of a: the loss or its gradients are scaled otherwise, as "
            "where they are not divided by the number of micro-batches or ranks, or are divided twice."
        )
    if first and beyond:
        worst = max(beyond, key=lambda each: each.relative)
        times = "" if worst.factor is None else f", and is {worst.factor:.3g} times that of a"
        return (
            f"{len(beyond)} of {len(tensors)} gradients differ by more than rounding of {rounding.dtype}. That of "
            f"{worst.tensor} differs by {worst.relative:.2g} of its norm, where {rounding.relative:.2g} is "
            f"explained{times}: it is computed from other data, or another sum."
        )
    if not first and all_.relative > _JUMP * max(rounding.relative, before):
        return f"gradients differ by {all_.relative:.2g}, where they differed by {before:.2g} in the step before."
    return ""


def _gradients(
    names: list[str], a: Mapping[str, Tensor], b: Mapping[str, Tensor], rounding: Rounding
) -> list[Magnitude]:
    """The magnitudes of gradients.

    A gradient may be zero but for rounding, as that of the bias of keys. So its difference is compared with the largest
    gradient, by its root mean square, among the parameters of its module.
    """
    sizes: dict[str, float] = {}
    for name in names:
        module = name.rpartition(".")[0]
        sizes[module] = max(sizes.get(module, 0.0), *map(_root_mean_square, _comparable(a[name], b[name])))
    found = []
    for name in names:
        each = _magnitude(name, a[name], b[name])
        x, y = _comparable(a[name], b[name])
        beyond = (
            each.largest == math.inf or _root_mean_square(y - x) > rounding.relative * sizes[name.rpartition(".")[0]]
        )
        found.append(replace(each, beyond=beyond))
    return found


def _comparable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in double precision, with zeros where both are NaN, or infinite with the same sign."""
    x, y = a.double(), b.double()
    same = ~x.isfinite() & ((x == y) | (x.isnan() & y.isnan()))
    return x.masked_fill(same, 0.0), y.masked_fill(same, 0.0)


def _largest(difference: Tensor) -> float:
    """The largest element of a difference, infinite if one of them is NaN."""
    return float(difference.abs().nan_to_num(nan=math.inf, posinf=math.inf).max()) if difference.numel() else 0.0


def _magnitude(name: str, a: Tensor, b: Tensor) -> Magnitude:
    import torch

    x, y = (each.flatten() for each in _comparable(a, b))
    if x.equal(y) or not x.numel():
        return Magnitude(name, 0.0, 0.0, 0, 1.0)
    difference, norm, largest = y - x, float(x.norm()), _largest(y - x)
    coarser = min((a.dtype, b.dtype), key=lambda dtype: torch.finfo(dtype).bits if dtype.is_floating_point else 64)
    measured = norm > 0 and largest < math.inf
    return Magnitude(
        name,
        float(difference.norm()) / norm if measured else math.inf,
        largest,
        _ulps(x.to(coarser), y.to(coarser)),
        float(x @ y) / norm**2 if measured else None,
    )


def _ulps(a: Tensor, b: Tensor) -> int:
    """The largest number of values of the dtype that lie between an element of a and that of b."""
    import torch

    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.int8}

    def ordered(tensor: Tensor) -> Tensor:
        number = tensor.contiguous().view(kinds[tensor.element_size()]).to(torch.int64)
        lowest = -(1 << (8 * tensor.element_size() - 1))
        return torch.where(number < 0, lowest - number, number)

    return int((ordered(a) - ordered(b)).abs().max()) if a.dtype.is_floating_point else int((a - b).abs().max())


def _together(names: list[str], a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Magnitude:
    """All tensors as one."""
    squares = products = differences = largest = 0.0
    for name in names:
        x, y = (each.flatten() for each in _comparable(a[name], b[name]))
        squares += float(x @ x)
        products += float(x @ y)
        differences += float((y - x) @ (y - x))
        largest = max(largest, _largest(y - x))
    if largest == math.inf:
        return Magnitude("", math.inf, largest, 0, None)
    relative = math.sqrt(differences / squares) if squares else (math.inf if differences else 0.0)
    return Magnitude("", relative, largest, 0, products / squares if squares else None)


def _root_mean_square(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def _dtype(run: Run) -> str:
    """The coarsest dtype in which a run computes, by what its first rank has recorded in its first step."""
    first = next(iter(run.recordings.values()))
    _, entries = next(first.steps(), (0, []))
    found = {entry.name.description.partition(" ")[0] for entry in entries}
    found |= {str(entry.value) for entry in entries if entry.name.tensor.startswith("autocast on ")}
    settings = first.facts.get("settings", {})
    if first.facts.get("gpu") and settings.get("float32_matmul_precision", "highest") != "highest":
        found.add("tf32")
    return max((dtype for dtype in found if dtype in UNITS), key=UNITS.__getitem__, default="float32")


def _state(step: int, *runs: Run) -> list[StateDifference]:
    """What differs in the state of the first rank in a step, but generators, whose draws follow the layout."""
    states = States(0)
    found = []
    for run in runs:
        steps = Segments(next(iter(run.recordings.values())).paths).steps()
        found.append(next((entries for number, entries in steps if number == step), None))
    states.step(step, *found)
    return [each for each in states.differing(phases.PARAMETER) if not each.name.startswith(GENERATOR)]


def _files(folder: Path) -> dict[int, list[Path]]:
    """The files of values by step, those of lower ranks first."""
    found: dict[int, list[Path]] = {}
    for path in sorted((folder / "values").glob("step*.rank*.pt")):
        if match := re.fullmatch(r"step([0-9]{10})\.rank[0-9]{5,7}\.pt", path.name):
            found.setdefault(int(match[1]), []).append(path)
    if not found:
        raise RecordingError(folder, "it has no values of gradients and parameters", "what `record --values` writes")
    return found


def _load(paths: list[Path]) -> dict[str, dict[str, Tensor]]:
    """The values of a step; what several ranks have written is that of the first of them.

    Raises:
        RecordingError: a file is none that a recorder writes.
    """
    import torch

    found: dict[str, dict[str, Tensor]] = {phase: {} for phase in (phases.INITIAL, phases.GRADIENT, phases.PARAMETER)}
    for path in paths:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            for phase, tensors in content.items():
                for name, tensor in tensors.items():
                    if phase not in found or not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                        raise TypeError(f"{phase!r} {name!r}")
                    found[phase].setdefault(name, tensor)
        except (OSError, RuntimeError, pickle.UnpicklingError, TypeError, AttributeError, EOFError) as error:
            why = str(error).partition("\n")[0]
            raise RecordingError(
                path, f"it cannot be read: {why}", "values that dash_guard.record has written"
            ) from error
    return found
