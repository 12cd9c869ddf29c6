"""A call of one of our operators in Inductor's code.

Code in Python calls what `ops` has as the operator's attribute `direct`, because the way through PyTorch's dispatcher
to an implementation in Python takes longer than all else that the host does for an attention.  Other wrappers, in C++
or as a graph, know operators alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.ir import FallbackKernel, IRNode, TensorBox
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree


class _OperatorCall(FallbackKernel):
    def get_kernel_name(self) -> str:
        name = super().get_kernel_name()
        if V.graph.cpp_wrapper or V.graph.fx_wrapper:
            return name
        return name.removesuffix(".default") + ".direct"


def operator_call(operator: torch._ops.OpOverload, *args: Any) -> Sequence[TensorBox]:
    """The results of an operator that has the attribute `direct`."""
    results: Sequence[TensorBox] = pytree.tree_map_only(IRNode, TensorBox.create, _OperatorCall.create(operator, *args))
    return results
