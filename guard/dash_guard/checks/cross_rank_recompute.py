"""Cross-rank recompute: all ranks run forward and backward of one rank's micro-batch and compare what they compute.

Note [Cross-rank recompute]
It finds a defect that repeats, which no repetition on the same rank can show. It needs no stored reference: the ranks
check each other. It runs in one of `cross_rank_recompute` steps. The seed and the step alone decide in which one, so
that all ranks run it at the same place: before each optimizer of the step, when its gradients are complete. The ranks
first agree over the guard's own group that all of them can run it. Then one rank, chosen by turns, sends its inputs. A
program may call several models between two updates, such as the two of a GAN: the last call of each runs again.

* The determinism preflight: in the first step of training, the recompute runs twice. If most ranks do not repeat their
  own bits, or healthy ranks differ, the program is not deterministic, and no machine may be blamed.
* Where ranks differ, they run the micro-batch again in eager code with every operator hashed. An operator with equal
  inputs and different results accuses the machine; different inputs or different operators accuse the program.
* Two ranks cannot vote. So they run the micro-batch once more with all samples shifted by one place. A rank whose
  result does not move with its sample contradicts itself, as it does if the defect is at one place of a result. They
  also run it with a backward that begins with zeros: a rank whose gradients are not all zero contradicts itself too.
  Differences that more than one rank shows, here or in the preflight, come from the program. Sums over samples depend
  on their order, so local gradients are not compared in the shifted run. Neither run needs equal parameters, so both
  also work after replicas have diverged, and where no other rank does the same work. There, every recompute does both
  runs, and they count as one fact.
* A recompute that the monitor requests runs at the next step whose number `AGREE` divides, if all ranks have the
  request by then. The ranks ask each other first, so that none runs it alone.
* Results that ranks legitimately compute differently (shards of tensor parallelism, experts) are compared only with
  ranks that do the same work, see `recompute.execution.Execution.work`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dash_inductor.errors import described
from dash_inductor.observers import active, phases
from dash_inductor.observers.hook import Hook
from dash_inductor.observers.names import Names
from dash_inductor.upstream.eager import in_backward, is_compiled, not_compiled

from ..fingerprints.fingerprint import why_unseen
from ..recompute.execution import Digest, Execution, zero
from ..recompute.micro_batch import MicroBatch, compiled, fit_for_graphs, in_eager_code, run_function, why_failed
from ..recompute.operators import OperatorLog
from ..recompute.parameters import Protected, Versions
from ..shared.votes import classes, first_difference
from ..transport.messages import Message
from ..upstream.parallel import is_gathered, needs_accumulation, why_not_again
from .check import Check, Host
from .state import State, lanes_of

PREFLIGHT, SCHEDULED, ORDERED = "preflight", "scheduled", "ordered"
_PURPOSES = (PREFLIGHT, SCHEDULED, ORDERED)
AGREE = 8
"""The number of steps after which ranks ask each other again whether the monitor has requested a recompute."""

CALLS = 4
"""The largest number of models whose last calls run again before one optimizer steps; more take turns."""

_WINDOW = 8  # digests from the first one that differs, and one before it


def place(seed: int, window: int, every: int) -> int:
    """The index, within a window of `every` steps, of the step with a cross-rank recompute; the same on all ranks.

    Args:
        seed: the seed of the choice.
        window: the number of the window.
        every: the number of steps of a window.
    """
    content = f"{seed} {window} {every}".encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") % every


class CrossRankRecompute(Check):
    """A check that runs one rank's micro-batch on all ranks and compares the results, see Note [Cross-rank recompute].

    Args:
        rank: the rank that this check belongs to.
        cross_rank_recompute: n: run it in one of n steps; 0: only in the preflight and when the monitor requests it.
        seed: seed of the choice of steps, and of random numbers in a recompute.
    """

    name = "cross_rank_recompute"
    together = True

    def __init__(self, rank: Host, cross_rank_recompute: int = 100, seed: int = 0, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self._every, self._seed = cross_rank_recompute, seed
        self._function: Callable[[], object] | None = None
        self._names = Names()
        self._roots: dict[int, tuple[nn.Module, Any]] = {}  # with the handle of a hook
        self._depth = 0
        self._batches: dict[int, MicroBatch] = {}  # the last call of each outermost module, by its id
        self._versions: Versions | None = None  # of the module that runs, when it began
        self._wanted, self._cannot = False, ""
        self._held: dict[int, int] = {}  # by optimizer, the last step that has decided whether to recompute
        self._tried: set[int] = set()  # optimizers before which a recompute was tried
        self._preflights: set[int] = set()  # ids of modules whose preflight is done
        self._weights: dict[int, str] = {}  # which weights a module had then: pipelines have others in each stage
        self._calls, self._last = 0, 0  # recomputes of this step, and the step of the last one
        self._alone_in_forward = not settings.get("same_rank_recompute")  # whether no other check runs a forward again
        self._said = False
        self._turn = 0
        self._order = 0  # its number, 0 for none
        self._excluded: frozenset[str] = frozenset()
        self._inherent: set[int] = set()  # contradictions that several ranks show: they come from the program
        self._off = ""

    # Events of the program.

    def step_began(self, step: int) -> None:
        """Decide whether the inputs of modules are copied in this step, because it may have a recompute."""
        self._batches, self._cannot = {}, ""
        self._wanted = not self._off and self._may_run(step)

    @not_compiled
    def module_begins(self, module: nn.Module) -> None:
        """Put a forward hook that copies the inputs on an outermost module, once."""
        if self._depth == 0 and id(module) not in self._roots and next(module.parameters(), None) is not None:
            handle = module.register_forward_hook(Hook(self._called), with_kwargs=True)
            self._roots[id(module)] = (module, handle)
        if self._depth == 0 and self._wanted:
            self._versions = Versions(module)
        self._depth += 1

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """Count the end of a module's forward, to know which modules are outermost."""
        self._depth = max(0, self._depth - 1)

    def _called(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self._wanted and self._depth == 0 and torch.is_grad_enabled():
            self._copy(module, args, kwargs)

    @not_compiled
    def _copy(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not active.is_on(self.rank) or in_backward():
            return  # not training, or a checkpoint runs a part again
        try:
            self._batches.pop(id(module), None)
            self._batches[id(module)] = batch = MicroBatch.of(module, args, kwargs)
            batch.cannot = "" if self._versions is None else self._versions.why_not_again()
        except Exception as error:  # a hook of the program's module must not raise
            self._cannot = described(error)

    def order(self, message: Message) -> None:
        """Receive the monitor's request for a recompute, at the next step that `AGREE` divides, or to end the check."""
        if message.body.get("off"):
            self._off = str(message.body["off"])[:200]
        else:
            self._order = int(message.body.get("number", 0))

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the recompute of this step, if it has one, now that gradients are complete."""
        step, number = self.rank.step, id(optimizer)
        if self._held.get(number) == step:
            return
        self._held[number] = step
        if not (self._scheduled(step) or number not in self._tried or self._may_be_ordered(step)):
            return
        scheduled = self._scheduled(step) or number not in self._tried
        self._tried.add(number)
        if in_backward():
            self._say_unseen(step, "the optimizer steps within the backward")
            return
        batches, self._batches = list(self._batches.values()), {}
        self._start(step, batches, scheduled)

    def run_now(self, function: Callable[[], object]) -> None:
        """Run a cross-rank recompute of a function of the program now; all ranks call this.

        The function runs forward and backward of the same inputs on all ranks, such as one micro-batch through all
        stages of a pipeline. Ranks whose stages have the same layers are compared with each other.
        """
        self._function = function
        try:
            self._start(self.rank.step, [], True)
        finally:
            self._function = None

    def close(self) -> None:
        """Remove the forward hooks."""
        for _, handle in self._roots.values():
            handle.remove()
        self._roots.clear()

    # The recompute itself.

    def _scheduled(self, step: int) -> bool:
        return self._every > 0 and (step - 1) % self._every == place(self._seed, (step - 1) // self._every, self._every)

    def _may_be_ordered(self, step: int) -> bool:
        return bool(self._preflights) and step % AGREE == 0

    def _may_run(self, step: int) -> bool:
        """Whether a step may have a recompute: every optimizer has one before its first step, most in step 1."""
        return self._scheduled(step) or not self._preflights or self._may_be_ordered(step) or step <= 2

    def _start(self, step: int, batches: list[MicroBatch], scheduled: bool) -> None:
        group = self.rank.group
        batches = self._chosen(batches)
        why = self._why_not(batches)
        mine = [step, scheduled, self._order, bool(self._off), bool(why), len(batches)]
        mine += [_hash([batch.signature() for batch in batches]), _hash([batch.shapes() for batch in batches])]
        everyone = group.gather([*mine, any(map(compiled, batches))])
        _, _, orders, off, cannot, _, signatures, shapes, graphs = zip(*everyone, strict=True)
        if len({tuple(row[:2]) for row in everyone}) > 1:
            self._unseen("ranks are not in the same step")
            return
        if any(off):
            self._off = self._off or "another rank has switched it off"
        if self._off or not (scheduled or min(orders)):
            return
        if not scheduled:
            self._order = 0
        if any(cannot) or len(set(signatures)) > 1:
            self._say_unseen(step, why or ("another rank cannot" if any(cannot) else "ranks call different modules"))
            return
        if any(graphs) and len(set(shapes)) > 1:
            self._unseen("ranks have inputs of different shapes, which would recompile graphs")
            return
        of = self._turn % len(everyone)
        self._turn += 1
        for batch in [None] if self._function is not None else batches:
            if not self._off:
                self._recompute(step, SCHEDULED if scheduled else ORDERED, of, batch)

    def _chosen(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """At most `CALLS` of the calls, by turns; the last ones first."""
        if len(batches) <= CALLS:
            return batches
        self._unseen(f"calls of more than {CALLS} models between two updates")
        start = self._turn * CALLS % len(batches)
        return [*batches, *batches][start : start + CALLS]

    def _why_not(self, batches: list[MicroBatch]) -> str:
        if self._function is not None:
            roots = [root for root, _ in self._roots.values()]
            gathered = any(map(is_gathered, roots))
            why = "FSDP2 has gathered parameters, as between a forward and its backward" if gathered else ""
            why = why if roots else "no model has run yet"
        elif not batches:
            roots, why = [], self._cannot or "no module was called with gradients in this step"
        else:
            roots, why = [batch.root for batch in batches], self._cannot
            why = why or next(filter(None, (batch.why_not_sent() for batch in batches)), "")
        parted = State.of(self.rank).classes.parted
        if any(not parted.isdisjoint(root.modules()) for root in roots):
            return "replicas of the model have diverged: it was updated by gradients that were not reduced"
        return why or next(filter(None, map(why_not_again, roots)), "")

    def _recompute(self, step: int, purpose: str, of: int, batch: MicroBatch | None) -> None:
        group, refused = self.rank.group, ""
        if self._last != step:
            self._last, self._calls = step, 0
        self._calls += 1
        key = 0 if batch is None else id(batch.root)
        purpose = purpose if key in self._preflights else PREFLIGHT
        if key not in self._preflights:
            self._preflights.add(key)
            self._weights[key] = _weights([] if batch is None else [batch.root])
        if self._function is None and batch is not None:
            batch, refused = self._received(batch, of)
        run = functools.partial(self._run, batch, seed=self._seed * 1_000_003 + step, preflight=purpose == PREFLIGHT)
        first, work, failed = run() if not refused else ([], "", refused)
        second = run()[0] if purpose == PREFLIGHT and not refused else first
        work = f"{work} {self._weights[key]}".strip()
        kept = [d.number() for d in first if _label(d) not in self._excluded]
        repeats = [d.number() for d in second if _label(d) not in self._excluded] == kept
        works = group.gather([_hash(work), _hash(kept), repeats, bool(failed)])
        if any(row[3] for row in works):
            self._off = failed or "another rank cannot"
            self._say_unseen(step, self._off, again=True)
            return
        body: dict[str, Any] = {"purpose": purpose, "of": of, "work": work, "count": len(kept), "repeats": repeats}
        body["call"] = self._calls
        if any(is_compiled(root) for root in self._models(batch)):
            body["compiled"] = True  # its operators are not seen
        peers = classes({rank: str(row[0]) for rank, row in enumerate(works)})
        alone = len(peers) == len(works) > 1
        differ = any(len({works[rank][1] for rank in ranks}) > 1 for ranks in peers)
        if differ or not all(row[2] for row in works):
            if purpose != PREFLIGHT:
                second = run()[0]
            body |= self._compared(first, second, peers)
            body |= self._operators(run, peers, repeats)
            body |= self._contradiction(batch, first, purpose, self._seed * 1_000_003 + step, alone)
            if purpose == PREFLIGHT:
                self._exclude(first, peers)
        elif alone or (purpose == PREFLIGHT and len(works) > 1):
            found = self._contradiction(batch, first, purpose, self._seed * 1_000_003 + step, alone)
            body |= found if alone else {}
        self.rank.coverage.count(self.name, calls=1, tensors=len(kept))
        if len(peers) == len(works):
            self._unseen("no other rank does the same work")
        self.send(step, **body)

    def _received(self, batch: MicroBatch, of: int) -> tuple[MicroBatch, str]:
        """The micro-batch of rank `of`.

        Returns:
            The micro-batch, and why it cannot be used; "" if it can.
        """
        group = self.rank.group
        mine = batch.encode() if self.rank.number == of else [torch.empty(0, dtype=torch.uint8)] * 2
        sizes = group.gather([part.numel() for part in mine])[of]
        if self.rank.number != of:
            mine = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        arguments, tensors = (group.broadcast(part, of) if part.numel() else part for part in mine)
        try:
            return batch.given(bytes(arguments.tolist()), tensors), ""
        except Exception as error:  # all ranks learn of it and go on training together
            return batch, f"inputs of rank {of} do not fit: {described(error)}"[:300]

    def _run(
        self,
        batch: MicroBatch | None,
        seed: int,
        log: OperatorLog | None = None,
        turned: int = 0,
        silent: bool = False,
        preflight: bool = False,
    ) -> tuple[list[Digest], str, str]:
        """Run the micro-batch, or the function, once; parameters that it writes are put back.

        In compiled code, which no dispatch mode sees, this needs copies of all parameters, which only the preflight
        makes.

        Returns:
            The digests, the work of this rank, and why the run failed; "" if it did not.
        """
        watches = any(observer.watches_graphs for observer in active.observers) and log is None
        execution = Execution(self._names, watches, turned, silent=silent)
        around = fit_for_graphs()
        failed = ""
        try:
            roots = self._models(batch)
            in_graphs = any(map(is_compiled, roots))
            with ExitStack() as stack:
                if not in_graphs:
                    protected = Protected(parameter for root in roots for parameter in root.parameters())
                    stack.callback(protected.restore)
                    stack.enter_context(protected)
                if log is not None:
                    log.module = execution.module
                    around = in_eager_code
                    stack.enter_context(log)
                if self._function is not None:
                    run_function(self._function, roots, execution, seed, around, copies=preflight and in_graphs)
                elif batch is not None:
                    batch.run(execution, seed, around, copies=preflight and in_graphs)
        except Exception as error:  # all ranks learn of it and go on training together
            failed = why_failed(error)[:300]
        digests = execution.end()
        failed = failed or execution.failed
        roots_ = f"{execution.roots} " if self._function is not None else ""
        return digests, roots_ + execution.work(), failed

    def _models(self, batch: MicroBatch | None) -> list[nn.Module]:
        """The outermost modules of a micro-batch, or, without one, of the program."""
        return [root for root, _ in self._roots.values()] if batch is None else [batch.root]

    def _compared(self, first: list[Digest], second: list[Digest], peers: list[list[int]]) -> dict[str, Any]:
        """The digests of both runs, from the first one in which ranks differ."""
        group = self.rank.group
        kept = [[d for d in digests if _label(d) not in self._excluded] for digests in (first, second)]
        rows = dict(enumerate(group.gather_padded([d.number() for d in kept[0]])))
        found = first_difference(rows, peers)
        if found is None:  # a rank has not repeated its bits
            pairs = itertools.zip_longest(*([d.number() for d in digests] for digests in kept))
            mine = next((n for n, (a, b) in enumerate(pairs) if a != b), len(rows[self.rank.number]))
            found = min(number for (number,) in group.gather([mine]))
        start = max(0, found - 1)
        return {"first": found, "start": start} | {
            name: [[d.phase, d.tensor[:200], d.value[:8].hex()] for d in digests[start : start + _WINDOW]]
            for name, digests in zip(("once", "again"), kept, strict=True)
        }

    def _contradiction(
        self, batch: MicroBatch | None, first: list[Digest], purpose: str, seed: int, alone: bool
    ) -> dict[str, Any]:
        """The first digest in which this rank contradicts itself and no other rank does; {} if there is none.

        Args:
            batch: the micro-batch; None for a function of the program.
            first: the digests of the first run.
            purpose: preflight, scheduled or ordered.
            seed: seed of random numbers.
            alone: whether no other rank does the same work, so that rounding may differ on one rank by chance.
        """
        found: list[tuple[int, str, Digest]] = []  # place among all digests, and in which run
        places = {_label(digest): place for place, digest in enumerate(first)}
        if batch is not None:
            silent = self._run(batch.silenced(), seed, silent=True)[0]
            nothing = zero()
            found += [(places.get(_label(d), 0), "silent", d) for d in silent if d.value != nothing]
        if batch is not None and batch.samples() > 1:
            turned = self._run(batch.turned(), seed, turned=batch.samples())[0]
            there = [(places.get(_label(d)), d) for d in turned if d.phase != phases.LOCAL_GRADIENT]
            found += [(n, "turned", d) for n, d in there if n is not None and d.value != first[n].value]
        found.sort(key=lambda each: each[0])
        mine = [_hash(f"{how} {_label(digest)}") for _, how, digest in found]
        rows = self.rank.group.gather_padded(mine)
        others = {number for rank, row in enumerate(rows) if rank != self.rank.number for number in row}
        if purpose == PREFLIGHT:
            by_order = {number for (_, how, _), number in zip(found, mine, strict=True) if how == "turned"}
            self._inherent = others | by_order if alone else others & set(mine)
        for (at, _, digest), number in zip(found, mine, strict=True):
            if number not in others and number not in self._inherent:
                return {"contradicts": [digest.phase, digest.tensor[:200], str(at)]}
        return {}

    def _operators(self, run: Callable[..., Any], peers: list[list[int]], repeats: bool) -> dict[str, Any]:
        """The first operator in which ranks differ, and the first one in which two runs of this rank differ."""
        logs = []
        for _ in range(2):
            logs.append(log := OperatorLog())
            if run(log=log)[2]:
                log.operators.clear()
        rows = dict(enumerate(self.rank.group.gather_padded([each.number() for each in logs[0].operators])))
        body: dict[str, Any] = {}
        across = first_difference(rows, peers)
        if across is not None and across < len(logs[0].operators):
            body["operator"] = logs[0].operators[across].written()
            body["drawn"] = logs[0].operators[across].is_random
        own = first_difference(dict(enumerate([each.number() for each in log.operators] for log in logs)), [[0, 1]])
        if own is not None and own < min(len(log.operators) for log in logs):
            body["unrepeated"] = [log.operators[own].written() for log in logs]
            body["random"] = logs[0].operators[own].is_random
        return body

    def _exclude(self, first: list[Digest], peers: list[list[int]]) -> None:
        """Exclude digests on which no majority of ranks agrees although the last digests are equal.

        Ranks compute these differently by design. If the last digests differ too, nothing is excluded: then the ranks
        do not compute the same at all.
        """
        rows = self.rank.group.gather_padded([d.number() for d in first])
        own: Sequence[int] = next(ranks for ranks in peers if self.rank.number in ranks)
        if len({len(rows[rank]) for rank in own}) > 1 or len({rows[rank][-1] for rank in own}) > 1:
            return
        excluded = set()
        for number, digest in enumerate(first):
            values = [rows[rank][number] for rank in own]
            if 2 * max(values.count(value) for value in values) <= len(values):
                excluded.add(_label(digest))
        self._excluded |= excluded
        for label in sorted(excluded)[:20]:
            self._unseen(f"{label} differs between all ranks of this program")

    def _say_unseen(self, step: int, why: str, again: bool = False) -> None:
        """Count a recompute that could not run, and tell the monitor if none has run: nothing checks the forward.

        Args:
            step: the step.
            why: the reason.
            again: whether none will run from now on, even if some have.
        """
        self._unseen(why)
        if (again or not self._preflights) and not self._said and self._alone_in_forward and self.rank.world > 1:
            self._said = True
            self.send(step, cannot=why[:200])

    def _unseen(self, why: str) -> None:
        self.rank.coverage.unseen(self.name, why)


def _label(digest: Digest) -> str:
    return f"{digest.phase} {digest.tensor}"


def _weights(roots: Sequence[nn.Module]) -> str:
    """Identifies the weights of models that are not divided among ranks; "" for other models."""
    parameters = [parameter for root in roots for parameter in root.parameters()]
    if any(map(needs_accumulation, roots)) or any(isinstance(p, DTensor) or why_unseen(p) for p in parameters):
        return ""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.numel():
            by_device.setdefault(parameter.device, []).append(parameter.detach())
    return f"{_hash([lanes_of(tensors).tolist() for tensors in by_device.values()]) % (1 << 32):08x}"


def _hash(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)
