"""The assembly of `common.device.score_gluon` in PyTorch: its own text, run instruction by instruction on tensors.

Special functions are exact here, and rounded to fp32; those of a GPU are wrong by two units in the last place at most.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import torch
from torch import Tensor

from dash_inductor.kernels.common.device import score_gluon

LOWEST = torch.finfo(torch.float32).min


def _text(function: Any, *arguments: Any) -> str:
    found = function(*arguments)
    return str(getattr(found, "value", found))


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _rounded(x: Tensor) -> Tensor:
    return x.float()


class Machine:
    """Registers that hold tensors, fp32 or int32 or of truths, and the instructions that the assembly uses."""

    def __init__(self, registers: dict[str, Tensor]) -> None:
        self.registers = registers

    def value(self, name: str) -> Tensor:
        if name.startswith("0f"):
            return torch.tensor(struct.unpack("<f", int(name[2:], 16).to_bytes(4, "little"))[0])
        if name.startswith("0x") or name.isdigit():
            return torch.tensor(int(name, 0), dtype=torch.int32)
        return self.registers[name]

    def run(self, instruction: str) -> None:
        operation, rest = instruction.split(" ", 1)
        target, *names = (part.strip() for part in rest.split(","))
        given = [self.value(name) for name in names]
        self.registers[target] = getattr(self, operation.replace(".", "_"))(*given)

    def mul_rn_f32(self, a: Tensor, b: Tensor) -> Tensor:
        return _rounded(a.double() * b.double())

    def add_rn_f32(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def fma_rn_f32(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return _rounded(a.double() * b.double() + c.double())

    def ex2_approx_ftz_f32(self, a: Tensor) -> Tensor:
        found = _rounded(a.double().exp2())
        return torch.where(found < 2.0**-126, 0.0, found)

    def rcp_approx_ftz_f32(self, a: Tensor) -> Tensor:
        return _rounded(1.0 / a.double())

    def neg_f32(self, a: Tensor) -> Tensor:
        return -a

    def abs_f32(self, a: Tensor) -> Tensor:
        return a.abs()

    def max_NaN_f32(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b.expand(a.shape))

    def mov_b32(self, a: Tensor) -> Tensor:
        return _bits(a) if a.dtype == torch.float32 else a

    def mov_f32(self, a: Tensor) -> Tensor:
        return a

    def or_b32(self, a: Tensor, b: Tensor) -> Tensor:
        return a | b

    def and_b32(self, a: Tensor, b: Tensor) -> Tensor:
        return a & b

    def setp_ne_b32(self, a: Tensor, b: Tensor) -> Tensor:
        return a != b

    def setp_eq_f32(self, a: Tensor, b: Tensor) -> Tensor:
        return a == b

    def setp_lt_f32(self, a: Tensor, b: Tensor) -> Tensor:
        return a < b

    def selp_f32(self, a: Tensor, b: Tensor, keep: Tensor) -> Tensor:
        return torch.where(keep, a, b)


def _instructions(text: str) -> list[str]:
    parts = (" ".join(part.split()) for part in re.split(r"[;{}]|(?<=:)\n", text))
    return [part for part in parts if part and not part.startswith(".reg")]


def begun(s: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """As `Score.begun` for threads with one product each: (arguments, words)."""
    machine = Machine({"$2": s, "$3": torch.tensor(slope)})
    for instruction in _instructions(_text(score_gluon._begin_text, 1)):
        machine.run(instruction)
    return machine.registers["$0"], machine.registers["$1"]


def powers(v: Tensor, factor: float, shift: Tensor, hides: bool, ways: str = "own") -> tuple[Tensor, Tensor]:
    """(two to the power of scores less `shift`, scores less `shift`) of arguments, as a forward has them.

    Args:
        ways: the way that threads go through the assembly: their "own", as threads with one argument each; "far", which
            a thread goes with all of its arguments if one of them is not near; or "near".
    """
    given = {"$1": v, "$2": _bits(v), "$3": torch.tensor(factor), "$4": shift}
    power, score = _both_ways(_text(score_gluon._powers_text, 1, hides), given, ("$0", "%score"), ways)
    return power, score


def powers_and_slopes(
    v: Tensor, factor: float, shift: Tensor, ways: str = "own"
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(two to the power of scores less `shift`, slopes, shares) of arguments, as a backward has them."""
    given = {"$2": v, "$3": _bits(v), "$4": torch.tensor(factor), "$5": shift}
    power, slope, share = _both_ways(_text(score_gluon._slopes_text, 1), given, ("$0", "$1", "%share"), ways)
    return power, slope, share


def _both_ways(text: str, given: dict[str, Tensor], results: tuple[str, ...], ways: str) -> list[Tensor]:
    start, near, far = re.split(r"@%far bra FAR;|bra DONE;\s*FAR:", text.replace("DONE:", ""))
    found = []
    for way in (near, far):
        machine = Machine(dict(given))
        for instruction in _instructions(start + way):
            machine.run(instruction)
        found.append([machine.registers[name] for name in results])
        is_far = machine.registers["%far"]
    near_results, far_results = found
    if ways != "own":
        return far_results if ways == "far" else near_results
    return [torch.where(is_far, a, b) for a, b in zip(far_results, near_results, strict=True)]


def far_share(v: Tensor) -> Tensor:
    """The share of any argument by the form for far ones."""
    machine = Machine({"$1": v})
    for instruction in _instructions(_text(score_gluon._far_text)):
        machine.run(instruction)
    return machine.registers["$0"]
