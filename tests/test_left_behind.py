"""State that a test leaves behind is an error of that test, and the next one does not meet it."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config

import _dash_inductor_state
from dash_inductor import _switch

from .support.left_behind import nothing_left_behind, seed

logger = logging.getLogger("dash_inductor")


def _leave(module: object, name: str, value: object) -> Callable[[], object]:
    return lambda: setattr(module, name, value)


CHANGES: dict[str, Callable[[], object]] = {
    "os.environ: A_NEW_ONE was None and is '1'": lambda: os.environ.update(A_NEW_ONE="1"),
    "os.environ: HOME was": lambda: os.environ.pop("HOME"),
    "process: working directory was": lambda: os.chdir("/"),
    "sys: path was": lambda: sys.path.insert(0, "elsewhere"),
    "sys: argv was": lambda: sys.argv.append("--more"),
    "the logger dash_inductor: level was": lambda: logger.setLevel(1),
    "the logger dash_inductor: handlers was": lambda: logger.addHandler(logging.NullHandler()),
    "torch: default dtype was torch.float32": lambda: torch.set_default_dtype(torch.float64),
    "torch: default device was": lambda: torch.set_default_device("meta"),
    "torch: gradients was True": lambda: torch.set_grad_enabled(False),
    "torch: anomaly detection was False": lambda: torch.set_anomaly_enabled(True),
    "torch: threads was": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch: precision of float32 matmuls": lambda: torch.set_float32_matmul_precision("medium"),
    "torch: flash attention was True": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "torch: memory efficient attention was True": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "torch: math attention was True": lambda: torch.backends.cuda.enable_math_sdp(False),
    "torch: cuDNN attention was True": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "a setting of torch: fill_uninitialized_memory was": _leave(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "a setting of torch: cudnn.benchmark was False": _leave(torch.backends.cudnn, "benchmark", True),
    "a setting of torch: cudnn.deterministic was False": _leave(torch.backends.cudnn, "deterministic", True),
    "torch._dynamo.config: suppress_errors was False": _leave(torch._dynamo.config, "suppress_errors", True),
    "torch._inductor.config: max_autotune was False": _leave(torch._inductor.config, "max_autotune", True),
    "torch._functorch.config: donated_buffer was": lambda: setattr(
        torch._functorch.config, "donated_buffer", not torch._functorch.config.donated_buffer
    ),
    "dash_inductor._switch: _on was True": _leave(_switch, "_on", False),
    "_dash_inductor_state: failure was None and is 'a reason'": _leave(_dash_inductor_state, "failure", "a reason"),
}


@pytest.mark.parametrize("said", CHANGES)
def test_what_is_left_behind_is_named_and_changed_back(said: str) -> None:
    with pytest.raises(AssertionError) as error, nothing_left_behind():
        CHANGES[said]()
    assert str(error.value).startswith(f"left behind: {said}")
    with nothing_left_behind():  # it is as it was, and can be changed again
        pass
    with pytest.raises(AssertionError), nothing_left_behind():
        CHANGES[said]()


def test_what_is_changed_back_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left_behind(), monkeypatch.context() as patch, torch._inductor.config.patch(max_autotune=True):
        patch.chdir(tmp_path)
        patch.setenv("A_NEW_ONE", "1")


def test_random_numbers_are_the_same_in_every_test() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    first = draw()
    seed()
    assert draw() == first != draw()
