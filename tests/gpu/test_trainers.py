"""The callback of transformers' Trainer on a GPU, and when `CUBLAS_WORKSPACE_CONFIG` is set too late there."""

from __future__ import annotations

import pytest

from ..support.processes import run_python

pytestmark = pytest.mark.gpu

CODE = """
    import logging
    import os
    import sys

    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

    import tempfile

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from dash_inductor.integrations.transformers import DeterministicCallback, _log

    class Shown(logging.Handler):
        def emit(self, record):
            print(record.levelname, record.getMessage(), flush=True)

    _log.addHandler(Shown())
    early = sys.argv[1] == "early"
    torch.cuda.init()  # as TrainingArguments does
    settings = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**settings, vocab_size=64, attention_dropout=0.1))
        callback = DeterministicCallback(strict=True) if early else None
        model.cuda()
        callback = callback or DeterministicCallback(strict=True)
        data = [{"input_ids": [n % 61 for n in range(512)], "labels": [n % 61 for n in range(512)]}] * 16
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, max_steps=3, torch_compile=True, bf16=True, log_level="info", report_to=[], save_strategy="no",
                per_device_train_batch_size=2, disable_tqdm=True,
            )
            Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))
    assert not torch.are_deterministic_algorithms_enabled()
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_the_callback_of_transformers(when: str) -> None:
    """A context alone is no sign of a product: the variable is late only if there were tensors on the GPU."""
    pytest.importorskip("transformers", reason="the Trainer is transformers'")
    printed = run_python(CODE, when).stdout.splitlines()
    assert printed.count("INFO dash_inductor: 2 of 2 attentions replaced") >= 1, printed
    assert any("is set too late" in line for line in printed) == (when == "late"), printed
