"""`Form`, the device encoding of a mask relation, and the device functions that all encodings share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ...mask_data import MaskData

HIDDEN = tl.constexpr(-1)
"""In a vector of keys: the key does not exist, or is not valid.  No query sees it, in any form."""
FAR = tl.constexpr(2**31 - 1)
"""More than any position, rank or segment id."""


@dataclass(frozen=True)
class Vectors:
    """The tensors from which the per-token vectors of a form are computed.

    Args:
        values: the operands of a component by role, without absent ones.
        valid: for segment ids, [batch, kv_len]: nonzero for valid keys.
    """

    form: Form
    values: Mapping[str, Tensor]
    valid: Tensor | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Form:
    """A device encoding of a relation: int32 vectors per token, and the functions that read them.

    Device functions get the vectors of the queries, and those of the keys, as a tuple.  The tuple of the keys is their
    positions alone if `reads_positions`.

    Attributes:
        name: the name in kernel names and messages.
        queries, keys: the number of vectors per query and per key.
        vectors: a function ``vectors(of, data)`` that computes the vectors with PyTorch: int32 [batch, queries, q_len]
            and [batch, keys, kv_len].
        load_queries, load_keys: device functions ``(side, row, tokens, exists)`` that load the form's vectors for the
            given tokens of a `Side`; `row` is the index of the first in `Side.VECTORS`.  Queries that do not exist get
            values with which they see no key.
        test: a device function ``(shown, queries, keys)``, also for Gluon: restricts `shown`, a bool per pair or True,
            to the pairs of which the query sees the key; queries and keys broadcast to the pairs.
        classify: a device function ``(queries, rows_exist, keys, columns_exist)`` that classifies tile pairs: (no pair
            is shown, all are, at least one is known to be), each bool [kv tiles, q tiles].  The vectors are [q tiles,
            rows] and [kv tiles, columns], some of which may not exist.  A tile with missing columns may count as fully
            shown.
        keep: a device function ``(scores, queries, keys)`` for Gluon: fp32 scores, set to -inf where queries do not see
            keys.
        reads_positions: whether the form reads the positions of the keys instead of vectors.
        is_range: whether the vectors of a query are the first position that it sees and the one after the last, already
            clipped to band and lengths.
    """

    name: str
    queries: int
    keys: int
    vectors: Callable[[Vectors, MaskData], tuple[Tensor, Tensor]]
    load_queries: Any
    load_keys: Any
    test: Any
    classify: Any
    keep: Any
    reads_positions: bool = False
    is_range: bool = False

    def __repr__(self) -> str:
        """The name and a digest of the device functions: Triton's cache key has the text of compile-time constants."""
        functions = self.load_queries, self.load_keys, self.test, self.classify, self.keep
        sources = "".join(function.cache_key for function in functions)
        return f"{self.name}_{hashlib.sha256(sources.encode()).hexdigest()[:16]}"


class Side(NamedTuple):
    """The queries or the keys of a batch element.

    VECTORS: pointer to their per-token vectors, int32 [vectors, length], contiguous; length: the number of tokens.
    """

    VECTORS: object
    length: object


@triton.jit
def load_vector(side, row, tokens, exists, other):
    """Loads vector number `row` of a `Side` at the indices `tokens`; `other` where `exists` is false."""
    return tl.load(side.VECTORS + row * side.length + tokens, mask=exists, other=other)


@triton.jit
def load_positions(side, row, tokens, exists):
    """Returns the indices `tokens` of keys as their only vector; the `load_keys` of forms that read positions."""
    return (tokens,)


@triton.jit
def read_by(queries, keys, positions, MASK, INDEX: tl.constexpr):
    """Selects the vectors that form number INDEX of the mask reads: (its vectors of queries, its vectors of keys).

    queries, keys: all vectors of the mask.  positions: of the keys; a form that reads positions gets them instead of
    vectors of keys.  MASK has the members of `common.relations.Layout`.  A form is the device code of one mask
    relation.
    """
    ROW: tl.constexpr = MASK.Q_ROWS[INDEX]
    KV_ROW: tl.constexpr = MASK.KV_ROWS[INDEX]
    of_keys = (positions,)
    if not MASK.FORMS[INDEX].reads_positions:
        of_keys = keys[KV_ROW : KV_ROW + MASK.FORMS[INDEX].keys]
    return queries[ROW : ROW + MASK.FORMS[INDEX].queries], of_keys
