"""The first step of a program is run again: what differs is named, and the program computes what it does without."""

from __future__ import annotations

import json
import random
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dash_inductor import cli

OPENING = """
import sys, time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.use_deterministic_algorithms(True)
torch.manual_seed(0)

class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        return g + time.perf_counter_ns() % 1009 + 1

class Early(Late):
    @staticmethod
    def forward(ctx, x):
        return x + time.perf_counter_ns() % 1009 + 1
    @staticmethod
    def backward(ctx, g):
        return g

class Noise(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
    def forward(self, x):
        return self.function.apply(x)

def train(model, *args, steps=3, **kwargs):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        result = model(*args, **kwargs)
        (result[0] if isinstance(result, tuple) else result).square().sum().backward()
        optimizer.step()
    return [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]

X = torch.randn(8, 4)
"""

CLOSING = """
torch.save([*RESULT, torch.rand(3)], sys.argv[1])
"""


@pytest.fixture(autouse=True)
def flag_as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str, opening: str = OPENING
) -> dict[str, list[str]]:
    """What the doctor says of two runs of a program, by severity; the program's results are what they are without."""
    script = tmp_path / "train.py"
    script.write_text(opening + program + (CLOSING if "RESULT" in program else ""))
    results = [tmp_path / "with", tmp_path / "without"]
    cli.main(["doctor", "--json", "--stop-after", "0", str(script), str(results[0])])
    document = json.loads(capsys.readouterr().out)
    if "raise" not in program:
        assert [one["what"] for one in document["findings"] if one["check"] == "program"] == []  # it ran to its end
    if "RESULT" in program:
        torch.use_deterministic_algorithms(False)
        argv, sys.argv = sys.argv, [str(script), str(results[1])]
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            sys.argv = argv
        ours, plain = (torch.load(path, weights_only=False) for path in results)
        assert len(ours) == len(plain)
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    said: dict[str, list[str]] = {}
    for one in document["findings"]:
        if one["check"] == "two_runs":
            said.setdefault(one["severity"], []).append(one["what"])
    return said


EQUAL = {
    "linear": ("RESULT = train(nn.Linear(4, 4), X)", "Linear"),
    "dropout and batch norm": (
        "RESULT = train(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.BatchNorm1d(4)), X)",
        "Sequential",
    ),
    "spectral norm": (
        "RESULT = train(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), X)",
        "ParametrizedLinear",
    ),
    "a parameter that a forward writes": (
        """
class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.mean = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4), requires_grad=False)
    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0))
            self.weight.data.add_(0.25)
        return x * self.weight - self.mean
RESULT = train(Writes(), X)
""",
        "Writes",
    ),
    "a counter and a list": (
        """
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.calls, self.seen = nn.Parameter(torch.ones(4)), 0, []
    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        return x * self.weight * len(self.seen)
model = Counts()
RESULT = train(model, X)
assert model.seen == [1, 2, 3]
""",
        "Counts",
    ),
    "names and tuples": (
        """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x, *, scale, options):
        return self.layer(x) * scale * options["factor"], {"x": x}
RESULT = train(Both(), X, scale=torch.tensor(2.0), options={"factor": 3})
""",
        "Both",
    ),
    "a written input": (
        """
class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        return self.layer(x.add_(1))
model, first = Writes(), nn.Linear(4, 4)
optimizer = torch.optim.SGD([*model.parameters(), *first.parameters()], 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(first(X)).square().sum().backward()
    optimizer.step()
RESULT = [*model.parameters(), *first.parameters(), X]
""",
        "Linear, Writes",
    ),
    "an object as argument": (
        """
class Box:
    def __init__(self, x):
        self.x, self.reads = x, 0
class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, box):
        box.reads += 1
        return self.layer(box.x) * box.reads
box = Box(X)
RESULT = [*train(Reads(), box), torch.tensor(box.reads)]
assert box.reads == 3
""",
        "Reads",
    ),
    "encoder, head and loss": (
        """
encoder, head, loss = nn.Linear(4, 8), nn.Linear(8, 4), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], 0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss(head(encoder(X).relu()), torch.arange(8) % 4).backward()
    optimizer.step()
RESULT = [*encoder.parameters(), *head.parameters()]
""",
        "Linear, CrossEntropyLoss",
    ),
    "one module twice": (
        """
model = nn.Linear(4, 4)
(model(X) - model(X * 2)).square().sum().backward()
RESULT = [model.weight.grad, model.bias.grad]
""",
        "Linear",
    ),
    "accumulation": (
        """
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    model(X * step).square().sum().backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
RESULT = list(model.parameters())
""",
        "Sequential",
    ),
    "an optimizer in the backward": (
        """
model = nn.Linear(4, 4)
optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
def update(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)
for _ in range(2):
    model(X).square().sum().backward()
RESULT = list(model.parameters())
""",
        "Linear",
    ),
    "checkpoint": (
        """
class Model(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layers, self.reentrant = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), reentrant
    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)
RESULT = [*train(Model(False), X), *train(Model(True), X.clone().requires_grad_())]
""",
        "Model",
    ),
    "compiled": ("RESULT = train(torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3))), X)", "Sequential"),
    "compiled, with a result that is not used": (
        """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        y = self.layer(x)
        return y.exp(), y.tanh()
RESULT = train(torch.compile(Two()), X)
""",
        "Two",
    ),
    "compiled part": (
        "RESULT = train(nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4)), nn.Dropout(0.3)), X)",
        "Sequential",
    ),
    "autocast": (
        """
model = nn.Linear(4, 4)
with torch.autocast("cpu", torch.bfloat16):
    result = model(X)
result.float().square().sum().backward()
RESULT = [model.weight.grad]
""",
        "Linear",
    ),
    "a closure": (
        """
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
def closure():
    optimizer.zero_grad()
    loss = model(X).square().sum()
    loss.backward()
    return loss
optimizer.step(closure)
RESULT = list(model.parameters())
""",
        "Sequential",
    ),
    "gradients without a backward": (
        """
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    for p, g in zip(model.parameters(), torch.autograd.grad(model(X).square().sum(), list(model.parameters()))):
        p.grad = g
    optimizer.step()
RESULT = list(model.parameters())
""",
        "Linear",
    ),
    "gradients of gradients": (
        """
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
X.requires_grad_()
(slope,) = torch.autograd.grad(model(X).sum(), X, create_graph=True)
slope.square().sum().backward()
RESULT = [p.grad for p in model.parameters() if p.grad is not None]
""",
        "Sequential",
    ),
    "a written result, a scaler and clipping": (
        """
model = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 4))
optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
for _ in range(3):
    optimizer.zero_grad()
    result = model(X)
    result.mul_(2)
    scaler.scale(result.square().sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
RESULT = list(model.parameters())
""",
        "Sequential",
    ),
    "lazy, after its first call": (
        """
model = nn.LazyLinear(4)
for _ in range(2):
    model(X).square().sum().backward()
RESULT = [model.weight.grad]
""",
        "Linear",
    ),
    "traced, transformed and without data before": (
        """
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
model = nn.Linear(4, 4)
with FakeTensorMode():
    nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
with torch.device("meta"):
    nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
make_fx(lambda x: model(x).sin())(X)
torch.vmap(model)(X)
torch.func.grad(lambda p: torch.func.functional_call(model, p, (X,)).sum())(dict(model.named_parameters()))
RESULT = train(model, X)
""",
        "Linear",
    ),
    "one tensor twice": (
        """
class Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x, *, labels):
        if x is not labels:
            raise ValueError("two tensors")
        labels.add_(1)
        return self.layer(x)
RESULT = train(Once(), X, labels=X)
""",
        "Once",
    ),
    "one tensor with a gradient twice": (
        """
class Once(nn.Module):
    def forward(self, x, y):
        if x is not y:
            raise ValueError("two tensors")
        return x * y
model, once = nn.Linear(4, 4), Once()
for _ in range(2):
    x = model(X)
    once(x, x).sum().backward()
RESULT = [model.weight.grad]
""",
        "Linear, Once",
    ),
    "evaluation first": (
        """
model = nn.Linear(4, 4)
with torch.no_grad():
    model(X)
RESULT = train(model, X)
""",
        "Linear",
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_deterministic_is_equal(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, names = EQUAL[name]
    said = found(tmp_path, capsys, program)
    assert list(said) == ["ok"], said
    assert f"give equal bits: {names} (" in said["ok"][0]


COMPILED = "a compiled module"
DIFFERENT = {
    "forward": (
        "RESULT = train(nn.Sequential(nn.Linear(4, 4), Noise(Early), nn.Linear(4, 4)), X)",
        "the output of Sequential.1 (Noise) differs, and everything before it is equal. The operator add",
    ),
    "backward": (
        "train(nn.Sequential(nn.Linear(4, 4), Noise(Late), nn.Linear(4, 4)), X)",
        "differs: it comes out of the backward of Sequential.1 (Noise), whose own gradient is equal, or of what is",
    ),
    "a parameter's gradient": (
        """
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
    def forward(self, x):
        return x * Late.apply(self.scale)
train(nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 4)), X)
""",
        "the gradient of the parameter scale of Sequential.1 (Scale) differs",
    ),
    "the head of two": (
        """
first, head = nn.Linear(4, 4), nn.Sequential(Noise(Late))
head(first(X)).square().sum().backward()
""",
        "Sequential from the same state differ: all outputs are equal, and the gradient of input 1 of Sequential",
    ),
    "state outside of modules": (
        """
import ctypes
calls = ctypes.c_int(0)  # whose value is not put back
class Counts(nn.Module):
    def forward(self, x):
        calls.value += 1
        return x * calls.value
train(nn.Sequential(nn.Linear(4, 4), Counts()), X)
""",
        "the output of Sequential.1 (Counts) differs",
    ),
    "compiled": (
        """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.last(noise(self.first(x)))
@torch.compiler.disable
def noise(x):
    return Late.apply(x)
train(torch.compile(Model()), X)
""",
        "of Model.first (Linear) differs",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_is_not_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, words = DIFFERENT[name]
    (what,) = found(tmp_path, capsys, program.replace("RESULT = ", ""))["warning"]
    assert words in what
    if name == "compiled":
        assert "or state that the program keeps outside of modules" in what
    else:
        assert "is given something else, which no operator of PyTorch has computed" in what


UNKNOWN = {
    "lazy": ("nn.LazyLinear(4)(X).sum().backward()", "it makes its parameters in its first call"),
    "a generator": (
        """
class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
    def forward(self, x, generator):
        return self.weight * torch.rand(4, generator=generator)
train(Draws(), X, torch.Generator())
""",
        "an argument of type Generator, which cannot be copied",
    ),
    "a second call that raises": (
        """
import ctypes
calls = ctypes.c_int(0)  # whose value is not put back
class Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
    def forward(self, x):
        calls.value += 1
        if calls.value == 2:
            raise ValueError("only once")
        return x * self.weight
Once()(X).sum().backward()
""",
        "ValueError: only once",
    ),
    "numpy": (
        """
import numpy
generator = numpy.random.default_rng()
class Jitter(nn.Module):
    def forward(self, x):
        return x * generator.random()
train(nn.Sequential(nn.Linear(4, 4), Jitter()), X)
""",
        "its forward may draw from a generator of NumPy",
    ),
    "a function": ("weight = torch.ones(4, requires_grad=True)\n(X * weight).sum().backward()", "no module"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_run_again_is_said(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, words = UNKNOWN[name]
    said = found(tmp_path, capsys, program)
    assert list(said) == ["note"], said
    assert words in said["note"][0]


@pytest.mark.parametrize(
    "program",
    ["nn.Linear(4, 4)(X)\nraise ValueError('before the backward')", "print(X)", "nn.Linear(4, 4)(X).detach()"],
)
def test_a_program_without_a_backward_has_no_runs(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert found(tmp_path, capsys, program) == {}


def test_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(OPENING + "Noise(Early)(X.requires_grad_()).sum().backward()")
    for words, expected in ((["--once"], False), ([], True)):
        cli.main(["doctor", "--json", *words, str(script)])
        checks = {one["check"] for one in json.loads(capsys.readouterr().out)["findings"]}
        assert ("two_runs" in checks) is expected


def test_random_numbers_of_python_are_put_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = """
import random
random.seed(0)
class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        return self.layer(x) * random.random()
RESULT = [*train(Drops(), X), torch.tensor(random.random())]
"""
    state = random.getstate()
    assert list(found(tmp_path, capsys, program)) == ["ok"]
    random.setstate(state)


def test_the_flag_is_what_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = """
seen = []
class Looks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return x * 2
    @staticmethod
    def backward(ctx, g):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return g * 2
loss = Noise(Looks)(X.requires_grad_()).sum()
torch.use_deterministic_algorithms(False)
loss.backward()
assert seen == [True, False] * (len(seen) // 2) and len(seen) > 4
assert not torch.are_deterministic_algorithms_enabled()
"""
    assert list(found(tmp_path, capsys, program)) == ["ok"]


def test_a_repetition_begins_with_the_state_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = """
import os
reads, writes = os.pipe()  # what is written is not taken back
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(4)), 0
        self.register_buffer("total", torch.zeros(()))
    def forward(self, x):
        self.calls += 1
        self.total += 1
        os.write(writes, b"%r," % ((self.calls, int(self.total), float(self.weight.detach()[0])),))
        return x * self.weight
model = Counts()
optimizer = torch.optim.SGD(model.parameters(), 0.5)
for _ in range(2):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
first = (1, 1, 1.0)
seen = list(eval(os.read(reads, 1 << 16)))
assert seen == [first] * (len(seen) - 1) + [(2, 2, 0.5)] and len(seen) > 3, seen
"""
    assert list(found(tmp_path, capsys, program)) == ["ok"]
