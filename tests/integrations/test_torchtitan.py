"""`deterministic` in a configuration of torchtitan: its own trainer trains a step, for an H100 that is not there."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from ..models.programs import PACKAGES, ROOT
from ..support.fakecuda import compiler
from ..support.processes import run_python

pytestmark = [
    pytest.mark.full,  # the others do without the packages of `make test-models`
    pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler"),
]

TRAIN = """
    import json
    import logging
    import sys

    from tests.support import fakecuda, mockgpu

    mockgpu.install_driver()
    fakecuda.install()
    from tests.models import programs, titan

    mockgpu.install_torch()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dash_inductor.integrations.torchtitan import deterministic
    from torchtitan.tools.logging import logger

    flags, texts = [], []

    class Heard(logging.Handler):
        def emit(self, record):
            texts.append((record.levelname, record.getMessage()))
            flags.append(torch.are_deterministic_algorithms_enabled())

    def change(config):
        config.debug.deterministic = False
        config.metrics.log_freq = 17
        assert deterministic(config, **options) is config
        assert (config.debug.deterministic, config.debug.seed) == (True, 0)
        assert config.metrics.log_freq == 17

    options, compiled = json.loads(sys.argv[1]), sys.argv[2] == "compiled"
    logger.addHandler(Heard())
    logger.setLevel(logging.INFO)
    torch.set_default_dtype(torch.bfloat16)
    error = ""
    with programs._settings(), FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        try:
            titan.step("llama3", sys.argv[3], compiled=compiled, change=change)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    found = [(*text, flag) for text, flag in zip(texts, flags) if "attentions" in text[1] or "too late" in text[1]]
    json.dump({"texts": found, "error": error}, sys.stdout)
"""


def train(options: dict[str, Any], compiled: bool = True, attention: str = "flex") -> dict[str, Any]:
    assert PACKAGES.exists(), f"make test-models installs requirements/programs.txt into {PACKAGES}"
    sources = os.pathsep.join(map(str, (ROOT, PACKAGES)))
    arguments = json.dumps(options), "compiled" if compiled else "eager", attention
    printed = run_python(TRAIN, *arguments, PYTHONPATH=sources).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def test_a_training() -> None:
    """One message, under the flag that torchtitan has set; its blocks share one graph."""
    found = train({"strict": True})
    assert found["error"] == ""
    assert found["texts"] == [["INFO", "dash_inductor: 1 of 1 attentions replaced", True]]


def test_blocks_that_are_not_compiled() -> None:
    found = train({"strict": True}, compiled=False, attention="varlen")
    assert found["error"].startswith("FallbackError: strict=True, but no attention was compiled in the first step")
    assert "compile the model by --compile.enable" in found["error"]


def test_metrics_of_another_class() -> None:
    code = """
        from dataclasses import dataclass
        from types import SimpleNamespace

        import pytest

        from dash_inductor.errors import ArgumentError
        from dash_inductor.integrations.torchtitan import DeterministicMetrics, deterministic

        with pytest.raises(ArgumentError, match="config.metrics='DeterministicMetrics.Config' is not allowed"):
            deterministic(SimpleNamespace(metrics=DeterministicMetrics.Config()))
    """
    run_python(code, PYTHONPATH=str(PACKAGES))
