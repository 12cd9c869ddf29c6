"""Replaces PyTorch's FlashAttention in eager programs: each shape is planned once, then launched directly.

`torch.nn.attention.activate_flash_attention_impl` calls `activate`, which overrides PyTorch's kernels for the forward
and backward of `scaled_dot_product_attention`.  The first call with a shape plans the site as in a compiled graph, so
that kernels and bits are the same as in compiled programs, and publishes its record.  Later calls look up what to
launch by the metadata of their tensors.  If the site is not replaced, PyTorch's own kernel runs under deterministic
algorithms.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from .. import _switch
from ..config import config
from ..graph.model_line import line_of_program
from ..model.plan import Fallback
from ..model.reasons import Reason
from ..passes.base.fallback_error import fallback_error
from ..planning.prediction import predicted_us
from ..records.publication import publish
from ..records.records import FORWARD_ONLY, FULL, SiteRecord, Tensors
from ..upstream.dispatch import OpOverload
from .determinism import DETERMINISTIC
from .packed import OPERATORS, Classes, Packed
from .planned import Asked, Planned, RunForward, backward_of, forward_of, planned

_aten = torch.ops.aten
_KINDS = 4096
"""The maximum number of cached entries per operator."""
_TENSORS = 6
"""The number of leading tensor arguments of a backward: grad_out, query, key, value, out and logsumexp."""


def no_more(query: Tensor, key: Tensor) -> tuple[Any, ...]:
    """Returns an empty tuple, for forwards that return only out and logsumexp: the default of `Pair.more`."""
    return ()


def _more_of_cuda(query: Tensor, key: Tensor) -> tuple[Any, ...]:
    return None, None, query.shape[2], key.shape[2], *_unread(query.device, query.dtype)


@functools.cache
def _unread(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Placeholder seed, offset and weights of calls without dropout; nothing reads them, so all calls share them."""
    state, offset = (torch.zeros(size, dtype=torch.uint64, device=device) for size in (2, ()))
    return state, offset, torch.empty(0, dtype=dtype, device=device)


@dataclass(frozen=True)
class Pair:
    """A forward and a backward attention operator of PyTorch whose kernels are overridden.

    Attributes:
        forward: (query, key, value, dropout_p, is_causal, ...) -> (out, logsumexp, ...).
        backward: (grad_out, query, key, value, out, logsumexp, ..., dropout_p, is_causal, ...) -> (dq, dk, dv).
        more: a function of query and key; it returns what a forward without dropout returns after out and logsumexp,
            such as the random state.
    """

    forward: OpOverload
    backward: OpOverload
    more: Callable[[Tensor, Tensor], tuple[Any, ...]] = no_more


CUDA = Pair(
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_backward.default,
    _more_of_cuda,
)


class Handle:
    """Keeps the overrides of PyTorch's attention kernels in place until `remove` is called."""

    def __init__(self, library: Library) -> None:
        self._library: Library | None = library

    def remove(self) -> None:
        """Removes the overrides, so that PyTorch's own kernels run again."""
        self._library = None


def activate() -> Handle:
    """Overrides PyTorch's CUDA kernels for FlashAttention and packed attention; the returned handle undoes it."""
    return in_front("CUDA", CUDA, packed=True)


def in_front(device: str, pair: Pair, *, packed: bool = False) -> Handle:
    """Overrides PyTorch's kernels for a forward and backward on a device; does nothing if DASH_INDUCTOR=0 is set.

    Args:
        device: the dispatch key, "CUDA" or "CPU".
        pair: the two operators.
        packed: whether to override packed (varlen) attention, too, in order to record its calls.

    Returns:
        The handle whose `remove` restores PyTorch's kernels.
    """
    library = Library("aten", "IMPL", device)
    if _switch.off_for_good() is not None:
        return Handle(library)
    sites, classes = _Sites(pair), Classes()
    functions: list[tuple[OpOverload, Callable[..., Any]]] = [
        (pair.forward, _Forward(pair.forward, get_kernel(pair.forward, device), sites)),
        (pair.backward, _Backward(pair.backward, get_kernel(pair.backward, device), sites)),
    ]
    if packed:
        functions += [(op, Packed(op, get_kernel(op, device), classes)) for op in OPERATORS]
    with warnings.catch_warnings():
        # Overriding PyTorch's kernels, about which it warns, is intended.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for op, function in functions:
            library.impl(op._schema.name.removeprefix("aten::"), function, device, with_keyset=True)
    return Handle(library)


class _Sites:
    """The planned sites and their records: one per shape, and more if later calls of a shape have another outcome."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._names: dict[Hashable, str] = {}
        self._told: set[Hashable] = set()
        self._lock = threading.Lock()

    def name_of(self, asked: Asked) -> str:
        """The name of the record for a call; calls with equal shapes and arguments have the same name."""
        with self._lock:
            return self._names.setdefault(_about(asked), f"flash_attention_{len(self._names)}")

    def tell(self, asked: Asked, found: Planned | Fallback, trains: bool) -> None:
        """Publishes the record of a site, unless an equal one has been published.

        Args:
            asked: the call.
            found: the plan, or the reason why it is not replaced.
            trains: whether it has a backward.

        Raises:
            FallbackError: the site is not replaced, `config.strict` is set, and the reason is not a setting of the
                program.
        """
        name, about = self.name_of(asked), (_about(asked), found, trains)
        with self._lock:
            if about in self._told:
                return
            self._told.add(about)
        record = _record(name, self.pair, asked, found, trains)
        publish([record], "joint" if trains else "inference", origin="eager")
        if config.strict and record.reason not in (None, Reason.CPU_OFF):
            raise fallback_error(f"dash_inductor did not replace an attention: {record}")


def _about(asked: Asked) -> tuple[Hashable, ...]:
    tensors = asked.query, asked.key, asked.value
    facts = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
    return *facts, asked.causal, asked.scale, asked.unusual


def _record(name: str, pair: Pair, asked: Asked, found: Planned | Fallback, trains: bool) -> SiteRecord:
    query = asked.query
    fallback = found if isinstance(found, Fallback) else None
    site, plan, arch = (None, None, "") if isinstance(found, Fallback) else (found.site, found.plan, found.arch)
    forward = "not replaced" if plan is None else plan.forward
    return SiteRecord(
        name=name,
        op=(pair.backward if trains else pair.forward)._schema.name,
        status="replaced" if fallback is None else "fallback",
        reason=None if fallback is None else fallback.reason,
        detail="" if fallback is None else fallback.detail,
        site=site,
        plan=plan,
        forward="not replaced: by the setting forward='keep'" if forward == "keep" else forward,
        mask="causal" if asked.causal else "full",
        line=line_of_program(),
        tensors=Tensors(
            tuple(query.shape),
            tuple(asked.key.shape),
            tuple(asked.value.shape),
            str(query.dtype).removeprefix("torch."),
            str(query.device),
        ),
        arch=arch,
        predicted_us=predicted_us(plan, site, arch) if trains and plan is not None and site is not None else None,
        kind=FULL if trains else FORWARD_ONLY,
    )


def _is_flag(argument: torch.Argument) -> bool:
    return not isinstance(argument.type, (torch.TensorType, torch.OptionalType))


class _Kernel:
    """The override of a kernel, with a cache of what to run by tensor metadata."""

    def __init__(self, op: OpOverload, original: Any, sites: _Sites) -> None:
        self._original, self._sites = original, sites
        self._arguments = op._schema.arguments
        self._runs: dict[tuple[Any, ...], Any] = {}
        """Tensor metadata and flags -> what runs; None for PyTorch's own kernel."""

    def _asked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Asked:
        given: dict[str, Any] = {argument.name: argument.default_value for argument in self._arguments}
        given |= dict(zip(given, args, strict=False)) | dict(kwargs)
        words = [f"{name}={given[name]}" for name in ("dropout_p", "return_debug_mask") if given.get(name)]
        words += ["an attn_mask"] * (given.get("attn_mask") is not None)
        tensors = given["query"], given["key"], given["value"]
        op = self._sites.pair.forward._schema.name
        return Asked(op, *tensors, given["is_causal"], given["scale"], ", ".join(words))

    def _remember(self, facts: tuple[Any, ...], run: Any) -> Any:
        if len(self._runs) >= _KINDS:
            self._runs.clear()
        self._runs[facts] = run
        return run

    def _fallback(self, keys: Any, args: Any, kwargs: Any) -> Any:
        with DETERMINISTIC:
            return self._original.call_boxed(keys, *args, **kwargs)


class _Forward(_Kernel):
    def __call__(self, keys: Any, query: Tensor, key: Tensor, value: Tensor, *flags: Any, **kwargs: Any) -> Any:
        if _switch.is_off_in_code():
            return self._original.call_boxed(keys, query, key, value, *flags, **kwargs)
        facts = (
            query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(), query.dtype, key.dtype,
            value.dtype, query.device, *flags, *kwargs.items(), config.forward, config.schedule, config.split_kv,
        )  # fmt: skip
        try:
            found = self._runs[facts]
        except KeyError:
            found = self._remember(facts, self._made((query, key, value, *flags), kwargs))
        if found is None:
            return self._fallback(keys, (query, key, value, *flags), kwargs)
        run, more = found
        return run(query, key, value) + more

    def _made(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[RunForward, tuple[Any, ...]] | None:
        """The function that launches the forward, and the operator's further results; None for PyTorch's own kernel."""
        asked = self._asked(args, kwargs)
        tensors = asked.query, asked.key, asked.value
        found, launch = planned(asked), None
        if isinstance(found, Planned) and found.plan.forward != "keep":
            try:
                launch = forward_of(found, tensors, self._sites.name_of(asked))
            except Exception as error:
                found = Fallback(Reason.COMPILE_FAILED, f"{type(error).__name__}: {error}")
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        self._sites.tell(asked, found, trains)
        return None if launch is None else (launch, self._sites.pair.more(asked.query, asked.key))


class _Backward(_Kernel):
    def __init__(self, op: OpOverload, original: Any, sites: _Sites) -> None:
        super().__init__(op, original, sites)
        behind = op._schema.arguments[_TENSORS:]
        places = [i for i, argument in enumerate(behind) if not argument.kwarg_only and _is_flag(argument)]
        self._flags = slice(places[0], places[-1] + 1)
        """The slice of flags and numbers among the arguments after the tensors; it contains no tensor."""

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _switch.is_off_in_code():
            return self._original.call_boxed(keys, *args, **kwargs)
        grad_out, query, key, value, out, logsumexp, *rest = args
        facts = (
            grad_out.stride(), grad_out.dtype, query.shape, query.stride(), key.shape, key.stride(), value.shape,
            value.stride(), out.stride(), logsumexp.stride(), query.dtype, key.dtype, value.dtype, query.device,
            *rest[self._flags], *kwargs.items(), config.forward, config.schedule, config.split_kv, config.profile,
        )  # fmt: skip
        try:
            run = self._runs[facts]
        except KeyError:
            run = self._remember(facts, self._made(args, kwargs))
        if run is None:
            return self._fallback(keys, args, kwargs)
        return run(grad_out, query, key, value, out, logsumexp)

    def _made(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
        asked = self._asked(args, kwargs)
        grad_out, query, key, value, out, logsumexp, *_ = args
        found, run = planned(asked), None
        if isinstance(found, Planned):
            dtypes = grad_out.dtype, query.dtype, out.dtype, logsumexp.dtype
            if dtypes != (query.dtype, query.dtype, query.dtype, torch.float32):
                found = Fallback(Reason.DTYPE, ", ".join(map(str, dtypes)))
            elif logsumexp.shape[:2] != query.shape[:2] or logsumexp.dim() != 3 or logsumexp.shape[2] < query.shape[2]:
                found = Fallback(Reason.LAYOUT, f"log-sum-exp {tuple(logsumexp.shape)}")
        if isinstance(found, Planned):
            try:
                tensors = grad_out, query, key, value, out, logsumexp
                run = backward_of(found, tensors, self._sites.name_of(asked))
            except Exception as error:
                found = Fallback(Reason.COMPILE_FAILED, f"{type(error).__name__}: {error}")
        self._sites.tell(asked, found, trains=True)
        return run
