"""Watches a program while it runs, for what no compile shows: attention in eager mode, the flag in a forward, seeds."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import varlen

from ..upstream.dispatch import mode_count
from ..upstream.dynamo import eval_frame, skip_code
from ..upstream.patches import replaced
from .findings import Check, Seen, Severity

OK, NOTE, WARNING, ERROR = Severity

_LIBRARIES = tuple(str(Path(str(module.__file__)).parent) for module in (torch, sys.modules["dash_inductor"]))
_LOOKS = "_dash_inductor_looks_at"


class Running:
    """Looks at a program that runs inside `watched`; `checks` are what there is to say about it afterwards.

    Args:
        name: what the program is called, for example its file.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._eager: dict[tuple[str, str], None] = {}  # line, and what the call is in
        self._toggled: dict[tuple[str, str, bool], None] = {}  # line, the module whose forward runs, and the new value
        self._seeded = self._drawn = False
        self.checks: tuple[Check, ...] = (self.eager_attention, self.flag_inside_a_forward, self.seed)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at what runs in the block, in this process."""
        functions: dict[Any, dict[str, Callable[..., None]]] = {
            F: {"scaled_dot_product_attention": self._attention},
            varlen: {"varlen_attn": self._attention},
            torch: {
                "use_deterministic_algorithms": self._flag,
                "manual_seed": self._seed,
                "set_rng_state": self._seed,
            },
            torch.cuda: dict.fromkeys(("manual_seed", "manual_seed_all", "set_rng_state"), self._seed),
        }
        _let_dynamo_know_the_originals()
        generators = _Generators()
        with ExitStack() as stack:
            for owner, looks in functions.items():
                changed = {name: _looked_at(getattr(owner, name), look) for name, look in looks.items()}
                stack.enter_context(replaced(owner, changed))
            try:
                yield
            finally:
                self._drawn = generators.drew_without_a_seed()

    def _attention(self, query: Tensor, *args: Any, **kwargs: Any) -> None:
        tensors = [query, *(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))]
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if trains and torch.are_deterministic_algorithms_enabled() and not mode_count():
            self._eager[_line(), _compiled_around()] = None

    def _flag(self, mode: bool, *args: Any, **kwargs: Any) -> None:
        module = "" if _called_by_pytorch() else _forward_around()
        if module and bool(mode) is not torch.are_deterministic_algorithms_enabled():
            self.toggled(_line(), module, bool(mode))

    def _seed(self, *args: Any, **kwargs: Any) -> None:
        self._seeded = self._seeded or not _called_by_pytorch()

    def toggled(self, line: str, module: str, value: bool) -> None:
        """The flag takes another value in the forward of a module, or, for "", in a compiled function before a line."""
        self._toggled[line, module, value] = None

    def eager_attention(self) -> Iterator[Seen]:
        """Attention with gradients that ran in eager mode under deterministic algorithms, line by line."""
        for line, around in self._eager:
            what = f"the attention at {line} ran in eager mode{around}: dash_inductor did not see it"
            advice = "Compile what calls it: torch.compile(model)."
            if around:
                advice = "Let it be compiled with the rest: TORCH_LOGS=graph_breaks names what breaks a graph, and why."
            yield WARNING, what, advice

    def flag_inside_a_forward(self) -> Iterator[Seen]:
        """Whether deterministic algorithms are switched while a forward runs."""
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
        """Whether random numbers are the same in every run."""
        if self._drawn and not self._seeded:
            what = f"{self._name} draws random numbers and seeds no generator: they are others in every run"
            yield WARNING, what, "Call torch.manual_seed(0) before the model is made and the data are read."


def original(function: Any) -> Any:
    """The function that a program would call if nobody looked."""
    return getattr(function, _LOOKS, function)


def _looked_at(function: Callable[..., Any], look: Callable[..., None]) -> Callable[..., Any]:
    """The same function, whose eager calls are looked at; in compiled code it is the function itself."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            look(*args, **kwargs)
        return function(*args, **kwargs)

    looking: Any = call
    setattr(looking, _LOOKS, function)
    # Dynamo compiles no call of eager code on its own; into what it compiles it is inlined.
    skip_code(looking.__code__)
    return call


def _let_dynamo_know_the_originals() -> None:
    """Let Dynamo find the functions of PyTorch that it treats by rules of their own, under the names that they have."""
    torch.compile(torch.sin, backend="eager")(torch.ones(1))


def _frames() -> Iterator[types.FrameType]:
    """The frames of the program and of libraries, from the innermost outwards, without those of the doctor."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame
        frame = frame.f_back


def _called_by_pytorch() -> bool:
    """Whether PyTorch itself calls a function, for example to put back what it has found."""
    return next(_frames()).f_code.co_filename.startswith(_LIBRARIES)


def _line() -> str:
    """``file:line`` of what called a function of PyTorch, outside of PyTorch."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if not file.startswith(("<", *_LIBRARIES)):
            return f"{file}:{frame.f_lineno}"
    return "an unknown line"


def _compiled_around() -> str:
    """Why a call in a compiled program is an eager one; "" where no compiled function runs."""
    for frame in _frames():
        if frame.f_code.co_filename == eval_frame.__file__:
            disabled = isinstance(frame.f_locals.get("self"), eval_frame.DisableContext)
            return ", inside torch._dynamo.disable" if disabled else ", behind a graph break of a compiled function"
    return ""


def _forward_around() -> str:
    """The class of the module whose forward runs; "" where none does."""
    for frame in _frames():
        if frame.f_code.co_filename == nn.modules.module.__file__ and frame.f_code.co_name == "_call_impl":
            return type(frame.f_locals["self"]).__name__
    return ""


class _Generators:
    """PyTorch's own generators of random numbers, as they were."""

    def __init__(self) -> None:
        self._seed, self._state = torch.initial_seed(), torch.get_rng_state()

    def drew_without_a_seed(self) -> bool:
        """Whether one has drawn since then that nobody has seeded."""
        if torch.initial_seed() == self._seed:
            return not torch.equal(torch.get_rng_state(), self._state) or any(_offsets())
        return False


def _offsets() -> Iterator[int]:
    """How far the generators of the GPUs that the program uses have come."""
    if torch.cuda.is_initialized():
        yield from (generator.get_offset() for generator in torch.cuda.default_generators)
