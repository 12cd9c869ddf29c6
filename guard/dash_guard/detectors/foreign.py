"""Finds ranks that run something else than the others: other versions, settings, environment variables or kernels.

What it knows of a rank, and what other detectors have found to differ there by the program (data, optimizer settings,
state that it alone has written), it writes into `Job.explanations`: no machine is accused of what that may explain.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from dash_inductor.untrusted import printable, shortened

from ..observation.labels import ORDER_OF_SETS, STRING_HASHES
from ..report.findings import Finding
from ..transport.messages import Message
from . import wording
from .detector import Detector, Job

OWN = re.compile(
    r"rank|settings\.initial_seed|gpu\.memory|"
    r"environment\.(CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES|.*_(IFNAME|HCA|SEED|PORT|ADDR|RANK|ID|HOSTID))"
)
"""Facts that legitimately differ between ranks."""

_PATIENCE = 5.0  # seconds that facts wait for those of all ranks, or for those that a change of all ranks brings
_SHOWN = 16


class Foreign(Detector):
    """A detector that compares the facts (versions, settings, environment) and the numerics keys of all ranks.

    Ranks whose hashes of strings differ are a note, if all of them have deterministic algorithms on: a program that
    iterates over a set of strings does so in another order on each of them.

    Facts are compared when all ranks have sent them, and, like numerics keys, whenever they have changed and then not
    changed for a while.
    """

    kinds = frozenset({"facts", "keys", "times", "joined"})

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(job, **settings)
        self._facts: dict[int, dict[str, str]] = {}
        self._counts: dict[str, Counter[str]] = {}  # ranks by the value of each fact
        self._hashes: dict[int, str] = {}  # of strings
        self._keys: dict[int, str] = {}
        self._shapes: dict[int, str] = {}
        self._since: float | None = None
        self._steps: dict[int, int] = {}  # in which ranks have changed their facts
        self._reported: set[tuple[tuple[int, ...], tuple[str, ...]]] = set()
        self._observed: dict[int, dict[str, None]] = {}  # explanations that other detectors have found
        self._keys_since: float | None = None

    def take(self, message: Message, now: float) -> None:
        """Take a rank's facts, its numerics keys, the shape of its collectives, or the notice that it has joined."""
        if message.kind == "joined":
            self._keys.pop(message.rank, None)
            self._count(self._facts.pop(message.rank, {}), -1)
            self._hashes.pop(message.rank, None)
            self._steps.pop(message.rank, None)
        elif message.kind == "facts":
            if message.rank in self._facts:
                self._steps[message.rank] = message.step
            self._count(self._facts.pop(message.rank, {}), -1)
            facts = {sys.intern(name): sys.intern(value) for name, value in _leaves(message.body["facts"])}
            self._facts[message.rank] = facts
            self._hashes[message.rank] = str(message.body.get("string_hashes"))
            self._count(facts, 1)
            self._since = now
            self._explain()
        elif message.kind == "keys":
            self._keys[message.rank] = " ".join(map(str, message.body["keys"]))
            self._keys_since = now
        elif self._shapes.get(message.rank) != message.body["shape"]:
            self._shapes[message.rank] = str(message.body["shape"])
            self._keys_since = now if self._keys else None

    def detect(self, now: float) -> list[Finding]:
        """Return findings about ranks that differ, once all facts have arrived or the rest is late."""
        found: list[Finding] = []
        complete = len(self._facts) >= self.job.world and not self._steps
        if self._since is not None and (complete or now - self._since > _PATIENCE):
            self._since = None
            found += self._compare(self._facts, self._counts, "")
            found += self._compare_hashes()
        if self._keys_since is not None and now - self._keys_since > _PATIENCE:
            self._keys_since = None
            stages: dict[str, list[int]] = {}  # ranks with the same collectives hold the same part of a model
            for rank, shape in self._shapes.items():
                stages.setdefault(shape, []).append(rank)
            for peers in stages.values():
                keys = {rank: {"numerics keys": self._keys.get(rank, "")} for rank in peers}
                counts = Counter(of["numerics keys"] for of in keys.values())
                found += self._compare(keys, {"numerics keys": counts}, "kernels: ")
        return found

    def finish(self, now: float) -> list[Finding]:
        """Return the last findings, without waiting for ranks whose facts are missing."""
        return self.detect(now + _PATIENCE + 1)

    def observe(self, finding: Finding, now: float) -> None:
        """Note the ranks on which another detector has found something that the program does there alone."""
        kind, ranks = finding.kind, finding.ranks
        if finding.cause != "program" or finding.severity == "note" or not 0 < len(ranks) < max(3, self.job.world):
            return
        phrase = {
            "data": "it reads the inputs of another rank",
            "bits": f"its {finding.tensor or finding.stage} differs",
            "desync": f"the program wrote {finding.tensor} on some ranks only",
        }.get(kind, "")
        if phrase and (kind != "desync" or finding.tensor):
            for rank in ranks:
                self._observed.setdefault(rank, {})[phrase] = None
            self._explain()

    def _explain(self) -> None:
        """Write what is known now of each rank into `Job.explanations`."""
        self.job.explanations.clear()
        majority, halves = _differing(self._facts, self._counts)
        for rank, facts in self._facts.items():
            for name in [*(name for name, most in majority.items() if facts.get(name, "nothing") != most), *halves]:
                self.job.explain(rank, f"its {name} differs")
            if facts.get("settings.cudnn_benchmark") == "true" and "gpu.name" in facts:
                self.job.explain(rank, "cudnn.benchmark chooses its kernels by their times")
        for rank, phrases in self._observed.items():
            for phrase in phrases:
                self.job.explain(rank, phrase)

    def _count(self, facts: Mapping[str, str], times: int) -> None:
        for name, value in facts.items():
            self._counts.setdefault(name, Counter())[value] += times

    def _compare(
        self, facts: Mapping[int, Mapping[str, str]], counts: Mapping[str, Mapping[str, int]], prefix: str
    ) -> list[Finding]:
        """Findings about facts on which a majority of ranks agrees; other facts legitimately differ between ranks."""
        common, undecided = _differing(facts, counts)
        others: dict[str, list[int]] = {name: [] for name in common}
        for rank, of in sorted(facts.items()):
            for name, most in common.items():
                if of.get(name, "nothing") != most:
                    others[name].append(rank)
        apart: dict[tuple[int, ...], dict[str, list[str]]] = {}
        for name, ranks in others.items():
            apart.setdefault(tuple(ranks), {})[name] = [facts[ranks[0]].get(name, "nothing"), common[name]]
        found = []
        for odd, names in apart.items():
            if self._is_new(odd, names):
                found.append(self._finding(odd, names, len(facts), prefix))
        if undecided and self._is_new((), undecided):
            found.append(self._halves(undecided, sorted(facts), prefix))
        return found

    def _compare_hashes(self) -> list[Finding]:
        """A note about ranks whose hashes of strings differ from those of a majority, or of all if there is none."""
        hashes = {rank: self._hashes[rank] for rank in sorted(self._facts)}
        most, times = Counter(hashes.values()).most_common(1)[0] if hashes else ("", 0)
        odd = [rank for rank, value in hashes.items() if 2 * times <= len(hashes) or value != most]
        wanted = all(facts.get("settings.deterministic_algorithms") == "true" for facts in self._facts.values())
        if not odd or not wanted or not self._is_new(tuple(odd), {STRING_HASHES: None}):
            return []
        others = " and all others" if len(odd) < len(hashes) else ""
        return [
            Finding(
                "foreign",
                "note",
                f"Python's string hashes differ between {wording.ranks(odd)}{others}, {ORDER_OF_SETS}",
                "nothing, if the program iterates over no set of strings; else start it with PYTHONHASHSEED=0",
                ranks=tuple(odd) if others else (),
                cause="program",
                evidence={"ranks": odd},
            )
        ]

    def _is_new(self, ranks: tuple[int, ...], names: Mapping[str, object]) -> bool:
        key = ranks, tuple(names)
        if key in self._reported:
            return False
        self._reported.add(key)
        return True

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
            step=min((self._steps[rank] for rank in ranks if rank in self._steps), default=None),
            cause="program",
            evidence=dict(list(names.items())[:_SHOWN]),
        )

    def _halves(self, names: Mapping[str, list[str]], ranks: list[int], prefix: str) -> Finding:
        shown = "; ".join(f"{name} is {' or '.join(map(shortened, pair))}" for name, pair in list(names.items())[:3])
        return Finding(
            "foreign",
            "suspect",
            f"half of the ranks differ from the other half: {prefix}{shown}",
            "start all ranks with the same environment and versions, else their bits may differ",
            ranks=tuple(ranks) if len(ranks) == 2 else (),
            cause="program",
            evidence=dict(list(names.items())[:_SHOWN]),
        )


def _differing(
    facts: Mapping[int, Mapping[str, str]], counts: Mapping[str, Mapping[str, int]]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The facts in which ranks differ and should not.

    Args:
        facts: the value of each fact, by rank.
        counts: the number of ranks that have each value, by fact.

    Returns:
        The value that a majority has, by fact; and both values, by fact, where each is that of a half: one half is
        foreign, and no vote says which.
    """
    common: dict[str, str] = {}
    undecided: dict[str, list[str]] = {}
    for name in sorted(counts):
        values = Counter({value: times for value, times in counts[name].items() if times > 0})
        values["nothing"] += len(facts) - values.total()
        ((most, times),) = values.most_common(1)
        values += Counter()  # without values that no rank has
        if 2 * times > len(facts):
            if len(values) > 1:
                common[name] = most
        elif len(values) == 2:
            undecided[name] = sorted(values)
    return common, undecided


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, f"{path}.{name}" if path else str(name))
    elif not OWN.fullmatch(path):
        yield printable(path)[:100], printable(value if isinstance(value, str) else json.dumps(value))[:200]
