"""`OPERANDS`, the table of the tensors that a call may read besides query, key and value and those of its mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from ..errors import ArgumentError
from .components import Operand
from .dropout import Dropout
from .relations import Axis


class Part(Protocol):
    """The value of an attribute of `AttentionSpec` for an optional operand, such as the bias or the dropout.

    It refers to a tensor, and may have parameters of its own, such as the probability of dropout.

    Attributes:
        TEXT: a regular expression for ``str(part)``, without groups.
    """

    TEXT: ClassVar[str]

    @property
    def operand(self) -> Operand:
        """The reference to the tensor that the operand is."""

    @staticmethod
    def parse(text: str) -> Part:
        """Parse the result of ``str(part)``."""


@dataclass(frozen=True)
class Bias:
    """An attention bias: ``bias[b, h, i, j]`` is added to the scaled score of query i of head h and key j.

    Args:
        operand: a float tensor [batch, heads, q_len, kv_len], any strides, any values; it has size 1 along dimensions
            that do not matter.
        gradient: whether the graph needs its gradient, [batch, heads, q_len, kv_len].
        summed: the dimensions of the gradient, 0, 1 or both, that are summed to size 1.
    """

    operand: Operand
    gradient: bool = False
    summed: tuple[int, ...] = ()

    TEXT: ClassVar[str] = r"\d+(?:\+gradient[01]*)?"

    def __post_init__(self) -> None:
        if sorted({*self.summed} & {0, 1}) != sorted(self.summed):
            raise ArgumentError("summed", self.summed, "0, 1 or both, each once")

    def __str__(self) -> str:
        return f"{self.operand}" + ("+gradient" + "".join(map(str, self.summed)) if self.gradient else "")

    @staticmethod
    def parse(text: str) -> Bias:
        """Parse the result of ``str(bias)``."""
        index, gradient, summed = text.partition("+gradient")
        return Bias(Operand.parse(index), bool(gradient), tuple(map(int, summed)))


@dataclass(frozen=True)
class OperandKind:
    """A row of `OPERANDS`: the properties of one optional operand of calls.

    Attributes:
        name: the attribute of `AttentionSpec`, and the word in texts of calls and in names of kernels.
        part: the class of the attribute's value.
        side: which kernels read the tensor.
        dtype: the dtype of the tensor; "float" stands for any float.
        axes: the dimensions of the tensor; () for a tensor [1].
        changes: what the operand changes: "scores" (something is added for each pair of query and key), "probabilities"
            (of pairs), or "rows" (what the softmax or its backward computes for each query).
        argument: the name of the tensor among the arguments of kernels.
        broadcasts: whether the tensor has size 1 along dimensions that do not matter.
        numbers: the attributes of the `part` that kernels take as further arguments, by name.
    """

    name: str
    part: type[Part]
    side: Literal["forward", "backward", "both"]
    dtype: Literal["float", "float32", "int64"]
    axes: tuple[Axis, ...]
    changes: Literal["scores", "probabilities", "rows"]
    argument: str
    broadcasts: bool = False
    numbers: tuple[str, ...] = ()


_KINDS = (
    OperandKind("bias", Bias, "both", "float", ("b", "h", "q", "kv"), "scores", "BIAS", broadcasts=True),
    OperandKind("dropout", Dropout, "both", "int64", (), "probabilities", "SEED", numbers=("threshold", "rescale")),
    OperandKind("slopes", Operand, "both", "float32", ("b", "h"), "scores", "SLOPES", broadcasts=True),
    OperandKind("grad_logsumexp", Operand, "backward", "float32", ("b", "h", "q"), "rows", "GRAD_LSE"),
    OperandKind("sinks", Operand, "forward", "float32", ("b", "h", "q"), "rows", "SINKS", broadcasts=True),
)

OPERANDS = {kind.name: kind for kind in _KINDS}
"""The optional operands by name, in the order in which a call numbers them; `AttentionSpec` documents their meaning."""

ADDED = tuple(name for name, kind in OPERANDS.items() if kind.changes == "scores")
"""The names of the operands that are added to scores."""
