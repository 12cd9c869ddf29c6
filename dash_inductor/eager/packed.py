"""Records packed (varlen) attention in eager programs; it is not replaced but runs PyTorch's kernels.

`varlen_attn` and other packed attention call two operators of PyTorch.  The overrides of their kernels run these under
deterministic algorithms, and publish one record for each class of calls: calls that differ at most in the numbers of
tokens and documents, which change in every step.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from .. import _switch
from ..config import config
from ..graph.model_line import line_of_program
from ..model.reasons import Reason
from ..passes.base.fallback_error import fallback_error
from ..records.publication import publish
from ..records.records import FORWARD_ONLY, FULL, SiteRecord, Tensors
from ..upstream.dispatch import OpOverload
from .determinism import DETERMINISTIC

_aten = torch.ops.aten
FORWARD, BACKWARD = _aten._flash_attention_forward.default, _aten._flash_attention_backward.default
OPERATORS: tuple[OpOverload, ...] = (FORWARD, BACKWARD)
"""The operators of packed attention; PyTorch's FlashAttention for unpacked tensors calls them, too."""

_DETAIL = (
    "packed attention is replaced in compiled functions alone; PyTorch's kernels run, under deterministic algorithms"
)


class Packed:
    """Overrides the kernel of a packed attention operator: records calls, and runs PyTorch's kernel deterministically.

    Args:
        op: the operator, one of `OPERATORS`.
        original: PyTorch's kernel.
        classes: the classes of calls that have been recorded; the forward and the backward operator share them.
    """

    def __init__(self, op: OpOverload, original: Any, classes: Classes) -> None:
        self._original, self._classes = original, classes
        self._names = [argument.name for argument in op._schema.arguments]
        self._trains = op is BACKWARD

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if _switch.is_off_in_code() or given["cum_seq_q"] is None:  # called by another operator, which has a record
            return self._original.call_boxed(keys, *args, **kwargs)
        query, key, value = given["query"], given["key"], given["value"]
        trains = self._trains or any(tensor.requires_grad for tensor in (query, key, value))
        window = given.get("window_size_left"), given.get("window_size_right")
        self._classes.tell((query, key, value), given["is_causal"], window, trains)
        with DETERMINISTIC:
            return self._original.call_boxed(keys, *args, **kwargs)


class Classes:
    """The classes of packed attention calls that have a record; calls that differ only in lengths are of one class."""

    def __init__(self) -> None:
        self._told: set[Hashable] = set()
        self._lock = threading.Lock()

    def tell(self, tensors: tuple[Tensor, ...], causal: bool, window: tuple[int | None, ...], trains: bool) -> None:
        """Publishes a record for a packed call, unless its class has one.

        Args:
            tensors: query, key and value, [tokens, heads, head dim].
            causal: whether the mask is causal.
            window: the bounds of the window on the left and on the right.
            trains: whether it has a backward.

        Raises:
            FallbackError: `config.strict` is set.
        """
        query = tensors[0]
        shapes = [(None, *tensor.shape[1:]) for tensor in tensors]
        about = *shapes, query.dtype, query.device, causal, window, trains
        with self._lock:
            if about in self._told:
                return
            number = len(self._told)
            self._told.add(about)
        bounds = "" if window in ((None, None), (-1, -1)) else f"; its window is {window}"
        record = SiteRecord(
            name=f"packed_attention_{number}",
            op=(BACKWARD if trains else FORWARD)._schema.name,
            status="fallback",
            reason=Reason.VARLEN,
            detail=_DETAIL + bounds,
            site=None,
            plan=None,
            forward="not replaced",
            mask="causal" if causal else "full",
            line=line_of_program(),
            tensors=Tensors(
                shapes[0], shapes[1], shapes[2], str(query.dtype).removeprefix("torch."), str(query.device)
            ),
            kind=FULL if trains else FORWARD_ONLY,
        )
        publish([record], "joint" if trains else "inference", origin="eager")
        if config.strict:
            raise fallback_error(f"dash_inductor did not replace an attention: {record}")
