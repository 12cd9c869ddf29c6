"""One call of an outermost module that can run again, on the same rank or on all ranks with one rank's inputs.

Running it again changes nothing that the training reads: no gradient is accumulated (`backward.differentiate`),
buffers, attributes of modules (`saved_state.SavedState`) and RNG states are restored, and `DistributedDataParallel`
runs without its reducer. FSDP2 gathers parameters as always, so all of its ranks must run the call at the same place.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dash_inductor.errors import described
from dash_inductor.observers import active
from dash_inductor.untrusted import Refused, parse_json
from dash_inductor.upstream.eager import (  # fmt: skip
    compiler_is_loaded,
    has_cuda_graphs,
    is_compiled,
    versions_kept,
    without_accumulation_hooks,
)
from dash_inductor.upstream.pytree import tree_flatten, tree_leaves, tree_unflatten

from ..upstream.parallel import not_reduced, why_not_again
from .backward import differentiate, traceless
from .execution import Execution
from .parameters import Values, Versions, WroteParameters
from .saved_state import SavedState
from .side_effects import SideEffect, no_side_effects

_PLAIN = (int, float, bool, str, type(None))
_LEAVES = 1 << 12
_FIELDS = 64
"""The largest number of JSON values of one argument."""


@dataclass(frozen=True)
class Settings:
    """The PyTorch settings that decide how a module computes: autocast, and the enabled attention kernels.

    Attributes:
        autocast: (device type, enabled, dtype) for each device type.
        attention: whether the flash, memory-efficient, math and cuDNN kernels are enabled.
    """

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    attention: tuple[bool, bool, bool, bool]

    @classmethod
    def now(cls, devices: Iterable[str]) -> Settings:
        """The current settings, with autocast for these device types."""
        on = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in sorted(devices))
        return cls(on, _attention())

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context manager in which these settings are active."""
        before = _attention()
        with ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            _set_attention(self.attention)
            try:
                yield
            finally:
                _set_attention(before)


def _attention() -> tuple[bool, bool, bool, bool]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
    )  # fmt: skip


def _set_attention(flags: tuple[bool, bool, bool, bool]) -> None:
    cuda = torch.backends.cuda
    if flags != _attention():
        cuda.enable_flash_sdp(flags[0])
        cuda.enable_mem_efficient_sdp(flags[1])
        cuda.enable_math_sdp(flags[2])
        cuda.enable_cudnn_sdp(flags[3])


@dataclass
class Random:
    """The random number generator states of PyTorch (CPU, and the current GPU), Python and, if it is loaded, NumPy."""

    cpu: Tensor
    gpu: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> Random:
        """The current states of all of these generators."""
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        numpy = sys.modules.get("numpy.random")
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if on_gpu else None,
            random.getstate(),
            None if numpy is None else numpy.get_state(),
        )

    def restore(self) -> None:
        """Set the random number generators of PyTorch, Python and NumPy to these states."""
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


def seed_all(seed: int) -> None:
    """Seed PyTorch (CPU, and the current GPU), Python and NumPy, so that all ranks draw the same random numbers."""
    seed %= 1 << 63
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % (1 << 32))


@dataclass
class MicroBatch:
    """A recorded call of an outermost module.

    Attributes:
        root: the module, as the program calls it.
        leaves: its arguments in flat order; tensors are copies.
        structure: the pytree structure of the arguments.
        settings: the settings of the call.
        random: the RNG states before the call, if it runs again on this rank; otherwise None.
        saved: the buffers and attributes of modules before the call, likewise.
        gradients: for a call that runs again on this rank, the gradients of the tensors in its result, by their index.
        cannot: why the call itself cannot run again; "" if at most its module (`why_not_again`) prevents that.
        turns: whether the samples were rotated by one place, so that random gradients must be rotated too.
        silent: whether the backward begins with zeros in place of gradients.
    """

    root: nn.Module
    leaves: list[Any]
    structure: Any
    settings: Settings
    random: Random | None = None
    saved: SavedState | None = None
    gradients: dict[int, Tensor] = field(default_factory=dict)
    cannot: str = ""
    turns: bool = False
    silent: bool = False

    @classmethod
    def of(cls, root: nn.Module, args: Any, kwargs: Any) -> MicroBatch:
        """Record a call with copies of its arguments."""
        leaves, structure = tree_flatten((args, kwargs))
        copies = _fresh(leaves)
        devices = {p.device.type for p in root.parameters()} | {t.device.type for t in copies if isinstance(t, Tensor)}
        return cls(root, copies, structure, Settings.now(devices - {"meta"}))

    def why_not_again(self) -> str:
        """Why the call cannot run again on this rank; "" if it can."""
        return self.cannot or why_not_again(self.root)

    def why_not_sent(self) -> str:
        """Why other ranks cannot run this call; "" if they can."""
        if why := self.why_not_again():
            return why
        if len(self.leaves) > _LEAVES:
            return f"{len(self.leaves)} arguments"
        for leaf in self.leaves:
            if isinstance(leaf, Tensor):
                if isinstance(leaf, DTensor) or leaf.layout != torch.strided or leaf.is_quantized:
                    return f"an argument that is a {type(leaf).__name__} of layout {leaf.layout}"
            elif not isinstance(leaf, _PLAIN):
                return f"an argument of type {type(leaf).__name__}"
        return ""

    def signature(self) -> int:
        """A signed 64-bit hash of the module's class, and of the structure, types and repetitions of its arguments.

        Ranks can run each other's micro-batches only if it is equal.
        """
        kinds = [str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in self.leaves]
        return _number(f"{type(self.root).__name__} {self.structure} {kinds} {_first_places(self.leaves)}")

    def shapes(self) -> int:
        """A signed 64-bit hash of the shapes and strides of tensor arguments, and of the values of other arguments."""
        return _number(json.dumps([_described(leaf) for leaf in self.leaves]))

    def encode(self) -> list[Tensor]:
        """Encode the arguments as two tensors, uint8 [n] on the CPU: descriptions in JSON, and bytes of tensors."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        parts = [t.detach().contiguous().view(-1).view(torch.uint8).cpu() for t in tensors if t.numel()]
        payload = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        text = json.dumps([_described(leaf) for leaf in self.leaves]).encode()
        return [torch.frombuffer(bytearray(text), dtype=torch.uint8), payload]

    def given(self, described: bytes, payload: Tensor) -> MicroBatch:
        """Returns a call of the same module with another rank's arguments, on the devices of this rank.

        Args:
            described, payload: what `encode` has returned on the other rank.

        Raises:
            Refused: the arguments do not fit this call.
        """
        found = parse_json(described, _FIELDS * (len(self.leaves) + 1))
        if not isinstance(found, list) or len(found) != len(self.leaves):
            raise Refused(f"{len(self.leaves)} arguments here, and others there")
        leaves, start = list[Any](), 0
        for ours, theirs in zip(self.leaves, found, strict=True):
            if isinstance(ours, Tensor):
                size, stride, needs_gradient = theirs
                tensor = torch.empty(size, dtype=ours.dtype)
                end = start + tensor.nbytes
                if tensor.numel():
                    tensor.view(-1).view(torch.uint8).copy_(payload[start:end])
                start = end
                leaves.append(_laid_out(tensor, stride, ours.device).requires_grad_(needs_gradient))
            else:
                leaves.append(theirs)
        leaves = [
            leaf if first < 0 else leaves[first] for leaf, first in zip(leaves, _first_places(self.leaves), strict=True)
        ]
        return MicroBatch(self.root, leaves, self.structure, self.settings)

    def samples(self) -> int:
        """The number of samples: the size of the first dimension if all tensor arguments have the same, otherwise 0."""
        sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in self.leaves if isinstance(leaf, Tensor)}
        return sizes.pop() if len(sizes) == 1 else 0

    def turned(self) -> MicroBatch:
        """This call with every sample shifted by one place along the first dimension."""
        turned = {id(leaf): _rolled(leaf) for leaf in self.leaves if isinstance(leaf, Tensor)}
        leaves = [turned.get(id(leaf), leaf) for leaf in self.leaves]
        return MicroBatch(self.root, leaves, self.structure, self.settings, turns=True)

    def silenced(self) -> MicroBatch:
        """This call with a backward that begins with zeros, so that all gradients must be zero."""
        return replace(self, silent=True)

    def run(
        self, execution: Execution, seed: int | None, around: Callable[[], Any] | None = None, copies: bool = False
    ) -> None:
        """Run the call and its backward again.

        The backward begins with `gradients`. If there are none, it begins with the loss if the module returns one, or
        else with random numbers.

        Args:
            execution: observes the call.
            seed: seed of random numbers; None draws the same numbers as the original call.
            around: returns a context manager for the call.
            copies: whether to copy the parameters first, see `undisturbed`.

        Raises:
            WroteParameters: the call wrote parameters, see `undisturbed`.
        """
        args, kwargs = tree_unflatten(_fresh(self.leaves), self.structure)
        with ExitStack() as stack:
            stack.enter_context(undisturbed([self.root], self.root.parameters(), execution, copies))
            if self.saved is not None:
                self.saved.restore()
            if seed is not None:
                seed_all(seed)
            elif self.random is not None:
                self.random.restore()
            stack.enter_context(self.settings.again())
            if around is not None:
                stack.enter_context(around())
            with torch.enable_grad():
                result = self.root(*args, **kwargs)
            execution.returned(result)
            pairs = _gradients(result, self.gradients, seed, self.samples() if self.turns else 0)
            if pairs:
                tensors, gradients = zip(*pairs, strict=True)
                differentiate(
                    self.root, tensors, [torch.zeros_like(g) for g in gradients] if self.silent else gradients
                )


def why_failed(error: Exception) -> str:
    """Why a call could not run again, from the error that was raised: what the program does, or what has failed."""
    is_refused = isinstance(error, SideEffect | WroteParameters)
    return str(error) if is_refused else f"it has failed: {described(error)}"


@contextmanager
def undisturbed(
    roots: Sequence[nn.Module], parameters: Iterable[Tensor], execution: Execution, copies: bool = False
) -> Iterator[None]:
    """A context manager in which modules and backwards run without an effect on training.

    On exit it restores the buffers and attributes of modules, the variables that their code names, the gradients and
    the random number generators.

    Args:
        roots: models whose state is restored, and whose gradients are not reduced across ranks.
        parameters: parameters whose gradients are put aside and restored on exit.
        execution: the observer that replaces all others inside the block.
        copies: whether to copy the parameters first, to restore them if the block writes them.

    Raises:
        WroteParameters: the block wrote parameters; with `copies`, their values have been restored.
        SideEffect: the block would do what cannot be undone, such as writing a file.
    """
    before = Random.now()
    saved = [SavedState(root) for root in roots]
    if cannot := next(filter(None, (each.why_not_again() for each in saved)), ""):
        raise SideEffect(cannot)
    versions = [Versions(root) for root in roots]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    values = Values(parameter for parameter, _ in gradients) if copies else None
    tensors = [tensor for each in saved for tensor in each.tensors]
    tensors += [parameter for parameter, _ in gradients if not parameter.is_inference()]
    with versions_kept(tuple({id(tensor): tensor for tensor in tensors}.values())):
        try:
            with ExitStack() as stack:
                stack.enter_context(active.instead([execution]))
                stack.enter_context(no_side_effects())
                for module in (module for root in roots for module in root.modules()):
                    stack.enter_context(not_reduced(module))
                stack.enter_context(without_accumulation_hooks(parameter for parameter, _ in gradients))
                for parameter, _ in gradients:
                    parameter.grad = None
                yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for each in saved:
                each.restore()
            before.restore()
            why = next(filter(None, (each.why_not_again() for each in versions)), "")
            if (values is not None and values.restore()) or why:
                raise WroteParameters(why or "its forward writes parameters through their data")


def run_function(
    function: Callable[[], object],
    roots: Sequence[nn.Module],
    execution: Execution,
    seed: int,
    around: Callable[[], Any] | None = None,
    copies: bool = False,
) -> None:
    """Run a function of the program, including its backwards, without an effect on the training.

    Args:
        function: does what the program does in a step, up to its gradients.
        roots: models that have run before; other models are protected from their first call in the function on.
        execution: observes the function.
        seed: seed of random numbers.
        around: returns a context manager for the function.
        copies: whether to copy the parameters first, see `undisturbed`.

    Raises:
        WroteParameters: the function wrote parameters, see `undisturbed`.
    """
    models, inside = list(roots), {id(module) for root in roots for module in root.modules()}
    with ExitStack() as stack:
        parameters = {id(p): p for root in roots for p in root.parameters()}.values()
        stack.enter_context(undisturbed(roots, parameters, execution, copies))
        stack.enter_context(traceless(models))

        def begins(root: nn.Module) -> None:
            if id(root) not in inside:
                inside.update(map(id, root.modules()))
                models.append(root)
                stack.enter_context(undisturbed([root], root.parameters(), execution, copies))

        execution.begins = begins
        if around is not None:
            stack.enter_context(around())
        seed_all(seed)
        function()


def _gradients(result: Any, gradients: dict[int, Tensor], seed: int | None, turned: int) -> list[tuple[Tensor, Tensor]]:
    """The results and gradients with which the backward begins; see `MicroBatch.run`."""
    results = results_of(result)
    if gradients:
        return [(tensor, gradients[number]) for number, tensor in results if number in gradients]
    if (loss := _loss(result)) is not None:
        return [(loss, torch.ones_like(loss))]
    return [(tensor, _noise(tensor, (seed or 0) + number, turned)) for number, tensor in results]


def results_of(result: Any) -> list[tuple[int, Tensor]]:
    """The tensors in a module's result that require gradients, as (index among all its tensors, tensor)."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [(n, leaf) for n, leaf in enumerate(leaves) if leaf.requires_grad and leaf.grad_fn is not None]


def in_eager_code() -> AbstractContextManager[Any]:
    """A context manager in which compiled code runs eagerly; it does not load the compiler if nothing was compiled."""
    return torch.compiler.set_stance("force_eager") if compiler_is_loaded() else nullcontext()


def fit_for_graphs() -> Callable[[], AbstractContextManager[Any]] | None:
    """Returns `in_eager_code` if the process has CUDA graphs, otherwise None.

    A CUDA graph writes to the same memory in every run, and the program may still read its results. So a module with
    CUDA graphs runs again in eager code.
    """
    return in_eager_code if has_cuda_graphs() else None


def compiled(batch: MicroBatch) -> bool:
    """Whether a recorded call runs compiled code, which would be compiled again for new shapes."""
    return is_compiled(batch.root)


def _loss(result: Any) -> Tensor | None:
    """The loss in a result: the result itself, its entry `loss`, or its first element; None if there is none."""
    candidates = [result, getattr(result, "loss", None)]
    if isinstance(result, dict):
        candidates.append(result.get("loss"))
    if isinstance(result, (tuple, list)) and result:
        candidates.append(result[0])
    for found in candidates:
        if isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad and found.is_floating_point():
            return found
    return None


def _noise(tensor: Tensor, seed: int, turned: int) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    generator = torch.Generator(local.device).manual_seed(seed % (1 << 63))
    noise = torch.randn(local.shape, generator=generator, dtype=torch.float32, device=local.device).to(local.dtype)
    if turned and noise.dim() and noise.shape[0] == turned:
        noise = noise.roll(1, 0)
    if isinstance(tensor, DTensor):
        return DTensor.from_local(
            noise, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
    return noise


def _rolled(tensor: Tensor) -> Tensor:
    return tensor.detach().roll(1, 0).requires_grad_(tensor.requires_grad)


def _copied(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    whole = isinstance(tensor, DTensor) or tensor.layout != torch.strided
    copy = plain.clone() if whole else _laid_out(plain, tensor.stride(), tensor.device)
    return copy.requires_grad_(tensor.requires_grad)


def _fresh(leaves: Sequence[Any]) -> list[Any]:
    """Arguments with copies of the tensors, which the call may write to; a tensor given twice has one copy."""
    copies = {id(leaf): _copied(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    return [copies.get(id(leaf), leaf) for leaf in leaves]


def _first_places(leaves: Sequence[Any]) -> list[int]:
    """For each argument, the place at which the same tensor is given first; -1 for others than tensors."""
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), place) if isinstance(leaf, Tensor) else -1 for place, leaf in enumerate(leaves)]


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return [list(leaf.shape), list(leaf.stride()), leaf.requires_grad]
    return leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__


def _laid_out(tensor: Tensor, stride: Sequence[int], device: torch.device) -> Tensor:
    """A copy with these strides, as compiled graphs require; a contiguous copy if elements would share memory."""
    steps = sorted((step, size) for step, size in zip(stride, tensor.shape, strict=True) if size > 1)
    overlaps = any(step < before * size for (before, size), (step, _) in itertools.pairwise([(1, 1), *steps]))
    dtype = tensor.dtype
    if overlaps:
        return torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)
    return torch.empty_strided(tensor.shape, stride, dtype=dtype, device=device).copy_(tensor)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
