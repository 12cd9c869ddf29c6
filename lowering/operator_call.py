"""A call of one of our operators in Inductor's code.

Code in Python calls what `ops` has as the operator's attribute `direct`, because the way through PyTorch's dispatcher
to an implementation in Python takes longer than all else that the host does for an attention.  Other wrappers, in C++
or as a graph, know operators alone.  An implementation that prepares its calls is told the layouts of its tensors in
one text more, where the graph knows them, which takes less time than to ask the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from ..operators.direct import TAKES_LAYOUTS
from ..upstream.dispatch import OpOverload
from ..upstream.inductor import FallbackKernel, IRNode, TensorBox, V
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
    """Whether the code that is generated is in Python."""
    return not (V.graph.cpp_wrapper or V.graph.fx_wrapper)


def _layout(tensor: IRNode | Sequence[IRNode]) -> str | None:
    """Device, dtype, size and strides of a tensor; None if the graph does not know them all."""
    if not isinstance(tensor, IRNode):
        return None
    size, stride = tensor.get_size(), tensor.get_stride()
    if not all(isinstance(each, (int, sympy.Integer)) for each in (*size, *stride)):
        return None
    return f"{tensor.get_device()} {str(tensor.get_dtype()).removeprefix('torch.')} {[*size]} {[*stride]}"


def operator_call(operator: OpOverload, *args: Any) -> Sequence[TensorBox]:
    """The results of an operator that has the attribute `direct`."""
    results: Sequence[TensorBox] = tree_map_only(IRNode, TensorBox.create, _OperatorCall.create(operator, *args))
    return results
