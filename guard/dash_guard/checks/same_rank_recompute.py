"""Same-rank recompute: forwards and backwards of a step run again on the same rank, and must give the same bits.

The check finds transient faults: in results of modules, in their gradients and in local gradients. A repeating defect
is found only by a cross-rank recompute. What lies between the result of a module and its gradient, such as a loss that
the program computes itself, is not run again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dash_inductor.errors import described
from dash_inductor.observers import active, phases
from dash_inductor.observers.hook import Hook
from dash_inductor.observers.names import Names
from dash_inductor.upstream.eager import has_cuda_graphs, in_backward, is_compiled, not_compiled

from ..recompute.execution import Digest, Execution
from ..recompute.micro_batch import MicroBatch, Random, Settings, in_eager_code, results_of, why_failed
from ..recompute.operators import OperatorLog
from ..recompute.parameters import Versions
from ..recompute.saved_state import SavedState
from ..transport.messages import Message
from .check import Check, Host

_OUT_OF = 100


@dataclass
class _Call:
    """A call of an outermost module in the current step."""

    root: nn.Module
    execution: Execution
    random: Random
    saved: SavedState
    versions: Versions
    settings: Settings
    batch: MicroBatch | None = None
    overlapped: bool = False


class SameRankRecompute(Check):
    """A check that runs forwards and backwards of some steps again, before the first optimizer of the step.

    Args:
        rank: the rank that this check belongs to.
        same_rank_recompute: how many of 100 steps are run again, from 0 to 100.
        seed: seed of the choice of steps, which is the same on all ranks.
    """

    name = "same_rank_recompute"
    together = True

    def __init__(self, rank: Host, same_rank_recompute: int = 0, seed: int = 0, **settings: Any) -> None:
        super().__init__(rank, **settings)
        self._share, self._seed = same_rank_recompute, seed
        self._names = Names()
        self._handles: dict[int, tuple[nn.Module, Any]] = {}
        self._depth = 0
        self._chosen = self._preflight_done = False
        self._held = 0
        self._calls: list[_Call] = []
        self._off = ""

    def step_began(self, step: int) -> None:
        """Decide by seed and step number whether this step is run again."""
        self._drop()
        self._chosen = not self._off and chosen(self._seed, step, self._share)

    @not_compiled
    def module_begins(self, module: nn.Module) -> None:
        """Keep the inputs and the state of an outermost module's call, and hash what the modules inside it compute."""
        outermost = self._depth == 0
        self._depth += 1
        if in_backward():
            return
        if outermost and next(module.parameters(), None) is not None:
            if id(module) not in self._handles:
                self._handles[id(module)] = (module, module.register_forward_hook(Hook(self._called), with_kwargs=True))
            if self._chosen and torch.is_grad_enabled():
                self._begin(module)
        if self._open() and self._calls[-1].batch is None:
            self._calls[-1].execution.module_begins(module)

    def _begin(self, module: nn.Module) -> None:
        for call in self._calls:  # their gradients of parameters cannot be separated from those of the next call
            call.execution.detach()
            call.overlapped |= not _has_gradients(call.execution)
        devices = {parameter.device.type for parameter in module.parameters()} - {"meta"}
        execution = Execution(self._names, owner=self.rank)
        call = _Call(module, execution, Random.now(), SavedState(module), Versions(module), Settings.now(devices))
        self._calls.append(call)

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """Hash the result of a module in a call that will run again."""
        self._depth = max(0, self._depth - 1)
        if self._open() and self._calls[-1].batch is None and not in_backward():
            self._calls[-1].execution.module_ended(module, result)

    def _called(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self._chosen and self._depth == 0:
            self._copy(module, args, kwargs, result)

    @not_compiled
    def _copy(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if not active.is_on(self.rank) or in_backward() or not self._open():
            return
        call = self._calls[-1]
        if call.root is not module or call.batch is not None:
            return
        try:
            call.batch = batch = MicroBatch.of(module, args, kwargs)
        except Exception as error:  # a hook of the program's module must not raise
            call.execution.failed = described(error)
            return
        call.execution.returned(result)
        batch.cannot = call.versions.why_not_again()
        batch.settings, batch.random, batch.saved = call.settings, call.random, call.saved
        for number, tensor in results_of(result):
            tensor.register_hook(lambda gradient, number=number: _keep(batch, number, gradient))

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the module calls of this step again and compare their digests, now that gradients are complete."""
        step = self.rank.step
        if not self._chosen or self._held == step:
            return
        self._held = step
        calls = self._calls
        group = self.rank.group
        # CUDA graphs write into results that the program may still read, and eager code rounds differently.
        cannot = in_backward() or has_cuda_graphs()
        why = next((why for call in calls if call.batch is not None and (why := call.batch.why_not_again())), "")
        everyone = group.gather([step, len(calls), bool(self._off), cannot or bool(why)])
        if len({tuple(row[:2]) for row in everyone}) > 1 or any(row[2] or row[3] for row in everyone):
            self._off = self._off or ("another rank has switched it off" if any(row[2] for row in everyone) else "")
            why = why or "ranks call different modules, step within the backward, or run CUDA graphs"
            self.rank.coverage.unseen(self.name, self._off or why)
            self._drop()
            return
        found, failed, count = dict[str, Any](), "", 0
        for number, call in enumerate(calls):
            once = [d for d in call.execution.end() if not (call.overlapped and d.phase == phases.LOCAL_GRADIENT)]
            again, failed = self._again(call, failed)
            count += len(once)
            if not found and not failed:
                found = {**differs(once, again), "call": number + 1} if differs(once, again) else {}
            third = any(bool(row[0]) for row in group.gather([bool(found) and found["call"] == number + 1]))
            if third:
                digests, failed = self._again(call, failed)
                if found and found["call"] == number + 1:
                    found["third"] = _value(digests, found["place"])
        shares = any(call.execution.work() for call in calls)
        graphs = {"compiled": True} if any(is_compiled(call.root) for call in calls) else {}
        where = [found["call"], found["place"]] if found else [0, 0]
        rows = group.gather([bool(found), bool(failed), shares, *where])
        self._calls = []
        if any(row[1] for row in rows):
            self._off = failed or "it has failed on another rank"
            self.rank.coverage.unseen(self.name, self._off)
            return
        differ = sum(row[0] for row in rows)
        if not self._preflight_done and 2 * differ >= len(rows):
            found |= self._operators(calls)
            self._off = "a step that is run again computes something else on most ranks"
            self.rank.coverage.unseen(self.name, self._off)
        self._preflight_done = True
        self.rank.coverage.count(self.name, steps=1, tensors=count)
        if found and shares and where > min(row[3:] for row in rows if row[0]):
            found = {}  # ranks that split modules pass on a wrong value that came before
        if found or self._off:
            alike = sum(bool(row[0]) and row[3:] == where for row in rows)
            self.send(step, calls=len(calls), off=self._off, alike=alike, **graphs, **found)

    def _operators(self, calls: list[_Call]) -> dict[str, Any]:
        """The first operator whose two further runs differ; all ranks run all calls."""
        logs = []
        for _ in range(2):
            logs.append(log := OperatorLog())
            for call in calls:
                self._again(call, "", log)
        pairs = zip(*(log.operators for log in logs), strict=False)
        pair = next((pair for pair in pairs if pair[0].number() != pair[1].number()), None)
        return {} if pair is None else {"unrepeated": [each.written() for each in pair], "random": pair[0].is_random}

    def _again(self, call: _Call, failed: str, log: OperatorLog | None = None) -> tuple[list[Digest], str]:
        execution = Execution(self._names)
        try:
            if call.batch is not None and log is not None:
                log.module = execution.module
                with log:
                    call.batch.run(execution, None, in_eager_code)
            elif call.batch is not None:
                call.batch.run(execution, None, copies=not self._preflight_done)
        except Exception as error:  # all ranks learn of it and go on training together
            failed = failed or why_failed(error)[:300]
        return execution.end(), failed or execution.failed or call.execution.failed

    def order(self, message: Message) -> None:
        """Switch the check off, with the reason that the monitor sends."""
        self._off = str(message.body.get("off", ""))[:200]

    def close(self) -> None:
        """Remove the hooks on modules and tensors."""
        self._drop()
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _open(self) -> bool:
        return self._chosen and bool(self._calls)

    def _drop(self) -> None:
        for call in self._calls:
            call.execution.end()
        self._calls.clear()


def chosen(seed: int, step: int, share: int) -> bool:
    """Whether a step is chosen, pseudorandomly, for about `share` of 100 steps; the same on all ranks."""
    content = f"{seed} {step}".encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") % _OUT_OF < share


def differs(once: list[Digest], again: list[Digest]) -> dict[str, Any]:
    """The first digest of a run that differs in the second run.

    Returns:
        A dictionary with place (index), phase, tensor, once and again (both digests); {} if all digests are equal.
    """
    for place, digest in enumerate(once):
        other = _value(again, place, digest)
        if other != digest.value[:8].hex():
            return {
                "place": place, "phase": digest.phase, "tensor": digest.tensor[:200],
                "once": digest.value[:8].hex(), "again": other,
            }  # fmt: skip
    return {}


def _value(digests: list[Digest], place: int, like: Digest | None = None) -> str:
    if place < len(digests) and (like is None or digests[place][:2] == like[:2]):
        return digests[place].value[:8].hex()
    found = [d for d in digests if like is not None and d[:2] == like[:2]]
    return found[0].value[:8].hex() if found else ""


def _has_gradients(execution: Execution) -> bool:
    return execution.has(phases.ACTIVATION_GRADIENT)


def _keep(batch: MicroBatch, number: int, gradient: Tensor | None) -> None:
    if gradient is not None:  # None: a result of compiled code that the loss does not use
        batch.gradients.setdefault(number, gradient.detach())
