"""Phrases for the sentences of findings, which several detectors use."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .detector import Job

_FEW = 8


def ranks(numbers: Sequence[int]) -> str:
    """Names ranks in words: ``rank 3``, ``ranks 1, 2 and 5``, ``ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more``."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = [str(number) for number in numbers[:_FEW]]
    others = len(numbers) - len(shown)
    last = f"{others} more" if others else shown.pop()
    return f"ranks {', '.join(shown)} and {last}"


def count(things: Collection[object], one: str) -> str:
    """The number of things with their noun: ``1 rank``, ``63 ranks``."""
    return f"{len(things)} {one}{'' if len(things) == 1 else 's'}"


def placed(numbers: Sequence[int], job: Job) -> str:
    """Like `ranks`, with the host and the GPU of a single rank if they are known: ``rank 17 (node2, GPU 1)``."""
    if len(numbers) != 1:
        return ranks(numbers)
    places = ", ".join(filter(None, (job.hosts.get(numbers[0]), job.gpus.get(numbers[0]))))
    return f"rank {numbers[0]} ({places})" if places else f"rank {numbers[0]}"


def machine_advice(numbers: Sequence[int], job: Job) -> str:
    """What to do about machines of these ranks that compute wrongly, with their hosts if they are known."""
    hosts = list(dict.fromkeys(filter(None, (job.hosts.get(number, "") for number in numbers))))[:_FEW]
    return (
        f"Run dcgmi diag -r 3 on {' and '.join(hosts) or 'its host'}, and take the machine out of service if it fails."
    )


def explained(numbers: Sequence[int], job: Job) -> str:
    """What else than a machine may explain what these ranks compute, in words; "" if nothing is known."""
    found = list(dict.fromkeys(phrase for rank in numbers for phrase in job.explanations.get(rank, ())))
    more = f", and {len(found) - 2} more" if len(found) > 2 else ""
    return " and ".join(found[:2]) + more


def named(stage: str, name: str) -> str:
    """The stage and the name of a tensor as findings show them, such as ``gradient blocks.0.attn.q.weight``."""
    return f"{stage} {name}"
