"""The gathered-parameter check: compares the parameters that FSDP2 has gathered with the shards they came from.

The lanes (128-bit hash) of a tensor are sums, so the lanes of the owners' shards add up to those of the whole
parameter. Parameters of a forward are hashed after the forward, as close to their use as possible. Parameters that are
gathered again for a backward, or for a compiled forward, which has no hooks, are hashed when they arrive.

Each rank hashes its own shard, and of every gathered parameter the segment of each owner, with the segment's position
in the whole parameter. The digests of the shards must equal those of the gathered segments on all ranks. The monitor
names a rank whose copy differs, or an owner whose segment arrived on all ranks with other bits than its shard has now.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from dash_inductor.observers import active
from dash_inductor.upstream.eager import in_backward

from ..fingerprints.fingerprint import add_lanes, why_unseen
from ..fingerprints.sizes import LANES
from ..shared.class_names import spelled
from ..shared.roots import OWNERS
from ..transport.messages import Message
from .check import Check, Host
from .comms import watch_gather
from .digests import Arriving, Queue, Ring
from .state import ON_CPU, State, local

SENT = 4
"""The number of last steps that each message contains."""

_WORD = 8
_TOO_MUCH = f"parameters on the CPU beyond {ON_CPU >> 20} MiB"


@dataclass
class Gathered:
    """The summed lanes of all parameters that one group of ranks has gathered in one step.

    Attributes:
        owners: the ranks whose shards make up a whole parameter, in the order of the shards.
        lanes: int64 [min(owners, OWNERS) + 1, 2] on the device: the gathered segments, then the own shard.
        tensors: the number of tensors that were hashed.
        words: the number of 8-byte words that were hashed, which is the hash position of the next tensor.
    """

    owners: tuple[int, ...]
    lanes: Tensor
    tensors: int = 0
    words: int = 0


class GatheredParameters(Check):
    """A check that hashes gathered parameters of FSDP2, in the first forward of a step.

    Args:
        rank: the rank that this check belongs to.
        collectives: n: check every n-th step; 0: never.
    """

    name = "gathered_parameters"

    def __init__(self, rank: Host, collectives: int = 1, **settings: Any) -> None:
        super().__init__(rank)
        self._state, self._every = State.of(rank), collectives
        self._queue = Queue()
        self._shards: dict[tuple[int, str], DTensor] = {}  # by module and name in it
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # in this step
        self._gathered: dict[tuple[str, torch.device], Gathered] = {}  # by ranks, and what for
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._after_forward: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # hashed after their forwards
        self._looking = 0
        self._failed: Exception | None = None
        self._ring = Ring()
        self._done: set[tuple[int, str]] = set()

    def step_began(self, step: int) -> None:
        """Forget which parameters were gathered in the last step."""
        self._seen.clear()
        self._done.clear()
        self._gathered.clear()
        self._looking = step
        self._queue.poll()

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Send those digests to the monitor whose copies have arrived on the host."""
        self._queue.poll()

    def module_begins(self, module: nn.Module) -> None:
        """Keep references to the shards of an FSDP2 module, whose parameters are still sharded before its forward."""
        self._state.module_begins(module)
        if module not in self._watched and self._every > 0 and self.rank.world > 1:
            self._watch(module)
        if isinstance(module, FSDPModule) and module not in self._seen and self._on():
            for key, parameter in _parameters(module):
                if isinstance(parameter, DTensor):
                    self._shards.setdefault(key, parameter)

    def module_ended(self, module: nn.Module, result: object) -> None:
        """Hash the gathered parameters of an FSDP2 module, which still exist right after its forward."""
        if not isinstance(module, FSDPModule) or module in self._seen or not self._on():
            return
        self._seen.add(module)
        self._after_forward.add(module)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.rank.coverage.unseen(self.name, "tensors that are captured into a CUDA graph")
            return
        for key, parameter in _parameters(module):
            shard = self._shards.get(key)
            if shard is not None and parameter is not shard and key not in self._done:
                self._done.add(key)
                why = self._add(parameter, shard)
                if why:
                    self.rank.coverage.unseen(self.name, why)

    def step_done(self, step: int) -> None:
        """Queue the digests of the step; they are sent as soon as they have been copied to the host."""
        if self._failed is not None:
            raise self._failed
        gathered, self._gathered = self._gathered, {}
        self._shards.clear()
        if gathered:
            arriving = [Arriving(each.lanes) for each in gathered.values()]
            named = [(where, each) for (where, _), each in gathered.items()]
            self._queue.put(arriving, functools.partial(self._arrived, step, named, arriving))

    def order(self, message: Message) -> None:
        """Answer the monitor's request for the digests of all segments that a group of ranks gathered in a step."""
        step, group = message.body.get("step"), message.body.get("group")
        kept = self._ring.get(step, group) if isinstance(step, int) else None
        self.send(self.rank.step, of=step, group=group, segments=None if kept is None else kept[2])

    def close(self) -> None:
        """Wait for digests that are still being copied to the host, and send them."""
        self._queue.poll(wait=True)

    def _on(self) -> bool:
        return self._every > 0 and self.rank.world > 1 and self.rank.step % self._every == 0

    def _add(self, whole: Tensor, shard: DTensor) -> str:
        """Hash a gathered parameter and the own shard of it.

        Returns:
            Why it cannot be hashed; "" if it was.
        """
        dimension = _sharded_along(whole, shard)
        plain, mine, coordinate = local(whole), local(shard), shard.device_mesh.get_coordinate()
        reason = why_unseen(plain) or why_unseen(mine)
        if reason or coordinate is None:
            return f"a parameter that is {reason or 'not here'}"
        if dimension is None:
            return "a parameter that is not sharded along its first dimension, and along one of a mesh"
        if plain.device != mine.device:
            return "a parameter whose shard lies on another device"
        place = tuple(slice(None) if n == dimension else where for n, where in enumerate(coordinate))
        owners = tuple(shard.device_mesh.mesh[place].tolist())
        if list(owners) != sorted(owners):
            return "a parameter whose mesh does not have ranks in ascending order"
        row = plain[:1].numel() * plain.element_size()
        rows = -(-plain.shape[0] // len(owners))
        if row * rows % _WORD or not plain.is_contiguous():
            return "a parameter whose shards do not begin at multiples of 8 bytes"
        gathered = self._of(spelled(owners), owners, plain)
        if gathered is None:
            return _TOO_MUCH
        size, first = plain.numel() * plain.element_size(), gathered.words
        if len(owners) <= OWNERS:
            segments = list(plain.detach().split(rows))
            firsts = [first + number * rows * row // _WORD for number in range(len(segments))]
            numbers = list(range(len(segments)))
        else:
            segments, firsts, numbers = [plain.detach()], [first], [0]
        own = coordinate[dimension]
        with torch.no_grad():
            cast = mine.detach().to(plain.dtype)
        add_lanes(
            [*segments, cast], gathered.lanes, [*numbers, len(gathered.lanes) - 1],
            [*firsts, first + own * rows * row // _WORD],
        )  # fmt: skip
        gathered.words += -(-size // _WORD)
        gathered.tensors += 1
        return ""

    def _of(self, where: str, owners: tuple[int, ...], tensor: Tensor) -> Gathered | None:
        """The lanes of these ranks; None if the tensors are too large for a CPU."""
        gathered = self._gathered.get((where, tensor.device))
        if gathered is None:
            lanes = torch.zeros(min(len(owners), OWNERS) + 1, LANES, dtype=torch.int64, device=tensor.device)
            gathered = self._gathered[where, tensor.device] = Gathered(owners, lanes)
        size = tensor.numel() * tensor.element_size()
        return None if tensor.device.type == "cpu" and gathered.words * _WORD + size > ON_CPU else gathered

    def _watch(self, module: nn.Module) -> None:
        """Observe what the FSDP2 modules in this one gather."""
        for inside in module.modules():
            if inside not in self._watched:
                self._watched.add(inside)
                if isinstance(inside, FSDPModule):
                    on_result = functools.partial(_gathered, weakref.ref(self), weakref.ref(inside))
                    if not watch_gather(inside, on_result):
                        self.rank.coverage.unseen(
                            self.name, "a module that gathers with a communication of the program"
                        )

    def gathered(self, module: nn.Module, own: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        """Hash the result of a module's all-gather; never raises, because it runs in the program's forward or backward.

        Args:
            module: the FSDP2 module.
            own: this rank's input of the all-gather.
            whole: the gathered tensor.
            group: the group of the all-gather.
        """
        backward = in_backward()
        if module in self._after_forward and not backward:
            return
        step = self.rank.step
        if not (active.is_on(self.rank) and step == self._looking and self._on()):
            return
        try:
            with torch.no_grad():
                why = self._add_flat(own, whole, group, "backward" if backward else "forward")
            if why:
                self.rank.coverage.unseen(self.name, why)
        except Exception as error:
            self._failed = self._failed or error

    def _add_flat(self, own: Tensor, whole: Tensor, group: dist.ProcessGroup, what: str) -> str:
        """Hash the result of an all-gather and this rank's input of it.

        Returns:
            Why they cannot be hashed; "" if they were.
        """
        owners = tuple(dist.get_process_group_ranks(group))
        reason = why_unseen(whole)
        if reason:
            return f"gathered parameters in the {what}: {reason}"
        if whole.is_cuda and torch.cuda.is_current_stream_capturing():
            return "tensors that are captured into a CUDA graph"
        size = own.numel() * own.element_size()
        if list(owners) != sorted(owners):
            return f"gathered parameters in the {what}: ranks are not in ascending order"
        if len(owners) > OWNERS:
            return f"gathered parameters in the {what}: more than {OWNERS} ranks"
        if size % _WORD:
            return f"gathered parameters in the {what}: shards are no multiple of {_WORD} bytes"
        gathered = self._of(f"{what} {spelled(owners)}", owners, whole)
        if gathered is None:
            return _TOO_MUCH
        first, words, here = gathered.words, size // _WORD, group.rank()
        segments = list(whole.view(len(owners), -1))
        add_lanes(
            [*segments, own], gathered.lanes, range(len(owners) + 1),
            [*(first + number * words for number in range(len(owners))), first + here * words],
        )  # fmt: skip
        gathered.words += words * len(owners)
        gathered.tensors += 1
        return ""

    def _arrived(self, step: int, gathered: Sequence[tuple[str, Gathered]], arriving: Sequence[Arriving]) -> None:
        kept = self._ring.of(step)
        for (where, each), numbers in zip(gathered, arriving, strict=True):
            lanes = [numbers.numbers()[row].tobytes().hex() for row in range(len(each.lanes))]
            whole = hashlib.blake2b(bytes.fromhex("".join(lanes[:-1])), digest_size=8).hexdigest()
            kept[where] = whole, lanes[-1], lanes[:-1]
            self.rank.coverage.count(self.name, groups=1, tensors=each.tensors)
        groups: dict[str, dict[str, list[str]]] = {}
        for number in range(max(1, step - SENT + 1), step + 1):
            for group, (whole, own, _) in self._ring.of(number).items():
                groups.setdefault(group, {})[str(number)] = [whole, own]
        self.send(step, groups=groups)


def _gathered(
    check: weakref.ref[GatheredParameters],
    module: weakref.ref[nn.Module],
    own: Tensor,
    whole: Tensor,
    group: dist.ProcessGroup,
) -> None:
    here, of = check(), module()
    if here is not None and of is not None:
        here.gathered(of, own, whole, group)


def _sharded_along(whole: Tensor, shard: DTensor) -> int | None:
    """The dimension of a shard's mesh along which FSDP2 has gathered it; None if there is no such dimension."""
    names = shard.device_mesh.mesh_dim_names or ()
    others = set(whole.device_mesh.mesh_dim_names or ()) if isinstance(whole, DTensor) else set()
    along = [
        number
        for number, placement in enumerate(shard.placements)
        if not isinstance(placement, Replicate) and not (others and names[number] in others)
    ]
    if len(along) != 1 or (isinstance(whole, DTensor) and not others):
        return None
    return along[0] if getattr(shard.placements[along[0]], "dim", None) == 0 else None


def _parameters(module: nn.Module) -> Iterator[tuple[tuple[int, str], Tensor]]:
    for inside in module.modules():
        for name, parameter in inside.named_parameters(recurse=False):
            yield (id(inside), name), parameter
