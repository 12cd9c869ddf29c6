"""Packed attention in programs that are not compiled: PyTorch's own kernels run, and a record says so.

`varlen_attn`, and whatever else has documents one behind the other, calls two operators of PyTorch.  The functions in
front of their kernels run these under deterministic algorithms, and publish one record for each class of calls, in
which the numbers of tokens and documents, other ones in every step, do not matter.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from .. import _switch
from ..config import config
from ..model.reasons import Reason
from ..passes.base.kept_error import kept_error
from ..records.publication import publish
from ..records.records import FORWARD_ONLY, FULL, SiteRecord, Tensors
from ..upstream.dispatch import OpOverload
from .determinism import DETERMINISTIC
from .lines import line_of_program

_aten = torch.ops.aten
FORWARD, BACKWARD = _aten._flash_attention_forward.default, _aten._flash_attention_backward.default
OPERATORS: tuple[OpOverload, ...] = (FORWARD, BACKWARD)
"""The operators of packed attention, which PyTorch's FlashAttention for tensors without documents calls, too."""

_DETAIL = (
    "packed attention is replaced in compiled functions alone; PyTorch's kernels run, under deterministic algorithms"
)


class Packed:
    """The function in front of the kernel of one of `OPERATORS`.

    Args:
        op: the operator.
        original: PyTorch's kernel.
        classes: the classes of calls that have a record, with their names; both operators have them in common.
    """

    def __init__(self, op: OpOverload, original: Any, classes: Classes) -> None:
        self._original, self._classes = original, classes
        self._names = [argument.name for argument in op._schema.arguments]
        self._trains = op is BACKWARD

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if _switch.is_off_in_code() or given["cum_seq_q"] is None:  # a call of another operator that has a record
            return self._original.call_boxed(keys, *args, **kwargs)
        query, key, value = given["query"], given["key"], given["value"]
        trains = self._trains or any(tensor.requires_grad for tensor in (query, key, value))
        window = given.get("window_size_left"), given.get("window_size_right")
        self._classes.tell((query, key, value), given["is_causal"], window, trains)
        with DETERMINISTIC:
            return self._original.call_boxed(keys, *args, **kwargs)


class Classes:
    """The classes of packed calls that have a record."""

    def __init__(self) -> None:
        self._told: set[Hashable] = set()
        self._lock = threading.Lock()

    def tell(self, tensors: tuple[Tensor, ...], causal: bool, window: tuple[int | None, ...], trains: bool) -> None:
        """Publish the record of a class that has none.

        Args:
            tensors: query, key and value, [tokens, heads, head dim].
            trains: whether it has a backward.

        Raises:
            SiteKeptError: `config.strict` is set.
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
            status="kept",
            reason=Reason.VARLEN,
            detail=_DETAIL + bounds,
            site=None,
            plan=None,
            forward="kept",
            mask="causal" if causal else "full",
            line=line_of_program(),
            tensors=Tensors(
                shapes[0], shapes[1], shapes[2], str(query.dtype).removeprefix("torch."), str(query.device)
            ),
            kind=FULL if trains else FORWARD_ONLY,
        )
        publish([record], "joint" if trains else "inference", origin="eager")
        if config.strict:
            raise kept_error(f"dash_inductor kept an attention: {record}")
