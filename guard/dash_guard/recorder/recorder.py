"""`record`: writes fingerprints of what a training program computes, step by step, to a file for each rank."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dash_inductor import arguments as _arguments
from dash_inductor.errors import ArgumentError, DashError, described
from dash_inductor.observers import active, hooks, phases
from dash_inductor.observers.log import Log
from dash_inductor.observers.log import check as check_log
from dash_inductor.observers.names import Names, state_of
from dash_inductor.observers.observer import Observer, Seen
from dash_inductor.upstream.dispatch import disable_current_modes

from ..fingerprints.fingerprint import description, local, why_unseen
from ..fingerprints.lane_buffer import CAPACITY, LaneBuffer
from ..observation import environment
from ..observation.labels import called
from ..observation.modules import Modules
from ..observation.state import State, Value
from ..observation.step_numbers import StepNumbers
from ..recordings.file import Name
from ..recordings.limits import TEXT
from ..recordings.writer import Writer
from . import in_graphs
from .losses import Losses
from .replicas import Replicas
from .step_digests import StepDigests
from .steps import Observed, StepWriter
from .values import GatheredValues

log = logging.getLogger("dash_guard")

OnReplicas = Literal["off", "warn", "raise"]
_ON_REPLICAS = ("off", "warn", "raise")


def record(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    every: int = 1,
    activations: bool = True,
    local_gradients: bool | None = None,
    replicas: OnReplicas = "warn",
    optimizer_state: bool = False,
    first_step: int | None = None,
    data: object = None,
    values: bool = False,
    log_to: Log | None = None,
) -> Recorder:
    """Record 128-bit fingerprints of everything that the training computes in this process, within a ``with`` block.

        with dash_guard.record("runs/a"):
            train()

    The environment variable DASH_GUARD_RECORD=folder records a whole program that is not changed.

    Modules that are called in evaluation mode or without gradients have names of their own, such as ``Model (evaluation
    in validate)``, so that a run can be compared with one that evaluates at other times.

    A step is what lies between two steps of the same optimizer; several optimizers may take turns. A step that a
    gradient scaler skips, because gradients overflow, counts too. A step of the recording contains, in this order,

    * its state: the generators of PyTorch, `random` and NumPy, and the positions of data loaders, as the first forward
      finds them; settings and counters of optimizers, before they step; the scale of a `GradScaler`;
    * in the first step, the parameters before it, as its optimizer has them;
    * tensors that are given to the outermost module, results of modules, and gradients of these results;
    * its loss, as a number: the sum of the tensors of one element whose `backward` the step calls, without the scale of
      a `GradScaler`;
    * gradients of attention (dQ, dK, dV) of every site that dash_inductor replaces in a graph compiled while recording;
    * with DDP, each parameter's gradient of this rank, before gradients are reduced;
    * each parameter's gradient as the optimizer gets it, and the parameter after the step;
    * buffers of modules, and on request the tensors of the optimizer's state, after the step.

    Recording does not disturb compiled graphs: results and gradients of modules inside a graph are not recorded,
    because a graph in which they had to exist would round differently. For a model compiled by
    ``torch.compile(model)``, its inputs, its results and their gradients are recorded; for one compiled by
    ``model.compile()``, not even these. Parameters and their gradients are always recorded, and so are gradients of
    attention under CUDA graphs. Recording does not wait for the device and changes no bit.
    ``torch.compiler.set_stance("force_eager")`` makes results of all modules visible, but eager code computes other
    bits than the graph.

    A recording never ends a training run. If its file cannot be written, or if it fails in any other way, there is one
    warning, the recording of this rank ends, and `compare` reports that it was cut off.

    Args:
        folder: the folder of the files of all ranks. If this rank has a file there, as after a restart, it continues in
            a new one, and a warning says so.
        model: gives the names of parameters and modules; by default, the first outermost module that is called in
            training, or else the modules that have the optimizer's parameters.
        optimizer: the optimizer, or several, whose steps count; by default, all.
        every: record the first of this many steps.
        activations: record inputs and results of modules, and gradients of results.
        local_gradients: record gradients before they are reduced; by default where DDP reduces them.
        replicas: what happens if ranks that DDP keeps equal differ in a gradient or a parameter of a recorded step:
            "warn" logs it; "raise" raises `ReplicasDiffer` on every rank before the optimizer's next recorded step, or
            at the end; both write it to the file. "off" does not compare ranks.
        optimizer_state: record tensors of the optimizer's state, all of which must be read: with AdamW, twice the size
            of the parameters.
        first_step: the number of the first step; by default the environment variable DASH_GUARD_FIRST_STEP, else one
            more than the optimizer's state has counted (AdamW counts, SGD does not), else 1.
        data: an object with a `state_dict`, such as a data loader, or several, whose state is recorded in each step; by
            default, the data loaders of PyTorch that have a `state_dict`, or a sampler or a data set with an `epoch`.
        values: also write the values of gradients and parameters, gathered from all ranks that have a part of them, for
            `compare_layouts`. This waits for the device, and takes twice the size of the parameters for each step.
        log_to: gets a digest of each recorded step for each kind of tensor (``digest/gradient``, ``digest/parameter``,
            ``digest/activation``, ...), a whole number below 2^48, after the next step has begun. Two runs with equal
            curves have equal fingerprints. `dash_inductor.integrations` has logs for W&B, TensorBoard and MLflow.

    Returns:
        A context manager, `Recorder`.

    Raises:
        ArgumentError: a bad argument.
    """
    _arguments.whole("every", every, 1, 1 << 31)
    flags = {
        "activations": activations,
        "values": values,
        "optimizer_state": optimizer_state,
        "local_gradients": local_gradients,
    }
    for name, flag in flags.items():
        if name != "local_gradients" or flag is not None:
            _arguments.truth(name, flag)
    if replicas not in _ON_REPLICAS:
        raise ArgumentError("replicas", replicas, _ON_REPLICAS)
    check_log(log_to)
    if model is not None and not isinstance(model, nn.Module):
        raise ArgumentError("model", model, "a torch.nn.Module, or None")
    optimizers = _optimizers(optimizer)
    folder, numbers, state = _arguments.path("folder", folder), StepNumbers(first_step), State(_data(data))
    recorder = Recorder(folder, every, optimizers, replicas, optimizer_state, numbers, state)
    recorder.log_to(log_to)
    if values:
        recorder.gather_values()
    recorder.modules = Modules(recorder, activations, local_gradients)
    if model is not None:
        recorder.names.add(model)
    return recorder


def _optimizers(given: object) -> list[torch.optim.Optimizer] | None:
    """The optimizers that an argument gives.

    Raises:
        ArgumentError: it gives something else.
    """
    if given is None:
        return None
    found: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    if not found or not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in found):
        raise ArgumentError("optimizer", given, "a torch.optim.Optimizer, several of them, or None")
    return found


def _data(given: object) -> list[Any] | None:
    """The objects with a `state_dict` that an argument gives; None for no argument.

    Raises:
        ArgumentError: it gives something else.
    """
    if given is None:
        return None
    found: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    if not all(callable(getattr(each, "state_dict", None)) for each in found):
        raise ArgumentError("data", given, "an object with a state_dict, a list of them, or None")
    return found


class Recorder(Observer):
    """A recording of this process, a context manager; see `record`.

    Attributes:
        folder: the folder of the files of all ranks.
        names: the names of modules and parameters.
        modules: the observed modules.
    """

    watches_graphs = True
    modules: Modules

    def __init__(
        self,
        folder: Path,
        every: int,
        optimizers: Iterable[torch.optim.Optimizer] | None,
        replicas: OnReplicas,
        optimizer_state: bool,
        numbers: StepNumbers,
        state: State,
    ) -> None:
        self.folder, self.names = folder, Names()
        self._numbers, self._optimizer_state = numbers, optimizer_state
        self._every, self._state = every, state
        self._begun = False  # whether the state that a forward begins with has been read in the present step
        self._values: dict[str, Value] = {}  # state of the present step that was not handed to the writer yet
        self._losses = Losses()
        self._gathered: GatheredValues | None = None
        self._flushed = False  # whether the writer has a part of the present step
        self._optimizers = None if optimizers is None else {id(optimizer) for optimizer in optimizers}
        self._companions: list[Observer] = [] if replicas == "off" else [Replicas(replicas, self._open)]
        self._lock = threading.RLock()  # hooks of the backward run on threads of autograd
        self._process = os.getpid()
        self._writer: Writer | None = None
        self._lanes: dict[torch.device, LaneBuffer] = {}
        self._entries: list[Observed] = []  # of the present step, those that were not handed to the writer yet
        self._steps = StepWriter()
        self._unseen: set[str] = set()
        self._calls: dict[tuple[str, str], int] = {}  # how often something has been observed in the present step
        self._initial: set[int] = set()  # optimizers whose parameters were recorded before their first step
        self._stepped: set[int] = set()  # optimizers that have stepped in the present step
        self._keys: tuple[str, ...] = ()
        self._failed = False
        self._wanted = True  # whether the present step is recorded; the first one always is

    def log_to(self, log: Log | None) -> None:
        """Log digests of the steps that follow, see `record`."""
        self._steps.digests = None if log is None else StepDigests(log)

    def gather_values(self) -> None:
        """From now on, write the values of gradients and parameters, too; called before the recording begins."""
        self._gathered = GatheredValues(self.folder)
        self._companions.append(self._gathered)

    @property
    def step_number(self) -> int:
        """The number of the current training step."""
        return self._numbers.number

    def __enter__(self) -> Recorder:
        for observer in active.observers:
            if isinstance(observer, Recorder):
                raise DashError(f"a recording is on already, into {observer.folder}: end it first")
        for journal in in_graphs.journals():
            journal.clear()
        active.observers += [self, *self._companions]
        hooks.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the recording: write what was observed, and remove hooks from modules and parameters.

        Raises:
            ReplicasDiffer: ranks that must be equal differ, with ``replicas="raise"``.
        """
        if not self.is_on():
            return
        others = self._others()
        for observer in (self, *self._companions):
            active.observers.remove(observer)
        self.modules.remove()
        if os.getpid() != self._process:
            return
        with self._lock:
            try:
                self._safely(self._flush)
                self._safely(self._save_values)
                if self._writer is not None:
                    self._writer.put(lambda file: self._steps.end())
                    self._writer.close()
                    for observer in others:
                        observer.check()
            finally:
                for observer in self._companions:
                    observer.close()

    def is_on(self) -> bool:
        """Whether the recording has begun and has not ended."""
        return self in active.observers

    def module_begins(self, module: nn.Module) -> None:
        """Put hooks on a module that is new, and note that its forward runs."""
        self._safely(lambda: self.modules.enter(module))

    def module_ended(self, module: nn.Module, result: Any) -> None:
        """Record the result of a module."""
        self._safely(lambda: self.modules.leave(module, result))

    def attention_gradients(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        """Record the gradients of one attention in a compiled graph, given as (name, gradient) pairs."""
        self.observe_in_step(phases.ATTENTION_GRADIENT, gradients)

    def step(self) -> None:
        """End the current step; for programs that update their parameters without a PyTorch optimizer."""
        with self._lock:
            self.begin()
            self._advance()

    def recording(self) -> bool:
        """Whether the current step is recorded; False in a forked process."""
        return self._wanted and os.getpid() == self._process

    def begin(self) -> None:
        """Begin the next training step if an optimizer has stepped; called at any event but an optimizer step."""
        if self._stepped:
            with self._lock:
                self._advance()

    def training_begins(self) -> None:
        """Record the state with which the forward of the step begins; called before each outermost call of training."""
        with self._lock:
            self.begin()
            self._read_first_state()

    def _read_first_state(self) -> None:
        if self.recording() and not self._begun:
            self._begun = True
            self._read_state(self._state.of_forward)

    def scaler_updates(self, scaler: torch.amp.GradScaler) -> None:
        """Record the scale of the loss in the present step."""
        with self._lock:
            if self.recording():
                self._read_state(lambda: self._state.of_scaler(scaler))

    def loss_scaled(self, loss: Tensor, scaled: Tensor) -> None:
        """Note a loss that is about to be differentiated in the place of its product with a scale."""
        with self._lock:
            self.begin()
            if self.recording():
                self._safely(lambda: self._losses.scaled(loss, scaled))

    def backward_begins(self, tensors: Sequence[Tensor]) -> None:
        """Add to the loss of the present step."""
        with self._lock:
            self.begin()
            if self.recording():
                self._safely(lambda: self._add_losses(tensors))

    def _add_losses(self, tensors: Sequence[Tensor]) -> None:
        with disable_current_modes(), torch.no_grad():
            if reason := self._losses.add(tensors):
                self._unsee(phases.LOSS, reason)

    def _read_state(self, read: Callable[[], dict[str, Value]]) -> None:
        with disable_current_modes():
            self._safely(lambda: self._values.update(read()))

    def scaler_updated(self) -> None:
        """End a step that a gradient scaler has skipped: no optimizer has stepped in it."""
        with self._lock:
            if os.getpid() == self._process and not self._stepped:
                self._advance()

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients of an optimizer's parameters, and before its first step also the parameters."""
        with self._lock:
            if not self._counts(optimizer):
                return
            if id(optimizer) in self._stepped:
                self._advance()
            self._safely(lambda: self._numbers.see(optimizer))
            if not self.recording():
                return
            for observer in self._others():
                observer.check()
            self._read_first_state()  # of a program that calls no module in eager code
            self._read_state(lambda: self._state.of_optimizer(optimizer))
            parameters = self.names.of_parameters(optimizer)
            if id(optimizer) not in self._initial:
                self._initial.add(id(optimizer))
                self._safely(lambda: self.observe(phases.INITIAL, parameters, place=0))
                self._gather(phases.INITIAL, parameters)
            self._gather(phases.GRADIENT, parameters, gradients=True)
            gradients = [(name, parameter.grad) for name, parameter in parameters if parameter.grad is not None]
            self._observe_parameters(phases.GRADIENT, parameters, gradients)

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the new parameters, the buffers and, if asked for, the optimizer state; hand all to the writer."""
        with self._lock:
            if not self._counts(optimizer):
                return
            self._stepped.add(id(optimizer))
            if not self.recording():
                return
            parameters = self.names.of_parameters(optimizer)
            self._observe_parameters(phases.PARAMETER, parameters, parameters)
            self._gather(phases.PARAMETER, parameters)
            self._safely(lambda: self._observe_state(optimizer, parameters))
            self._safely(self._flush)
            for observer in self._others():
                observer.step_ended(self.step_number)

    def _gather(self, phase: str, parameters: list[tuple[str, Tensor]], gradients: bool = False) -> None:
        """Copy values to the host; also if this rank records no more, because other ranks wait for its parts."""
        gathered = self._gathered
        if gathered is None:
            return
        with disable_current_modes(), torch.no_grad():
            if self._failed:
                with contextlib.suppress(Exception):
                    gathered.take(phase, parameters, gradients)
            else:
                self._safely(lambda: gathered.take(phase, parameters, gradients))

    def _save_values(self) -> None:
        if self._gathered is not None:
            self._gathered.save(environment.rank_and_world()[0], self.step_number)

    def _observe_state(self, optimizer: torch.optim.Optimizer, parameters: list[tuple[str, Tensor]]) -> None:
        if self._optimizer_state:
            state = [
                (f"{name} {key}", value)
                for name, parameter in parameters
                for key, value in state_of(optimizer, parameter).items()
            ]
            self.observe(phases.OPTIMIZER_STATE, state)
        buffers = self.modules.buffers()
        if buffers:
            self.observe(phases.BUFFER, buffers)

    def prepare(self, device: torch.device) -> None:
        """Allocate buffers on a device, before a CUDA graph is warmed up, whose memory pool must not contain them."""
        with self._lock:
            in_graphs.prepare(device)
            if device not in self._lanes:
                with disable_current_modes(), torch.inference_mode(False):
                    self._lanes[device] = LaneBuffer(device)

    def replicate(self, model: DistributedDataParallel) -> None:
        """Report a DDP model, whose parameters are equal on all of its ranks, to other observers."""
        for observer in self._others():
            observer.replicated(model)

    def observe(
        self,
        phase: str,
        tensors: Sequence[tuple[str, Tensor]],
        place: int | None = None,
        copies: list[tuple[list[str], Tensor]] | None = None,
    ) -> None:
        """Add fingerprints of tensors to the current step.

        Args:
            phase: one of `phases.STAGES`.
            tensors: (name, tensor) pairs.
            place: the index at which they are inserted among the entries of the step; by default, after all others.
            copies: a list to which (names, lanes) pairs are appended, for the tensors that could be hashed; lanes:
                int64 [names, 2], on the device.
        """
        with self._lock:
            by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
            for name, tensor in tensors:
                plain = local(tensor)
                if self._can_be_seen(f"{phase} {name}", plain):
                    by_device.setdefault(plain.device, []).append((name, plain))
            for device, group in by_device.items():
                for start in range(0, len(group), CAPACITY):
                    part = group[start : start + CAPACITY]
                    lanes = self._observe(phase, device, part, place, copy=copies is not None)
                    if copies is not None and lanes is not None:
                        copies.append(([name for name, _ in part], lanes))

    def observe_in_step(self, phase: str, tensors: Sequence[tuple[str, Tensor]], place: int | None = None) -> None:
        """Call `observe` for an event during a step, if the step is recorded; an error ends only the recording."""
        with self._lock:
            self.begin()
            if self.recording():
                self._safely(lambda: self.observe(phase, tensors, place))

    def _safely(self, work: Callable[[], None]) -> None:
        """Do a part of the recording; an exception ends the recording, and training goes on."""
        if self._failed:
            return
        try:
            work()
        except Exception as error:
            self._failed = True
            self._entries.clear()
            why = f"the recorder has failed: {described(error)}"[:TEXT]
            log.warning("the recording of this rank ends in step %d, and training goes on: %s", self.step_number, why)
            self._open().leave(f"anything from step {self.step_number} on", why)

    def place(self) -> int:
        """The index that the next recorded tensor of this step gets, to be passed to `observe` as `place`."""
        return len(self._entries)

    def _observe(
        self, phase: str, device: torch.device, tensors: list[tuple[str, Tensor]], place: int | None, copy: bool
    ) -> Tensor | None:
        self.prepare(device)
        rows = self._lanes[device]
        if len(tensors) > rows.free():
            self._flush()
        added = rows.add([tensor for _, tensor in tensors])
        where = len(self._entries) if place is None else min(place, len(self._entries))
        self._entries[where:where] = [
            (Name(phase, self._called(phase, name), description(tensor)), device, row)
            for (name, tensor), row in zip(tensors, added, strict=True)
        ]
        return rows.copy(added) if copy else None

    def _observe_parameters(
        self, phase: str, parameters: list[tuple[str, Tensor]], tensors: list[tuple[str, Tensor]]
    ) -> None:
        """Observe gradients or values of parameters, and pass their lanes to other observers of the phase."""
        shown = [observer for observer in self._others() if phase in observer.phases]
        lanes: list[tuple[list[str], Tensor]] = []
        self._safely(lambda: self.observe(phase, tensors, copies=lanes if shown else None))
        for observer in shown:
            observer.seen(Seen(phase, parameters, lanes, self._failed))

    def _others(self) -> list[Observer]:
        return [observer for observer in active.observers if observer is not self]

    def _can_be_seen(self, name: str, tensor: Tensor) -> bool:
        reason = why_unseen(tensor)
        if reason:
            self._unsee(name, reason)
        return not reason

    def _unsee(self, name: str, reason: str) -> None:
        """Write once why there is no fingerprint or value of something."""
        if name not in self._unseen:
            self._unseen.add(name)
            self._open().put(lambda file: file.json({"type": "unseen", "name": name, "reason": f"it is {reason}"}))

    def _called(self, phase: str, name: str) -> str:
        calls = self._calls[phase, name] = self._calls.get((phase, name), 0) + 1
        return called(name, calls)

    def _counts(self, optimizer: torch.optim.Optimizer) -> bool:
        return os.getpid() == self._process and (self._optimizers is None or id(optimizer) in self._optimizers)

    def _advance(self) -> None:
        self._safely(self._flush)
        self._safely(self._save_values)
        self._numbers.advance()
        self._wanted = (self.step_number - 1) % self._every == 0
        self._stepped.clear()
        self._calls.clear()
        self._values.clear()
        self._losses = Losses()
        self._begun = self._flushed = False

    def _flush(self) -> None:
        """Send what was observed of the current step to the writer."""
        if os.getpid() != self._process:
            return
        from_graphs = [taken for journal in in_graphs.journals() if (taken := journal.take()) is not None]
        if not self.recording() or not (self._entries or from_graphs or (self._flushed and self._values)):
            return
        self._flushed = True
        entries, self._entries = self._entries, []
        ready = {device: rows.take() for device, rows in self._lanes.items()}
        step, state, loss = self.step_number, dict(self._values), self._losses.take()
        self._values.clear()
        self._write_new_keys()
        self._open().put(lambda file: self._steps.write_state(file, step, state))
        self._open().put(lambda file: self._steps.write_loss(file, step, loss))
        self._open().put(lambda file: self._steps.write(file, step, entries, ready, from_graphs))

    def _open(self) -> Writer:
        if self._writer is None:
            rank, world = environment.rank_and_world()
            self._writer = Writer(self.folder, rank, environment.facts(rank, world, self._every))
        return self._writer

    def _write_new_keys(self) -> None:
        keys = environment.numerics_keys()
        if keys != self._keys:
            self._keys = keys
            self._open().put(lambda file: file.json({"type": "facts", "numerics_keys": list(keys)}))
