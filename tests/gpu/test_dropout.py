"""Dropout on a GPU: what is kept, to which bits it leads, and that every replay and every recomputation agrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dash_inductor import lowering
from dash_inductor.config import config
from dash_inductor.kernels.reference import backward as reference
from dash_inductor.kernels.reference import forward as reference_forward
from dash_inductor.model import Band, Dropout, Operand
from dash_inductor.records.records import clear_sites, sites

from ..support import keyed
from ..support.dropout import dense, exact, kept_pairs
from ..support.hf_models import VOCABULARY, padding, token_ids
from ..support.keyed import KeyedAttention
from ..support.portable_plans import portable_plan
from ..support.repeats import bits, differing_runs

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
P = 0.1


@pytest.fixture(autouse=True)
def nothing_but_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators' eager kernels would give the right values too: they must not run here."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("the reference executor ran in place of a kernel")

    monkeypatch.setattr(reference_forward, "forward", refuse)
    monkeypatch.setattr(reference, "backward", refuse)
    lowering.register()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def arch() -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def kernels(
    problem: KeyedAttention, p: float = P, schedule: str | None = None
) -> Callable[[KeyedAttention, Tensor], list[Tensor]]:
    """Out, log-sum-exp and gradients of problems like this one, by the portable kernels."""
    dropout = Dropout(p, Operand(len(problem.extras)))
    site = problem.site()
    planned = portable_plan(replace(site, spec=replace(site.spec, dropout=dropout)), arch(), schedule)
    calls = [str(replace(problem.spec(results), dropout=dropout)) for results in (1, 3)]

    def step(
        q: Tensor, k: Tensor, v: Tensor, do: Tensor, extras: list[Tensor]
    ) -> tuple[Tensor, ...]:  # fmt: skip
        out, lse = keyed.attend(q, k, v, extras, calls[0], planned)
        return out, lse, *keyed.gradients(do, q, k, v, out, lse, extras, calls[1], planned)

    torch._dynamo.reset()
    compiled = torch.compile(step, dynamic=False)
    return lambda x, seed: list(compiled(x.q, x.k, x.v, x.do, [*(t.detach() for t in x.extras), seed]))


def problem(
    dim: int, dtype: torch.dtype, mask: Band, q_len: int, kv_len: int, *, group: int = 1, valid: str = "all",
    documents: str = "none",
) -> KeyedAttention:  # fmt: skip
    return KeyedAttention.random(
        q_len, kv_len, mask, dims=(dim, dim), kv_heads=2, group=group, dtype=dtype, valid=valid, documents=documents,
        scale=dim**-0.5, device="cuda",
    )  # fmt: skip


CASES = [
    (64, BF16, Band(0), 300, 300, 2, "all", "none", None),
    (64, FP16, Band(), 257, 500, 1, "holes", "none", None),
    (128, BF16, Band(), 512, 512, 1, "all", "none", None),
    (128, BF16, Band(0, 99), 400, 400, 2, "all", "none", "spt"),
    (80, BF16, Band(0), 300, 300, 1, "all", "sorted", None),
    (64, FP32, Band(0), 200, 200, 1, "all", "none", None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_values_are_those_of_what_the_definition_keeps(case: tuple, p: float) -> None:  # type: ignore[type-arg]
    """Against fp64.  One pair that is kept or dropped otherwise is an error of the size of the largest values."""
    *facts, group, valid, documents, schedule = case
    x = problem(*facts, group=group, valid=valid, documents=documents)
    seed = torch.tensor([-0x123456789ABCDEF], device="cuda")
    found = kernels(x, p, schedule)(x, seed)
    dropout = Dropout(p, Operand(0))
    kept = kept_pairs(dropout, seed, *x.q.shape[:3], x.k.shape[2])
    out, lse, gradients = exact((x.q, x.k, x.v), x.do, x.keep()[:, None], kept, dropout, x.scale)
    tolerance = 1e-4 if x.q.dtype == FP32 else 0.03
    for ours, true in zip((found[0], *found[2:]), (out, *gradients), strict=True):
        assert (ours - true).abs().max() < tolerance * true.abs().max()
        assert (ours - true).norm() < tolerance / 3 * true.norm()
    assert torch.equal(lse.isfinite(), found[1].isfinite())


@pytest.mark.parametrize("dim", [64, 128])
def test_bits_repeat_and_belong_to_the_place_of_a_head(dim: int) -> None:
    """Under load, and where other batch elements and lengths of the launch are others."""
    x = problem(dim, BF16, Band(0), 500, 500)
    seed = torch.tensor([42], device="cuda")
    run = kernels(x)
    expected = run(x, seed)
    assert differing_runs(lambda: run(x, seed), 50, load=True) == 0
    alone = x.for_elements(lambda t: t[:1])
    assert same([t[:1] for t in expected], run(alone, seed))
    assert not same(expected, run(x, seed + 1))


def test_a_probability_that_rounds_to_zero_drops_nothing() -> None:
    x = problem(64, BF16, Band(0), 300, 300)
    found = kernels(x, 2.0**-20)(x, torch.zeros(1, dtype=torch.int64, device="cuda"))
    planned = portable_plan(x.site(), arch(), "two_pass")
    out, _ = torch.compile(keyed.attend, dynamic=False)(x.q, x.k, x.v, [], str(x.spec(1)), planned)
    assert (found[0] - out).abs().max() < 0.01


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=P)


def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(attention(q, k, v).sin(), k, v)


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = checkpoint(lambda q, k, v: attention(q, k, v).sin(), q, k, v, use_reentrant=False)
    return checkpoint(attention, q, k, v, use_reentrant=False)


def inputs(length: int = 300) -> list[Tensor]:
    g = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(2, 4, length, 64, device="cuda", generator=g).to(BF16).requires_grad_() for _ in range(3)]


def step(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    out = function(*tensors)
    gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
    return [out.detach().clone(), *(t.clone() for t in gradients)]


@pytest.mark.parametrize("function", [layers, checkpointed])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_programs_repeat_after_manual_seed(function: Callable[..., Tensor], mode: str, deterministic: None) -> None:
    """Five steps: the first ones warm up and record CUDA graphs, the others replay them.  Every step draws anew."""
    tensors = inputs()
    torch._dynamo.reset()
    compiled = torch.compile(function, mode=mode)

    def steps() -> list[list[Tensor]]:
        torch.manual_seed(0)
        found = []
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            found.append(step(compiled, tensors))
        return found

    with config.patch(strict=True):
        first = steps()
    assert [r.status for r in sites()] == ["replaced"] * 2
    for a, b in zip(first, steps(), strict=True):
        assert same(a, b)
    assert not any(same(first[i], first[j]) for i in range(5) for j in range(i))
    dropout = Dropout(P, Operand(0))
    visible = torch.ones(300, 300, dtype=torch.bool, device="cuda").tril()
    torch.manual_seed(0)
    for found in first[:3]:
        limits = torch.iinfo(torch.int64)
        seeds = torch.randint(limits.min, limits.max, (2, 1), device="cuda")
        kept = [kept_pairs(dropout, seed, 2, 4, 300, 300) for seed in seeds]
        q, k, v = leaves = [t.detach().double().requires_grad_() for t in tensors]
        x = dense(q, k, v, visible, kept[0], dropout, 0.125)[0].sin()
        out = dense(x, k, v, visible, kept[1], dropout, 0.125)[0]
        true = [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]
        for ours, wanted in zip(found, true, strict=True):
            assert (ours - wanted).norm() < 0.02 * wanted.norm()


def test_dynamic_lengths(deterministic: None) -> None:
    """One graph serves all lengths, with the bits of a graph of static ones."""

    def run(dynamic: bool) -> list[list[Tensor]]:
        torch._dynamo.reset()
        clear_sites()
        found = []
        compiled = torch.compile(layers, dynamic=dynamic)
        for length in (300, 411, 256):
            torch.manual_seed(length)
            found.append(step(compiled, inputs(length)))
        return found

    for a, b in zip(run(True), run(False), strict=True):
        assert same(a, b)


def model_of(family: str) -> nn.Module:
    """A model with the dropout that its configuration has by default."""
    import transformers

    sizes = {
        "Bert": {
            "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        },
        "GPT2": {"n_embd": 256, "n_layer": 2, "n_head": 4, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2},
    }[family]  # fmt: skip
    settings = getattr(transformers, f"{family}Config")(vocab_size=VOCABULARY, attn_implementation="sdpa", **sizes)
    torch.manual_seed(0)
    kind = {"Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel"}[family]
    model: nn.Module = getattr(transformers, kind)(settings)
    return model.train().to("cuda", BF16)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["Bert", "GPT2"])
def test_models_with_default_dropout(family: str, padded: bool, deterministic: None) -> None:
    """Two trainings from one seed are equal in every bit; all attention is replaced."""
    model, tokens = model_of(family), token_ids(2, 300).cuda()
    # without a mask BERT makes one in some versions of transformers, which PyTorch computes by its math implementation
    valid = padding("right", 2, 300) if padded else torch.ones(2, 300)
    more = {"attention_mask": valid.long().cuda()} if padded or family == "Bert" else {}
    torch._dynamo.reset()
    compiled = torch.compile(model)

    def train() -> list[Tensor]:
        torch.manual_seed(0)
        found = []
        for _ in range(2):
            model.zero_grad()
            compiled(input_ids=tokens, labels=tokens, **more).loss.backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    with config.patch(strict=True):
        first = train()
    assert [(r.status, r.detail.split(";")[0]) for r in sites()] == [("replaced", "dropout with probability 0.1")] * 2
    assert same(first, train())
    half = len(first) // 2
    assert not same(first[:half], first[half:])
    assert all(t.isfinite().all() for t in first)
