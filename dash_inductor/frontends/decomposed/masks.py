"""Combines the masks and biases of decomposed attention: into a mask and a bias, or into one tensor for both.

Note [A bias beside a finite number]
    A program may add a bias to its scores and then replace hidden ones by a finite number, the lowest of their dtype or
    -1e9.  If every query sees a key, which the reader of masks proves, that hides keys as minus infinity does, as long
    as no score that is seen comes near the number.  Products of query and key do not; a bias may, because it may be a
    mask itself.  Then a query could see nothing but keys that the bias hides, and its probabilities would be spread
    over hidden keys too.  So mask and bias are read apart only if the bias is proved to stay above half of the number,
    as ALiBi does, which is computed from positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ...graph.sizes import static
from ...graph.temporaries import Temporaries
from ...masks.bounds import bounds
from .labels import Atom, Dimension, Labels
from .places import Reader
from .scores import Factor, Stuck, Term

aten = torch.ops.aten


def mask_and_bias_of(reader: Reader) -> tuple[Node | None, Node | None]:
    """Return the mask of the scores and the bias that is added to them beside it; None where there is none.

    There is a bias beside a mask only under the conditions of Note [A bias beside a finite number]: otherwise the first
    tensor combines all masks and biases.

    Raises:
        Stuck: the dimensions of a mask or bias are not those of the scores.
    """
    terms = reader.values.scores.terms
    if not _are_apart(terms):
        return _mask_of(reader, terms), None
    added = [term for term in terms if term.kind == "add"]
    return _mask_of(reader, terms[len(added) :]), _mask_of(reader, added)


def _are_apart(terms: list[Term]) -> bool:
    added = [term for term in terms if term.kind == "add"]
    hidden = terms[len(added) :]
    if not added or not must_be_read(terms) or any(term.kind == "add" for term in hidden):
        return False
    fill = max(term.fill for term in hidden)
    found = [bounds(term.tensor) for term in added]
    least = sum(
        -math.inf if each is None else min(term.factor * number for number in each)
        for term, each in zip(added, found, strict=True)
    )
    return least > fill / 2 and any(each != (0.0, 0.0) for each in found)  # zeros are no bias


def _mask_of(reader: Reader, found: list[Term]) -> Node | None:
    """Return one tensor with all these masks and biases of the scores; None without any.

    It is a boolean mask, True where a query sees a key, if they do nothing but set hidden scores to minus infinity.
    Otherwise, it is added to the scores.

    Raises:
        Stuck: the dimensions of a mask are not those of the scores.
    """
    terms = [(term, in_four(reader, term)) for term in found]
    if not terms:
        return None
    if all(term.kind == "hide" and term.fill == -math.inf for term, _ in terms):
        return _all_visible(reader.temporaries, terms)
    combined: Node | None = None
    for term, tensor in terms:
        combined = _with_term(reader, combined, term, tensor)
    return combined


def must_be_read(terms: list[Term]) -> bool:
    """Return whether a mask must be recognised to be exact, and cannot be added to the scores as a bias.

    That is the case if hidden scores are replaced by a finite number: for a query whose keys are all hidden, adding the
    number instead would give another result.
    """
    return any(term.kind == "hide" and term.fill != -math.inf for term in terms)


def _all_visible(temporaries: Temporaries, terms: list[tuple[Term, Node]]) -> Node:
    found: Node | None = None
    for term, tensor in terms:
        visible = _call(temporaries, aten.logical_not.default, tensor) if term.hidden_if else tensor
        found = visible if found is None else _call(temporaries, aten.logical_and.default, found, visible)
    assert found is not None
    return found


def _with_term(reader: Reader, before: Node | None, term: Term, tensor: Node) -> Node:
    """Return what is added to the scores, `before` extended by one more term."""
    temporaries = reader.temporaries
    if term.kind == "add":
        if term.factor != 1.0:
            tensor = _call(temporaries, aten.mul.Tensor, tensor, term.factor)
        return tensor if before is None else _call(temporaries, aten.add.Tensor, before, tensor)
    like = tensor if before is None else before
    dtype = torch.float32 if before is None else before.meta["val"].dtype
    fill = -math.inf if term.fill == -math.inf else torch.finfo(dtype).min
    facts = {"dtype": dtype, "device": like.meta["val"].device}
    filled, rest = (temporaries.call(aten.full.default, [], value, like=tensor, **facts) for value in (fill, 0.0))
    rest = rest if before is None else before
    chosen = (filled, rest) if term.hidden_if else (rest, filled)
    return _call(temporaries, aten.where.self, tensor, *chosen)


def _call(temporaries: Temporaries, target: Callable[..., Any], *args: Any) -> Node:
    return temporaries.call(target, *args, like=max(arg for arg in args if isinstance(arg, Node)))


def in_four(reader: Reader, term: Term | Factor) -> Node:
    """Return the tensor of a term or a factor in four dimensions that broadcast to the scores.

    Raises:
        Stuck: its dimensions are not those of the scores.
    """
    atoms, wanted, tensor = reader.values.atoms, atoms_of(reader), term.tensor
    labels = atoms.resolved(term.labels)
    if labels == wanted:
        for _ in range(4 - tensor.meta["val"].dim()):
            tensor = _call(reader.temporaries, aten.unsqueeze.default, tensor, 0)
        return tensor
    own = term.own(atoms)
    present = {atom for dimension in own for atom in dimension}
    lacking = [a for d in wanted if present & set(d) for a in d if a not in present]  # such as the windows of an image
    tensor, own = _repeated(reader, tensor, own, lacking)
    present |= set(lacking)
    return reader.in_four(tensor, own, tuple(_if_present(dimension, present) for dimension in wanted))


def _repeated(reader: Reader, tensor: Node, own: Labels, atoms: list[Atom]) -> tuple[Node, Labels]:
    """Return the tensor expanded along further leading atoms, and its labels.

    Raises:
        Stuck: the size of an atom is dynamic.
    """
    shape = [*(static(atom.size) for atom in atoms), *(-1 for _ in own)]
    if None in shape:
        raise Stuck(tensor, "it broadcasts along some of the leading dimensions, whose sizes are dynamic")
    for _ in atoms:
        tensor = _call(reader.temporaries, aten.unsqueeze.default, tensor, 0)
    if atoms:
        tensor = _call(reader.temporaries, aten.expand.default, tensor, shape)
    return tensor, (*((atom,) for atom in atoms), *own)


def atoms_of(reader: Reader) -> Labels:
    """Return the atoms (index ranges) of the scores' four dimensions: batch, heads, queries, keys."""
    return reader.values.atoms.resolved(reader.roles.of_kind("score"))


def _if_present(dimension: Dimension, present: set[Any]) -> Dimension:
    return dimension if set(dimension) <= present else ()
