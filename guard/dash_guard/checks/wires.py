"""Reductions, which nobody can check by what went in: results are compared among ranks, and some with a second run.

All members of an `all_reduce` must have the same result; of a `reduce_scatter` each has its own.  One bucket of each
backward is reduced twice, and must be the same both times.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dash_inductor.observers import active
from dash_inductor.observers.names import unwrapped
from dash_inductor.upstream.eager import in_backward

from ..fingerprints.fingerprint import why_unseen
from ..shared.class_names import LENGTH, spelled
from ..upstream import parallel
from .check import Check, Host
from .comms import Between, Reduction, Turns, repeat_reductions
from .digests import Arriving, Queue, Ring
from .state import ON_CPU, State, lanes_of

SENT = 4
"""Steps of each message."""

_LABEL = 100  # characters
_REDUCE, _SCATTER = "all_reduce", "reduce_scatter"


@dataclass
class _Results:
    """Lanes of what came out of the collectives of a group in this step.

    Attributes:
        first: by backward and bucket.
        twice: the same of those that were run again: first and second result, and what they are of.
    """

    first: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    twice: list[tuple[Tensor, Tensor, str]] = field(default_factory=list)


class Wires(Check):
    """Puts doors on DDP and FSDP2 models behind their first backward.

    Args:
        rank: of which this is a check.
        doors: n: results of every n-th step are looked at; 0: models get no doors.
    """

    name = "wires"
    together = True

    def __init__(self, rank: Host, doors: int = 1, **settings: object) -> None:
        super().__init__(rank)
        self._state, self._every = State.of(rank), doors
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._models: list[weakref.ref[nn.Module]] = []  # in the order in which they have begun
        self._agreed = False
        self._reductions: list[tuple[Reduction, str, weakref.ref[DistributedDataParallel]]] = []
        self._results: dict[str, _Results] = {}  # by collective and ranks
        self._looking = self._on_cpu = 0  # at a step; bytes of it
        self._failed: Exception | None = None
        self._queue, self._ring = Queue(), Ring()

    def step_began(self, step: int) -> None:
        """A new step."""
        self._results, self._looking, self._on_cpu = {}, step, 0
        self._queue.poll()

    def module_begins(self, module: nn.Module) -> None:
        """Find models."""
        self._state.module_begins(module)
        if module in self._known or self._every == 0 or self.rank.world < 2:
            return
        for inside in module.modules():
            if inside not in self._known:
                self._known.add(inside)
                if not self._agreed:
                    self._models.append(weakref.ref(inside))
                elif isinstance(inside, DistributedDataParallel | FSDPModule):
                    self.rank.coverage.unseen(self.name, "a model that has begun after the first step")

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the doors once; look at what came out of them."""
        self._raise()
        self._queue.poll()
        if not self._agreed and self._every > 0 and self.rank.world > 1:
            self._agreed = True
            self._agree()
        for reduction, where, reference in self._reductions:
            again = reduction.second()
            if again is None:
                continue
            backward, bucket, result = again
            first = self._results[where].first.get((backward, bucket)) if where in self._results else None
            if first is not None and self._may(result):
                name = f"bucket {bucket} of {_names(reference)}"
                self._results[where].twice.append((first, lanes_of([result]), name))

    def step_done(self, step: int) -> None:
        """Send what came out as soon as it has arrived."""
        self._raise()
        results, self._results = self._results, {}
        for where, each in results.items():
            first = [each.first[key] for key in sorted(each.first)]
            tensors = [*first, *(part for *pair, _ in each.twice for part in pair)]
            if tensors:
                arriving = [Arriving(torch.cat(tensors))]
                labels = [label for *_, label in each.twice]
                self._queue.put(
                    arriving, functools.partial(self._arrived, step, where, len(first), labels, arriving, tensors)
                )

    def close(self) -> None:
        """Wait for what is on its way."""
        self._queue.poll(wait=True)

    def _agree(self) -> None:
        """A model gets a door if all ranks of its group have it, and nothing stands in the way on any of them."""
        found = list(self._candidates())
        mine = [_number(f"{kind} {where} {of} {not why}") for kind, _, where, of, why, _ in found]
        rows = self.rank.group.gather_padded(mine)
        self.rank.group.gather([1])  # everybody knows
        chosen = []
        for number, (kind, module, _, _, why, ranks) in enumerate(found):
            alike = all(len(rows[r]) > number and rows[r][number] == mine[number] for r in ranks)
            if why or not alike:
                why = why or "other ranks have another model"
                self.rank.coverage.unseen(self.name, f"{kind} of a model: {why}")
            else:
                chosen.append((kind, module, ranks))
        turns: dict[str, list[nn.Module]] = {}  # those of a group of ranks are the same on all of them
        for kind, module, ranks in chosen:
            if isinstance(module, DistributedDataParallel):
                self._put(module, ranks)
            else:
                turns.setdefault(f"{kind} {spelled(ranks)}", []).append(module)
        of: dict[nn.Module, dict[str, tuple[str, int]]] = {}
        for where, modules in turns.items():
            for turn, module in enumerate(modules):
                of.setdefault(module, {})[where.split()[0]] = where, turn
        for module, doors in of.items():
            assert isinstance(module, FSDPModule)
            scatters, between = None, None
            if _SCATTER in doors:
                scatters = self._turns(module, *doors[_SCATTER], turns)
            if _REDUCE in doors:
                where, turn = doors[_REDUCE]
                reduced = functools.partial(_summed, weakref.ref(self), where, -1 - turn)
                between = Between(module, self._turns(module, where, turn, turns), reduced)
            repeat_reductions(module, scatters, between, self._state.counts(module))
        self.rank.coverage.count(self.name, models=len({id(module) for _, module, _ in chosen}))

    def _candidates(self) -> Sequence[tuple[str, nn.Module, str, str, str, tuple[int, ...]]]:
        """Collective, module, group and parameters of all that could have a door; why it cannot; its ranks."""
        found = []
        for reference in self._models:
            inside = reference()
            module = None if inside is None else parallel.composable_ddp(inside) or inside
            if isinstance(module, DistributedDataParallel) and module.process_group.size() > 1:
                ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(module.process_group))
                collectives = [(_REDUCE, ranks, parallel.no_comm_hook(module))]
            elif isinstance(module, FSDPModule):
                own = "" if parallel.own_scatter(module) is not None else "the program has its own way to reduce"
                collectives = [(_SCATTER, parallel.scatter_ranks(module), own)]
                if len(between := parallel.reduce_ranks(module)) > 1:
                    collectives.append((_REDUCE, between, parallel.no_reduce_hook(module)))
            else:
                continue
            shapes = " ".join(f"{p.dtype}{tuple(p.shape)}" for p in module.parameters() if p.requires_grad)
            for kind, ranks, why in collectives:
                where = spelled(ranks)
                if in_backward():
                    why = why or "an optimizer steps within the backward"
                elif len(where) > LENGTH or list(ranks) != sorted(ranks):
                    why = why or "its ranks take too long to name, or do not ascend"
                if ranks:
                    found.append((kind, module, where, shapes, why, ranks))
        self._models.clear()
        return found

    def _turns(self, module: nn.Module, where: str, turn: int, turns: dict[str, list[nn.Module]]) -> Turns:
        told = functools.partial(_twice, weakref.ref(self), where, weakref.ref(module))
        return Turns(turn, len(turns[where]), told)

    def _put(self, model: DistributedDataParallel, ranks: tuple[int, ...]) -> None:
        where = f"all_reduce {spelled(ranks)}"
        told = functools.partial(_reduced, weakref.ref(self), where)
        reduction = Reduction(model, told, self._state.counts(model))
        try:
            reduction.put(model)
        except RuntimeError:  # a hook of PyTorch's, which all ranks have
            self.rank.coverage.unseen(self.name, "all_reduce of a model: the program has a comm hook of its own")
        else:
            self._reductions.append((reduction, where, weakref.ref(model)))

    def _may(self, result: Tensor) -> bool:
        """Whether a result is looked at; coverage says why not."""
        why = why_unseen(result) or ""
        if result.device.type == "cpu":
            self._on_cpu += result.numel() * result.element_size()
            why = why or (f"beyond {ON_CPU >> 20} MiB on the CPU" if self._on_cpu > ON_CPU else "")
        elif torch.cuda.is_current_stream_capturing():
            why = why or "captured into a CUDA graph"
        if why:
            self.rank.coverage.unseen(self.name, f"a result that is {why}")
        return not why

    def reduced(self, where: str, backward: int, bucket: int, result: Tensor) -> None:
        """A bucket has been reduced."""
        self._safely(lambda: self._reduced(where, backward, bucket, result))

    def twice(self, where: str, module: nn.Module, first: Tensor, second: Tensor) -> None:
        """Gradients of a module of FSDP have been reduced twice."""
        self._safely(lambda: self._twice(where, module, first, second))

    def _reduced(self, where: str, backward: int, bucket: int, result: Tensor) -> None:
        if self._is_on() and self._may(result):
            self._results.setdefault(where, _Results()).first[backward, bucket] = lanes_of([result])

    def _twice(self, where: str, module: nn.Module, first: Tensor, second: Tensor) -> None:
        if self._is_on() and self._may(first):
            pair = lanes_of([first]), lanes_of([second])
            self._results.setdefault(where, _Results()).twice.append((*pair, self._state.names.of_module(module)))

    def _is_on(self) -> bool:
        """Whether this step is looked at; a check that is off has no new steps."""
        step = self.rank.step
        return active.is_on(self.rank) and step == self._looking and step % self._every == 0

    def _safely(self, call: Callable[[], None]) -> None:
        """Within a collective of the program, to which nothing may happen; an error ends the check later."""
        try:
            call()
        except Exception as error:
            self._failed = self._failed or error

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _arrived(
        self,
        step: int,
        where: str,
        count: int,
        labels: Sequence[str],
        arriving: Sequence[Arriving],
        held: Sequence[Tensor],
    ) -> None:
        """Tell what came out; `held` are tensors of other streams, whose memory is not used again before this."""
        numbers = arriving[0].numbers()
        digest = hashlib.blake2b(numbers[:count].tobytes(), digest_size=8).hexdigest() if count else ""
        pairs = numbers[count:].reshape(len(labels), 2, -1)
        differ = [label for label, (first, second) in zip(labels, pairs, strict=True) if (first != second).any()]
        self._ring.of(step)[where] = [digest, differ[0][:_LABEL] if differ else ""]
        self.rank.coverage.count(self.name, results=count, repeated=len(labels))
        kept: dict[str, dict[str, list[str]]] = {}
        for number in range(max(1, step - SENT + 1), step + 1):
            for of, told in self._ring.of(number).items():
                kept.setdefault(of, {})[str(number)] = told
        self.send(step, wires=kept)


def _reduced(check: weakref.ref[Wires], where: str, backward: int, bucket: int, result: Tensor) -> None:
    here = check()
    if here is not None:
        here.reduced(where, backward, bucket, result)


def _summed(check: weakref.ref[Wires], where: str, module: int, call: int, result: Tensor) -> None:
    here = check()
    if here is not None:
        here.reduced(where, call, module, result)


def _twice(
    check: weakref.ref[Wires], where: str, module: weakref.ref[nn.Module], first: Tensor, second: Tensor, group: object
) -> None:
    here, of = check(), module()
    if here is not None and of is not None:
        here.twice(where, of, first, second)


def _names(model: weakref.ref[DistributedDataParallel]) -> str:
    found = model()
    return "a model that is gone" if found is None else type(unwrapped(found)).__name__


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
