"""Train twice with the Trainer of transformers: ``python -m tests.support.trainer cpu padded`` prints what came of it.

A process of its own, because `full_determinism` sets environment variables.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import dash_inductor

from .hf_models import VOCABULARY, build, token_ids
from .model_table import line

LENGTHS = (40, 25)
"""Tokens of the sequences of every batch."""
STEPS = 3


def collator(kind: str) -> Any:
    """For "padded" or "packed" batches."""
    if kind == "packed":
        return DataCollatorWithFlattening()
    words = Tokenizer(WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0")
    return DataCollatorForLanguageModeling(tokenizer, mlm=False)


def train(device: str, kind: str, folder: str) -> list[torch.Tensor]:
    """The parameters after a few steps of training from the start."""
    torch._dynamo.reset()
    arguments = TrainingArguments(
        output_dir=folder,
        torch_compile=True,
        full_determinism=True,
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        max_steps=STEPS,
        per_device_train_batch_size=len(LENGTHS),
        gradient_accumulation_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    sequences = [token_ids(1, length)[0].tolist() for length in LENGTHS] * STEPS * 2
    model = build("Llama", head_dim=16 if device == "cpu" else 64)
    data = [{"input_ids": tokens} for tokens in sequences]
    Trainer(model, arguments, data_collator=collator(kind), train_dataset=data).train()
    return [p.detach().cpu() for p in model.parameters()]


def main(device: str, kind: str) -> None:
    # The first device alone: with more the Trainer uses threads, which run the model without its compiled code.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    dash_inductor.config.cpu = "reference"
    with tempfile.TemporaryDirectory() as folder:
        first = train(device, kind, folder)
        records = dash_inductor.sites()
        second = train(device, kind, folder)
    facts = {
        "sites": line(records, calls=len(records)),
        "equal": all(map(torch.equal, first, second)),
        "finite": all(bool(p.isfinite().all()) for p in first),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
