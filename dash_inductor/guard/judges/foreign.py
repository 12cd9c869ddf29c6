"""Ranks that run something else than the others: other versions, settings, variables or kernels."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ..._untrusted import printable, shortened
from .. import wording
from ..findings import Finding
from ..judge import Job, Judge
from ..messages import Message

OWN = re.compile(
    r"rank|settings\.initial_seed|gpu\.memory|"
    r"environment\.(CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES|.*_(IFNAME|HCA|SEED|PORT|ADDR|RANK|ID|HOSTID))"
)
"""Facts that ranks have for themselves."""

_PATIENCE = 5.0  # seconds that the first facts wait for those of all ranks
_SHOWN = 16


class Foreign(Judge):
    """Compares facts of all ranks once, and their numerics keys whenever they have not changed for a while."""

    kinds = frozenset({"facts", "keys", "times", "joined"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job, **settings)
        self._facts: dict[int, dict[str, str]] = {}
        self._keys: dict[int, str] = {}
        self._shapes: dict[int, str] = {}
        self._since: float | None = None
        self._keys_since: float | None = None

    def take(self, message: Message, now: float) -> None:
        """A message has come."""
        if message.kind == "joined":
            self._keys.pop(message.rank, None)
        elif message.kind == "facts":
            self._facts[message.rank] = dict(_leaves(message.body["facts"]))
            self._since = now
        elif message.kind == "keys":
            self._keys[message.rank] = " ".join(map(str, message.body["keys"]))
            self._keys_since = now
        elif self._shapes.get(message.rank) != message.body["shape"]:
            self._shapes[message.rank] = str(message.body["shape"])
            self._keys_since = now if self._keys else None

    def judge(self, now: float) -> list[Finding]:
        """What is new."""
        found: list[Finding] = []
        if self._since is not None and (len(self._facts) >= self.job.world or now - self._since > _PATIENCE):
            self._since = None
            found += self._compare(self._facts, "")
        if self._keys_since is not None and now - self._keys_since > _PATIENCE:
            self._keys_since = None
            for shape in set(self._shapes.values()):  # ranks with the same collectives have the same part of a model
                peers = [rank for rank, of in self._shapes.items() if of == shape]
                found += self._compare({r: {"numerics keys": self._keys.get(r, "")} for r in peers}, "kernels: ")
        return found

    def finish(self, now: float) -> list[Finding]:
        """What is new."""
        return self.judge(now + _PATIENCE + 1)

    def _compare(self, facts: Mapping[int, Mapping[str, str]], prefix: str) -> list[Finding]:
        """A majority must agree on a fact, else ranks have it for themselves."""
        others: dict[tuple[int, ...], dict[str, list[str]]] = {}
        undecided: dict[str, list[str]] = {}
        for name in sorted({name for of in facts.values() for name in of}):
            values = {rank: of.get(name, "nothing") for rank, of in facts.items()}
            counts = Counter(values.values())
            common, times = counts.most_common(1)[0]
            if len(counts) == 1:
                continue
            if 2 * times <= len(values):
                if len(counts) == 2:  # halves: one of them is foreign, and no vote tells which
                    undecided[name] = sorted(counts)
                continue
            ranks = tuple(sorted(rank for rank, value in values.items() if value != common))
            others.setdefault(ranks, {})[name] = [values[ranks[0]], common]
        found = [self._finding(ranks, names, len(facts), prefix) for ranks, names in others.items()]
        if undecided:
            found.append(self._halves(undecided, sorted(facts), prefix))
        return found

    def _finding(self, ranks: tuple[int, ...], names: Mapping[str, list[str]], world: int, prefix: str) -> Finding:
        shown = [f"{name} is {shortened(theirs)}, not {shortened(ours)}" for name, (theirs, ours) in names.items()]
        more = f", and {len(shown) - 3} more" if len(shown) > 3 else ""
        return Finding(
            "foreign",
            "suspect",
            f"{wording.ranks(ranks)} {'differs' if len(ranks) == 1 else 'differ'} from {world - len(ranks)} others: "
            f"{prefix}{'; '.join(shown[:3])}{more}",
            "start all ranks with the same environment and versions, else their bits may differ",
            ranks=ranks,
            cause="program",
            evidence=dict(list(names.items())[:_SHOWN]),
        )

    def _halves(self, names: Mapping[str, list[str]], ranks: list[int], prefix: str) -> Finding:
        shown = "; ".join(f"{name} is {' or '.join(map(shortened, pair))}" for name, pair in list(names.items())[:3])
        return Finding(
            "foreign",
            "suspect",
            f"ranks differ from each other, and none are fewer: {prefix}{shown}",
            "start all ranks with the same environment and versions, else their bits may differ",
            ranks=tuple(ranks) if len(ranks) == 2 else (),
            cause="program",
            evidence=dict(list(names.items())[:_SHOWN]),
        )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, f"{path}.{name}" if path else str(name))
    elif not OWN.fullmatch(path):
        yield printable(path)[:100], printable(value if isinstance(value, str) else json.dumps(value))[:200]
