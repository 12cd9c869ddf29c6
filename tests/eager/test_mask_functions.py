"""Mask functions of transformers, taken apart and made again: the masks are those of transformers itself."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.eager.mask_functions import Made, Operand, program, taken_apart

masking = pytest.importorskip("transformers.masking_utils", reason="the masks come from the extra 'hf'")
from dash_inductor.eager import in_transformers  # noqa: E402
from dash_inductor.eager.lazy_mask import LazyMask  # noqa: E402

BATCH, LENGTH = 3, 12
NUMBERS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) // 5 - 1
POSITIONS = torch.cat([torch.arange(n) for n in (1, 4, 7)]).expand(BATCH, -1)
VALID = torch.arange(LENGTH) >= torch.tensor([0, 3, 7])[:, None]


def packed() -> Callable[..., Tensor]:
    """As `create_causal_mask` makes it."""
    documents = masking.find_packed_sequence_indices(POSITIONS)
    remapped = masking.remap_positions_for_packed_sequence(masking.sliding_window_causal_mask_function(3), POSITIONS)
    return masking.and_masks(remapped, masking.packed_sequence_mask_function(documents))


FUNCTIONS = {
    "causal": lambda: masking.causal_mask_function,
    "bidirectional": lambda: masking.bidirectional_mask_function,
    "window": lambda: masking.sliding_window_causal_mask_function(4),
    "two-sided": lambda: masking.sliding_window_bidirectional_mask_function(4),
    "chunks": lambda: masking.chunked_causal_mask_function(5, torch.tensor([0, 3, 7])),
    "blocks": lambda: masking.or_masks(masking.causal_mask_function, masking.blockwise_overlay(NUMBERS)),
    "packed": packed,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("valid", [None, VALID], ids=["all", "padded"])
@pytest.mark.parametrize(
    ("queries", "query_offset", "key_offset"),
    [(LENGTH, 0, 0), (5, 0, 0), (5, LENGTH - 5, 0), (5, LENGTH - 2, 3), (1, LENGTH - 1, 0), (3, 2, 0)],
)
def test_masks_are_those_of_transformers(
    name: str, valid: Tensor | None, queries: int, query_offset: int, key_offset: int
) -> None:
    arguments: dict[str, Any] = {"batch_size": BATCH, "q_length": queries, "kv_length": LENGTH}
    arguments |= {"q_offset": query_offset, "kv_offset": key_offset, "attention_mask": valid}
    if key_offset and name in ("chunks", "blocks", "packed"):
        pytest.skip("reads a token that is not there")
    expected = masking.sdpa_mask(mask_function=FUNCTIONS[name](), allow_is_causal_skip=False, **arguments)
    found = in_transformers.mask(mask_function=FUNCTIONS[name](), allow_is_causal_skip=False, **arguments)
    assert found is not None
    assert isinstance(found, LazyMask) is ((query_offset - key_offset) in (0, LENGTH - queries))
    assert (found.shape, found.dtype, found.device) == (expected.shape, torch.bool, expected.device)
    assert torch.equal(found & True, expected)


def test_what_needs_no_mask() -> None:
    """As many queries as keys, one query, or all pairs; the elements of a mask of valid keys are never looked at."""
    assert in_transformers.mask(2, 8, 8) is None
    assert in_transformers.mask(2, 1, 8, q_offset=7) is None
    assert in_transformers.mask(2, 4, 8, allow_is_causal_skip=False, allow_is_bidirectional_skip=True) is None
    assert in_transformers.mask(2, 8, 8, local_size=9) is None
    assert in_transformers.mask(2, 8, 8, local_size=8) is not None
    assert in_transformers.mask(2, 4, 8, q_offset=4) is not None
    assert in_transformers.mask(2, 8, 8, attention_mask=torch.ones(2, 8, dtype=torch.bool)) is not None


def test_a_program_has_one_object() -> None:
    """Functions that are made anew with other tensors are the same program; another constant is another one."""
    first, second, other = (
        in_transformers.mask(
            2, 8, 8, mask_function=masking.sliding_window_causal_mask_function(size), attention_mask=valid
        )
        for size, valid in ((4, torch.ones(2, 8)), (4, torch.zeros(2, 8)), (5, torch.ones(2, 8)))
    )
    assert isinstance(first, LazyMask)
    assert first.program is second.program is not other.program  # type: ignore[union-attr]
    assert copy.deepcopy(first.program) is pickle.loads(pickle.dumps(first.program)) is first.program


def more_by_one(size: int) -> Callable[..., Tensor]:
    size += 1

    def inner(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k > q - size

    return inner


def of_a_local(size: int) -> Callable[..., Tensor]:
    of_the_size = size + 1

    def inner(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k > q - of_the_size

    return inner


def by_flag(flag: int, size: int) -> Callable[..., Tensor]:
    if flag:

        def inner(b: Any, h: Any, q: Any, k: Any) -> Any:
            return k > q - size + flag

    else:

        def inner(b: Any, h: Any, q: Any, k: Any) -> Any:
            return k <= q - size + flag

    return inner


def of_a_list(sizes: list[int]) -> Callable[..., Tensor]:
    def inner(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k > q - sizes[0]

    return inner


def with_default(size: int) -> Callable[..., Tensor]:
    def inner(b: Any, h: Any, q: Any, k: Any, more: int = size) -> Any:
        return k > q - size - more

    return inner


@pytest.mark.parametrize(
    "function", [more_by_one(3), of_a_local(3), of_a_list([3]), with_default(3), lambda b, h, q, k: q, None, print]
)
def test_what_cannot_be_taken_apart(function: object) -> None:
    """A factory that does more than hand on its arguments, or a function without one: the mask then has elements."""
    assert taken_apart(function, []) is None
    if callable(function) and function is not print:
        found = in_transformers.mask(1, 4, 4, mask_function=function, allow_is_causal_skip=False)
        assert type(found) is Tensor


@pytest.mark.parametrize("flag", [0, 1])
def test_a_factory_that_chooses(flag: int) -> None:
    rule = taken_apart(by_flag(flag, 2), [])
    assert rule == Made(by_flag, (flag, 2))
    shape = (1, 1, 5, 5)
    place = torch.arange(5)
    expected = by_flag(flag, 2)(0, 0, place[:, None], place[None])
    assert torch.equal(program(rule, False)([], shape, torch.device("cpu"))[0, 0], expected)


def test_texts() -> None:
    """They name what is compiled, and are the same in every process."""
    operands: list[Tensor] = []
    rule = taken_apart(masking.and_masks(masking.causal_mask_function, masking.padding_mask_function(VALID)), operands)
    assert rule == Made(
        masking.and_masks, (masking.causal_mask_function, Made(masking.padding_mask_function, (Operand(0),)))
    )
    assert operands == [VALID] or operands[0] is VALID
    text = "and_masks(causal_mask_function, padding_mask_function(operand 0)), positions from the end"
    assert str(program(rule, True)) == text


def lazy() -> LazyMask:
    found = in_transformers.mask(BATCH, LENGTH, LENGTH, attention_mask=VALID)
    assert isinstance(found, LazyMask)
    return found


@pytest.mark.parametrize(
    "operation",
    [
        lambda mask: mask[:, :, 2:, :-1],
        lambda mask: ~mask,
        lambda mask: mask.to(torch.float32),
        lambda mask: torch.where(mask, 0.0, -1.0),
        lambda mask: torch.cat([mask, mask], dim=1),
        lambda mask: mask.contiguous().tolist(),
        lambda mask: mask.sum(),
        lambda mask: operator.iand(mask, mask[:, :, :1]),
        lambda mask: mask.expand(-1, 2, -1, -1),
        lambda mask: copy.deepcopy(mask),
        lambda mask: pickle.loads(pickle.dumps(mask)),
        lambda mask: torch.zeros(3, 1, 12, 12).masked_fill_(mask, 1.0),
    ],
)
def test_a_lazy_mask_is_a_tensor_to_programs(operation: Callable[[Any], Any]) -> None:
    mask = lazy()
    dense = mask.dense().contiguous()
    found, expected = operation(mask), operation(dense)
    assert type(found) is type(expected)
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


@pytest.mark.parametrize(
    "operation", [lambda mask: mask.detach(), lambda mask: mask.to("cpu"), lambda mask: mask.to(device="meta")]
)
def test_what_leaves_a_mask_without_elements(operation: Callable[[Any], Any]) -> None:
    """Reentrant checkpoints detach what they are given, and hooks send it to other devices."""
    found = operation(lazy())
    assert isinstance(found, LazyMask)
    assert all(operand.device == found.device for operand in found.operands)
    assert "padding_mask_function" in repr(found)


@pytest.mark.parametrize(
    "operation",
    [
        lambda mask: mask.fill_(True),
        lambda mask: mask.__setitem__(0, True),
        lambda mask: mask.masked_fill_(mask, False),
    ],
)
def test_a_mask_without_elements_is_not_written_to(operation: Callable[[Any], Any]) -> None:
    """It would be lost; a copy has elements."""
    with pytest.raises(TypeError, match=r"mask\.clone\(\)"):
        operation(lazy())
    copied = lazy().clone()
    assert type(copied) is Tensor
