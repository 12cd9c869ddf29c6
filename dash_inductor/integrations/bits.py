"""Hashes of what a test computes, and the file that has those of an earlier run; see `pytest_plugin`.

A file has the results of several tests, each under the environments in which it has run: bits may differ between
architectures, versions and numerics keys, and are compared in equal environments alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, DashError
from ..planning.numerics import NUMERICS_VERSION
from ..records import records
from ..upstream import arch
from ..upstream.compat import triton_version

FORMAT = 1

Value = tuple[str, str]
"""The name and the hash of one value."""


class BitsDiffer(DashError, AssertionError):
    """Raised if hashes differ from those of a file, or if the file has none for this environment."""


def hashes(name: str, value: object) -> Iterator[Value]:
    """Yields the names and hashes of all tensors and numbers in a value.

    Args:
        name: the name of the value; the parts of a value have names such as ``model.layers.0.weight``.
        value: a dense tensor, a module (its parameters and buffers), an optimizer (its state), a mapping, list or tuple
            of values, or None, a bool, a number or a string.

    Raises:
        ArgumentError: the value is none of these.
    """
    for part, leaf in _leaves(name, value):
        yield part, _of_leaf(part, leaf)


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The parts of a value that have no parts, each with its name."""
    if isinstance(value, nn.Module):
        value = {**dict(value.named_parameters()), **dict(value.named_buffers())}
    elif isinstance(value, Optimizer):
        value = value.state_dict()["state"]
    if not isinstance(value, (Mapping, list, tuple)) or not value:
        yield name, value
        return
    for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(f"{name}.{key}", part)


def _of_leaf(name: str, value: object) -> str:
    if isinstance(value, Tensor):
        return _of_tensor(name, value)
    if isinstance(value, (Mapping, list, tuple)):
        return _digest(b"empty", b"")
    if isinstance(value, float):
        return _digest(b"float", struct.pack("<d", value))
    if value is None or isinstance(value, (bool, int, str)):
        return _digest(type(value).__name__.encode(), str(value).encode())
    allowed = "tensors, modules, optimizers, numbers, strings, and mappings and sequences of them"
    raise ArgumentError(name, type(value).__name__, allowed)


def _of_tensor(name: str, value: Tensor) -> str:
    is_plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    if not is_plain or value.is_quantized or value.is_meta:
        kind = f"{type(value).__name__} ({value.layout}, {value.device.type})"
        raise ArgumentError(name, kind, "a dense tensor of this rank alone")
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _digest(f"{value.dtype} {tuple(value.shape)}".encode(), plain.numpy().tobytes())


def _device_type(tensor: Tensor) -> str:
    return tensor.device.type


def _digest(kind: bytes, data: bytes) -> str:
    return hashlib.sha256(kind + b"\0" + data).hexdigest()[:32]


def environment(of_cpu: bool = False) -> dict[str, str]:
    """The names and values of what bits depend on besides the program: architecture, GPU or CPU, and versions.

    Args:
        of_cpu: whether the CPU has computed values, although there is a GPU.
    """
    cpu = {"cpu": f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"}
    found = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "triton": str(triton_version()),
        "dash_inductor numerics": str(NUMERICS_VERSION),
    }
    if torch.cuda.is_available():
        device = torch.device("cuda")
        gpu = {"arch": arch.arch_of(device), "gpu": torch.cuda.get_device_name(device)}
        return {**gpu, **(cpu if of_cpu else {}), **found}
    return {"arch": "cpu", **cpu, **found}


class Bits:
    """The hashes of the values that a test computes, step by step."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._steps = 0
        self._is_over = False
        self._of_cpu = False
        self._known = {id(graph): graph for graph in records.graphs()}  # a graph that is gone could share its id

    def step(self, **values: object) -> None:
        """Hashes the values of the next step, by name: ``bits.step(loss=loss, model=model)``.

        Args:
            values: what `hashes` takes.

        Raises:
            ArgumentError: a value that cannot be hashed, no value, or two whose names are the same, as those of
                ``{1: ..., "1": ...}``.
            DashError: the test has ended.
        """
        if self._is_over:
            raise DashError("bits.step(...) is called after the test, whose bits have been compared or written")
        if not values:
            raise ArgumentError("values", values, "at least one, by name")
        found = dict[str, str]()
        for name, value in values.items():
            leaves = list(_leaves(name, value))
            # An optimizer that steps on a GPU may count its steps on the CPU.
            self._of_cpu |= {_device_type(leaf) for _, leaf in leaves if isinstance(leaf, Tensor)} == {"cpu"}
            for part, leaf in leaves:
                if part in found:
                    raise ArgumentError("values", f"two values with the name {part}", "values with different names")
                found[part] = _of_leaf(part, leaf)
        self.values += [(f"step {self._steps}: {part}", digest) for part, digest in found.items()]
        self._steps += 1

    def end(self) -> None:
        """Makes every further step an error: its values would be in no file and in no comparison."""
        self._is_over = True

    def environment(self) -> dict[str, str]:
        """`environment`, and the numerics keys of attention that was compiled, or loaded from a cache, since then."""
        graphs = [graph for graph in records.graphs() if id(graph) not in self._known]
        keys = {site.plan.numerics_key for graph in graphs for site in graph.sites if site.plan is not None}
        return {**environment(self._of_cpu), "numerics keys": ", ".join(sorted(keys))}


@dataclass(frozen=True)
class BitsFile:
    """A JSON file with hashes of tests.

    Args:
        path: the file; it need not exist.
    """

    path: Path

    def write(self, test: str, bits: Bits) -> None:
        """Writes the hashes of a test for this environment, in place of those that are there; other tests are kept.

        Processes may write the same file at the same time.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            tests = self._read()
            here = {"environment": bits.environment(), "values": dict(bits.values)}
            others = [one for one in tests.get(test, []) if one["environment"] != here["environment"]]
            tests[test] = [*others, here]
            text = json.dumps({"format": FORMAT, "tests": dict(sorted(tests.items()))}, indent=1)
            self.path.write_text(f"{text}\n", encoding="utf-8")

    def compare(self, test: str, bits: Bits, missing: Literal["fail", "pass"] = "fail") -> None:
        """Compares the hashes of a test with those in the file for this environment.

        Args:
            missing: what happens if the file has none for this environment.

        Raises:
            BitsDiffer: they differ; the message names the first value that does.
        """
        here, stored = bits.environment(), self._read().get(test, [])
        of_here = next((one for one in stored if one["environment"] == here), None)
        if of_here is not None:
            self._compare(of_here["values"], dict(bits.values))
        elif missing == "fail":
            raise BitsDiffer(f"{self.path} has no bits of {test} for this environment. {_nearest(here, stored)}")

    def _compare(self, stored: dict[str, str], found: dict[str, str]) -> None:
        names = [*stored, *(name for name in found if name not in stored)]
        different = [name for name in names if stored.get(name) != found.get(name)]
        if not different:
            return
        first, more = different[0], f", and {len(different) - 1} of {len(names)} values after it" * (len(different) > 1)
        lines = [
            f"{first} differs from {self.path}{more}",
            f"  stored  {stored.get(first, 'nothing')}",
            f"  now     {found.get(first, 'nothing')}",
            "The environment is equal, with all versions and numerics keys. If the change is meant: --update-bits",
        ]
        raise BitsDiffer("\n".join(lines))

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        if not self.path.exists() or not self.path.stat().st_size:
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            version, tests = content["format"], content["tests"]
        except (KeyError, TypeError, ValueError) as error:
            raise DashError(f"{self.path} is no file of bits: {type(error).__name__}: {error}") from error
        if version != FORMAT:
            raise DashError(f"{self.path} has format {version!r}, not {FORMAT}: write it anew with --update-bits")
        return dict(tests)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.path.open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _nearest(here: dict[str, str], stored: list[dict[str, Any]]) -> str:
    """What differs between this environment and the one in the file that is most like it, in a sentence."""
    if not stored:
        return "It has none of any environment: --update-bits writes them"
    nearest = min((_differences(here, one["environment"]) for one in stored), key=len)
    return f"The nearest that it has differs in {'; '.join(nearest)}: --update-bits adds this one"


def _differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return [f"{name} {there.get(name)!r}, here {here.get(name)!r}" for name in names]
