"""Observes a running program, for what its compiles do not show: eager attention, switches of the flag, seeds."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy.random
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.utils.data import DataLoader

from ..upstream.patches import replaced
from . import frames
from .findings import Check, Seen, Severity
from .libraries import TRANSFORMER_ENGINE, UNKNOWN, Library, is_attention, library_of
from .looking import functions_looked_at, layers_looked_at, looking
from .reading import foreign_modes, here
from .step import Step

OK, NOTE, WARNING, ERROR = Severity

_PYTORCH = Library(
    "",
    "PyTorch's kernels are deterministic under the flag, but for memory-efficient attention, which raises or warns.",
    "",
)
_FLEX = Library("", "In eager mode it computes the scores of all pairs, and is deterministic as matmuls are.", "")
_HASH_SEED = "PYTHONHASHSEED"
_OF_OPERATORS = "GeneratedBackwardFor_"
"""The prefix of the autograd function that PyTorch makes for a custom operator; the operator's full name follows."""


@dataclass(frozen=True)
class _Call:
    """Attention that ran in eager mode: its line, the compiled code around it, and its name ("" for PyTorch's own)."""

    line: str
    around: str
    name: str


@dataclass(frozen=True)
class _Told:
    """Further facts about an eager call: the text of its line, its module, and the library."""

    text: str
    module: str
    library: Library


class Running:
    """Observes a program that runs inside the context `watched`; afterwards, its `checks` yield the findings.

    Args:
        name: the name of the program, for example its file.
        repeat: whether to run the first step again.

    Attributes:
        step: observes the first step.
    """

    def __init__(self, name: str, repeat: bool = True) -> None:
        self._name = name
        self.step = Step(repeat)
        self._eager: dict[_Call, _Told] = {}
        self._toggled: dict[tuple[str, str, bool], None] = {}  # line, the module whose forward runs, and the new value
        self._seeded = self._drawn = False
        self._drawn_by: list[str] = []  # other generators from which the program has drawn
        self._seeded_by: set[str] = set()
        self._workers: dict[str, None] = {}  # lines that begin to read by workers before anything is seeded
        self._own: dict[str, None] = {}  # lines that make a generator of NumPy without a seed
        self._hash_seed = ""
        self.checks: tuple[Check, ...] = (
            self.eager_attention, self.flag_inside_a_forward, self.seed, self.other_seeds, self.data_loader_workers,
            self.string_hashes, *self.step.checks,
        )  # fmt: skip

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context manager that observes the program that runs in its block, in this process."""
        functions: dict[Any, dict[str, Callable[..., None]]] = {
            F: {"scaled_dot_product_attention": self._attention},
            varlen: {"varlen_attn": self._attention},
            torch: {
                "use_deterministic_algorithms": self._flag,
                "set_deterministic_debug_mode": self._debug_mode,
                "manual_seed": self._seed,
                "set_rng_state": self._seed,
            },
            torch.cuda: dict.fromkeys(("manual_seed", "manual_seed_all", "set_rng_state"), self._seed),
            random: dict.fromkeys(("seed", "setstate"), self._seeder("random")),
            numpy.random: {
                **dict.fromkeys(("seed", "set_state"), self._seeder("numpy.random")),
                "default_rng": self._default_rng,
            },
            DataLoader: {"__iter__": self._reads},
        }
        layers = {"forward": self._once(self._layer), "__init__": self._once(self._made)}
        _let_dynamo_know_the_originals()
        generators = _Generators()
        self._hash_seed = os.environ.get(_HASH_SEED, "random")
        with ExitStack() as stack:
            stack.enter_context(functions_looked_at(self._once(self._function)))
            stack.enter_context(layers_looked_at(layers))
            for owner, looks in functions.items():
                changed = {name: looking(getattr(owner, name), self._once(look)) for name, look in looks.items()}
                stack.enter_context(replaced(owner, changed))
            stack.enter_context(self.step.watched())
            try:
                yield
            finally:
                self._drawn = generators.drew_without_a_seed()
                self._drawn_by = generators.others_that_drew()

    def _once(self, look: Callable[..., None]) -> Callable[..., None]:
        """Wraps `look` so that it ignores what the doctor repeats."""

        def look_once(*args: Any, **kwargs: Any) -> None:
            if not self.step.repeats:
                look(*args, **kwargs)

        return look_once

    def _attention(self, query: Tensor, *args: Any, **kwargs: Any) -> None:
        from ..eager.sdpa import is_in_place  # imported here, because a bad setting must not end the doctor's report

        if _trains(query, *args, *kwargs.values()) and not is_in_place():
            self._tell("", _PYTORCH)

    def _function(self, function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> None:
        if _has_gradients(*args, *kwargs.values()):
            self.step.reading.function(place := here())
            if is_attention(function):
                self.step.foreign.function(function, args, kwargs, place)
        if is_attention(function) and _trains(*args, *kwargs.values()):
            module, name = function.__module__, function.__name__
            of_operator = name.removeprefix(_OF_OPERATORS)
            if not module.startswith("torch."):
                self._tell(f"{module}.{name}", library_of(module) or UNKNOWN)
            elif "Flex" in name:
                self._tell("flex_attention", _FLEX)
            elif of_operator != name and not of_operator.startswith("torch_attn"):  # its function is wrapped
                self._tell(of_operator, library_of(of_operator) or UNKNOWN)

    def _made(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not frames.in_a_layer() and library_of(type(layer).__module__) is TRANSFORMER_ENGINE:
            self.step.foreign.made(layer, frames.line()[0])

    def _layer(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not frames.in_a_layer() and _has_gradients(*args, *kwargs.values(), *layer.parameters()):
            self.step.foreign.ran(layer, frames.line()[0])
        if _trains(*args, *kwargs.values(), *layer.parameters()):
            library = library_of(type(layer).__module__)
            assert library is not None
            self._tell(f"{type(layer).__module__}.{type(layer).__name__}", library, layer)

    def _tell(self, name: str, library: Library, layer: nn.Module | None = None) -> None:
        """Records eager attention; `layer` is its module, if it is one."""
        if frames.in_a_layer():
            return
        line, text = frames.line()
        call = _Call(line, frames.compiled_around(), name)
        if call not in self._eager:
            around = frames.modules()
            module = layer or next(iter(around), None)
            named = "" if module is None else frames.name_of(module, around[-1] if around else module)
            self._eager[call] = _Told(text, named, library)

    def _debug_mode(self, debug_mode: int | str) -> None:
        self._flag(debug_mode not in (0, "default"))

    def _flag(self, mode: bool, *args: Any, **kwargs: Any) -> None:
        if not frames.called_by_pytorch():
            self.step.heard.switched(frames.line()[0], bool(mode))
        around = [] if frames.called_by_pytorch() else frames.modules()
        if around and bool(mode) is not torch.are_deterministic_algorithms_enabled():
            self.toggled(frames.line()[0], type(around[0]).__name__, bool(mode))

    def _seed(self, *args: Any, **kwargs: Any) -> None:
        self._seeded = self._seeded or not frames.called_by_pytorch()

    def _seeder(self, generator: str) -> Callable[..., None]:
        def seeded(*args: Any, **kwargs: Any) -> None:
            if not frames.called_by_pytorch():  # which puts states back
                self._seeded_by.add(generator)

        return seeded

    def _default_rng(self, seed: Any = None) -> None:
        if seed is None and not frames.called_by_pytorch():
            self._own[frames.line()[0]] = None

    def _reads(self, loader: DataLoader[Any]) -> None:
        if loader.num_workers and loader.generator is None and loader.worker_init_fn is None and not self._seeded:
            self._workers[frames.line()[0]] = None

    def toggled(self, line: str, module: str, value: bool) -> None:
        """Records that the determinism flag is switched inside the forward of a module, or in a compiled function.

        Args:
            line: the source line of the switch; for a compiled function, the line of the next operation, or "its end"
                if there is none, because Dynamo does not record the line of the switch.
            module: the class of the module; "" for a compiled function.
            value: whether the flag is on afterwards.
        """
        self._toggled[line, module, value] = None

    def eager_attention(self) -> Iterator[Seen]:
        """Reports attention with gradients that ran in eager mode under deterministic algorithms, by line."""
        for call, told in self._eager.items():
            name = f" {call.name}" if call.name else ""
            module = f", in {told.module}" if told.module else ""
            ran = f"the attention{name} at {call.line} ran in eager mode{call.around}{module}"
            advice = "Compile what calls it: torch.compile(model)."
            if call.around:
                advice = "Let it be compiled with the rest: TORCH_LOGS=graph_breaks names what breaks a graph, and why."
            advice = told.library.advice or advice
            text = f"`{told.text}`: " if told.text else ""
            yield WARNING, f"{ran}: dash_inductor did not see it. {told.library.known}", text + advice

    def flag_inside_a_forward(self) -> Iterator[Seen]:
        """Checks whether deterministic algorithms are switched on or off during a forward."""
        for line, module, value in self._toggled:
            switches = f"switches deterministic algorithms {'on' if value else 'off'}"
            if module:
                what = f"{line} {switches} inside the forward of {module}"
            else:
                what = f"a compiled function {switches} before {line}"
            advice = (
                "Call torch.use_deterministic_algorithms(True) once, before the first call of the model: what is "
                "compiled or runs with the flag off, the backward too, is not deterministic."
            )
            yield WARNING, what, advice

    def seed(self) -> Iterator[Seen]:
        """Checks whether a program that draws random numbers has seeded the generators."""
        if self._drawn and not self._seeded:
            what = f"{self._name} draws random numbers and seeds no generator: they are others in every run"
            yield WARNING, what, "Call torch.manual_seed(0) before the model is made and the data are read."

    def other_seeds(self) -> Iterator[Seen]:
        """Checks whether a program that draws from `random` or NumPy has seeded them."""
        for generator in self._drawn_by:
            if generator not in self._seeded_by:
                what = f"{self._name} draws from {generator} and does not seed it: its numbers are others in every run"
                yield WARNING, what, f"Call {generator}.seed(0) before anything is drawn."
        for line in self._own:
            what = f"{line} makes a generator of NumPy without a seed: its numbers are others in every run"
            yield WARNING, what, "Give it a seed: numpy.random.default_rng(0)."

    def data_loader_workers(self) -> Iterator[Seen]:
        """Checks whether workers of data loaders get their seeds from a generator that is seeded."""
        for line in self._workers:
            what = f"{line} reads data by workers, whose seeds come from PyTorch's generator, which nothing has seeded"
            yield WARNING, what, "Call torch.manual_seed(0) before, or give the DataLoader a seeded generator."

    def string_hashes(self) -> Iterator[Seen]:
        """Checks whether a program sets PYTHONHASHSEED when it is too late; notes that nothing sets it."""
        if self._hash_seed != "random":
            return
        if os.environ.get(_HASH_SEED, "random") != "random":
            what = f"{self._name} sets {_HASH_SEED}, which Python reads when it starts: hashes of strings stay random"
            yield WARNING, what, f"Set it before: {_HASH_SEED}=0 python train.py"
        else:
            what = "hashes of strings are others in every run, and with them the order of sets of strings"
            yield NOTE, what, f"If the program depends on the order of a set: {_HASH_SEED}=0 python train.py"


def _trains(*values: object) -> bool:
    """Whether an eager call with these arguments needs gradients while deterministic algorithms are on."""
    return torch.are_deterministic_algorithms_enabled() and _has_gradients(*values)


def _has_gradients(*values: object) -> bool:
    """Whether an eager call with these arguments needs gradients."""
    if not torch.is_grad_enabled() or foreign_modes():
        return False
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _let_dynamo_know_the_originals() -> None:
    """Makes Dynamo build its table of PyTorch functions with special rules, before the doctor wraps some of them."""
    torch.compile(torch.sin, backend="eager")(torch.ones(1))


class _Generators:
    """A snapshot of PyTorch's default random generators, and of those of `random` and NumPy."""

    def __init__(self) -> None:
        self._seed, self._state = torch.initial_seed(), torch.get_rng_state()
        self._others = _other_states()

    def others_that_drew(self) -> list[str]:
        """The modules whose generator has another state than at the snapshot."""
        now = _other_states()
        return [name for name, state in self._others.items() if now[name] != state]

    def drew_without_a_seed(self) -> bool:
        """Whether a generator has drawn numbers since the snapshot without having been seeded."""
        if torch.initial_seed() == self._seed:
            return not torch.equal(torch.get_rng_state(), self._state) or any(_offsets())
        return False


def _other_states() -> dict[str, object]:
    of_numpy: Any = numpy.random.get_state()
    return {"random": random.getstate(), "numpy.random": (of_numpy[1].tobytes(), of_numpy[2:])}


def _offsets() -> Iterator[int]:
    """The offsets of the CUDA default generators."""
    if torch.cuda.is_initialized():
        yield from (generator.get_offset() for generator in torch.cuda.default_generators)
