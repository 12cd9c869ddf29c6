"""The parts of Inductor that lowerings use: its IR, tables of lowerings, templates, workspaces.  Imports Inductor."""

from typing import Any

from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
from torch._inductor.ir import BaseView, ExternKernel, FallbackKernel, FixedLayout, IRNode, Pointwise, TensorBox
from torch._inductor.lowering import empty_strided, fallback_handler, fallbacks, lowerings, register_lowering
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.select_algorithm import SymbolicGridFn
from torch._inductor.virtualized import V, ops
from torch._ops import OpOverload

__all__ = [
    "BaseView",
    "ExternKernel",
    "FallbackKernel",
    "FixedLayout",
    "IRNode",
    "Pointwise",
    "SymbolicGridFn",
    "TensorBox",
    "V",
    "WorkspaceArg",
    "WorkspaceZeroMode",
    "empty_strided",
    "fallback_handler",
    "is_generated",
    "lowerings",
    "ops",
    "register_lowering",
    "stable_topological_sort",
    "writes_inputs",
]


def is_generated(operator: OpOverload) -> bool:
    """Whether Inductor generates code for an ATen or prims operator, or makes a view, instead of calling ATen."""
    return operator in lowerings and operator not in fallbacks and operator.namespace in ("aten", "prims")


def writes_inputs(compiled: Any) -> bool:
    """Whether a compiled graph writes to one of its inputs; True if that is not known."""
    return bool(getattr(compiled, "mutated_inputs", True))
