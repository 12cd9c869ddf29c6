"""A small causal language model from transformers, trained on bytes of a text: what the demo trains.

Nothing here knows dash_inductor: deterministic algorithms and `torch.compile` are all that a training script needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = Path(__file__).parent / "data" / "alice.txt"

Report = Callable[[int, float], None]
"""Called after every step with the number of steps done and the loss."""


@dataclass(frozen=True)
class Settings:
    """Model and training.  `length` is in tokens (bytes), `batch` in sequences."""

    device: str
    dtype: torch.dtype
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    length: int
    batch: int
    steps: int
    learning_rate: float = 3e-4


CPU = Settings("cpu", torch.float32, hidden=256, heads=4, kv_heads=2, layers=2, length=256, batch=2, steps=30)
GPU = Settings("cuda", torch.bfloat16, hidden=2048, heads=16, kv_heads=4, layers=4, length=4096, batch=2, steps=30)
TINY = replace(CPU, hidden=32, heads=2, kv_heads=1, layers=1, length=80, steps=3)
SIZES = {"tiny": TINY, "cpu": CPU, "gpu": GPU}


@dataclass
class Run:
    """The results of a training run: every step's loss (fp32 scalars on the CPU) and the final parameters by name."""

    losses: list[Tensor] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def read_tokens(path: Path = TEXT) -> Tensor:
    """The file's bytes, int64 [size]."""
    return torch.tensor(list(path.read_bytes()))


def build_model(settings: Settings) -> nn.Module:
    """A Llama with random weights from a fixed seed; a vocabulary of 256 bytes."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=settings.hidden,
            intermediate_size=settings.hidden * 11 // 4,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            max_position_embeddings=settings.length,
            use_cache=False,
        )
    )
    return model.to(settings.device, settings.dtype)


def batch_of(tokens: Tensor, settings: Settings, step: int) -> Tensor:
    """The sequences of one step, int64 [batch, length], at places drawn from a generator seeded with the step."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(tokens) - settings.length + 1, (settings.batch, 1), generator=generator)
    return tokens[starts + torch.arange(settings.length)].to(settings.device)


def make_step(settings: Settings, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """One optimiser step of the compiled model on a batch; returns the loss, a detached scalar on the device."""
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def train(settings: Settings, tokens: Tensor, report: Report = lambda done, loss: None) -> Run:
    """Train from scratch; the model is compiled anew, so a second call shares nothing with the first."""
    torch._dynamo.reset()
    model = build_model(settings)
    step = make_step(settings, model)
    run = Run()
    for done in range(1, settings.steps + 1):
        run.losses.append(step(batch_of(tokens, settings, done)).float().cpu())
        report(done, run.losses[-1].item())
    run.parameters = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return run


def differences(first: Run, second: Run) -> list[str]:
    """Everything that is not bitwise equal: losses by step, parameters by name; empty if the runs agree.

    NaN counts as a difference, because a run that diverged proves nothing.
    """
    if len(first.losses) != len(second.losses) or first.parameters.keys() != second.parameters.keys():
        return ["number of losses or names of parameters"]
    losses = zip(first.losses, second.losses, strict=True)
    unequal = [f"loss of step {step}" for step, (a, b) in enumerate(losses, 1) if not _same_bits(a, b)]
    parameters = first.parameters
    return unequal + [name for name in parameters if not _same_bits(parameters[name], second.parameters[name])]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """`torch.equal` takes 0.0 and -0.0 for the same; their bytes differ."""
    return torch.equal(a, b) and torch.equal(_bytes(a), _bytes(b))


def digest(run: Run) -> str:
    """SHA-256 (hex) over the bytes of all losses and all parameters, in order."""
    state = hashlib.sha256()
    for value in (*run.losses, *run.parameters.values()):
        state.update(_bytes(value).numpy())
    return state.hexdigest()


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().flatten().view(torch.uint8)
