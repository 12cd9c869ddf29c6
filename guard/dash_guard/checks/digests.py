"""Digests of many tensors in a tree: a leaf is for one tensor, a root for one stage of one class of ranks.

A leaf is the tensor's lanes, the 128-bit fingerprint as two 64-bit numbers, as in recordings. A root is BLAKE2b of the
names, and of the lanes of all leaves as they lie in memory, in one call. If the roots of ranks differ, nodes along the
module path are computed as well: a node is BLAKE2b of its children.
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
"""Bytes of a root or a node."""

STEPS = 64
"""The number of last steps whose leaves a rank keeps."""

_AT_ONCE = 200  # leaves or nodes in an answer: 30 KB with names of 100 characters
_LENGTH = 200  # characters of a name in an answer
_LANES = 16  # bytes


@dataclass(frozen=True)
class Labels:
    """The names and descriptions of leaves, in the order in which the tensors were observed.

    Attributes:
        names: names along module paths, such as ``blocks.0.attn.q.weight exp_avg``.
        descriptions: dtype and shape of each tensor.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]

    def digest(self) -> str:
        """A digest of all names and descriptions, as `WHICH` hexadecimal digits."""
        hashed = hashlib.blake2b("\0".join(self.names).encode(), digest_size=WHICH // 2)
        hashed.update("\0".join(("", *self.descriptions)).encode())
        return hashed.hexdigest()


@dataclass(frozen=True)
class Leaves:
    """The fingerprints of some tensors.

    Attributes:
        labels: the names and descriptions of the tensors.
        lanes: their lanes, 16 bytes per tensor.
    """

    labels: Labels
    lanes: bytes

    @classmethod
    def of(cls, rows: Sequence[tuple[str, str, bytes]]) -> Leaves:
        """Makes leaves from rows of (name, description, lanes), with lanes of 16 bytes."""
        names, descriptions, lanes = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(Labels(names, descriptions), b"".join(lanes))

    def which(self) -> int:
        """The first six hexadecimal digits of the root, which identify the names and descriptions, as a number."""
        return int(self.labels.digest(), 16)

    def number(self) -> int:
        """A hash of all fingerprints, the last sixteen hexadecimal digits of the root, as a signed 64-bit number."""
        return _signed(hashlib.blake2b(self.lanes, digest_size=ROOT).digest())

    def numbers(self) -> list[int]:
        """The digest of each leaf, as a signed 64-bit number."""
        return [_signed(bytes.fromhex(self._leaf(number))) for number in range(len(self.labels.names))]

    def root(self) -> str:
        """The root digest in hexadecimal: 6 digits of the hash of names, dtypes and shapes, 16 of the hash of lanes."""
        return self.labels.digest() + hashlib.blake2b(self.lanes, digest_size=ROOT).hexdigest()

    def below(self, path: str) -> dict[str, str]:
        """The digests below a path, by name: of its leaves if there are at most 200, otherwise of its children.

        Args:
            path: a module path, "" for all leaves; the names below ``blocks.0`` begin with ``blocks.0.``.
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
    """The digest of some bytes, as 16 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=ROOT).hexdigest()


class Ring:
    """The values of the last `STEPS` steps, by step and key; older steps are dropped."""

    def __init__(self) -> None:
        self._steps: OrderedDict[int, dict[Any, Any]] = OrderedDict()

    def of(self, step: int) -> dict[Any, Any]:
        """The dictionary of a step's values by key, which the caller may fill; a new step begins with an empty one."""
        if step not in self._steps:
            self._steps[step] = {}
            while len(self._steps) > STEPS:
                self._steps.popitem(last=False)
        return self._steps[step]

    def get(self, step: int, key: Any) -> Any:
        """The value stored for a key in a step; None if there is none or it was dropped."""
        return self._steps.get(step, {}).get(key)


class Queue:
    """A FIFO queue of functions, each called when its lanes have been copied from devices to the host."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Sequence[Arriving], Callable[[], None]]] = deque()

    def put(self, arriving: Sequence[Arriving], then: Callable[[], None]) -> None:
        """Queue `then`, which is called by a `poll` after all of `arriving` are on the host."""
        self._waiting.append((arriving, then))

    def poll(self, wait: bool = False) -> None:
        """Call the queued functions whose hashes are on the host; with `wait`, wait for the others and call all."""
        while self._waiting and (wait or all(each.here() for each in self._waiting[0][0])):
            self._waiting.popleft()[1]()
