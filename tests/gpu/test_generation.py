"""Attention over key/value caches and generation on a GPU: the bits of a forward that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

import dash_inductor
from dash_inductor import config, sites
from dash_inductor.eager.attention import attention
from dash_inductor.eager.registration import NAME
from dash_inductor.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache

from ..support.hopper import MARKS
from ..support.kv_caches import HEADS, Pages, check_bits, sequences

pytestmark = MARKS

LENGTHS = {1: (1, 700, 1025, 3000), 3: (3, 1024, 1026, 2501)}
"""Lengths of sequences, by the number of queries."""
CASES: list[tuple[int, int | None, int, dict[str, Any]]] = [
    (1, 16, 64, {}),
    (1, 16, 128, {}),
    (3, 256, 64, {}),
    (3, 256, 128, {}),
    (1, None, 128, {}),
    (1, 256, 64, {"window_size": (300, 0)}),
    (3, 16, 128, {"window_size": (1500, 0), "softmax_scale": 0.2}),
    (1, 16, 64, {"softcap": 30.0}),
    (3, 256, 128, {"softcap": 80.0}),
    (1, 16, 256, {}),
]
"""Queries, tokens of a block, head dimension, options."""


@pytest.mark.parametrize(("queries", "size", "dim", "options"), CASES, ids=str)
def test_over_caches(queries: int, size: int | None, dim: int, options: dict[str, Any]) -> None:
    """In any blocks, beside any sequences, with NaN behind all of them."""
    with config.patch(strict=True):
        check_bits(LENGTHS[queries], queries, size, dim, torch.bfloat16, "cuda", causal=True, **options)
    assert {(record.status, record.forward) for record in sites()} == {("replaced", "hopper")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_over_caches_without_groups(dtype: torch.dtype) -> None:
    """A query for each key head, also beside a softcap."""
    with config.patch(strict=True):
        for softcap in (0.0, 30.0):
            check_bits((2, 129, 2000), 1, 64, 128, dtype, "cuda", causal=True, key_heads=HEADS, softcap=softcap)
    assert {record.mask for record in sites()} == {"causal", "interval(none,0,none)"}
    assert {record.forward for record in sites()} == {"hopper"}


def test_in_a_cuda_graph() -> None:
    """The host waits for nothing: a captured step of generation is replayed for other lengths."""
    tensors = sequences(2, 2600, 128, torch.bfloat16, "cuda")
    trained = flash_attn_func(*tensors, causal=True).detach()
    q, k, v = (t.detach() for t in tensors)
    pages = Pages((2600, 2600), 16, "cuda")
    caches = [pages.cache(t, (0, 0)) for t in (k, v)]
    lengths, entries = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.arange(2, device="cuda")
    new = [t[:, :1].clone() for t in (q, k, v)]

    def step() -> Tensor:
        return flash_attn_with_kvcache(
            new[0], *caches, *new[1:], cache_seqlens=lengths, block_table=pages.table, causal=True
        )

    for _ in range(2):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for now in ((0, 5), (1023, 2000), (1500, 1024), (2599, 1)):
        for cache, whole in zip(caches, (k, v), strict=True):
            cache.copy_(pages.cache(whole, now))
        at = torch.tensor(now, device="cuda")
        lengths.copy_(at)
        for one, whole in zip(new, (q, k, v), strict=True):
            one.copy_(whole[entries, at][:, None])
        graph.replay()
        assert torch.equal(out[:, 0], trained[entries, at]), now


@contextmanager
def _eager() -> Iterator[Callable[..., Tensor]]:
    yield attention


@contextmanager
def _compiled() -> Iterator[Callable[..., Tensor]]:
    def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    torch.use_deterministic_algorithms(True)
    try:
        yield torch.compile(sdpa)
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _flash() -> Iterator[Callable[..., Tensor]]:
    def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    dash_inductor.register()
    activate_flash_attention_impl(NAME)
    try:
        yield sdpa
    finally:
        restore_flash_attention_impl()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("door", [_eager, _compiled, _flash])
def test_single_queries_without_a_mask(door: Callable[[], Any], dim: int) -> None:
    """With whole keys they have the bits of training; split keys, beyond 1024, are the negative control."""
    tensors = sequences(2, 3100, dim, torch.bfloat16, "cuda")
    trained = flash_attn_func(*tensors, causal=True).detach()
    q, k, v = (t.detach().transpose(1, 2) for t in tensors)
    with door() as run:
        for split_kv in (True, False, True):
            if door is _compiled:
                torch._dynamo.reset()  # compiled functions keep the settings with which they were compiled
            same = {}
            with config.patch(split_kv=split_kv, strict=True):
                for length in (64, 1000, 1024, 1025, 1500, 3000):
                    found = run(q[:, :, length - 1 : length], k[:, :, :length], v[:, :, :length])
                    same[length] = torch.equal(found[:, :, 0], trained[:, length - 1])
            assert all(equal for length, equal in same.items() if not split_kv or length <= 1024), same
            assert split_kv != all(same.values()), same


@pytest.fixture(scope="module")
def generation() -> Any:
    pytest.importorskip("transformers", reason="the models come from the extra 'hf'")
    from ..support import generation

    return generation


LENGTH, COUNT = 1100, 40


@pytest.mark.parametrize("split_kv", [False, True])
def test_generation(generation: Any, split_kv: bool) -> None:
    """Token by token with a cache of transformers; split keys are the negative control."""
    model = generation.model_of("cuda")
    with config.patch(split_kv=split_kv, strict=True):
        tokens, found = generation.by_dynamic_cache(model, generation.prompt(LENGTH, "cuda"), COUNT)
        expected = generation.trained(model, tokens, COUNT)
    same = (found == expected).all(1)
    assert same[0]
    assert bool(same.all()) != split_kv, same
    assert torch.allclose(found, expected, atol=0.1)


def test_generation_over_a_paged_cache(generation: Any) -> None:
    """Two sequences at a time, of different lengths; the setting does not matter."""
    model = generation.model_of("cuda")
    prompts = [generation.prompt(length, "cuda") for length in (LENGTH, 333)]
    with config.patch(strict=True):
        for tokens, found in generation.by_blocks(model, prompts, COUNT, 16):
            expected = generation.trained(model, tokens, COUNT)
            assert torch.equal(found, expected), (found == expected).all(1)
