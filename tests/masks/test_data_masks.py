"""Masks that depend on inputs: the validity of keys, beside bands, as it is read and as the graph then has it."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from dash_inductor.config import config
from dash_inductor.graph.nodes import op_name
from dash_inductor.masks import recognition, token_data
from dash_inductor.model.mask import Band
from dash_inductor.model.reasons import Reason
from dash_inductor.model.relations import EQUAL
from dash_inductor.planning import planner
from dash_inductor.records.records import sites

from ..support.graphs import (
    BACKWARD,
    CPU_FORWARD,
    FORWARD,
    Shape,
    assert_as_exact,
    assert_not_replaced_after_an_error,
    capture,
    cuda_inputs,
    efficient,
    joint_graph,
    planes,
    rewritten,
    step,
    tensors,
    trace,
)
from ..support.mask_graphs import assert_components_are_the_mask, read_graph, read_mask, trace_mask
from .test_recognition import columns, packed_sequence_chain, rows, window

LOWEST = torch.finfo(torch.float32).min


def causal(q, k):
    return columns(k) <= rows(q)


def additive(visible, value=-math.inf):
    return torch.where(visible, 0.0, value)


def per_key(mask: Tensor) -> Tensor:
    return mask[:, None, None, :]


# Masks that are read, however they are written: (mask, band)


def transformers_chain(q, k, m):
    """As transformers writes it: one place per element, and the mask expanded at the end."""
    entry = torch.arange(q.shape[0])[:, None, None, None]
    valid = m.to(torch.bool)[entry, torch.arange(k.shape[2])[None, None, None, :]]
    mask = (q.new_ones((), dtype=torch.bool) & causal(q, k)[None, None] & valid).expand(q.shape[0], -1, -1, -1)
    return torch.where(mask, 0.0, -math.inf).expand(-1, q.shape[1], -1, -1)


def packed_chain_with_padding(q, k, m):
    return packed_sequence_chain(q, k) + additive(per_key(m != 0))


def encoder(q, k, m):
    return (m > 0)[:, None, None, :].expand(-1, 1, q.shape[2], -1)


def lengths(q, k, m):
    """The number of valid tokens of each batch entry."""
    return (torch.arange(k.shape[2]) < m.clamp(0, 1).sum(1, keepdim=True))[:, None, None, :] & causal(q, k)


def from_integers(q, k, m):
    return (causal(q, k).long() * per_key(m)) != 0


def by_subtraction(q, k, m):
    """As older models write it, with infinity."""
    return torch.where(1.0 - per_key(m.bool().float()) > 0, -math.inf, 0.0) + additive(causal(q, k))


def several_predicates(q, k, m):
    first, second = m > 0, m < 3
    return additive((per_key(first).expand(-1, 1, q.shape[2], -1) & ~per_key(~second)) & window(q, k))


def either_predicate(q, k, m):
    wide = per_key(m).expand(-1, 1, q.shape[2], -1)
    return (wide == 1) | (wide == 3) | (wide > 5)


def not_in_a_range(q, k, m):
    wide = per_key(m).expand(-1, 1, q.shape[2], -1)
    return ~((wide >= 0) & (wide <= 1)) & causal(q, k)


def one_for_all(q, k, m):
    """A vector without batch entries."""
    return causal(q, k) & (m[0] != 0)


def one_for_all_tokens(q, k, m):
    return causal(q, k) & (m[:, 0] != 0)[:, None, None, None]


def a_flag(q, k, m):
    return causal(q, k) & (m != 0).any()


def through_unknown_operators(q, k, m):
    return additive(torch.sin(m.float()).round()[:, None, None, :] > 0) + additive(causal(q, k))


def transposed(q, k, m):
    return (m.t().contiguous().t() != 0)[:, None, None, :] & causal(q, k)


def tokens_first(q, k, m):
    """The vector is stored with the tokens in front of the batch entries."""
    first = m.t().contiguous() != 0
    return first[None, :, :, None].permute(2, 0, 3, 1) & causal(q, k)


def flattened(q, k, m):
    (batch, _, q_len, _), kv_len = q.shape, k.shape[2]
    mask = (per_key(m) != 0) & causal(q, k)
    return mask.reshape(batch * q_len, kv_len).reshape(batch, 1, q_len, kv_len)


def part_of_a_longer_one(q, k, m):
    """The mask of a cache: more keys than this call has."""
    longer = torch.cat([m, m], 1) != 0
    return causal(q, k) & per_key(longer[:, : k.shape[2]])


# The same with segments


def documents(q, k, s):
    """Numbers of documents, as a batch brings them."""
    return causal(q, k) & (s[:, None, :, None] == s[:, None, None, :])


def restarting_positions(q, k, p):
    """As transformers finds packed sequences: a new one begins where positions do not go on."""
    first_dummy = p[:, :1] - 1
    packed = (torch.diff(p, prepend=first_dummy, dim=-1) != 1).cumsum(-1)
    entry = torch.arange(q.shape[0])[:, None, None, None]
    q_index, kv_index = torch.arange(q.shape[2])[None, None, :, None], torch.arange(k.shape[2])[None, None, None, :]
    mask = causal(q, k) & (packed[entry, q_index] == packed[entry, kv_index])
    return torch.where(mask.expand(q.shape[0], -1, -1, -1), 0.0, -math.inf)


def documents_with_padding(q, k, s):
    return additive(documents(q, k, s) & per_key(s > 0))


def padding_before_documents(q, k, s):
    """The same, with the condition of the keys in front."""
    return per_key(s % 7 != 3) & documents(q, k, s)


def documents_by_difference(q, k, s):
    small = s.to(torch.int16).long()
    return window(q, k) & ((small[:, None, :, None] - small[:, None, None, :]) == 0)


def documents_of_two_vectors(q, k, s):
    return s[:, None, :, None] == (s * 3 + 1)[:, None, None, :]


def small_numbers(q, k, s):
    s = s.clamp(0, 5).to(torch.uint8)
    return ~(s[:, None, :, None] + 1 != s[:, None, None, :] + 1)


def chunks(q, k, s):
    return causal(q, k) & (rows(q) // 8 == columns(k) // 8)


def chunks_and_keys(q, k, s):
    return causal(q, k) & (rows(q) // 8 == columns(k) // 8) & per_key(s > 0)


def moved_chunks(q, k, s):
    """Chunks that begin at the first valid token, as transformers has them for left padding."""
    start = (s > 0).int().argmax(-1)[:, None, None, None]
    return (rows(q) - start) // 8 == (columns(k) - start) // 8


def chunks_from_the_end(q, k, s):
    offset = k.shape[2] - q.shape[2]
    return (rows(q) + offset) // 8 == columns(k) // 8


def every_third(q, k, s):
    return (rows(q) + 1) % 3 == columns(k) % 3


SEGMENTED = [
    (documents, "causal & segments"),
    (restarting_positions, "causal & segments"),
    (documents_with_padding, "causal & segments & keys"),
    (padding_before_documents, "causal & segments & keys"),
    (documents_by_difference, "band(0,4) & segments"),
    (documents_of_two_vectors, "segments"),
    (small_numbers, "segments"),
    (chunks, "causal & segments"),
    (chunks_and_keys, "causal & segments & keys"),
    (moved_chunks, "segments"),
    (chunks_from_the_end, "segments"),
    (every_third, "segments"),
]

KEYED = [
    (transformers_chain, Band(0, None)),
    (packed_chain_with_padding, Band(0, None)),
    (encoder, Band()),
    (lengths, Band(0, None)),
    (from_integers, Band(0, None)),
    (by_subtraction, Band(0, None)),
    (several_predicates, Band(0, 4)),
    (either_predicate, Band()),
    (not_in_a_range, Band(0, None)),
    (one_for_all, Band(0, None)),
    (one_for_all_tokens, Band(0, None)),
    (a_flag, Band(0, None)),
    (through_unknown_operators, Band(0, None)),
    (transposed, Band(0, None)),
    (tokens_first, Band(0, None)),
    (flattened, Band(0, None)),
    (part_of_a_longer_one, Band(0, None)),
]


def data(batch: int = 3, length: int = 20, dtype: torch.dtype = torch.int64, seed: int = 0) -> Tensor:
    """Small numbers, of which some are zero; one batch entry has nothing else."""
    found = torch.randint(-1, 7, (batch, length), generator=torch.Generator().manual_seed(seed))
    found[-1] = 0
    return found.to(dtype)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("make", "band"), KEYED, ids=lambda x: getattr(x, "__name__", ""))
def test_valid_keys(make, band, dynamic) -> None:
    module = trace_mask(make, data(), dynamic=dynamic)
    found = read_graph(module)
    assert (found.reason, found.detail) == (None, "")
    assert found.components is not None
    assert (found.band, found.components.keys is None) == (band, False)
    for batch, length in ((3, 20), (2, 33), (5, 7)) if dynamic else ((3, 20),):
        q = torch.zeros(batch, 2, length, 4)
        for seed in range(3):
            assert_components_are_the_mask(module, found.components, q, q, data(batch, length, seed=seed))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("make", "mask"), SEGMENTED, ids=lambda x: getattr(x, "__name__", ""))
def test_segments(make, mask, dynamic) -> None:
    module = trace_mask(make, data(), dynamic=dynamic)
    found = read_graph(module)
    assert (found.reason, found.detail) == (None, "")
    assert str(found.components) == mask
    assert found.components is not None
    for batch, length in ((3, 20), (2, 33), (5, 7)) if dynamic else ((3, 20),):
        q = torch.zeros(batch, 2, length, 4)
        for seed in range(3):
            assert_components_are_the_mask(module, found.components, q, q, data(batch, length, seed=seed))


@pytest.mark.parametrize("make", [chunks, chunks_from_the_end, every_third])
def test_segments_of_different_lengths(make) -> None:
    """Numbers of positions alone, where there are more queries than keys, and fewer."""
    module = trace_mask(make, data(), q_len=20, kv_len=30, dynamic=True)
    found = read_graph(module)
    assert found.components is not None
    assert found.components.segments is not None
    for q_len, kv_len in ((20, 30), (30, 20), (3, 41)):
        q, k = torch.zeros(3, 2, q_len, 4), torch.zeros(3, 2, kv_len, 4)
        assert_components_are_the_mask(module, found.components, q, k, data(length=q_len))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(
    "predicate",
    [lambda m: m.bool(), lambda m: m != 0, lambda m: m > 0, lambda m: m == 1, lambda m: ~m.bool(), lambda m: m >= 2],
)
@pytest.mark.parametrize("spread", [False, True], ids=["by key", "by pair"])
def test_types_and_predicates(spread, predicate, dtype) -> None:
    """The predicate is computed key by key, or for all pairs."""

    def make(q, k, m):
        wide = per_key(m).expand(-1, 1, q.shape[2], -1) if spread else per_key(m)
        return predicate(wide) & causal(q, k)

    module, q = trace_mask(make, data(dtype=dtype)), torch.zeros(3, 2, 20, 4)
    found = read_graph(module)
    if found.components is None:  # no truth value is 2
        assert (dtype, found.detail) == (torch.bool, "no query sees a key")
        assert not make(q, q, data(dtype=dtype)).any()
    else:
        assert_components_are_the_mask(module, found.components, q, q, data(dtype=dtype))


@pytest.mark.parametrize(("q_len", "kv_len"), [(12, 20), (20, 12), (1, 20), (20, 1)])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_different_lengths(q_len, kv_len, dynamic) -> None:
    def make(q, k, m):
        return (columns(k) <= rows(q) + (k.shape[2] - q.shape[2])) & per_key(m != 0)

    module = trace_mask(make, data(length=kv_len), q_len=q_len, kv_len=kv_len, dynamic=dynamic)
    found = read_graph(module)
    assert found.components is not None
    assert found.components.keys is not None
    q, k = torch.zeros(3, 2, q_len, 4), torch.zeros(3, 2, kv_len, 4)
    assert_components_are_the_mask(module, found.components, q, k, data(length=kv_len))


# Positions of packed documents


def documents_of(p: Tensor, *, step: int = 1) -> Tensor:
    """As transformers counts them."""
    return (torch.diff(p, prepend=p[:, :1] - step, dim=-1) != step).cumsum(-1)


def packed(q, k, p, *, numbers=documents_of, window=None, ahead=0):
    """As transformers compares them: by the positions that come with the batch, not by places."""
    number = numbers(p)
    entry = torch.arange(q.shape[0])[:, None, None, None]
    q_index, kv_index = torch.arange(q.shape[2])[None, None, :, None], torch.arange(k.shape[2])[None, None, None, :]
    mask = number[entry, q_index] == number[entry, kv_index]
    last = p[entry, q_index] + ahead if ahead else p[entry, q_index]
    mask = mask & (p[entry, kv_index] <= last)
    return mask if window is None else mask & (p[entry, kv_index] > p[entry, q_index] - window)


def positions(batch: int = 3, length: int = 20, seed: int = 0) -> Tensor:
    """Most are one more than the one before."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.randint(-9, 9, (batch, length), generator=generator)
    return torch.where(torch.rand(batch, length, generator=generator) < 0.7, 1, others).cumsum(1)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("options", "band"),
    [
        ({}, Band(0, None)),
        ({"window": 5}, Band(0, 4)),
        ({"ahead": 2}, Band(-2, None)),
        ({"window": 3, "ahead": 1}, Band(-1, 2)),
    ],
)
def test_positions_in_one_document_are_places(options, band, batch, dynamic) -> None:
    module = trace_mask(lambda q, k, p: packed(q, k, p, **options), positions(batch), batch=batch, dynamic=dynamic)
    found = read_graph(module)
    assert (found.reason, found.detail) == (None, "")
    assert found.components is not None
    assert (str(found.components), found.components.segments is not None) == (f"{band} & segments", True)
    for length in (20, 33, 7) if dynamic else (20,):
        for seed in range(4):
            q = torch.zeros(batch, 2, length, 4)
            assert_components_are_the_mask(module, found.components, q, q, positions(batch, length, seed))


def any_step(p):
    """Counts steps of 2 as well: positions in a document are farther apart than places."""
    return ((torch.diff(p, prepend=p[:, :1]) - 1) // 2 != 0).cumsum(-1)


def of_other_entries(p):
    return documents_of(p.flip(0))


def of_the_first_entry(p):
    return documents_of(p[:1]).expand(p.shape[0], -1)


def moved_by_one(p):
    return documents_of(p).roll(1, 1)


def begins_with_the_last(p):
    """True of documents, but the neighbour is not read through a roll."""
    return (p - p.roll(1, 1) != 1).cumsum(-1)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "numbers",
    [
        any_step,
        of_other_entries,
        of_the_first_entry,
        moved_by_one,
        begins_with_the_last,
        lambda p: documents_of(p, step=2),
        lambda p: (torch.diff(p, prepend=p[:, :1]) > 1).cumsum(-1),
        lambda p: (torch.diff(p, prepend=p[:, :1]) != 1).cumsum(0),
        lambda p: documents_of(p) // 2,
        lambda p: documents_of(p * 2),
        lambda p: (torch.diff(p, prepend=p[:, :1]) == 1).cumsum(-1),
    ],
)
def test_other_counts_prove_nothing_of_positions(numbers, dynamic) -> None:
    """The comparison of positions is one of numbers, and not of places."""
    module = trace_mask(lambda q, k, p: packed(q, k, p, numbers=numbers), positions(), dynamic=dynamic)
    found = read_graph(module)
    assert str(found.components) == "segments & interval"
    q = torch.zeros(3, 2, 20, 4)
    assert_components_are_the_mask(module, found.components, q, q, positions())


# Masks that data decide otherwise


def differ_by_flag(q, k, m):
    return torch.where((m != 0).any(), causal(q, k), window(q, k))


def union(q, k, m):
    return causal(q, k) | per_key(m != 0)


def prefix(q, k, m):
    """The first keys are seen by all queries."""
    return causal(q, k) | (torch.arange(k.shape[2]) < m[:, :1])[:, None, None, :]


def hidden_queries(q, k, m):
    return causal(q, k) & (m != 0)[:, None, :, None]


def counted_positions(q, k, m):
    position = m.cumsum(-1) - 1
    return position[:, None, None, :] <= position[:, None, :, None]


def moving_start(q, k, m):
    """A band whose place data decide."""
    return columns(k) <= rows(q) + m[:, :1][:, None, None]


def by_head(q, k, m):
    return causal(q, k) & (m[:, : q.shape[1]] > 0)[:, :, None, None]


def weights(q, k, m):
    return additive(causal(q, k)) + per_key(m.float())


def other_documents(q, k, m):
    return m[:, None, :, None] != m[:, None, None, :]


def two_kinds_of_documents(q, k, m):
    other = m.flip(1)
    return documents(q, k, m) & (other[:, None, :, None] == other[:, None, None, :])


def documents_or_first(q, k, m):
    return documents(q, k, m) | (columns(k) < 1)


def ordered_documents(q, k, m):
    return m[:, None, :, None] >= m[:, None, None, :]


def positions_of_data(q, k, m):
    """A mask whose numbers may overflow."""
    return rows(q) + m[:, None, :, None] * 2 == columns(k) + m[:, None, None, :] * 2


def documents_by_numbers_that_are_rounded(q, k, m):
    return m[:, None, :, None].float() == m[:, None, None, :].float()


def relative(q, k, m):
    """Data by the distance of the two positions."""
    distance = (rows(q) - columns(k)).abs()
    return causal(q, k) & (m[0] != 0)[distance]


CHOICES = {differ_by_flag: "interval", hidden_queries: "interval", by_head: "head_interval"}
"""Masks of bounds that a condition without a key chooses, with the component that they have beside a causal mask."""


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("make", CHOICES, ids=lambda f: f.__name__)
def test_choices_of_bounds(make, dynamic) -> None:
    module = trace_mask(make, data(), dynamic=dynamic)
    found = read_graph(module)
    assert str(found.components) == f"causal & {CHOICES[make]}"
    for seed in range(3):
        q = torch.zeros(3, 2, 20, 4)
        assert_components_are_the_mask(module, found.components, q, q, data(seed=seed))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "make",
    [
        union,
        weights,
        relative,
        other_documents,
        two_kinds_of_documents,
        documents_or_first,
        documents_by_numbers_that_are_rounded,
    ],
    ids=lambda f: f.__name__,
)
def test_what_is_more_than_vectors_say_is_dense_or_not_replaced(make, dynamic) -> None:
    module = trace_mask(make, data(), dynamic=dynamic)
    found = read_graph(module)
    if make is weights:  # no mask at all
        assert (found.components, found.reason, bool(found.detail)) == (None, "not_a_band", True)
        return
    assert found.components is not None
    assert found.components.dense is not None
    assert (found.components.keys, found.components.segments) == (None, None)
    for seed in range(3):
        q = torch.zeros(3, 2, 20, 4)
        assert_components_are_the_mask(module, found.components, q, q, data(seed=seed))


def document_starts(q, k, m):
    """As torchtitan writes its default mask: causal, from the first token of the query's document on."""
    return causal(q, k) & (columns(k) >= m[:, None, :, None])


def windows_of_data(q, k, m):
    """Every query sees keys from one number of its own to another, by values of -inf."""
    shown = (columns(k) >= rows(q) - m[:, None, :, None]) & (columns(k) < rows(q) + 2 * m[:, None, :, None])
    return torch.where(shown, 0.0, -math.inf)


def prefix_of_documents(q, k, m):
    """The first keys of a document are seen by all of its queries."""
    same = m[:, None, :, None] == m[:, None, None, :]
    return same & (causal(q, k) | (torch.arange(k.shape[2]) < m[:, :1])[:, None, None, :])


def steep_prefix(q, k, m):
    """A bound that may be farther than any position, whatever the type of an index."""
    return (columns(k) <= rows(q) * 2**45) | (columns(k) < m[:, :1])[:, None, None, :]


def far_prefix(q, k, m):
    """A bound that a constant brings back from where numbers are clamped, almost."""
    return (columns(k) <= m[:, None, :, None] * 2**35 - (2**30 - 1)) | (columns(k) < m[:, :1])[:, None, None, :]


def constant_prefix(q, k, m):
    """Causal from the start of a document on, with first keys that everyone sees."""
    return (causal(q, k) & (columns(k) >= m[:, None, :, None])) | (columns(k) < 3)


def larger_numbers(q, k, m):
    """A comparison that is strict, so that the number after the largest one is no integer of the type."""
    return m[:, None, :, None] > m[:, None, None, :]


def windows_of_numbers(q, k, m):
    return (m[:, None, None, :] <= m[:, None, :, None]) & (m[:, None, None, :] > m[:, None, :, None] - 2)


def valid_starts(q, k, m):
    return document_starts(q, k, m) & per_key(m != 1)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("make", "components"),
    [
        (prefix, "interval"),
        (moving_start, "interval"),
        (ordered_documents, "interval"),
        (counted_positions, "interval"),
        (document_starts, "causal & interval"),
        (windows_of_data, "interval"),
        (prefix_of_documents, "segments & interval"),
        (valid_starts, "causal & keys & interval"),
        (constant_prefix, "dense"),
        (steep_prefix, "interval"),
        (far_prefix, "interval"),
        (windows_of_numbers, "interval"),
        (larger_numbers, "dense"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_intervals(make, components, dynamic) -> None:
    module = trace_mask(make, data(), dynamic=dynamic)
    found = read_graph(module)
    assert str(found.components) == components, found
    for seed in range(3):
        q = torch.zeros(3, 2, 20, 4)
        assert_components_are_the_mask(module, found.components, q, q, data(seed=seed))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "make",
    [
        lambda q, k, m: additive(causal(q, k) & per_key(m != 0), LOWEST),
        lambda q, k, m: additive(causal(q, k)) + additive(per_key(m != 0), LOWEST),
        lambda q, k, m: (1.0 - per_key(m.bool().float())) * LOWEST,
        lambda q, k, m: (1.0 - per_key(m.float())) * LOWEST,
        lambda q, k, m: (1.0 - per_key(m.float())) * -math.inf,
        lambda q, k, m: additive(documents(q, k, m), LOWEST),
        lambda q, k, m: additive(chunks(q, k, m), LOWEST),
    ],
)
def test_finite_values_are_not_replaced(make, dynamic) -> None:
    """A query whose keys are all invalid would see all of them alike; and other data than 0 and 1 are no mask."""
    found = read_mask(make, data(), dynamic=dynamic)
    assert found.components is None
    assert found.reason in ("depends_on_input", "not_a_band")


def test_without_a_given_tensor_nothing_is_read_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above: without loads all of these masks are not replaced."""
    monkeypatch.setattr(token_data.Loads, "find", lambda *_: None)
    for make, _ in (*KEYED, *SEGMENTED):
        if make in (chunks, chunks_from_the_end, every_third):
            continue
        assert read_mask(make, data()).components is None, make.__name__


@pytest.mark.parametrize(("op", "wrong"), [("le", "lt"), ("ge", "gt"), ("eq", "ge")])
def test_a_wrong_rule_is_caught(op, wrong, monkeypatch) -> None:
    monkeypatch.setitem(recognition.RULES, f"aten::{op}", recognition.RULES[f"aten::{wrong}"])

    def make(q, k, m):
        wide = per_key(m).expand(-1, 1, q.shape[2], -1)
        return causal(q, k) & (wide >= 2) & (wide != 4) & ~(wide == 5)

    found = read_mask(make, data())
    assert (found.components, found.reason) == (None, "value_mismatch")


def test_layers_have_operands_of_their_own(monkeypatch) -> None:
    """Equal chains are read once, and random ones are told apart."""
    calls = []
    real = recognition._read
    monkeypatch.setattr(recognition, "_read", lambda *args: calls.append(args) or real(*args))

    def layers(q, k, m):
        same = [additive(causal(q, k) & per_key(m != 0)) for _ in range(2)]
        drawn = [additive(causal(q, k) & per_key(torch.rand_like(m.float()) < m)) for _ in range(2)]
        return torch.stack([*same, *drawn])

    module = trace_mask(layers, data())
    query, key, _ = (node for node in module.graph.nodes if node.op == "placeholder")
    ends = [node for node in module.graph.nodes if str(node.target) == "aten.where.self"]
    found = [recognition.recognise(end, query=query, key=key).components for end in ends]
    assert len(calls) == 3
    leaves = [[load.node for load in components.loads] for components in found if components is not None]
    assert len({node for nodes in leaves for node in nodes}) == len(leaves) == 4
    for end, nodes in zip(ends, leaves, strict=True):
        assert all(node < end for node in nodes)


# Dense masks


def given(q, k, m):
    """The mask of all pairs is an input."""
    return m


def given_beside_a_band(q, k, m):
    return additive(m & causal(q, k))


def hidden_by(q, k, m):
    return torch.zeros(q.shape[2], k.shape[2]).masked_fill(m, -math.inf)


def padded_to_16(q, k, m):
    return F.pad(additive(m), (0, 16))[..., : k.shape[2]].expand(q.shape[0], q.shape[1], -1, -1)


def swapped(q, k, m):
    return m.transpose(-1, -2)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", [(20, 20), (3, 1, 20, 20), (1, 2, 20, 20), (3, 2, 20, 20)], ids=str)
@pytest.mark.parametrize(
    ("make", "mask"),
    [
        (given, "dense"),
        (given_beside_a_band, "causal & dense"),
        (hidden_by, "dense"),
        (padded_to_16, "dense"),
        (swapped, "dense"),
    ],
)
def test_planes_that_are_inputs(make, mask, shape, dynamic) -> None:
    def random(seed: int) -> Tensor:
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5

    if dynamic and make is padded_to_16:
        pytest.skip("the sizes of the trace say that batch size and heads are equal")
    module = trace_mask(make, random(0), dynamic=dynamic)
    found, q = read_graph(module), torch.zeros(3, 2, 20, 4)
    assert (str(found.components), found.detail) == (mask, "")
    assert found.components is not None
    for seed in range(3):
        assert_components_are_the_mask(module, found.components, q, q, random(seed))


def test_large_planes_are_not_copied() -> None:
    """Planes of any length are checked, in windows that take no memory."""
    for length in (1500, 3000, 16384):
        for make, mask in ((given_beside_a_band, "causal & dense"), (given, "dense"), (hidden_by, "dense")):
            plane = torch.zeros(1, 1, 1, 1, dtype=torch.bool).expand(3, 1, length, length)
            found = read_mask(make, plane, q_len=length, kv_len=length)
            assert (str(found.components), found.detail) == (mask, "")


def test_a_wrong_rule_for_a_large_plane_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(q, k, m):
        return additive(m <= 3)

    plane = torch.zeros(1, 1, 1, 1, dtype=torch.int64).expand(3, 1, 8192, 8192)
    assert str(read_mask(make, plane, q_len=8192, kv_len=8192).components) == "dense"
    monkeypatch.setitem(recognition.RULES, "aten::le", recognition.RULES["aten::lt"])
    assert read_mask(make, plane, q_len=8192, kv_len=8192).components is None


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("make", [union, other_documents, relative, *CHOICES])
def test_gradients_with_dense_masks_and_choices(make, dynamic) -> None:
    numbers = data(length=70)
    function, inputs = attention(make, numbers), tensors(*[(3, 2, 70, 16)] * 3)
    for tensor in (*inputs, numbers) if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, tensor.dim() // 2)
    with capture() as graphs, config.patch(strict=True):
        results = step(graphs.compile(function), inputs)
    (record,) = sites()
    assert f"{CHOICES.get(make, 'dense')}(0" in record.mask
    assert (graphs.count(FORWARD), graphs.count(BACKWARD), graphs.count(CPU_FORWARD)) == (1, 1, 0)
    assert_as_exact(function, inputs, results)


# The graph


def attention(make: Callable[..., Tensor], mask: Tensor, kv_heads: int = 2) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(q, k, mask))

    return function


GRAPHS = [
    *((make, f"{band} & keys".removeprefix("full & ")) for make, band in KEYED),
    *SEGMENTED,
]
DYNAMIC_SOON = (
    transformers_chain,
    lengths,
    several_predicates,
    one_for_all,
    flattened,
    restarting_positions,
    padding_before_documents,
    small_numbers,
    chunks_and_keys,
    moved_chunks,
)
"""Masks whose gradients are computed with dynamic lengths in every run, beside all of them with static ones."""


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("make", "mask", "dynamic"),
    [
        pytest.param(
            make, mask, dynamic, id=f"{make.__name__}-{'dynamic' if dynamic else 'static'}",
            marks=[pytest.mark.full] if dynamic and make not in DYNAMIC_SOON else [],
        )
        for make, mask in GRAPHS for dynamic in (False, True)
    ],
)  # fmt: skip
def test_gradients_and_what_is_left_of_the_mask(make, mask, dynamic) -> None:
    length = 70
    numbers = data(length=length)
    if make is part_of_a_longer_one and dynamic:
        pytest.skip("the vector of data has another dynamic length")
    function, inputs = attention(make, numbers), tensors(*[(3, 2, length, 16)] * 3)
    if dynamic:
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 2)
            torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(numbers, 0)
        torch._dynamo.mark_dynamic(numbers, 1)
    with capture(plane_length=length) as graphs, config.patch(strict=True):
        results = step(graphs.compile(function), inputs)
    assert [re.sub(r"(?<=s)\((\d,)?\d\)", "", record.mask) for record in sites()] == [mask]
    assert (graphs.count(FORWARD), graphs.count(BACKWARD), graphs.count(CPU_FORWARD)) == (1, 1, 0)
    assert graphs.planes == []
    assert_as_exact(function, inputs, results)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("make", "mask"),
    [
        (documents, "causal & segments(0,0)"),
        (documents_with_padding, "causal & segments(0,0) & keys(1)"),
        (chunks_and_keys, "causal & segments(0,0) & keys(1)"),
        (documents_of_two_vectors, "segments(0,1)"),
        (every_third, "segments(0,1)"),
    ],
)
def test_queries_and_keys_with_the_same_numbers_have_one_operand(make, mask) -> None:
    with capture() as graphs:
        step(graphs.compile(attention(make, data(length=40))), tensors(*[(3, 2, 40, 16)] * 3))
    assert [record.mask for record in sites()] == [mask]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("read", [True, False])
def test_segments_on_cuda(monkeypatch: pytest.MonkeyPatch, read: bool) -> None:
    """The Hopper kernels read them; where no kernel does, a site falls back, and the record says what the mask is."""
    if not read:
        for family in planner.FAMILIES:
            monkeypatch.setattr(family, "reads", family.reads - {EQUAL})

    def bias() -> Tensor:
        position = torch.arange(128, device="cuda")
        same = position.unsqueeze(1) // 64 == position // 64
        zero, low = (torch.full((), x, dtype=torch.bfloat16, device="cuda") for x in (0.0, -math.inf))
        return torch.where(same & (position <= position.unsqueeze(1)), zero, low)

    _, record = rewritten(joint_graph(efficient, bias=bias))
    assert record.mask == "causal & segments(0,0)"
    if read:
        assert record.plan is not None
        assert record.plan.kernel == record.plan.forward == "hopper"
    else:
        assert record.reason == Reason.MASK_UNSUPPORTED
        assert "segments" in record.detail


@pytest.mark.usefixtures("deterministic")
def test_layers_share_the_operand() -> None:
    mask = data(length=40)

    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(3):
            wide = per_key(mask).expand(-1, 1, q.shape[2], -1)
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=additive((wide > 2) & causal(q, k)))
        return q

    inputs = tensors(*[(3, 2, 40, 16)] * 3)
    with capture(plane_length=40) as graphs, config.patch(strict=True):
        results = step(graphs.compile(layers), inputs)
    assert (graphs.count(BACKWARD), graphs.count("aten::ge"), graphs.planes) == (3, 1, [])
    assert_as_exact(layers, inputs, results)


def keyed_site() -> GraphModule:
    """A site of the memory-efficient operator on CUDA, with a causal mask and valid keys."""

    def site(q: Tensor, k: Tensor, v: Tensor, do: Tensor, m: Tensor) -> tuple[Any, ...]:
        zero, low = (torch.full((), x, dtype=torch.bfloat16, device="cuda") for x in (0.0, -math.inf))
        position = torch.arange(128, device="cuda")
        visible = (position <= position.unsqueeze(1)) & (m != 0).unsqueeze(1).unsqueeze(1)
        bias = torch.where(visible, zero, low).expand(2, 8, 128, 128)
        return efficient(q, k, v, do, bias=lambda: bias)

    return trace(site, lambda: [*cuda_inputs(Shape()), torch.empty(2, 128, dtype=torch.int64, device="cuda")])


@pytest.mark.usefixtures("deterministic")
def test_kernels_take_valid_keys_on_cuda() -> None:
    """The operators read the vector that the graph computes; on sm_90 the tables that are made of it follow."""
    graph, record = rewritten(keyed_site())
    assert (record.status, record.mask) == ("replaced", "causal & keys(0)")
    assert record.plan is not None
    assert record.plan.kernel == record.plan.forward == "hopper"
    assert planes(graph, 128) == []
    forward, backward = (n.args[-4] for n in graph.nodes if op_name(n) in (FORWARD, BACKWARD))
    assert forward[:4] == backward[:4]
    assert (forward[0].meta["val"].shape, forward[0].meta["val"].dtype) == ((2, 128), torch.bool)
    assert [tuple(n.meta["val"].shape) for n in forward[1:4]] == [(2, 1, 128)] * 3
    assert [tuple(n.meta["val"].shape) for n in forward[4:]] == [(2, 1), (2, 1, 1)]
    assert [tuple(n.meta["val"].shape) for n in backward[4:]] == [(2, 1), (2, 1, 1), (2, 1)]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("number", range(1, 7))
def test_an_error_in_any_step_leaves_the_graph_as_it_was(number) -> None:
    assert_not_replaced_after_an_error(keyed_site(), number)


@pytest.mark.usefixtures("deterministic")
def test_graphs_are_let_go_of() -> None:
    module = keyed_site()
    rewritten(module)
    alive = weakref.ref(module.graph)
    del module
    gc.collect()
    assert alive() is None


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("checkpointed", "dynamic"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.full),
        pytest.param(True, False, marks=pytest.mark.full),
    ],
)
def test_compiled_code(checkpointed, dynamic) -> None:
    """Two layers through all of Inductor, at two lengths."""

    def block(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        for make in (chunks_and_keys, documents_with_padding):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=make(q, k, m))
        return q

    def layers(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return checkpoint(block, q, k, v, m, use_reentrant=False) if checkpointed else block(q, k, v, m)

    compiled = torch.compile(layers, dynamic=dynamic)
    for length in (40, 55):
        m, inputs = data(length=length), tensors(*[(3, 2, length, 16)] * 3)
        with config.patch(cpu="reference", strict=True):
            results = step(lambda q, k, v, m=m: compiled(q, k, v, m), inputs)
        assert_as_exact(lambda q, k, v, m=m: layers(q, k, v, m), inputs, results, strides=False)
    assert {record.mask for record in sites()} == {"causal & segments(0,0) & keys(1)"}


@pytest.mark.usefixtures("deterministic")
def test_a_fallback_forward_leaves_the_site() -> None:
    """Its log-sum-exp for a query without keys is not what the backward needs; without data all is known."""
    inputs = tensors(*[(3, 2, 40, 16)] * 3)
    for make, reason in ((transformers_chain, Reason.FORWARD_FALLBACK), (lambda q, k, m: causal(q, k), None)):
        with capture() as graphs, config.patch(forward="keep"):
            step(graphs.compile(attention(make, data(length=40))), inputs)
        assert [record.reason for record in sites()] == [reason]
        assert graphs.count(BACKWARD) == (reason is None)
