"""The tensors of attention that nodes around the softmax of decomposed attention can hold.

With scores S, probabilities P = softmax(S), probabilities after dropout D, output O = D V, and G the gradient of O:

    dD = G V^T, dP = dD * keep / (1 - p), dS = P * (dP - rowsum(P * dP)), dV = D^T G, dQ = dS K, dK = dS^T Q

The rows of dS have the sum 0, so that anything subtracted from all scores of a row has no gradient.

Where a tensor f multiplies scores, S = f R, the products with key and query read f dS in the place of dS, and the
gradient of f is a sum of R dS.  Where scores are divided, S = R / f, they read dS / f, and it is a sum of
-dS (R / f / f).  Softmaxes with one more in the sum have kinds of their own (`one_more`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .labels import Labels

Kind = Literal[
    "score", "row", "maximum", "index", "flag", "hidden", "visible", "row visible", "empty", "tanh", "tanh squared",
    "slope", "exponential", "sum", "random", "keep",
    "P", "D", "dD", "dP", "P dP", "rowsum", "P rowsum", "dP - rowsum", "dS", "capped dS", "dsink", "zero",
    "f dS", "R / f", "R / f / f", "R dS", "dfactor",
    "rest", "P / sum", "dP / sum", "dP P / sum", "rowsum / sum", "rest rowsum / sum", "dE",
    "O", "dQ", "dK", "dV",
]  # fmt: skip

Operand = Literal["Q", "K", "V", "G"]
RESULTS: tuple[Kind, ...] = ("O", "dQ", "dK", "dV")
PUBLIC = (*RESULTS, "dsink", "dfactor")
"""The kinds of values that the rest of the program may read."""


@dataclass(frozen=True)
class Value:
    """What a node holds: a tensor of attention (`kind`), times the constant `factor`.

    Attributes:
        kind: the name of the tensor.
        labels: for each dimension of the node, the atoms (index ranges, such as the heads) that it merges.
        factor: the constant.
    """

    kind: Kind | Operand
    labels: Labels = ()
    factor: float = 1.0
