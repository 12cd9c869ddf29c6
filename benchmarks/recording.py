"""The cost of `dash_guard.record` in a training step, of which it changes no bit.

    python -m benchmarks.recording [--hidden 4096 --layers 4 --batch 4 --length 4096] [--steps 6 --rounds 3]
                                   [--device cuda] [--name recording]

Two Llamas of transformers from one start, by default of a billion parameters in bf16, train on the same tokens by
turns, both compiled: one is never recorded, the other always.  Rows: the median time of a step of each, the share that
recording adds, the fingerprints of a step, and whether all parameters are bitwise equal in the end.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dash_guard
from dash_guard.recordings.file import path_of
from dash_guard.recordings.recording import Recording

from . import common


def llama(options: argparse.Namespace) -> LlamaForCausalLM:
    """Makes the model; its weights depend on the seed alone."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=options.hidden, intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 128,
        num_key_value_heads=max(1, options.hidden // 512), max_position_embeddings=options.length, use_cache=False,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(options.device, torch.bfloat16)


def trainer(model: LlamaForCausalLM, options: argparse.Namespace) -> Callable[[int], float]:
    """Returns a function that trains a number of steps and returns the milliseconds per step."""
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=options.device == "cuda")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32000, (options.batch, options.length), generator=generator).to(options.device)
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None

    def train(steps: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            compiled(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        wait()
        return (time.perf_counter() - start) / steps * 1e3

    return train


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures one row of the table."""
    plain, recorded = llama(options), llama(options)
    train_plain, train_recorded = trainer(plain, options), trainer(recorded, options)
    off, on = [], []
    for number in range(options.rounds + 1):
        time_off = train_plain(options.steps)
        with dash_guard.record(folder / str(number), model=recorded):
            time_on = train_recorded(options.steps)
        if number:  # the first round compiles
            off.append(time_off)
            on.append(time_on)
    entries = [
        sum(bool(entry.fingerprint) for entry in found) for _, found in Recording(path_of(folder / "1", 0)).steps()
    ]
    before, after = statistics.median(off), statistics.median(on)
    pairs = zip(plain.parameters(), recorded.parameters(), strict=True)
    return {
        "parameters": sum(parameter.numel() for parameter in plain.parameters()),
        "step ms": before,
        "recorded ms": after,
        "added %": (after / before - 1) * 100,
        "fingerprints a step": entries[-1],
        "bitwise equal": all(torch.equal(a, b) for a, b in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 4096), ("layers", 4), ("batch", 4), ("length", 4096), ("steps", 6), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--name", default="recording", help="name of the results file")
    options = parser.parse_args()
    common.watchdog(600)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # of the module
    with tempfile.TemporaryDirectory() as folder:
        row = measure(options, Path(folder))
    common.table([row])
    print(common.write(options.name, {"conditions": common.conditions(), "options": vars(options), "rows": [row]}))


if __name__ == "__main__":
    main()
