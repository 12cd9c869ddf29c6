"""One training in a process of its own, for `benchmarks.step`: it compiles, and then does what lines of stdin ask for.

    python -m benchmarks.step_child MODEL VARIANT [--padded] [--device cuda]

It answers each line with a line of JSON: first, unasked, memory and losses; "turn": the median step in ms; "host": the
median ms in which the host has queued a step; "kernels": the attention's kernels and the GPU's busy time of a step;
"bits": whether two trainings from the first state are equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .step_kernels import profiled
from .step_variants import VARIANTS
from .whole_models import MODELS, Made
from .whole_models.made import padded

STEPS = 8
"""Steps of a turn, fewer where they take longer than `TURN`, but three."""
TURN = 1000.0
"""ms."""
WARMUP = 5
TRAINED = 4
"""Steps of each of two trainings whose bits are compared."""


class Training:
    """A compiled model, its optimizer and its inputs.

    Args:
        made: the model and its inputs, on the device.
        mode: that of ``torch.compile``.

    Attributes:
        losses: that of every step.
        queued: the time in ms in which the host has queued each step.
    """

    def __init__(self, made: Made, mode: str | None = None) -> None:
        self.model, self.inputs = made
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.compiled = torch.compile(self.model, mode=mode)
        self.first_state = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
        self.losses: list[float] = []
        self.queued: list[float] = []

    def step(self) -> float:
        """Runs one step and returns its time in ms."""
        synchronize(self.model)
        torch.compiler.cudagraph_mark_step_begin()
        start = time.perf_counter()
        result: Any = self.compiled(**self.inputs)
        loss = result if isinstance(result, Tensor) else result.loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.queued.append((time.perf_counter() - start) * 1e3)
        synchronize(self.model)
        elapsed = (time.perf_counter() - start) * 1e3
        self.losses.append(loss.item())
        return elapsed

    def trained(self) -> list[Tensor]:
        """Returns the losses and the parameters after `TRAINED` steps from the initial state."""
        self.model.load_state_dict(self.first_state)
        self.optimizer.state.clear()
        torch.manual_seed(1)
        self.losses.clear()
        for _ in range(TRAINED):
            self.step()
        return [torch.tensor(self.losses), *(p.detach().cpu().clone() for p in self.model.parameters())]


def synchronize(model: torch.nn.Module) -> None:
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()


def answers(training: Training) -> dict[str, Callable[[], Any]]:
    """Returns the functions that answer the requests on stdin, by request."""

    def kernels() -> dict[str, Any]:
        forward, backward, busy = profiled(training.step)
        return {
            "forward": forward.name, "forward ms": forward.ms, "backward": backward.name, "backward ms": backward.ms,
            "busy ms": busy,
        }  # fmt: skip

    def bits() -> bool:
        once, again = training.trained(), training.trained()
        return all(torch.equal(a, b) for a, b in zip(once, again, strict=True))

    def turn() -> float:
        times: list[float] = []
        while len(times) < 3 or (len(times) < STEPS and sum(times) < TURN):
            times.append(training.step())
        return statistics.median(times)

    def host() -> float:
        first = len(training.queued)
        turn()
        return statistics.median(training.queued[first:])

    return {"turn": turn, "host": host, "kernels": kernels, "bits": bits}


def first_answer(training: Training, device: str) -> dict[str, Any]:
    """Returns peak memory of a step in MiB, whether losses are finite, and the outcome of every attention."""
    import dash_inductor

    for _ in range(WARMUP):
        training.step()
        torch.cuda.empty_cache()  # other processes compile at the same time, and hold what they have saved
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    training.step()
    memory = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
    fates = [f"not replaced: {r.reason.value}" if r.reason else "replaced" for r in dash_inductor.sites()]
    return {
        "memory": memory, "finite": all(abs(loss) < 1e9 for loss in training.losses),
        "sites": {fate: fates.count(fate) for fate in dict.fromkeys(fates)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    variant = VARIANTS[options.variant]
    with variant.set():
        torch.manual_seed(0)
        with torch.device(options.device):
            model, inputs = MODELS[options.model]()
            inputs = padded(inputs) if options.padded else inputs
            model.to(torch.bfloat16)
        training = Training((model, inputs), variant.mode)
        print(json.dumps(first_answer(training, options.device)), flush=True)
        asked = answers(training)
        for line in sys.stdin:
            print(json.dumps(asked[line.strip()]()), flush=True)


if __name__ == "__main__":
    main()
