"""A call of one of our operators in Inductor's code.

Code in Python calls what `ops` has as the operator's attribute `direct`, because the way through PyTorch's dispatcher
to an implementation in Python takes longer than all else that the host does for an attention.  Other wrappers, in C++
or as a graph, know operators alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..upstream.dispatch import OpOverload
from ..upstream.inductor import FallbackKernel, IRNode, TensorBox, V
from ..upstream.pytree import tree_map_only


class _OperatorCall(FallbackKernel):
    def get_kernel_name(self) -> str:
        name = super().get_kernel_name()
        if V.graph.cpp_wrapper or V.graph.fx_wrapper:
            return name
        return name.removesuffix(".default") + ".direct"


def operator_call(operator: OpOverload, *args: Any) -> Sequence[TensorBox]:
    """The results of an operator that has the attribute `direct`."""
    results: Sequence[TensorBox] = tree_map_only(IRNode, TensorBox.create, _OperatorCall.create(operator, *args))
    return results
