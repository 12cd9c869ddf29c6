"""Attention over key/value caches and generation on the CPU: the bits of a forward that trains, and errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dash_inductor import config, sites
from dash_inductor.errors import ArgumentError
from dash_inductor.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache
from dash_inductor.records.records import clear_sites

from ..support.kv_caches import HEADS, Pages, check_bits, sequences

OPTIONS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": True, "window_size": (37, -1), "softmax_scale": 0.3},
    {"causal": True, "softcap": 5.0, "num_splits": 3},
    {"causal": True, "window_size": (20, 0), "softcap": 30.0},
]


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with config.patch(cpu="reference", strict=True):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [None, 16])
def test_bits(size: int | None, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Of one query and of several, which need not fit into a tile with the others of their key head."""
    for queries, lengths in ((1, (2, 64, 65, 190)), (3, (3, 130, 70, 129)), (17, (20, 17, 128, 191))):
        check_bits(lengths, queries, size, 16, dtype, "cpu", **options)
    check_masks()


@pytest.mark.parametrize("options", OPTIONS[::2], ids=str)
@pytest.mark.parametrize("key_heads", [1, HEADS])
def test_bits_of_other_groups(key_heads: int, options: dict[str, Any]) -> None:
    check_bits((2, 77, 130), 1, 32, 16, torch.float32, "cpu", key_heads=key_heads, **options)
    check_masks()


def check_masks() -> None:
    """Those of caches are ranges of keys, for which no kernel splits keys; none is added as a bias."""
    masks = {record.mask for record in sites()}
    expected = {"causal", "band(0,20)", "band(0,37)", "interval(none,0,none)", "interval(0,1,none)"}
    assert masks <= expected, masks
    assert any(mask.startswith("interval") for mask in masks)
    assert all(record.site is not None and record.site.spec.bias is None for record in sites())


def test_an_eager_program_compiles_again_for_other_sizes_then_never() -> None:
    compiled = []
    for length in (90, 120, 150, 180):
        clear_sites()
        check_bits((length, 40), 2, 16, 16, torch.bfloat16, "cpu", causal=True, window_size=(50, 0))
        check_bits((length, 40), 2, 16, 16, torch.bfloat16, "cpu", causal=True)
        compiled.append(len(sites()))
    assert compiled[0] > 0 == compiled[-1]


def test_in_a_compiled_function() -> None:
    torch.use_deterministic_algorithms(True)
    run = torch.compile(lambda *given, **options: flash_attn_with_kvcache(*given, **options), fullgraph=True)
    check_bits((100, 31), 2, 16, 16, torch.float32, "cpu", causal=True, run=run)


def test_values() -> None:
    """Without a mask all queries see all keys of their sequence; those that see none, or have none, give zeros."""
    lengths, (q, k, v) = (40, 0, 2), (t.detach() for t in sequences(3, 64, 16, torch.float64, "cpu"))
    q, counts = q[:, :3].float(), torch.tensor((40, 0, 2))
    found = flash_attn_with_kvcache(q, k.float(), v.float(), cache_seqlens=counts)
    causal = flash_attn_with_kvcache(q, k.float(), v.float(), cache_seqlens=counts, causal=True)
    window = flash_attn_with_kvcache(q, k.float(), v.float(), cache_seqlens=counts, window_size=(5, 1))
    for b, length in enumerate(lengths):
        keys, values = (t[b, :length].transpose(0, 1).repeat_interleave(4, 0) for t in (k, v))
        scores = q[b].double().transpose(0, 1) @ keys.mT / math.sqrt(16)
        expected = (scores.softmax(-1) @ values).transpose(0, 1)
        torch.testing.assert_close(found[b].double(), expected, atol=1e-5, rtol=1e-5)
        hidden = torch.arange(length) > torch.arange(3)[:, None] + length - 3
        expected = (scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0) @ values).transpose(0, 1)
        torch.testing.assert_close(causal[b].double(), expected, atol=1e-5, rtol=1e-5)
        behind = torch.arange(length) - (torch.arange(3)[:, None] + length - 3)
        hidden = (behind < -5) | (behind > 1)
        expected = (scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0) @ values).transpose(0, 1)
        torch.testing.assert_close(window[b].double(), expected, atol=1e-5, rtol=1e-5)
    whole = flash_attn_with_kvcache(q, k.float(), v.float())
    assert torch.equal(whole, flash_attn_with_kvcache(q, k.float(), v.float(), cache_seqlens=64))


def test_entries_of_a_cache() -> None:
    """Sequences may lie anywhere in a contiguous cache, which new keys are written to, too; nothing has a gradient."""
    tensors = sequences(3, 50, 16, torch.float32, "cpu")
    q, k, v = (t.detach() for t in tensors)
    entries = torch.tensor([4, 0, 3])
    caches = [torch.full((5, 64, *t.shape[2:]), torch.nan) for t in (k, v)]
    for cache, whole in zip(caches, (k, v), strict=True):
        cache[entries, :48] = whole[:, :48]
    new = [t[:, 48:].requires_grad_() for t in (q.clone(), k.clone(), v.clone())]
    lengths = torch.full((3,), 48, dtype=torch.int32)
    found = flash_attn_with_kvcache(
        new[0], *caches, *new[1:], cache_seqlens=lengths, cache_batch_idx=entries, causal=True
    )
    assert torch.equal(found, flash_attn_func(*tensors, causal=True)[:, 48:])
    assert not found.requires_grad
    assert all(torch.equal(cache[entries, :50], whole) for cache, whole in zip(caches, (k, v), strict=True))
    assert all(cache[entries, 50:].isnan().all() for cache in caches)


def test_what_is_not_supported() -> None:
    q, k, v = (t.detach()[:, :8] for t in sequences(2, 16, 16, torch.float32, "cpu"))
    table = Pages((8, 8), 8, "cpu").table
    wrong: list[tuple[str, dict[str, Any]]] = [
        *((name, {name: q}) for name in ("rotary_cos", "rotary_sin", "cache_leftpad", "alibi_slopes")),
        ("return_softmax_lse", {"return_softmax_lse": True}),
        ("k, v", {"k": k, "cache_seqlens": 3}),
        ("cache_seqlens", {"k": k, "v": v}),
        ("cache_seqlens", {"cache_seqlens": torch.zeros(3)}),
        ("cache_seqlens", {"cache_seqlens": -1}),
        ("cache_seqlens", {"cache_seqlens": 9}),
        ("cache_seqlens", {"cache_seqlens": 1, "k": k, "v": v}),
        ("cache_batch_idx", {"cache_batch_idx": torch.arange(2), "block_table": table}),
        ("cache_batch_idx", {"cache_batch_idx": torch.arange(3)}),
        ("block_table", {"block_table": table[:1]}),
    ]
    for name, given in wrong:
        with pytest.raises(ArgumentError, match=rf"^{name}="):
            flash_attn_with_kvcache(q, k, v, **given)
    with pytest.raises(ArgumentError, match="k_cache"):
        flash_attn_with_kvcache(q, k[:1], v[:1])
    with pytest.raises(ArgumentError, match=r"^q="):
        flash_attn_with_kvcache(q[:, :, :3], k, v)


def test_an_eager_program_is_compiled_for_the_setting() -> None:
    """Each value has code of its own, whichever was compiled first."""
    given = [t.detach() for t in sequences(2, 40, 16, torch.float32, "cpu")]
    compiled = []
    for split_kv in (True, False, True, False):
        clear_sites()
        with config.patch(split_kv=split_kv):
            flash_attn_func(*given)
        compiled.append(len(sites()))
    assert compiled == [1, 1, 0, 0]


def test_generation() -> None:
    """Token by token, with a cache of transformers and with a paged one, a model has the logits of one forward."""
    pytest.importorskip("transformers", reason="the models come from the extra 'hf'")
    from ..support import generation

    model, count = generation.model_of("cpu"), 6
    prompts = [generation.prompt(length, "cpu") for length in (70, 61)]
    for tokens, logits in (
        *(generation.by_dynamic_cache(model, tokens, count) for tokens in prompts),
        *generation.by_blocks(model, prompts, count, 16),
    ):
        assert torch.equal(logits, generation.trained(model, tokens, count))
