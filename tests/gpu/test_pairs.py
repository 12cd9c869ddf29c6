"""Dense masks and biases on a GPU, with dropout too: values, bits, and what compiled programs with a bias do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn

import dash_inductor
from dash_inductor import lowering, sites
from dash_inductor.config import config
from dash_inductor.kernels.portable.family import forward_tiles
from dash_inductor.kernels.reference import backward as reference
from dash_inductor.kernels.reference import forward as reference_forward
from dash_inductor.lowering import backward
from dash_inductor.model import Band, Plan, Tiles

from ..support.paired import PairedAttention, as_pytorch, step
from ..support.portable_plans import portable_plan
from ..support.repeats import bits, differing_runs
from ..support.together import side_by_side

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"
Results = tuple[Tensor, ...]


@pytest.fixture(scope="module", autouse=True)
def compiled_side_by_side() -> Iterator[None]:
    lowering.register()
    with side_by_side():
        yield


@pytest.fixture(autouse=True)
def nothing_but_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators' eager kernels would give the right values too: they must not run here."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("the reference executor ran in place of a kernel")

    for module, name in ((reference_forward, "forward"), (reference, "backward"), (reference, "bias_gradient")):
        monkeypatch.setattr(module, name, refuse)


@contextmanager
def enough_programs(number: int) -> Iterator[None]:
    """The dq kernel makes a bias's gradient if it then has so many programs, else a kernel of its own does."""
    with pytest.MonkeyPatch.context() as patch, inductor_config.patch(force_disable_caches=True):
        patch.setattr(backward, "ENOUGH_PROGRAMS", number)
        yield


IN_DQ, APART = 1, 1 << 30


@pytest.fixture(params=[IN_DQ, APART], ids=["in-dq", "apart"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    with enough_programs(request.param):
        yield


def planned(p: PairedAttention, schedule: str | None = None) -> Plan:
    return portable_plan(p.site(), "sm_{}{}".format(*torch.cuda.get_device_capability()), schedule)


def run(problems: Sequence[PairedAttention], plans: Sequence[Plan], *, dynamic: bool = False) -> list[Results]:
    """`paired.step` of all problems as one graph, which is compiled once for all calls with the same problems."""
    facts = [
        ((str(p.spec(1)), str(p.spec(3, gradient=p.bias is not None))), str(plan))
        for p, plan in zip(problems, plans, strict=True)
    ]

    def together(tensors: list[Any]) -> list[Results]:
        return [step(*of, *fact) for of, fact in zip(tensors, facts, strict=True)]

    given = []
    for p in problems:
        tensors = [t.detach() for t in (p.q, p.k, p.v, p.do)]
        if dynamic:
            for t in tensors:
                torch._dynamo.maybe_mark_dynamic(t, 2)
        given.append((*tensors, [t.detach() for t in p.extras]))
    torch._dynamo.reset()
    compiled = torch.compile(together, dynamic=False, fullgraph=True)
    results: list[Results] = compiled(given)
    return results


CASES: list[tuple[int, torch.dtype, Band, int, int, int, dict[str, Any]]] = [
    (64, BF16, Band(0), 255, 255, 2, {"dense": "bhqk"}),
    (128, BF16, Band(), 300, 200, 1, {"dense": "qk", "keys": True}),
    (40, FP16, Band(-40, 40), 200, 300, 1, {"dense": "bk"}),
    (64, FP32, Band(0), 129, 257, 2, {"dense": "hqk"}),
    (64, BF16, Band(), 255, 255, 1, {"bias": "hqk:random"}),
    (128, BF16, Band(0), 256, 256, 2, {"bias": "bhqk:infinite"}),
    (64, FP16, Band(), 200, 300, 1, {"bias": "qk:lowest"}),
    (128, FP32, Band(), 130, 190, 1, {"bias": "bqk:infinite", "keys": True}),
    (64, BF16, Band(0, None, "bottom_right"), 100, 300, 2, {"bias": "hk:random", "dense": "b1"}),
    (64, BF16, Band(), 200, 200, 2, {"bias": "hqk:random", "drops": 0.1}),
    (128, BF16, Band(), 130, 190, 1, {"dense": "bk", "keys": True, "drops": 0.5}),
    (64, FP32, Band(0), 129, 129, 1, {"bias": "qk:random", "drops": 0.3}),
    (256, BF16, Band(0), 255, 255, 2, {"bias": "hqk:random"}),
    (192, FP16, Band(), 130, 190, 1, {"bias": "bqk:infinite", "keys": True}),
]


def problems() -> list[PairedAttention]:
    return [
        PairedAttention.random(
            q_len, kv_len, band, dim=dim, dtype=dtype, group=group, scale=dim**-0.5, device=DEVICE, **data
        )
        for dim, dtype, band, q_len, kv_len, group, data in CASES
    ]  # fmt: skip


@pytest.mark.usefixtures("both_ways")
def test_values() -> None:
    """At most twice PyTorch's own error, and rows without keys give zeros."""
    given = problems()
    for p, (out, dq, dk, dv, *rest) in zip(given, run(given, [planned(p) for p in given]), strict=True):
        true_out, true, sees = p.exact()
        ours = [out, dq, dk, dv, *(p.reduced(t) for t in rest)]
        assert (out[~sees] == 0).all()
        assert (dq[~sees] == 0).all()
        for got, theirs, exact in zip(ours, as_pytorch(p), (true_out, *true), strict=True):
            error = (theirs.double() - exact).norm()
            allowed = 2 * error + 4 * torch.finfo(p.q.dtype).eps * exact.norm()
            assert (got.double() - exact).norm() <= allowed, (p.spec(0), p.q.dtype)


@pytest.mark.usefixtures("both_ways")
def test_bits() -> None:
    """The same in every run, under load, with poisoned memory, and whatever is where nobody looks."""
    given = [p.surrounded(0.0) for p in problems()]
    plans = [planned(p, schedule) for p, schedule in zip(given, ("two_pass", "spt") * len(given), strict=False)]
    expected = [t for results in run(given, plans) for t in results]
    for fill in (float("nan"), float("inf")):
        again = [t for results in run([p.surrounded(fill) for p in given], plans) for t in results]
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(expected, again, strict=True)), fill
    assert all(t.isfinite().all() for t in expected)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("how", [{}, {"load": True}, {"poisoned": True}], ids=["idle", "load", "poisoned"])
def test_repeated_runs(how: dict[str, bool]) -> None:
    given = problems()[:6]
    texts = [(p, planned(p, "spt" if i % 2 else "two_pass")) for i, p in enumerate(given)]
    facts = [((str(p.spec(1)), str(p.spec(3, gradient=p.bias is not None))), str(of)) for p, of in texts]

    def together(tensors: list[Any]) -> list[Tensor]:
        return [t for of, fact in zip(tensors, facts, strict=True) for t in step(*of, *fact)]

    torch._dynamo.reset()
    compiled = torch.compile(together, dynamic=False, fullgraph=True)
    tensors = [(p.q, p.k, p.v, p.do, p.extras) for p in given]
    assert differing_runs(lambda: compiled(tensors), 50, **how) == 0


LONG: list[tuple[int, torch.dtype, Band, int, dict[str, Any]]] = [
    (128, BF16, Band(), 1024, {"bias": "hqk:random"}),
    (128, BF16, Band(0), 1000, {"bias": "hqk:infinite", "keys": True}),
    (64, BF16, Band(-200, 300), 1024, {"bias": "bqk:random", "drops": 0.1}),
    (64, FP16, Band(), 1024, {"bias": "qk:lowest", "dense": "bhqk"}),
    (128, BF16, Band(0), 1024, {"bias": "bhqk:random"}),
    (64, FP32, Band(), 520, {"bias": "hqk:random"}),
]
"""Many tiles, and sums over three batch elements, two heads, both or neither."""


def test_both_ways_to_a_bias_gradient_have_the_same_bits() -> None:
    """The values are right, too: sums that pass through memory tile by tile, and sums in registers."""
    given = [
        PairedAttention.random(
            length, length, band, dim=dim, dtype=dtype, batch=3, scale=dim**-0.5, device=DEVICE, **data
        )
        for dim, dtype, band, length, data in LONG
    ]
    plans = [planned(p, "two_pass") for p in given]
    found = []
    for number in (IN_DQ, APART):
        with enough_programs(number):
            found.append(run(given, plans))
    for p, ours, others in zip(given, *found, strict=True):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, others, strict=True)), p.spec(0)
        true_out, true, _ = p.exact()
        values = [*ours[:4], p.reduced(ours[4])]
        for got, theirs, exact in zip(values, as_pytorch(p), (true_out, *true), strict=True):
            allowed = 2 * (theirs.double() - exact).norm() + 4 * torch.finfo(p.q.dtype).eps * exact.norm()
            assert (got.double() - exact).norm() <= allowed, p.spec(0)


def test_a_batch_element_alone_has_the_same_bits() -> None:
    """The output and the gradients of q, k and v, however many addends the dq kernel adds up one after the other."""
    p = PairedAttention.random(512, 512, Band(), dim=128, dtype=BF16, batch=3, device=DEVICE, bias="hqk:random")
    plan = planned(p, "two_pass")
    with enough_programs(IN_DQ):
        ((*results, _),) = run([p], [plan])
        for b in range(3):
            q, k, v, do = (t[b : b + 1] for t in (p.q, p.k, p.v, p.do))
            ((*alone, _),) = run([PairedAttention(q, k, v, do, p.band, p.scale, bias=p.bias)], [plan])
            assert all(torch.equal(bits(a[b : b + 1]), bits(c)) for a, c in zip(results, alone, strict=True)), b


def test_dynamic_lengths_have_the_bits_of_static_ones() -> None:
    given = problems()
    plans = [planned(p) for p in given]
    for a, b in zip(run(given, plans), run(given, plans, dynamic=True), strict=True):
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def test_every_head_dim_compiles_and_is_right() -> None:
    """Tiles of all rows of the tables for this architecture."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    given = [
        PairedAttention.random(150, 170, Band(), dim=dim, dtype=dtype, scale=dim**-0.5, device=DEVICE, **data)
        for dim in (16, 32, 96, 192, 256)
        for dtype, data in ((BF16, {"dense": "qk"}), (BF16, {"bias": "hqk:random"}), (FP32, {"bias": "qk:infinite"}))
        if dtype is BF16 or dim <= 128  # others are left to PyTorch in fp32
    ]
    tiles = [forward_tiles(arch, 8 * p.q.element_size(), p.q.shape[3], p.v.shape[3]) for p in given]
    assert all(isinstance(t, Tiles) for t in tiles)
    for p, (out, *gradients) in zip(given, run(given, [planned(p) for p in given]), strict=True):
        true_out, true, _ = p.exact()
        ours = [out, *gradients[:3], *(p.reduced(t) for t in gradients[3:])]
        for got, theirs, exact in zip(ours, as_pytorch(p), (true_out, *true), strict=True):
            allowed = 2 * (theirs.double() - exact).norm() + 4 * torch.finfo(p.q.dtype).eps * exact.norm()
            assert (got.double() - exact).norm() <= allowed


# ---- programs


class Relative(nn.Module):
    """Layers whose bias of relative positions is learned and shared, as T5 has it."""

    def __init__(self, heads: int, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.table, self.dropout = heads, nn.Embedding(65, heads), dropout
        self.qkv = nn.ModuleList(nn.Linear(64 * heads, 3 * 64 * heads, bias=False) for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        bias = self.table((place[None] - place[:, None]).clamp(-32, 32) + 32).permute(2, 0, 1)[None]
        bias = bias.contiguous()  # under deterministic algorithms PyTorch computes others by its math implementation
        if mask is not None:
            bias = bias + mask
        for qkv in self.qkv:
            q, k, v = qkv(x).unflatten(2, (3, self.heads, 64)).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), dropout_p=self.dropout)
            x = x + out.transpose(1, 2).flatten(2)
        return x


def gradients_of(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    torch._dynamo.reset()
    model.zero_grad()
    out = torch.compile(model)(*inputs)
    (out.float() ** 2).mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("length", [256, 203])
@pytest.mark.parametrize("masked", [False, True])
def test_a_learned_bias(masked: bool, length: int, deterministic: None) -> None:
    torch.manual_seed(0)
    model = Relative(4).to(DEVICE, BF16)
    x = torch.randn(3, length, 256, device=DEVICE, dtype=BF16)
    mask = [torch.zeros(3, 1, 1, length, device=DEVICE, dtype=BF16)] if masked else []
    for m in mask:
        m[1, ..., length // 2 :] = torch.finfo(BF16).min
    with config.patch(strict=True):
        ours = gradients_of(model, x, *mask)
    assert {(r.status, r.mask, r.forward) for r in sites()} == {("replaced", "full + bias", "portable")}
    assert all(map(torch.equal, ours, gradients_of(model, x, *mask)))
    hidden = [torch.zeros_like(m, dtype=torch.float64).masked_fill(m < -1, -torch.inf) for m in mask]
    with torch.compiler.set_stance("force_eager"):  # torch 2.15 cannot compile the positions of 203 tokens
        theirs = gradients_of(model, x, *mask)
        exact = gradients_of(model.double(), x.double(), *hidden)
    for a, b, r in zip(ours, theirs, exact, strict=True):
        assert (a - r).norm() <= 2 * (b - r).norm() + 1e-3 * r.norm()


def test_a_learned_bias_with_dropout(deterministic: None) -> None:
    """As T5 has it by default: equal bits from equal seeds, other ones from others."""
    model = Relative(4, dropout=0.1).to(DEVICE, BF16)
    x, found = torch.randn(3, 203, 256, device=DEVICE, dtype=BF16), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        with config.patch(strict=True):
            found.append(gradients_of(model, x))
    assert {(r.status, r.mask, r.forward) for r in sites()} == {("replaced", "full + bias", "portable")}
    assert all(map(torch.equal, found[0], found[1]))
    assert not any(map(torch.equal, found[0], found[2]))


def test_a_mask_that_is_an_input(deterministic: None) -> None:
    """Additive, with queries whose keys are all hidden, as the padding of a batch on the left gives them."""
    length = 200
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, 64, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(3))
    place = torch.arange(length, device=DEVICE)
    shown = (place[None] <= place[:, None]) & (place >= torch.tensor([0, 50], device=DEVICE)[:, None, None])
    for low in (float("-inf"), torch.finfo(BF16).min):
        mask = torch.where(shown[:, None], 0.0, low).to(BF16)
        for given in (mask, shown[:, None]):
            torch._dynamo.reset()
            with config.patch(strict=True):
                out = torch.compile(F.scaled_dot_product_attention)(q, k, v, attn_mask=given)
                gradients = torch.autograd.grad(out.float().square().mean(), (q, k, v))
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                doubled = [t.double() for t in (q, k, v)]
                exact = F.scaled_dot_product_attention(*doubled, attn_mask=given.double() if given is mask else given)
                true = torch.autograd.grad(exact.square().mean(), (q, k, v))
            for got, expected in zip((out, *gradients), (exact, *true), strict=True):
                assert (got.double() - expected.double()).norm() <= 0.02 * expected.double().norm()


def test_peak_memory_of_a_learned_bias(deterministic: None) -> None:
    """The peak is never above the peak of PyTorch's deterministic kernels."""

    def peak() -> int:
        torch.manual_seed(0)
        model = Relative(8).to(DEVICE, BF16)
        x = torch.randn(4, 1024, 512, device=DEVICE, dtype=BF16)
        gradients_of(model, x)
        torch._dynamo.reset()
        compiled = torch.compile(model)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            (compiled(x).float() ** 2).mean().backward()
        return torch.cuda.max_memory_allocated()

    ours = peak()
    with dash_inductor.disabled():
        theirs = peak()
    assert ours <= theirs, (ours, theirs)
