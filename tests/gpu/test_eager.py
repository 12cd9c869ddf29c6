"""Programs that are not compiled, on a GPU: their attention is replaced, and has the bits of compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dash_inductor
from dash_inductor.eager.attention import attention
from dash_inductor.records.records import SiteRecord, clear_sites, sites

from ..support.hf_models import build, inputs_of

pytestmark = pytest.mark.gpu

NAME = "dash_inductor"
REPEATS = 30
FLASH = "aten::_scaled_dot_product_flash_attention"


def tensors(length: int, *, dim: int = 64, batch: int = 2, heads: int = 4, kv_heads: int = 4) -> list[Tensor]:
    """Query, key, value and the gradient of the output, bf16 [batch, heads, length, dim]."""
    generator = torch.Generator("cuda").manual_seed(length)
    counts = (heads, kv_heads, kv_heads, heads)
    found = [
        torch.randn(batch, length, count, dim, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for count in counts
    ]
    return [tensor.requires_grad_(number < 3) for number, tensor in enumerate(found)]


def results(run: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """The output of an attention, and the gradients of query, key and value."""
    *inputs, grad = given
    out = run(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def exact(given: list[Tensor], seen: Tensor | None) -> list[Tensor]:
    """The definition in double precision."""
    doubled = [tensor.detach().double().requires_grad_() for tensor in given]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
        scores = scores if seen is None else scores.masked_fill(~seen, float("-inf"))
        return torch.softmax(scores, -1) @ value

    return results(run, doubled)


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device="cuda").tril()


def step(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("family", "kind", "masks"),
    [
        ("Llama", "plain", {"causal"}),
        ("Llama", "right", {"causal & keys(0)"}),
        ("Qwen3", "packed", {"causal & segments(0,0)"}),
        ("Mistral", "right", {"band(0,7) & keys(0)"}),
        ("Gemma2", "right", {"band(0,7) & keys(0)", "causal & keys(0)"}),
        ("GptOss", "right", {"band(0,7) & keys(0)", "causal & keys(0)"}),
    ],
)
def test_language_models(family: str, kind: str, masks: set[str]) -> None:
    """Two lengths; all attention is replaced."""
    pytest.importorskip("transformers", reason="the models come from the extra 'hf'")
    dash_inductor.register()
    ours, theirs = (
        build(family, head_dim=64, attn_implementation=name).to("cuda", torch.bfloat16)
        for name in (NAME, "eager" if family in ("Gemma2", "GptOss") else "sdpa")
    )
    for length in (200, 150):
        inputs = {name: tensor.cuda() for name, tensor in inputs_of(family, kind, length=length).items()}
        found, expected = step(ours, inputs), step(theirs, inputs)
        assert all(error(a, b) < 0.05 for a, b in zip(found, expected, strict=True))
        assert all(map(torch.equal, found, step(ours, inputs)))
    assert {record.mask for record in sites()} == masks
    assert {record.status for record in sites()} == {"replaced"}
    assert len(sites()) == 2 * len(masks)
    assert not torch.are_deterministic_algorithms_enabled()


def in_words(name: str, length: int) -> tuple[dict[str, Any], Callable[..., Tensor]]:
    """A mask as an argument of our attention, and the same attention as a program writes it."""
    masking = pytest.importorskip("transformers.masking_utils", reason="masks come from the extra 'hf'")
    from dash_inductor.eager import in_transformers

    valid = torch.arange(length, device="cuda") < torch.tensor([length, length - 37], device="cuda")[:, None]
    place = {"device": "cuda"}
    if name == "causal":
        return {"causal": True}, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if name == "padding":
        given = in_transformers.mask(2, length, length, attention_mask=valid, device="cuda")

        def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            at = torch.arange(q.shape[2], **place)
            mask = (at[None] <= at[:, None]) & valid[:, None, None]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        return {"mask": given}, padded
    function = masking.sliding_window_causal_mask_function(70)
    given = in_transformers.mask(2, length, length, mask_function=function, local_size=70, device="cuda")

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2], **place)
        mask = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 70)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])

    return {"mask": given}, windowed


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["causal", "padding", "window"])
def test_the_bits_of_a_compiled_program(name: str, dim: int) -> None:
    """Of output and gradients, in each of many calls, static and dynamic lengths alike."""
    for length in (300, 200):
        given = tensors(length, dim=dim)
        arguments, written = in_words(name, length)
        clear_sites()
        ours = results(lambda q, k, v, a=arguments: attention(q, k, v, **a), given)
        for _ in range(REPEATS):
            assert all(map(torch.equal, results(lambda q, k, v, a=arguments: attention(q, k, v, **a), given), ours))
        own = sites()
        clear_sites()
        torch.use_deterministic_algorithms(True)
        compiled = results(torch.compile(written, dynamic=False), given)
        torch.use_deterministic_algorithms(False)
        check_same(ours, compiled, own, sites())
        assert {record.status for record in (*own, *sites())} == {"replaced"}


def check_same(
    ours: list[Tensor], compiled: list[Tensor], own: Sequence[SiteRecord], theirs: Sequence[SiteRecord]
) -> None:
    """Equal bits; else an error that says which tensor differs, by how much, and what each side ran."""
    lines = [
        f"{name} differs in {int((a != b).sum())} numbers, by up to {float((a.float() - b.float()).abs().max()):.3g}"
        for name, a, b in zip(("out", "dq", "dk", "dv"), ours, compiled, strict=True)
        if not torch.equal(a, b)
    ]
    for side, records in (("eager", own), ("compiled", theirs)):
        lines += [
            f"{side}: {r.op}, {r.kind}, {r.status}, mask {r.mask}, recognised {r.recognised!r}, plan {r.plan}, "
            f"forward {r.forward}, numerics {r.plan and r.plan.numerics_key}, spec {r.site and r.site.spec}, {r.detail}"
            for r in records
        ]
    text = "\n".join(lines)
    assert all(map(torch.equal, ours, compiled)), f"\n{text}"


def test_grouped_heads_and_a_cache() -> None:
    """Few queries at the end of more keys, without a gradient."""
    pytest.importorskip("transformers", reason="masks come from the extra 'hf'")
    from dash_inductor.eager import in_transformers

    query, key, value, _ = tensors(300, kv_heads=2)
    with torch.no_grad():
        for count in (1, 40):
            few = query[:, :, -count:]
            mask = in_transformers.mask(2, count, 300, q_offset=300 - count, allow_is_causal_skip=False, device="cuda")
            found = attention(few, key, value, mask)
            with torch.enable_grad():
                expected = exact([query, key, value, query], causal(300))[0][:, :, -count:]
            assert error(found, expected) < 0.01


@pytest.mark.parametrize("dim", [64, 256])
def test_a_softcap_beside_padding(dim: int) -> None:
    """Queries that see no key have zeros; the mask is read, so that no tensor has the size of all pairs."""
    in_transformers = pytest.importorskip(
        "dash_inductor.eager.in_transformers", reason="masks come from the extra 'hf'"
    )
    length, softcap = 200, 5.0
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, heads, length, dim) for heads in (4, 2, 2, 4)]
    *leaves, grad = [torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in shapes]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    valid = torch.arange(length, device="cuda") >= torch.tensor([[0], [70]], device="cuda")
    mask = in_transformers.mask(2, length, length, attention_mask=valid, device="cuda")

    def run() -> list[Tensor]:
        out = attention(*leaves, mask, softcap=softcap)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    found = run()
    assert not found[0][1, :, :70].any()
    q, k, v = doubled = [leaf.detach().double().requires_grad_() for leaf in leaves]
    scores = softcap * torch.tanh(q @ k.repeat_interleave(2, 1).mT * dim**-0.5 / softcap)
    seen = causal(length) & valid[:, None, None]
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    out = torch.softmax(scores, -1) * seen.any(-1, keepdim=True) @ v.repeat_interleave(2, 1)
    expected = [out, *torch.autograd.grad(out, doubled, grad.double())]
    assert all(error(a, b) < 0.03 for a, b in zip(found, expected, strict=True))
    assert all(map(torch.equal, found, run()))
    assert [(record.status, record.mask) for record in sites()] == [("replaced", "causal & keys(0)")]
