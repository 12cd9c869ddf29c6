"""Digests of many tensors: leaves are lanes of the recorder's hash, roots stand for all leaves of a class and stage.

A root is BLAKE2b over the names, and over the lanes of its leaves, as they lie in memory: one call, whatever their
number.
Only if roots of ranks differ, nodes along the module path are computed: a node is BLAKE2b over its children.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..fingerprints.arriving import Arriving as Arriving
from ..fingerprints.fingerprint import digest
from ..shared.roots import WHICH

ROOT = 8
"""Bytes of a root, and of a node."""

STEPS = 64
"""Steps whose leaves a rank keeps."""

_AT_ONCE = 200  # leaves or nodes of an answer: with names of 100 characters 30 KB
_LENGTH = 200  # characters of a name in an answer
_LANES = 16  # bytes


@dataclass(frozen=True)
class Labels:
    """What leaves are of, in the order of their observation.

    Attributes:
        names: along module paths, such as ``blocks.0.attn.q.weight exp_avg``.
        descriptions: dtype and shape of each.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]

    def digest(self) -> str:
        """`WHICH` digits."""
        hashed = hashlib.blake2b("\0".join(self.names).encode(), digest_size=WHICH // 2)
        hashed.update("\0".join(("", *self.descriptions)).encode())
        return hashed.hexdigest()


@dataclass(frozen=True)
class Leaves:
    """Lanes of some tensors, 16 bytes of each."""

    labels: Labels
    lanes: bytes

    @classmethod
    def of(cls, rows: Sequence[tuple[str, str, bytes]]) -> Leaves:
        """Leaves by name, description and lanes of each."""
        names, descriptions, lanes = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(Labels(names, descriptions), b"".join(lanes))

    def which(self) -> int:
        """The first six digits of the root as a number; this one and the next are of 64 bits with a sign."""
        return int(self.labels.digest(), 16)

    def number(self) -> int:
        """The root without its first six digits."""
        return _signed(hashlib.blake2b(self.lanes, digest_size=ROOT).digest())

    def numbers(self) -> list[int]:
        """One for each leaf."""
        return [_signed(bytes.fromhex(self._leaf(number))) for number in range(len(self.labels.names))]

    def root(self) -> str:
        """Six digits of all names, dtypes and shapes, then sixteen of all lanes."""
        return self.labels.digest() + hashlib.blake2b(self.lanes, digest_size=ROOT).hexdigest()

    def below(self, path: str) -> dict[str, str]:
        """Digests of the leaves below a path if they are few, else of its children, in order; at most some hundred.

        Args:
            path: "" for all; what is below ``blocks.0`` has names that begin with ``blocks.0.``.
        """
        start = f"{path}." if path else ""
        inside = [number for number, name in enumerate(self.labels.names) if name.startswith(start)]
        if len(inside) <= _AT_ONCE:
            return {self.labels.names[number][:_LENGTH]: self._leaf(number) for number in inside}
        children: dict[str, list[int]] = {}
        for number in inside:
            child, dot, _ = self.labels.names[number][len(start) :].partition(".")
            children.setdefault(f"{start}{child}{dot}", []).append(number)
        if len(children) == 1 and (only := next(iter(children))).endswith("."):
            return self.below(only[:-1])
        found = {}
        for child, numbers in list(children.items())[:_AT_ONCE]:
            hashed = hashlib.blake2b(digest_size=ROOT)
            for number in numbers:
                hashed.update(f"{self.labels.names[number]}\0{self._leaf(number)}\0".encode())
            found[child[:_LENGTH]] = hashed.hexdigest() if child.endswith(".") else self._leaf(numbers[0])
        return found

    def _leaf(self, number: int) -> str:
        raw = self.lanes[_LANES * number : _LANES * (number + 1)]
        low, high = (int.from_bytes(raw[half : half + 8], "little", signed=True) for half in (0, 8))
        return digest(low, high, self.labels.descriptions[number]).hex()[: 2 * ROOT]


def _signed(content: bytes) -> int:
    return int.from_bytes(content[:8], "little", signed=True)


def short(content: bytes) -> str:
    """A digest of a root's length."""
    return hashlib.blake2b(content, digest_size=ROOT).hexdigest()


class Ring:
    """What belongs to the last steps."""

    def __init__(self) -> None:
        self._steps: OrderedDict[int, dict[Any, Any]] = OrderedDict()

    def of(self, step: int) -> dict[Any, Any]:
        """What is kept of a step; empty at first."""
        if step not in self._steps:
            self._steps[step] = {}
            while len(self._steps) > STEPS:
                self._steps.popitem(last=False)
        return self._steps[step]

    def get(self, step: int, key: Any) -> Any:
        """None if it is not kept (any more)."""
        return self._steps.get(step, {}).get(key)


class Queue:
    """What is to be done when numbers have arrived, in the order in which they were sent."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Sequence[Arriving], Callable[[], None]]] = deque()

    def put(self, arriving: Sequence[Arriving], then: Callable[[], None]) -> None:
        """Do something as soon as all of this has arrived."""
        self._waiting.append((arriving, then))

    def poll(self, wait: bool = False) -> None:
        """Do what can be done now; with `wait`, all of it, and wait for devices."""
        while self._waiting and (wait or all(each.here() for each in self._waiting[0][0])):
            self._waiting.popleft()[1]()
