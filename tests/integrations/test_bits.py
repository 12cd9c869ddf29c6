"""Hashes of values, files of hashes, and the pytest plugin in a project that has nothing but this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dash_inductor.errors import ArgumentError, DashError
from dash_inductor.integrations import bits as module
from dash_inductor.integrations.bits import BitsDiffer, BitsFile, hashes

from ..support.processes import HANGS

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int64,
    torch.uint8, torch.bool,
]  # fmt: skip


def one(value: object) -> str:
    ((name, found),) = hashes("x", value)
    assert name == "x"
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    value = torch.arange(24).reshape(4, 6).to(dtype)
    base = one(value)
    for place in range(value.numel() * value.element_size()):
        other = value.clone()
        other.reshape(-1).view(torch.uint8)[place] ^= 1
        assert one(other) != base
    assert one(value.reshape(6, 4)) != base
    assert one(value.reshape(-1)) != base


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_and_gradients_do_not_count(dtype: torch.dtype) -> None:
    value = torch.arange(24).reshape(4, 6).to(dtype)
    wide = torch.zeros(4, 12).to(dtype)
    wide[:, ::2] = value
    equal = [value.t().contiguous().t(), wide[:, ::2], nn.Parameter(value, requires_grad=False)]
    if dtype.is_floating_point and dtype.itemsize > 1:
        equal += [value.clone().requires_grad_(), value.clone().requires_grad_() * 1]
    if dtype.is_complex:
        equal.append(value.conj().resolve_conj().conj())
    assert {one(each) for each in equal} == {one(value)}


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1, 1.0), (True, 1), (None, "None"), (1, "1"), (0.1, 0.1 + 2e-17)])
def test_numbers_that_are_equal_and_others(a: object, b: object) -> None:
    assert (one(a) == one(b)) is (isinstance(a, float) and str(a) == str(b))
    assert one(a) == one(a)


def test_dtypes_are_told_apart_where_bytes_are_equal() -> None:
    zeros = {str(dtype): one(torch.zeros(8, dtype=dtype)) for dtype in DTYPES}
    assert len(set(zeros.values())) == len(DTYPES)
    assert one(torch.zeros(0)) != one(torch.zeros(0, 3))


def test_parts_have_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    names = [name for name, _ in hashes("a", {"m": model, "o": optimizer, "l": [1, (2.0, None)]})]
    assert names[:3] == ["a.m.0.weight", "a.m.0.bias", "a.m.1.weight"]
    assert "a.m.1.running_mean" in names
    assert "a.o.0.momentum_buffer" in names
    assert names[-3:] == ["a.l.0", "a.l.1.0", "a.l.1.1"]


@pytest.mark.parametrize(
    "value",
    [
        *(object(), torch.eye(3).to_sparse(), torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), {1}),
        torch.ones(2, device="meta"),
    ],
)
def test_what_cannot_be_hashed_is_named(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"^x\.0="):
        list(hashes("x", [value]))


def test_what_is_empty_counts() -> None:
    every = [list(hashes("x", value)) for value in ([], [[]], [[], []], {"a": []}, None, torch.zeros(0))]
    assert len({str(found) for found in every}) == len(every)


@pytest.mark.parametrize("values", [{"x": {1: 2, "1": 3}}, {"x": {"a.b": 1, "a": {"b": 2}}}], ids=str)
def test_values_of_one_name_are_refused(values: dict[str, Any]) -> None:
    """One of them would be lost."""
    with pytest.raises(ArgumentError, match="two values with the name x"):
        bits_of(values)


def bits_of(*steps: dict[str, Any]) -> module.Bits:
    found = module.Bits()
    for step in steps:
        found.step(**step)
    return found


STEPS = [{"loss": 1.0, "w": torch.ones(2)}, {"loss": 0.5, "w": torch.zeros(2)}]


@pytest.mark.parametrize(
    ("steps", "first", "more"),
    [
        ([STEPS[0], {"loss": 0.25, "w": torch.zeros(2)}], "step 1: loss", ""),
        ([STEPS[0], {"loss": 0.25, "w": torch.ones(2)}], "step 1: loss", ", and 1 of 4 values after it"),
        ([{"loss": 1.0, "w": torch.ones(3)}, STEPS[1]], "step 0: w", ""),
        (STEPS[:1], "step 1: loss", ", and 1 of 4 values after it"),
        ([*STEPS, {"end": 1}], "step 2: end", ""),
        ([{"loss": 1.0, "v": torch.ones(2)}, STEPS[1]], "step 0: w", ", and 1 of 5 values after it"),
    ],
)
def test_the_first_difference_is_named(steps: list[dict[str, Any]], first: str, more: str, tmp_path: Path) -> None:
    file = BitsFile(tmp_path / "bits" / "x.json")
    file.write("test", bits_of(*STEPS))
    file.compare("test", bits_of(*STEPS))
    with pytest.raises(BitsDiffer) as raised:
        file.compare("test", bits_of(*steps))
    assert str(raised.value).startswith(f"{first} differs from {file.path}{more}\n")


CPU, GPU = torch.ones(2), torch.zeros(2)
COMPUTED: list[tuple[dict[str, Any], bool]] = [
    ({"w": GPU}, False),
    ({"w": CPU}, True),
    ({"w": GPU, "loss": CPU}, True),
    ({"state": {"exp_avg": GPU, "step": CPU}}, False),
    ({"loss": 0.5, "w": []}, False),
    ({"a": {"b": [CPU]}}, True),
]
"""Values of a step, and whether the CPU has computed one of them."""


@pytest.mark.parametrize(("values", "of_cpu"), COMPUTED)
@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_cpu_counts_where_it_computes(
    values: dict[str, Any], of_cpu: bool, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what a GPU computes has one environment on all hosts; without a GPU it always counts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(module.arch, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(module, "_device_type", lambda tensor: "cuda" if tensor is GPU else "cpu")
    found = bits_of({"first": GPU}, values, {"last": GPU}).environment()
    assert ("cpu" in found) is (of_cpu or not has_gpu)
    assert ("gpu" in found) is has_gpu
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda of=capability: of)
        named = bits_of(values).environment().get("cpu", "")
        assert named.startswith(f"{capability}, ") is ("cpu" in found)


@pytest.mark.parametrize("name", [*module.environment(), "numerics keys"])
def test_environments_are_kept_apart(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its bits; where they are missing, the message says what differs from the nearest that is there."""
    file, here = BitsFile(tmp_path / "x.json"), bits_of(STEPS[0]).environment()
    file.write("test", bits_of(*STEPS))
    monkeypatch.setattr(module.Bits, "environment", lambda self: {**here, name: "another"})
    with pytest.raises(BitsDiffer, match=f"no bits of test for this environment.*{name} .*, here 'another'"):
        file.compare("test", bits_of(*STEPS))
    file.compare("test", bits_of(STEPS[1]), missing="pass")
    file.write("test", bits_of(STEPS[1]))
    file.compare("test", bits_of(STEPS[1]))
    monkeypatch.undo()
    file.compare("test", bits_of(*STEPS))


@pytest.mark.parametrize("content", ["{", "[]", '{"tests": {}}', '{"format": 99, "tests": {}}'])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    file = BitsFile(tmp_path / "x.json")
    file.path.write_text(content)
    for act in (file.compare, file.write):
        with pytest.raises(DashError, match=r"x\.json (is no file of bits|has format)"):
            act("test", bits_of(*STEPS))
    assert file.path.read_text() == content


def test_writers_of_one_file_lose_nothing(tmp_path: Path) -> None:
    file = BitsFile(tmp_path / "x.json")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: file.write(f"test {number}", bits_of({"x": number})), range(40)))
    assert len(json.loads(file.path.read_text())["tests"]) == 40
    for number in range(40):
        file.compare(f"test {number}", bits_of({"x": number}))


PROJECT = """
import os, pytest, torch

@pytest.fixture(params=[1, 2])
def scale(request):
    return request.param

def test_training(bits, scale):
    assert torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(0)
    w = torch.ones(2, requires_grad=True)
    for step in range(2):
        loss = (w * scale + float(os.environ.get("CHANGE", 0)) * step).sum()
        bits.step(loss=loss, w=w)

class TestOther:
    def test_no_bits(self):
        assert not torch.are_deterministic_algorithms_enabled()
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    def run(*words: str, project: str = PROJECT, **variables: str) -> tuple[int, str]:
        (tmp_path / "test_it.py").write_text(project)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True, timeout=HANGS
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_plugin(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    status, out = run()
    assert (status, "2 failed, 1 passed" in out) == (1, True)
    assert "test_it.json has no bits of test_training[1] for this environment" in out
    assert run("-o", "bits_missing=pass")[0] == 0
    assert not (tmp_path / "bits").exists()
    assert run("--update-bits", "-n", "2")[0] == 0
    assert run()[0] == run("-k", "training and 2")[0] == 0
    status, out = run(CHANGE="1e-6")
    assert (status, "2 failed" in out, out.count("step 1: loss differs from"), "During" in out) == (1, True, 4, False)
    assert run("--update-bits", CHANGE="1e-6")[0] == run(CHANGE="1e-6")[0] == 0
    assert run()[0] == 1


@pytest.mark.parametrize("broken", ["file", "folder"])
@pytest.mark.parametrize("words", [(), ("--update-bits",)], ids=["compare", "update"])
def test_a_file_that_is_none(
    words: tuple[str, ...], broken: str, run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    """The test fails in one line, without a traceback through the plugin."""
    if broken == "file":
        (tmp_path / "bits").mkdir()
        (tmp_path / "bits" / "test_it.json").write_text("{")
    else:
        (tmp_path / "bits" / "test_it.json").mkdir(parents=True)
    status, out = run(*words, project="def test_it(bits): bits.step(x=1)")
    expected = "is no file of bits: " if broken == "file" else "test_it.json cannot be read or written: Is a directory"
    assert (status, expected in out, "Error:" in out.replace("JSONDecodeError:", ""), "bits.py" in out) == (
        1,
        True,
        False,
        False,
    )


def test_a_test_without_a_step_fails(run: Callable[..., tuple[int, str]]) -> None:
    status, out = run(project="def test_it(bits): pass")
    assert (status, "never calls bits.step" in out) == (1, True)


WAYS = """
import os, pytest

VALUE = os.environ["VALUE"]

def test_that_asks_for_it(request):
    request.getfixturevalue("bits").step(x=VALUE)

@pytest.fixture
def own(bits):
    bits.step(x=VALUE)

def test_of_a_fixture(own): pass

class TestMethod:
    def test_it(self, bits):
        bits.step(x=VALUE)

class TestOther:
    @pytest.fixture
    def bits(self, bits):
        return bits.step

    def test_it(self, bits):
        bits(x=VALUE)
"""


def test_ways_to_the_fixture(run: Callable[..., tuple[int, str]]) -> None:
    """Bits are compared however a test has come to the fixture."""
    assert run("--update-bits", project=WAYS, VALUE="1")[0] == run(project=WAYS, VALUE="1")[0] == 0
    status, out = run(project=WAYS, VALUE="2")
    assert (status, "4 failed" in out, out.count("step 0: x differs from") >= 4) == (1, True, True)


NOT_COMPARED = """
import pytest, unittest

@pytest.mark.usefixtures("bits")
class T(unittest.TestCase):
    def test_it(self): pass

def it():
    '''
    >>> getfixture("bits").step(x=1)
    '''

@pytest.fixture
def own(bits):
    yield
    bits.step(x=2)

def test_it(bits, own):
    bits.step(x=1)
"""


def test_what_is_not_compared_is_an_error(run: Callable[..., tuple[int, str]]) -> None:
    """Bits of a doctest, of a unittest.TestCase, and of a step after the test."""
    status, out = run("--doctest-modules", "--update-bits", project=NOT_COMPARED)
    assert (status, "1 failed, 1 passed, 2 errors" in out, "is called after the test" in out) == (1, True, True)
    assert "test_it.py::T::test_it: the fixture `bits` is for tests that pytest calls itself" in out
    assert "test_it.py::test_it.it: the fixture `bits` is for tests that pytest calls itself" in out


def test_a_failing_test_writes_nothing(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    project = "def test_it(bits):\n    bits.step(x=1)\n    assert 0\n"
    assert run("--update-bits", project=project)[0] == 1
    assert not (tmp_path / "bits").exists()


def test_pytest_without_the_fixture_imports_no_torch(run: Callable[..., tuple[int, str]]) -> None:
    project = "import sys\ndef test_it(): assert 'torch' not in sys.modules\n"
    assert run(project=project)[0] == 0
