"""Unmodified models on a GPU, compiled under deterministic algorithms: all attention replaced, no mask, same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.exc import InductorError
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import dash_inductor
from dash_inductor.config import config
from dash_inductor.model import Band, Plan, Tiles
from dash_inductor.records.records import sites

from ..support.attention import Attention
from ..support.calls import forward_spec
from ..support.hf_models import BANDS, causal_lm, padding, t5, token_ids
from ..support.hopper_forward import rounding_of_sums
from ..support.repeats import bits

pytestmark = pytest.mark.gpu

Gradients = list[Tensor]


def gradients_of(model: nn.Module, tokens: Tensor, **more: Tensor) -> Gradients:
    """Gradients of all parameters after one compiled step, and the loss; `more` are other inputs than tokens."""
    torch._dynamo.reset()
    model.zero_grad()
    loss = torch.compile(model)(input_ids=tokens, **({"labels": tokens} | more)).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check_gradients(model: nn.Module, ours: Gradients, make: Callable[[], nn.Module], **inputs: Tensor) -> None:
    """Against fp64: at most twice the error of what PyTorch does with the site, in the same dtype.

    PyTorch computes in eager mode what its compiler raises an error for, as torch 2.15 does for T5's positions.
    """
    with dash_inductor.disabled():
        try:
            theirs = gradients_of(model, **inputs)
        except InductorError:
            with torch.compiler.set_stance("force_eager"):
                theirs = gradients_of(model, **inputs)
    exact = make().double().cuda()
    with torch.no_grad():
        for p, rounded in zip(exact.parameters(), model.parameters(), strict=True):
            p.copy_(rounded)
    with torch.compiler.set_stance("force_eager"):
        reference = gradients_of(exact, **inputs)
    for a, b, r in zip(ours, theirs, reference, strict=True):
        error = (b - r).norm()  # NaN where PyTorch's kernel gives it to queries without keys: then 2 % is the bound
        allowed = 2 * error + 1e-3 * r.norm() if error.isfinite() else 0.02 * r.norm()
        assert (a - r).norm() <= allowed  # bf16 keeps 8 bits; the model around is the same


@pytest.mark.parametrize("family", list(BANDS))
def test_language_models(family: str, deterministic: None) -> None:
    model = causal_lm(family, head_dim=64).to("cuda", torch.bfloat16)
    tokens = token_ids(2, 700).cuda()
    with config.patch(strict=True):
        ours = gradients_of(model, tokens)
    records = sites()
    assert len(records) >= 2
    assert all(r.status == "replaced" and r.mask == BANDS[family] for r in records)
    assert {r.forward for r in records} == {"hopper"}
    assert all(map(torch.equal, ours, gradients_of(model, tokens)))
    check_gradients(model, ours, lambda: causal_lm(family, head_dim=64), tokens=tokens)


@pytest.mark.parametrize("kind", ["ones", "right", "left", "holes"])
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_padded_batches(family: str, kind: str, deterministic: None) -> None:
    """Inputs as a collator sends them: an attention mask, and no label where there is no token."""
    model = causal_lm(family, head_dim=64).to("cuda", torch.bfloat16)
    tokens, valid = token_ids(2, 300).cuda(), padding(kind, 2, 300).cuda()
    inputs = {"tokens": tokens, "attention_mask": valid.long(), "labels": tokens.masked_fill(valid == 0, -100)}
    with config.patch(strict=True):
        ours = gradients_of(model, **inputs)
    assert {(r.status, r.mask) for r in sites()} == {("replaced", f"{BANDS[family]} & keys(0)")}
    assert all(t.isfinite().all() for t in ours)
    again = gradients_of(model, **inputs)
    differing = [
        (i, float((a - b).norm() / a.norm()))
        for i, (a, b) in enumerate(zip(ours, again, strict=True))
        if not torch.equal(a, b)
    ]
    assert differing == []
    check_gradients(model, ours, lambda: causal_lm(family, head_dim=64), **inputs)


@pytest.mark.parametrize("family", list(BANDS))
def test_dynamic_lengths(family: str, deterministic: None) -> None:
    """One compile serves all lengths, without a mask tensor."""
    model = causal_lm(family, head_dim=64).to("cuda", torch.bfloat16)
    compiled = torch.compile(model)
    counters.clear()
    with config.patch(strict=True):
        for length in (300, 411, 256):
            tokens = token_ids(2, length).cuda()
            torch._dynamo.mark_dynamic(tokens, 1)
            model.zero_grad()
            compiled(input_ids=tokens, labels=tokens).loss.backward()
            assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert len(sites()) == 2
    assert {r.forward for r in sites()} == {"hopper"}
    assert counters["stats"]["unique_graphs"] == 1


def test_no_mask_in_memory(deterministic: None) -> None:
    """One layer of Llama at 16384 tokens: its additive mask alone would take 0.5 GiB."""
    model = causal_lm(
        "Llama",
        layers=1,
        head_dim=64,
    ).to("cuda", torch.bfloat16)
    model.config.max_position_embeddings = 16384
    tokens = token_ids(1, 16384).cuda()

    def peak() -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients_of(model, tokens)
        return torch.cuda.max_memory_allocated() - before

    ours = peak()
    assert sites()
    assert all(r.status == "replaced" for r in sites())
    with dash_inductor.disabled():
        theirs = peak()
    assert ours < 16384**2, f"{ours / 2**20:.0f} MiB"  # less than one boolean mask
    assert theirs > ours + 16384**2


BACKENDS = {
    "flash": (SDPBackend.FLASH_ATTENTION, False),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, True),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, False),
    "cudnn masked": (SDPBackend.CUDNN_ATTENTION, True),
}


@pytest.mark.parametrize("name", list(BACKENDS))
def test_backends(name: str) -> None:
    """The nodes of every CUDA backend; cuDNN needs warn_only, strict determinism refuses it."""
    backend, masked = BACKENDS[name]
    torch.use_deterministic_algorithms(True, warn_only=backend is SDPBackend.CUDNN_ATTENTION)
    mask = torch.ones(320, 320, dtype=torch.bool, device="cuda").tril() if masked else None
    check_attention(
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=causal(q, k) if masked else None, is_causal=not masked
        ),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked),
        backend,
        f"aten::_scaled_dot_product_{name.removesuffix(' masked')}_attention_backward",
    )
    assert {record.mask for record in sites()} == {"causal"}


def causal(q: Tensor, k: Tensor) -> Tensor:
    return torch.arange(q.shape[2], device=q.device)[:, None] >= torch.arange(k.shape[2], device=q.device)[None, :]


def test_hand_written_attention(deterministic: None) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(torch.matmul(q, k.transpose(-2, -1)).div(8.0).softmax(-1), v)

    # Inductor's patterns know contiguous heads
    check_attention(plain, plain, None, "", contiguous=True)


def check_attention(
    compiled: Callable[..., Tensor],
    eager: Callable[..., Tensor],
    backend: SDPBackend | None,
    op: str,
    contiguous: bool = False,
) -> None:
    leaves = [torch.randn(2, 320, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    leaves = [(t.contiguous() if contiguous else t).requires_grad_() for t in leaves]
    do = torch.randn(2, 4, 320, 64, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
        try:
            eager(*leaves)
        except RuntimeError as error:
            pytest.skip(f"PyTorch with this backend alone: {error}")
        ours = torch.autograd.grad(torch.compile(compiled)(*leaves), leaves, do)
    (record,) = sites()
    assert record.status == "replaced", str(record)
    assert op in ("", record.op)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    with sdpa_kernel(SDPBackend.MATH):
        reference = torch.autograd.grad(eager(*exact), exact, do.double())
    for a, r in zip(ours, reference, strict=True):
        assert (a - r).norm() <= 1e-2 * r.norm()  # bf16 keeps 8 bits: 2**-8 per rounding, a few roundings


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers, self.checkpointed = nn.ModuleList([SelfAttention() for _ in range(3)]), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


@pytest.mark.parametrize("checkpointed", [False, True], ids=["saved", "checkpointed"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_fused_qkv_stack(checkpointed: bool, mode: str, deterministic: None) -> None:
    """Checkpointing and CUDA graphs give the bits of the plain stack."""
    torch.manual_seed(0)
    model = Stack(checkpointed).to("cuda", torch.bfloat16)
    x = torch.randn(2, 500, 256, device="cuda", dtype=torch.bfloat16)

    def step(compiled: nn.Module) -> Gradients:
        model.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    compiled = torch.compile(model, mode=mode)
    runs = [step(compiled) for _ in range(4)]
    assert len(sites()) == 3
    assert all(r.status == "replaced" for r in sites())
    assert all(all(map(torch.equal, runs[0], run)) for run in runs[1:])
    torch._dynamo.reset()
    model.checkpointed = False
    assert all(map(torch.equal, runs[0], step(torch.compile(model))))


@pytest.mark.parametrize("mask", [Band(), Band(0), Band(0, None, "bottom_right"), Band(0, 99), Band(-40, 40)], ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(320, 320), (200, 320), (320, 200)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_planned_forward(mask: Band, q_len: int, kv_len: int, dtype: torch.dtype) -> None:
    """The planned forward computes this mask, with the log-sum-exp that the backward reads."""
    p = Attention.random(q_len, kv_len, 64, mask, group=2, dtype=dtype)
    plan = p.plan("sm_{}{}".format(*torch.cuda.get_device_capability()))
    spec = str(forward_spec(mask, p.scale))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        results: tuple[Tensor, Tensor] = torch.ops.dash_inductor.attention_forward(q, k, v, [], spec, str(plan), "test")
        return results

    run = torch.compile(attend, dynamic=False)
    out, lse = run(p.q, p.k, p.v)
    exact, exact_lse, _ = p.exact()
    sees = exact_lse.isfinite()
    assert out.stride() == p.q.stride()
    assert lse.is_contiguous()
    assert (out - exact)[sees].norm() <= (
        5e-3 if dtype == torch.bfloat16 else 1e-5
    ) * exact.norm()  # 2**-8 and 2**-24, few roundings
    assert (lse - exact_lse)[sees].abs().max() < 1e-4 + rounding_of_sums(dtype, (64, 64))
    assert (out[~sees] == 0).all()
    again = run(p.q, p.k, p.v)[0]
    assert torch.equal(bits(out), bits(again))


def test_tf32_only_where_the_user_allows_it(deterministic: None) -> None:
    tiles = Tiles(32, 32, 8, 1)
    assert not Plan("portable", "two_pass", "keep", tiles).tf32
    leaves = [torch.randn(1, 2, 128, 64, device="cuda", requires_grad=True) for _ in range(3)]

    def step() -> Plan:
        torch._dynamo.reset()
        dash_inductor.clear_sites()
        torch.compile(F.scaled_dot_product_attention)(*leaves).sum().backward()
        plan = sites()[0].plan
        assert plan is not None
        return plan

    assert not step().tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert step().tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("kind", ["ones", "right"])
def test_t5(kind: str, deterministic: None) -> None:
    """Its bias of relative positions is learned, and does not lie as PyTorch's fused kernels want it: it is copied."""
    model = t5(layers=2, head_dim=64).to("cuda", torch.bfloat16)
    tokens, valid = token_ids(2, 150).cuda(), padding(kind, 2, 150).cuda()
    inputs = {"tokens": tokens, "attention_mask": valid.long()}
    ours = gradients_of(model, **inputs)
    assert [r.status for r in sites()] == ["replaced"] * 6
    assert all(map(torch.equal, ours, gradients_of(model, **inputs)))
    check_gradients(model, ours, lambda: t5(layers=2, head_dim=64), **inputs)
