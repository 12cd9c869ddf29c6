"""Ways of running a training step of one model: how it is compiled, checkpointed, cast and accumulated.

A way takes a model and a function like `torch.compile`, and gives a function that leaves gradients at the parameters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Compile = Callable[..., Callable[..., Any]]
Inputs = dict[str, Tensor]
Step = Callable[[Inputs], None]


def whole(model: nn.Module, compile: Compile, **options: Any) -> Step:
    compiled = compile(model, **options)
    return lambda inputs: compiled(**inputs).loss.backward()


def regional(model: nn.Module, compile: Compile) -> Step:
    """Every layer is compiled for itself; what makes the mask is not compiled."""
    for layer in model.model.layers:
        layer.forward = compile(layer.forward)
    return lambda inputs: model(**inputs).loss.backward()


def checkpointed(model: nn.Module, compile: Compile, save: Callable[[str], bool] | None = None) -> Step:
    """Layers run their forward again in the backward; with `save`, the results of operators of such names are kept."""
    options: dict[str, Any] = {"use_reentrant": False}
    if save is not None:

        def policy(context: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if save(str(op)) else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return whole(model, compile)


def autocast(model: nn.Module, compile: Compile) -> Step:
    compiled = compile(model)

    def step(inputs: Inputs) -> None:
        with torch.autocast(inputs["input_ids"].device.type, torch.bfloat16):
            loss = compiled(**inputs).loss
        loss.backward()

    return step


def accumulated(model: nn.Module, compile: Compile) -> Step:
    """The gradients of three batches are added at the parameters."""
    step = whole(model, compile)

    def steps(inputs: Inputs) -> None:
        for shift in range(3):
            step(inputs | {"input_ids": inputs["input_ids"].roll(shift, 1)})

    return steps


def compiled_autograd(model: nn.Module, compile: Compile) -> Step:
    def train(inputs: Inputs) -> None:
        compiled(**inputs).loss.backward()

    compiled = compile(model)
    return compile(train)


@dataclass(frozen=True)
class Way:
    """A way of running.

    Attributes:
        prepare: of a model and a function like `torch.compile`, a training step.
        options: more arguments of `prepare`.
        settings: of Dynamo.
        expected: the line of the records (`model_table.line`) for a padded batch and a Llama of two layers.
        tolerance: of a gradient against the eager one in float32, relative to its norm.
    """

    prepare: Callable[..., Step] = whole
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    expected: str = "2 causal & keys(0)"
    tolerance: float = 1e-5

    @contextlib.contextmanager
    def step(self, model: nn.Module, compile: Compile) -> Iterator[Step]:
        """The training step, with the settings of Dynamo that it needs."""
        with torch._dynamo.config.patch(self.settings):
            yield self.prepare(model, compile, **self.options)


def _is_attention(op: str) -> bool:
    return "scaled_dot_product" in op


def _is_product(op: str) -> bool:
    return op.startswith(("aten.mm", "aten.addmm"))


WAYS = {
    "default": Way(),
    "fullgraph": Way(options={"fullgraph": True}),
    "dynamic": Way(options={"dynamic": True}),
    "static": Way(options={"dynamic": False}),
    "regional": Way(regional, expected="1 dense(0)"),
    "checkpointed": Way(checkpointed),
    "attention saved": Way(checkpointed, {"save": _is_attention}),
    "products saved": Way(checkpointed, {"save": _is_product}),
    "autocast": Way(autocast, tolerance=2e-2),
    "accumulated": Way(accumulated),
    "compiled autograd": Way(compiled_autograd, settings={"compiled_autograd": True}),
}

MODES = {
    mode: Way(options={"mode": mode}) for mode in ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
}
"""For CUDA: modes of Inductor.  Choices that autotuning makes by timing are fixed within one process."""
