"""The training state of one rank: parameters, optimizer state and buffers, hashed once for all checks."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dash_inductor.observers import phases
from dash_inductor.observers.names import Names, state_of, unwrapped

from ..fingerprints.fingerprint import add_lanes, description, why_unseen
from ..fingerprints.fingerprint import local as local
from ..fingerprints.sizes import LANES
from .check import Host
from .classes import Classes, holders

KNOWN = ((-1404056226935107027, 6370743676088349933),) * 4 + ((-7276202848976383095, 3568138712966937863),)
"""The lanes of the tensors of `known_lanes`; the first four tensors are equal."""

ON_CPU = 64 << 20
"""The largest size of CPU tensors that are hashed at a time, in bytes; that takes tens of milliseconds."""


@dataclass(eq=False, slots=True)
class Entry:
    """A tensor of the training state, or an optimizer setting.

    Attributes:
        stage: the kind of the tensor: `phases.PARAMETER`, `phases.OPTIMIZER_STATE`, `phases.GRADIENT`, `phases.BUFFER`,
            or `SETTING`.
        name: its name along the module path.
        tensor: returns the tensor, or None if it was freed.
        ranks: the ranks that must have the same bits; () if none are declared.
        seen: whether the tensor is known to be hashable.
    """

    stage: str
    name: str
    tensor: Callable[[], Tensor | None]
    ranks: tuple[int, ...]
    seen: bool = False


@dataclass
class Hashed:
    """The lanes (128-bit hashes) of some tensors on one device.

    Attributes:
        entries: the tensors, in the order of the lanes.
        descriptions: dtype and shape of each tensor.
        marks: version and address of each tensor when it was hashed; a write by PyTorch changes the version.
        lanes: int64 [entries, 2] on the device.
    """

    entries: list[Entry] = field(default_factory=list)
    descriptions: list[str] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    lanes: Tensor = field(default_factory=lambda: torch.empty(0, LANES, dtype=torch.int64))


def picked(parts: Sequence[Hashed], entries: set[int]) -> list[Hashed]:
    """The parts with the entries alone that have these ids."""
    found = []
    for part in parts:
        rows = [row for row, entry in enumerate(part.entries) if id(entry) in entries]
        if rows:
            chosen = Hashed([part.entries[row] for row in rows], [part.descriptions[row] for row in rows])
            chosen.marks, chosen.lanes = [part.marks[row] for row in rows], rows_of(part.lanes, rows)
            found.append(chosen)
    return found


def rows_of(lanes: Tensor, rows: list[int]) -> Tensor:
    """Some rows of lanes, without a transfer if they are one range."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return lanes[rows[0] : rows[0] + len(rows)]
    numbers = torch.tensor(rows)
    return lanes[numbers.pin_memory().to(lanes.device, non_blocking=True) if lanes.is_cuda else numbers]


def mark(plain: Tensor, whole: Tensor) -> tuple[int, int]:
    """A pair of numbers that changes if PyTorch writes or moves a tensor.

    Args:
        plain: the part of the tensor on this rank (`local`).
        whole: the tensor, possibly a DTensor, whose own version counts the writes made through it.

    Returns:
        Version and address.
    """
    version = sum(0 if each.is_inference() else each._version for each in {id(t): t for t in (plain, whole)}.values())
    return version, plain.data_ptr()


class State:
    """Finds and hashes the training state of a rank for all of its checks; use `of` to get the shared instance.

    Args:
        rank: the rank whose state it is.

    Attributes:
        names: the names of modules and parameters.
        classes: the ranks that must hold each tensor with equal bits.
        reductions: the number of gradient reductions in this step, by the ranks of a DDP model or of the mesh of an
            FSDP2 module.
    """

    def __init__(self, rank: Host) -> None:
        self._rank = weakref.ref(rank)
        self.names, self.classes = Names(), Classes()
        self.reductions: Counter[tuple[int, ...]] = Counter()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._entries: dict[int, list[Entry]] = {}  # by optimizer
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._holders: dict[int, tuple[list[Entry], list[tuple[int, ...]]]] = {}  # by optimizer, with its entries
        self._after: tuple[int, int, list[Hashed]] | None = None

    @property
    def rank(self) -> Host:
        """The rank whose state this is."""
        rank = self._rank()
        assert rank is not None
        return rank

    @classmethod
    def of(cls, rank: Host) -> State:
        """The instance that all checks of a rank share; creates it at first."""
        found = _states.get(rank)
        if found is None:
            found = _states[rank] = cls(rank)
        return found

    def module_begins(self, module: nn.Module) -> None:
        """Register a module whose forward begins; an outermost module becomes a root of the names of tensors."""
        self.classes.begins(module)
        if module in self._known:
            return
        for inside in module.modules():
            self.classes.add(inside)
        if unwrapped(module) not in self._known:
            self.names.add(module)
            self._roots.add(module)
        self._known.update(unwrapped(module).modules())
        self._known.add(module)

    def counts(self, module: nn.Module) -> Callable[[], None]:
        """Returns a function that counts one reduction of a model's gradients in `reductions`.

        The function does not refer to a check, so it may be called after checks have ended.
        """
        if isinstance(module, DistributedDataParallel):
            ranks = tuple(dist.get_process_group_ranks(module.process_group))
        else:
            ranks = next((holders(each) for each in module.parameters() if isinstance(each, DTensor)), ())
        return functools.partial(self.reductions.update, (ranks,))

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop counting models as replicas if an optimizer is about to update them with unreduced gradients."""
        if self.classes.part(optimizer):
            self._entries.clear()
            self.rank.coverage.unseen(
                "bits", "replicas of a model that is updated with gradients that were not reduced"
            )

    def optimizer_entries(self, optimizer: torch.optim.Optimizer) -> list[Entry]:
        """An `Entry` for each parameter and state tensor of an optimizer; the same objects as before if none is new."""
        self.classes.resolve()
        self._optimizers.add(optimizer)
        tensors = [
            tensor
            for parameter in _updated(optimizer)
            for tensor in (parameter, *state_of(optimizer, parameter).values())
        ]
        known = self._entries.get(id(optimizer), [])
        if len(known) == len(tensors) and all(e.tensor() is t for e, t in zip(known, tensors, strict=True)):
            return known
        found: list[Entry] = []
        updated = {id(parameter) for parameter in _updated(optimizer)}
        for name, parameter in self.names.of_parameters(optimizer):
            if id(parameter) not in updated:
                continue
            found.append(Entry(phases.PARAMETER, name, weakref.ref(parameter), self.classes.of(parameter)))
            for key, value in state_of(optimizer, parameter).items():
                is_counter = key == "step" and value.dim() == 0 and not isinstance(value, DTensor)
                ranks = self.classes.holders(parameter) if is_counter else self.classes.of(parameter, value)
                found.append(Entry(phases.OPTIMIZER_STATE, f"{name} {key}", weakref.ref(value), ranks))
        self._entries[id(optimizer)] = found
        return found

    def holders(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, ...]]:
        """For each parameter group of an optimizer, the ranks that update the same parameters or shards of them.

        Call this after `after`.
        """
        entries, groups = self._entries.get(id(optimizer), []), optimizer.param_groups
        known = self._holders.get(id(optimizer))
        if known is None or known[0] is not entries or len(known[1]) != len(groups):
            ranks = [max(map(self.classes.holders, group["params"]), key=len, default=()) for group in groups]
            known = self._holders[id(optimizer)] = entries, ranks
        return known[1]

    def is_shared(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer updates a model of which several ranks are declared to hold parameters."""
        self.classes.resolve()
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        models = [[*unwrapped(root).parameters()] for root in self._roots]
        numbers = {id(parameter) for parameter in updated}
        models = [model for model in models if any(id(parameter) in numbers for parameter in model)]
        return any(len(self.classes.holders(parameter)) > 1 for model in (updated, *models) for parameter in model)

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[Entry]:
        """An `Entry` for the gradient of each of an optimizer's parameters that has one."""
        self.classes.resolve()
        return [
            Entry(phases.GRADIENT, name, weakref.ref(gradient), self.classes.of(parameter, gradient))
            for name, parameter in self.names.of_parameters(optimizer)
            if (gradient := parameter.grad) is not None
        ]

    def buffers(self, of: nn.Module | None = None) -> list[Entry]:
        """An `Entry` for each buffer of a module, or of all models that have run if `of` is None."""
        return [
            Entry(phases.BUFFER, self.names.of_buffer(module, name), weakref.ref(buffer), ())
            for root in ([of] if of is not None else self._roots)
            for module in unwrapped(root).modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def frozen(self, optimizers: Collection[torch.optim.Optimizer] | None = None) -> list[Entry]:
        """An `Entry` for each parameter of the models that have run, unless one of the given optimizers updates it.

        By default, these are all optimizers that have stepped.
        """
        optimizers = self._optimizers if optimizers is None else optimizers
        trained = {id(parameter) for optimizer in optimizers for parameter in _updated(optimizer)}
        return [
            Entry(
                phases.PARAMETER, self.names.of_parameter(parameter), weakref.ref(parameter), self.classes.of(parameter)
            )
            for root in self._roots
            for parameter in unwrapped(root).parameters()
            if id(parameter) not in trained and self.names.knows(parameter)
        ]

    def untrained(self, optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
        """The ids of the tensors of models that have run and of which none of the given optimizers updates anything.

        The program may write them as it likes, such as a copy of the model with averaged weights.
        """
        trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        return {
            id(tensor)
            for root in self._roots
            if trained.isdisjoint(map(id, root.parameters()))
            for tensor in (*root.parameters(), *root.buffers())
        }

    def searched(self) -> tuple[list[tuple[str, Tensor]], set[int]]:
        """The parameters of optimizers of which the program may keep copies, and the ids of what is no copy.

        These are the tensors of models that have run and of optimizers, and the gradients.
        """
        entries = [entry for entries in self._entries.values() for entry in entries]
        named = [
            (entry.name, tensor)
            for entry in entries
            if entry.stage == phases.PARAMETER
            and (tensor := entry.tensor()) is not None
            and not isinstance(tensor, DTensor)
        ]
        tensors = [entry.tensor() for entry in entries]
        tensors += [each for root in self._roots for each in (*root.parameters(), *root.buffers())]
        tensors += [each.grad for each in tensors if each is not None and each.is_leaf]
        return named, {id(each) for each in tensors if each is not None}

    def after(self, optimizer: torch.optim.Optimizer) -> list[Hashed]:
        """The hashes of an optimizer's parameters and state after its step; computed once for all checks."""
        key = self.rank.step, id(optimizer)
        if self._after is None or self._after[:2] != key:
            self._after = (*key, self.hash("at_rest", self.optimizer_entries(optimizer)))
        return self._after[2]

    def hash(self, check: str, entries: Sequence[Entry]) -> list[Hashed]:
        """Hash the tensors of entries; the coverage counts those that cannot be hashed, with the reason.

        Args:
            check: the check whose coverage counts them.
            entries: the entries.

        Returns:
            The lanes of the tensors, one `Hashed` for each device.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.rank.coverage.unseen(check, "tensors that are captured into a CUDA graph")
            return []
        by_device: dict[torch.device, Hashed] = {}
        tensors: dict[torch.device, list[Tensor]] = {}
        on_cpu = 0
        for entry, whole, plain in self._seen(check, entries):
            if plain.device.type == "cpu":
                on_cpu += plain.numel() * plain.element_size()
                if on_cpu > ON_CPU:
                    self.rank.coverage.unseen(check, f"tensors on the CPU beyond {ON_CPU >> 20} MiB")
                    continue
            hashed = by_device.setdefault(plain.device, Hashed())
            hashed.entries.append(entry)
            hashed.descriptions.append(_description(plain.dtype, plain.shape))
            hashed.marks.append(mark(plain, whole))
            tensors.setdefault(plain.device, []).append(plain)
        for device, hashed in by_device.items():
            hashed.lanes = lanes_of(tensors[device])
        return list(by_device.values())

    def _seen(self, check: str, entries: Sequence[Entry]) -> Iterator[tuple[Entry, Tensor, Tensor]]:
        for entry in entries:
            tensor = entry.tensor()
            if tensor is None:
                continue
            plain = local(tensor)
            reason = "" if entry.seen else why_unseen(plain)
            entry.seen = not reason
            if reason:
                self.rank.coverage.unseen(check, f"{entry.stage} {entry.name[:100]} is {reason}")
            elif plain.numel():
                yield entry, tensor, plain


def _updated(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The parameters that an optimizer updates; it has frozen ones too, if the program gives it all of a model."""
    for group in optimizer.param_groups:
        yield from (each for each in group["params"] if each.requires_grad or each.grad is not None)


@functools.lru_cache(maxsize=4096)
def _description(dtype: torch.dtype, shape: torch.Size) -> str:
    return description(torch.empty(shape, dtype=dtype, device="meta"))


_states: weakref.WeakKeyDictionary[Host, State] = weakref.WeakKeyDictionary()


def known_lanes(device: torch.device) -> Tensor:
    """Hashes five test tensors with the code that hashes all state; the lanes must be `KNOWN`.

    Returns:
        int64 [5, 2] on the device.
    """
    return lanes_of(_known_tensors(device))


@functools.lru_cache(maxsize=16)
def _known_tensors(device: torch.device) -> list[Tensor]:
    numbers = torch.arange(1 << 12, dtype=torch.int32)
    parts = [numbers[start:].clone() for start in (0, 0, 0, 0, 2)]
    return [part.pin_memory().to(device, non_blocking=True) for part in parts] if device.type == "cuda" else parts


def lanes_of(tensors: Sequence[Tensor], firsts: Sequence[int] | None = None) -> Tensor:
    """The lanes (128-bit hashes) of tensors on one device, int64 [tensors, 2] on that device.

    Args:
        tensors: the tensors.
        firsts: for each tensor that is a part of another one, the number of 8-byte words before it; by default 0.
    """
    with torch.inference_mode(False), torch.no_grad():
        lanes = torch.zeros(len(tensors), LANES, dtype=torch.int64, device=tensors[0].device)
        add_lanes(tensors, lanes, range(len(tensors)), firsts)
    return lanes
