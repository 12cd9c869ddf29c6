"""Errors on purpose, in one function of ours after another: a program must compile and run with PyTorch's numbers.

    python -m tests.passes.base.failing [part of a function's name ...]

throws in every function that the programs below call, at its first call and at a later one, and prints what goes wrong:
an error that reaches the program, other numbers, or no record.  The suite does the same with a sample.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dash_inductor
from dash_inductor.config import config
from dash_inductor.model.reasons import Reason
from dash_inductor.passes.ops import (
    index_sums,
    indices,
    known_masks,
    pad_mm,
    sorted_values,
    tied_embeddings,
    unrolled_reductions,
)
from dash_inductor.records.records import all_records, clear_sites

from ...support.graphs import partition_with

PACKAGES = ("frontends", "masks", "graph", "passes", "planning", "schedule", "records", "install")
OUTERMOST = ("install.installation.JointPass.apply", "graph.emit.erase_dead")
"""What Inductor calls, so that nothing of ours is around it; and what takes dead nodes away, which may stay."""
NOT_LOOKED_AT = ("records.profiles", "install.dynamo_backend", "install.precompile", "schedule.simulator")
"""Modules that do not run while a graph is compiled in this process."""


class Deliberate(Exception):
    """Thrown on purpose."""


@dataclass(frozen=True)
class Program:
    """A function with its inputs: a training step of it is run, or the forward if no input wants a gradient."""

    function: Callable[..., Tensor]
    inputs: Callable[[], list[Tensor]]


def _qkv(*more: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16), *more]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def _by_hand(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    k, v = (t[:, :, None].expand(2, 2, 2, 24, 16).reshape(2, 4, 24, 16) for t in (k, v))
    i = torch.arange(24)
    scores = torch.tanh(q @ k.mT / 16) * 4
    scores = scores.masked_fill((i[None] > i[:, None]) | (i[None] < i[:, None] - 9), -torch.inf)
    wide = torch.cat([scores, sinks[None, :, None, None].expand(2, -1, 24, 1)], -1)
    return wide.softmax(-1)[..., :-1] @ v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    i = torch.arange(24)
    documents = i // 10
    mask = (documents[None] == documents[:, None]) & (i[None] <= i[:, None])
    first = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return F.scaled_dot_product_attention(first, first, q, attn_mask=bias.expand(2, 4, 24, 24), dropout_p=0.0)


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    blocks = create_block_mask(lambda b, h, i, j: (j <= i) & (j > i - 7), None, None, 24, 24, device="cpu")
    found = flex_attention(q, k, v, lambda s, b, h, i, j: s + (j - i) * 0.1, block_mask=blocks, enable_gqa=True)
    assert isinstance(found, Tensor)
    return found


def _sums(x: Tensor, weight: Tensor) -> Tensor:
    index = torch.arange(160) * 7 % 40
    rows = x[index].sin() + F.embedding(index % 12, weight)
    return torch.zeros_like(x).index_add(0, index, rows).sin()


def _products(x: Tensor, weight: Tensor) -> Tensor:
    embedded = F.embedding(torch.arange(40) % 12, weight)
    return F.cross_entropy((x + embedded) @ weight.T, torch.arange(40) % 12, label_smoothing=0.1)


def _picked(x: Tensor) -> Tensor:
    order = torch.arange(40).flip(0)
    return x[order].sum(0).cos().sum() + x.median(1).values.sum()


def _sampled(x: Tensor, places: Tensor) -> Tensor:
    pooled = F.interpolate(x, size=(4, 4), mode="bilinear")
    return F.grid_sample(x, places.tanh(), align_corners=False).sum() + pooled.sin().sum()


def _tensors(*shapes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


PROGRAMS: dict[str, Program] = {
    "by hand": Program(_by_hand, lambda: _qkv((4,))),
    "sdpa": Program(_sdpa, lambda: _qkv((1, 4, 24, 24))),
    "flex": Program(_flex, lambda: [tensor.detach() for tensor in _qkv()]),  # it has no backward on the CPU
    "sums": Program(_sums, lambda: _tensors((40, 33), (12, 33))),
    "products": Program(_products, lambda: _tensors((40, 33), (12, 33))),
    "picked": Program(_picked, lambda: _tensors((40, 33))),
    "sampled": Program(_sampled, lambda: _tensors((1, 2, 8, 8), (1, 3, 3, 2))),
}


@dataclass
class Everywhere:
    """All functions of ours, each of which may throw.

    Attributes:
        names: of the functions.
        calls: how often each was called since `count`.
        target: the number of the function that throws, at its `turn`-th call.
    """

    names: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    target: int = -1
    turn: int = 1
    thrown: bool = False
    _originals: list[Any] = field(default_factory=list)

    def run(self, number: int, args: Any, kwargs: Any) -> Any:
        """Stands for a function, which throws only while a graph is compiled: kernels may fail as they do."""
        if not COMPILING:
            return self._originals[number](*args, **kwargs)
        self.calls[number] += 1
        if number == self.target and self.calls[number] == self.turn and not self.thrown:
            self.thrown = True
            raise Deliberate(self.names[number])
        return self._originals[number](*args, **kwargs)

    def begin(self, target: int = -1, turn: int = 1) -> None:
        """Count anew, and let a function throw."""
        self.calls, self.target, self.turn, self.thrown = [0] * len(self.names), target, turn, False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Put ourselves in front of every function: its code is another one inside of the block.

        Other modules, tables and classes may hold a function itself, so that another one under its name would not do.
        """
        changed: list[tuple[types.FunctionType, Any, Any]] = []
        try:
            for name, function in functions():
                original = types.FunctionType(
                    function.__code__, function.__globals__, function.__name__, function.__defaults__,
                    function.__closure__,
                )  # fmt: skip
                original.__kwdefaults__ = function.__kwdefaults__
                number = len(self.names)
                self.names.append(name)
                self._originals.append(original)
                changed.append((function, function.__code__, function.__defaults__))
                function.__globals__["__everywhere__"] = self
                function.__defaults__ = None
                function.__code__ = _code(number, function.__code__.co_freevars)
            self.begin()
            yield
        finally:
            for function, code, defaults in changed:
                function.__code__, function.__defaults__ = code, defaults
                function.__globals__.pop("__everywhere__", None)


def _code(number: int, free: tuple[str, ...]) -> types.CodeType:
    names = "".join(f"{name}, " for name in free)
    source = f"""
def make({names}):
    def stand_in(*args, **kwargs):
        if 0: ({names})
        return __everywhere__.run({number}, args, kwargs)
    return stand_in
"""
    space: dict[str, Any] = {}
    exec(source, space)
    code: types.CodeType = space["make"](*[None] * len(free)).__code__
    return code


def functions() -> Iterator[tuple[str, types.FunctionType]]:
    """The functions and methods of ours that run while a graph is compiled, by their names."""
    seen: set[int] = set()
    for package in PACKAGES:
        root = importlib.import_module(f"dash_inductor.{package}")
        infos = pkgutil.walk_packages(root.__path__, f"{root.__name__}.")
        for name in (root.__name__, *(info.name for info in infos)):
            if name.removeprefix("dash_inductor.") in NOT_LOOKED_AT:
                continue
            module = importlib.import_module(name)
            for path, function in _of(module, name):
                if function.__module__ == name and id(function) not in seen and "<" not in function.__code__.co_name:
                    seen.add(id(function))
                    if path.removeprefix("dash_inductor.") not in OUTERMOST:
                        yield path.removeprefix("dash_inductor."), function


def _of(owner: Any, path: str) -> Iterator[tuple[str, types.FunctionType]]:
    for name, value in list(vars(owner).items()):
        found = inner(value)
        if isinstance(found, types.FunctionType) and found.__code__.co_filename.endswith(".py"):
            yield f"{path}.{name}", found
        elif isinstance(value, type) and value.__module__ == getattr(owner, "__name__", None):
            yield from _of(value, f"{path}.{name}")


def inner(value: Any) -> Any:
    """The function behind decorators."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    value = getattr(value, "func", value)  # functools.cached_property
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


@contextlib.contextmanager
def everything_on_the_cpu() -> Iterator[None]:
    """Rewrites take small tensors of the CPU."""
    with contextlib.ExitStack() as stack:
        for module in (indices, index_sums, known_masks, pad_mm, unrolled_reductions, sorted_values):
            stack.enter_context(mock.patch.object(module, "DEVICES", ("cpu",)))
        for module, name, value in (
            (index_sums, "LEAST", 0), (tied_embeddings, "LEAST", 0), (unrolled_reductions, "LEAST", 0),
            (unrolled_reductions, "LEAST_COLUMNS", 1), (pad_mm, "LEAST_OPERATIONS", 0),
            (pad_mm, "OPERATIONS_PER_BYTE", 0),
            (pad_mm, "OF_AN_ODD_RESULT", 0), (pad_mm, "arch", _Arch),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(config.patch(cpu="reference"))
        yield


class _Arch:
    is_supported = staticmethod(lambda device: True)
    allow_tf32 = staticmethod(lambda device: True)


COMPILING: list[bool] = []
"""Not empty while a graph is compiled."""


def backend(module: Any, inputs: list[Any]) -> Any:
    """Inductor's passes and its partitioner, without its kernels."""
    COMPILING.append(True)
    try:
        return _PARTITION(module, inputs)
    finally:
        COMPILING.clear()


_PARTITION = partition_with(lambda graph: None)


def step(program: Program) -> list[Tensor]:
    """Output and gradients of a program that is compiled anew."""
    torch._dynamo.reset()
    clear_sites()
    inputs = program.inputs()
    output = torch.compile(program.function, backend=backend, fullgraph=True)(*inputs)
    if not output.requires_grad:
        return [output]
    grad_out = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad_out)]


def statuses() -> list[tuple[str, str]]:
    """What became of each place."""
    return [(record.name, record.status) for record in all_records()]


def wrong(expected: list[Tensor], usual: list[tuple[str, str]], program: Program, everywhere: Everywhere) -> str:
    """What goes wrong where a function throws; "" if nothing does.

    Args:
        expected: PyTorch's numbers.
        usual: what becomes of each place where nothing throws: an error that changes nothing needs no record.
    """
    try:
        found = step(program)
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    if not everywhere.thrown:
        return "was not called again"
    for ours, theirs in zip(found, expected, strict=True):
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4):
            return "other numbers"
    told = (Reason.INTERNAL_ERROR, Reason.COMPILE_FAILED)
    is_told = any(record.reason in told and "Deliberate" in record.detail for record in all_records())
    is_of_math = any(record.reason is Reason.MATH_PATH for record in all_records())  # the record that it has unread
    if statuses() != usual and not is_told and not is_of_math:
        return "no record"
    return ""


def plain(program: Program) -> list[Tensor]:
    """Output and gradients as PyTorch compiles it alone."""
    with dash_inductor.disabled():
        return step(program)


def failures(names: Sequence[str] = (), sample: int = 1) -> Iterator[tuple[str, str]]:
    """Throw in every function once or twice; the functions of which something goes wrong, and what.

    Args:
        names: parts of the names of functions; all without any.
        sample: of how many functions one is taken.
    """
    torch.use_deterministic_algorithms(True)
    everywhere, done = Everywhere(), set[int]()
    with everything_on_the_cpu():
        for program in PROGRAMS.values():  # what is done once in a process is done now
            step(program)
        with everywhere.watching():
            for title, program in PROGRAMS.items():
                everywhere.begin()
                expected = plain(program)
                everywhere.begin()
                step(program)
                calls, usual = list(everywhere.calls), statuses()
                for number, count in enumerate(calls):
                    name = everywhere.names[number]
                    asked = not names or any(part in name for part in names)
                    if not count or number in done or not asked:
                        continue
                    done.add(number)
                    if len(done) % sample:
                        continue
                    for turn in sorted({1, count // 2 + 1}):
                        everywhere.begin(number, turn)
                        found = wrong(expected, usual, program, everywhere)
                        everywhere.begin()
                        if found:
                            yield f"{name} ({title}, call {turn} of {count})", found


def main() -> None:
    found = 0
    for name, what in failures(sys.argv[1:]):
        found += 1
        print(f"{name}: {what}", flush=True)
    print(f"{found} go wrong")


if __name__ == "__main__":
    main()
