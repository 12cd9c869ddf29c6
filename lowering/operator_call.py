"""Calls our operators in the code that Inductor generates.

Python wrappers call the operator's attribute `direct`, because going through PyTorch's dispatcher to a Python
implementation takes longer than all other host work of an attention.  C++ and FX wrappers call the operator itself.  An
implementation that caches launchers by tensor layout also gets the layouts of its tensors as one string, if they are
static: comparing it takes less time than querying the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import sympy

from ..operators.direct import TAKES_LAYOUTS
from ..operators.document_tiles import document_tiles, document_tiles_of_mask
from ..operators.mask_tables import mask_tables
from ..upstream.dispatch import OpOverload
from ..upstream.inductor import FallbackKernel, IRNode, TensorBox, V, register_lowering
from ..upstream.pytree import tree_map_only


class _OperatorCall(FallbackKernel):
    def get_kernel_name(self) -> str:
        name = super().get_kernel_name()
        return name.removesuffix(".default") + ".direct" if _is_python() else name

    def codegen_args(self) -> list[str]:
        args: list[str] = super().codegen_args()
        assert isinstance(self.op_overload, OpOverload)
        if _is_python() and getattr(self.op_overload.overloadpacket.direct, TAKES_LAYOUTS):
            layouts = [_layout(tensor) for tensor in self.inputs]
            if None not in layouts:
                args.append(repr("; ".join(map(str, layouts))))
        return args


def _is_python() -> bool:
    """Returns whether Inductor generates Python code."""
    return not (V.graph.cpp_wrapper or V.graph.fx_wrapper)


def _layout(tensor: IRNode | Sequence[IRNode]) -> str | None:
    """Returns device, dtype, size and strides of a tensor as text; None if any of them is dynamic."""
    if not isinstance(tensor, IRNode):
        return None
    size, stride = tensor.get_size(), tensor.get_stride()
    if not all(isinstance(each, (int, sympy.Integer)) for each in (*size, *stride)):
        return None
    return f"{tensor.get_device()} {str(tensor.get_dtype()).removeprefix('torch.')} {[*size]} {[*stride]}"


def register() -> None:
    """Registers the lowerings of the operators of masks, which are always an `operator_call`."""
    for operator in (mask_tables, document_tiles, document_tiles_of_mask):
        register_lowering(operator, type_promotion_kind=None)(partial(operator_call, operator))


def operator_call(operator: OpOverload, *args: Any) -> Sequence[TensorBox]:
    """Adds a call of `operator`, which has the attribute `direct`, to the graph, and returns its results."""
    results: Sequence[TensorBox] = tree_map_only(IRNode, TensorBox.create, _OperatorCall.create(operator, *args))
    return results
