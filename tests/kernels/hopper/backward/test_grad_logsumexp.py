"""A gradient of the log-sum-exp in the Hopper backward: what `prepare` is compiled to, and what it is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dash_inductor.errors import ArgumentError
from dash_inductor.kernels.common.arguments import flat
from dash_inductor.kernels.hopper.backward import build, launch
from dash_inductor.model import Band, Operand

from ....support import sass
from ....support.hopper_builds import Case
from ....support.kernel_code import digest
from .test_launch import PLAN, SPEC, Device, device, run, tensors  # noqa: F401  # a fixture

WITH_GRADIENT = replace(SPEC, grad_logsumexp=Operand(0))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("data", [{}, {"segment_ids": True}, {"segment_ids": True, "varlen": True}], ids=str)
def test_prepare(dims: tuple[int, int], data: dict[str, bool]) -> None:
    """It reads one number more of a row, and spills nothing; main and finish are the same code."""
    plain = Case(dims, Band(0, None), "spt", **data).specialisation()
    found = build.Kernels(replace(plain, traits=replace(plain.traits, operands=("grad_logsumexp",))))
    _, report = sass.compile_with_report(lambda: found.prepare)
    assert (report.spill_stores, report.spill_loads) == (0, 0)
    assert digest(found.prepare.asm["ptx"]) != digest(build.Kernels(plain).prepare.asm["ptx"])
    assert digest(found.finish.asm["ptx"]) == digest(build.Kernels(plain).finish.asm["ptx"])


def test_main_is_the_same_code() -> None:
    plain = Case((64, 64), Band(0, None), "spt").specialisation()
    found = build.Kernels(replace(plain, traits=replace(plain.traits, operands=("grad_logsumexp",))))
    assert digest(found.main.asm["ptx"]) == digest(build.Kernels(plain).main.asm["ptx"])


def prepares(device: Device) -> list[tuple[Any, ...]]:  # noqa: F811
    return [arguments for name, *_, arguments in device.launched if name == "prepare"]


def test_what_prepare_is_given(device: Device) -> None:  # noqa: F811
    """Address and strides, which are not those of the log-sum-exp; a call without a gradient gives None."""
    given = tensors()
    gradient = torch.zeros(2, 300, 4).transpose(1, 2)
    run(given, WITH_GRADIENT, grad_logsumexp=gradient)
    run(given, WITH_GRADIENT, grad_logsumexp=gradient.contiguous())
    run(given)
    first, second, plain = prepares(device)
    assert first[-1] == (gradient.data_ptr(), 1200, 1, 4)
    assert second[-1][1:] == (1200, 300, 1)
    assert plain[-1] is None
    assert len(list(flat(first))) == len(list(flat(plain))) + 3
    assert [of.traits.reads("grad_logsumexp") for of in device.compiled_for] == [True, True, False]


def test_gradients_that_are_not_the_calls(device: Device) -> None:  # noqa: F811
    given, gradient = tensors(), torch.zeros(2, 4, 300)
    with pytest.raises(ArgumentError, match="grad_logsumexp=None is not allowed: expected a tensor"):
        launch.prepare([*given.values()], (), WITH_GRADIENT, PLAN, "")
    for wrong in (gradient[:, :, 1:], gradient.double(), gradient[..., None]):
        with pytest.raises(ArgumentError, match=r"float32 \(2, 4, 300\) on cpu"):
            run(given, WITH_GRADIENT, grad_logsumexp=wrong)
