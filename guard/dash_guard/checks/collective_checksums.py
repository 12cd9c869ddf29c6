"""Collective checksums: compares the results of reductions among ranks, and of some reductions with a second run.

The inputs of a reduction differ on every rank, so only results can be compared. All members of an `all_reduce` must
have the same result; each member of a `reduce_scatter` has its own. One bucket of each backward is reduced twice, and
both results must be equal.
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
"""The number of last steps that each message contains."""

_LABEL = 100  # characters
_REDUCE, _SCATTER = "all_reduce", "reduce_scatter"


_BACKWARDS = 1 << 32  # of one model


@dataclass
class _Results:
    """The lanes of the results of one kind of collective in one group of ranks in this step.

    Attributes:
        first: lanes of results, by backward and bucket.
        twice: lanes of the first and the second result of collectives that ran twice, and what was reduced.
    """

    first: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    twice: list[tuple[Tensor, Tensor, str]] = field(default_factory=list)


class CollectiveChecksums(Check):
    """A check that hashes the results of DDP's and FSDP2's collectives, by hooks installed after the first backward.

    Args:
        rank: the rank that this check belongs to.
        collectives: n: hash the results of every n-th step; 0: install no hooks.
    """

    name = "collective_checksums"
    together = True

    def __init__(self, rank: Host, collectives: int = 1, **settings: object) -> None:
        super().__init__(rank)
        self._state, self._every = State.of(rank), collectives
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._models: list[weakref.ref[nn.Module]] = []  # in the order in which they have begun
        self._agreed = False
        self._reductions: list[tuple[Reduction, str, weakref.ref[DistributedDataParallel]]] = []
        self._results: dict[str, _Results] = {}  # by collective and ranks
        self._looking = self._on_cpu = 0  # the step that is checked, and the bytes of its results on the CPU
        self._failed: Exception | None = None
        self._queue, self._ring = Queue(), Ring()

    def step_began(self, step: int) -> None:
        """Forget the results that were hashed in the last step."""
        self._results, self._looking, self._on_cpu = {}, step, 0
        self._queue.poll()

    def module_begins(self, module: nn.Module) -> None:
        """Collect the DDP and FSDP2 models that may get hooks."""
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
        """Install hooks the first time; later, hash the second results of DDP buckets that were reduced twice."""
        self._raise()
        self._queue.poll()
        if not self._agreed and self._every > 0 and self.rank.world > 1:
            self._agreed = True
            self._agree()
        for model, (reduction, where, reference) in enumerate(self._reductions):
            again = reduction.second()
            if again is None:
                continue
            backward, bucket, result = again
            key = model * _BACKWARDS + backward, bucket
            first = self._results[where].first.get(key) if where in self._results else None
            if first is not None and self._may(result):
                name = f"bucket {bucket} of {_names(reference)}"
                self._results[where].twice.append((first, lanes_of([result]), name))

    def step_done(self, step: int) -> None:
        """Queue the digests of the step's results; they are sent as soon as they have been copied to the host."""
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
        """Wait for digests that are still being copied to the host, and send them."""
        self._queue.poll(wait=True)

    def _agree(self) -> None:
        """Agree with all ranks on the models that get hooks: all ranks of the group have the model, and none has a
        reason against it.
        """
        found = list(self._candidates())
        mine = [_number(f"{kind} {where} {of} {not why}") for kind, _, where, of, why, _ in found]
        rows = self.rank.group.gather_padded(mine)
        self.rank.group.gather([1])  # no rank installs a hook before all ranks have the table
        chosen = []
        for number, (kind, module, _, _, why, ranks) in enumerate(found):
            alike = all(len(rows[r]) > number and rows[r][number] == mine[number] for r in ranks)
            if why or not alike:
                why = why or "other ranks have another model"
                self.rank.coverage.unseen(self.name, f"{kind} of a model: {why}")
            else:
                chosen.append((kind, module, ranks))
        turns: dict[str, list[nn.Module]] = {}  # the modules of a group of ranks are the same on all of its ranks
        for kind, module, ranks in chosen:
            if isinstance(module, DistributedDataParallel):
                self._put(module, ranks)
            else:
                turns.setdefault(f"{kind} {spelled(ranks)}", []).append(module)
        of: dict[nn.Module, dict[str, tuple[str, int]]] = {}
        for where, modules in turns.items():
            for turn, module in enumerate(modules):
                of.setdefault(module, {})[where.split()[0]] = where, turn
        for module, hooks in of.items():
            assert isinstance(module, FSDPModule)
            scatters, between = None, None
            if _SCATTER in hooks:
                scatters = self._turns(module, *hooks[_SCATTER], turns)
            if _REDUCE in hooks:
                where, turn = hooks[_REDUCE]
                reduced = functools.partial(_summed, weakref.ref(self), where, -1 - turn)
                between = Between(module, self._turns(module, where, turn, turns), reduced)
            repeat_reductions(module, scatters, between, self._state.counts(module))
        self.rank.coverage.count(self.name, models=len({id(module) for _, module, _ in chosen}))

    def _candidates(self) -> Sequence[tuple[str, nn.Module, str, str, str, tuple[int, ...]]]:
        """Collective, module, group, parameters, the reason against a hook ("" for none) and ranks of all models."""
        found = []
        for reference in self._models:
            inside = reference()
            module = None if inside is None else parallel.composable_ddp(inside) or inside
            if isinstance(module, DistributedDataParallel) and module.process_group.size() > 1:
                ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(module.process_group))
                collectives = [(_REDUCE, ranks, parallel.no_comm_hook(module))]
            elif isinstance(module, FSDPModule):
                own = (
                    ""
                    if parallel.own_scatter(module) is not None
                    else "the program has its own communication to reduce"
                )
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
                    why = why or "its list of ranks is too long or not in ascending order"
                if ranks:
                    found.append((kind, module, where, shapes, why, ranks))
        self._models.clear()
        return found

    def _turns(self, module: nn.Module, where: str, turn: int, turns: dict[str, list[nn.Module]]) -> Turns:
        on_result = functools.partial(_twice, weakref.ref(self), where, weakref.ref(module))
        return Turns(turn, len(turns[where]), on_result)

    def _put(self, model: DistributedDataParallel, ranks: tuple[int, ...]) -> None:
        where = f"all_reduce {spelled(ranks)}"
        on_reduced = functools.partial(_reduced, weakref.ref(self), where, len(self._reductions))
        reduction = Reduction(model, on_reduced, self._state.counts(model))
        try:
            reduction.put(model)
        except RuntimeError:  # a hook of the program, which all ranks have
            self.rank.coverage.unseen(self.name, "all_reduce of a model: the program has its own communication hook")
        else:
            self._reductions.append((reduction, where, weakref.ref(model)))

    def _may(self, result: Tensor) -> bool:
        """Whether a result can be hashed; coverage records why not."""
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
        """Hash the result of a reduction; never raises, because it runs in a collective of the program.

        Args:
            where: the kind of the collective and its ranks, as text.
            backward: the number of the backward under DDP, which differs between models, or of the `all_reduce` of a
                module under HSDP.
            bucket: the index of the bucket under DDP, or a negative number for the module under HSDP.
            result: the reduced tensor.
        """
        self._safely(lambda: self._reduced(where, backward, bucket, result))

    def twice(self, where: str, module: nn.Module, first: Tensor, second: Tensor) -> None:
        """Hash both results of a reduction of `module` that ran twice; never raises, like `reduced`."""
        self._safely(lambda: self._twice(where, module, first, second))

    def _reduced(self, where: str, backward: int, bucket: int, result: Tensor) -> None:
        if self._is_on() and self._may(result):
            self._results.setdefault(where, _Results()).first[backward, bucket] = lanes_of([result])

    def _twice(self, where: str, module: nn.Module, first: Tensor, second: Tensor) -> None:
        if self._is_on() and self._may(first):
            pair = lanes_of([first]), lanes_of([second])
            self._results.setdefault(where, _Results()).twice.append((*pair, self._state.names.of_module(module)))

    def _is_on(self) -> bool:
        """Whether this step is checked; a check that is off has no new steps."""
        step = self.rank.step
        return active.is_on(self.rank) and step == self._looking and step % self._every == 0

    def _safely(self, call: Callable[[], None]) -> None:
        """Make a call within a collective of the program, which must not raise; an error ends the check later."""
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
        """Send digests; `held` keeps tensors of other streams, so that their memory is not used again before this."""
        numbers = arriving[0].numbers()
        digest = hashlib.blake2b(numbers[:count].tobytes(), digest_size=8).hexdigest() if count else ""
        pairs = numbers[count:].reshape(len(labels), 2, -1)
        differ = [label for label, (first, second) in zip(labels, pairs, strict=True) if (first != second).any()]
        self._ring.of(step)[where] = [digest, differ[0][:_LABEL] if differ else ""]
        self.rank.coverage.count(self.name, results=count, repeated=len(labels))
        kept: dict[str, dict[str, list[str]]] = {}
        for number in range(max(1, step - SENT + 1), step + 1):
            for of, result in self._ring.of(number).items():
                kept.setdefault(of, {})[str(number)] = result
        self.send(step, checksums=kept)


def _reduced(
    check: weakref.ref[CollectiveChecksums], where: str, model: int, backward: int, bucket: int, result: Tensor
) -> None:
    here = check()
    if here is not None:
        here.reduced(where, model * _BACKWARDS + backward, bucket, result)


def _summed(check: weakref.ref[CollectiveChecksums], where: str, module: int, call: int, result: Tensor) -> None:
    here = check()
    if here is not None:
        here.reduced(where, call, module, result)


def _twice(
    check: weakref.ref[CollectiveChecksums],
    where: str,
    module: weakref.ref[nn.Module],
    first: Tensor,
    second: Tensor,
    group: object,
) -> None:
    here, of = check(), module()
    if here is not None and of is not None:
        here.twice(where, of, first, second)


def _names(model: weakref.ref[DistributedDataParallel]) -> str:
    found = model()
    return "a model that is gone" if found is None else type(unwrapped(found)).__name__


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
