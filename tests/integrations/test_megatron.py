"""Megatron-Core's layers with our core attention, on the CPU: against Megatron's own class, compiled and not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor import config, sites
from dash_inductor.errors import ArgumentError
from dash_inductor.records.records import clear_sites

from ..support.packed import documents, packed_attention
from ..support.processes import run_python

pytest.importorskip("megatron.core", reason="megatron-core is for Linux")

from megatron.core import tensor_parallel
from megatron.core.fusions import fused_softmax
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from dash_inductor.integrations.megatron import DotProductAttention

HEADS, DIM, BATCH = 8, 16, 2
CAUSAL, PADDING = AttnMaskType.causal, AttnMaskType.padding
forks: list[None] = []
"""An entry for each time that Megatron's generator of this rank was asked for."""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron asks for CUDA devices where it makes tensors."""

    def window(sq: int, skv: int, size: tuple[int, int]) -> Tensor:
        distance = torch.arange(skv) - torch.arange(sq)[:, None] - (skv - sq)
        return (distance < -size[0]) | (distance > size[1])

    class Tracker:
        def fork(self) -> Any:
            forks.append(None)
            return nullcontext()

    buffer = SimpleNamespace(get_tensor=lambda shape, dtype, name: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(dot_product_attention.parallel_state, "get_global_memory_buffer", lambda: buffer)
    monkeypatch.setattr(fused_softmax, "get_default_causal_mask", lambda n: torch.ones(n, n).triu(1).bool())
    monkeypatch.setattr(fused_softmax, "get_sliding_window_causal_mask", window)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    forks.clear()
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", Tracker)
    torch._dynamo.reset()
    clear_sites()
    with config.patch(cpu="reference", strict=True):
        yield


@dataclass(frozen=True)
class Layer:
    """A layer of a model, on one of `ranks` tensor-parallel ranks.

    Args:
        mask: "none", "padding" (of keys), or "pairs".
        more: other settings of the model.
    """

    kind: AttnMaskType = CAUSAL
    groups: int = HEADS
    ranks: int = 1
    mask: str = "none"
    more: tuple[tuple[str, Any], ...] = ()

    def made(self, of: type[Any]) -> Any:
        settings = TransformerConfig(
            num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_query_groups=self.groups,
            masked_softmax_fusion=False, use_cpu_initialization=True, **{"attention_dropout": 0.0} | dict(self.more),
        )  # fmt: skip
        ranks = SimpleNamespace(tp=SimpleNamespace(size=lambda: self.ranks))
        torch.manual_seed(1)
        return of(settings, 3, self.kind, "self", pg_collection=ranks)

    def tensors(self, length: int, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(length)
        heads = HEADS // self.ranks, self.groups // self.ranks, self.groups // self.ranks
        return [torch.randn(length, BATCH, n, DIM, generator=generator).to(dtype).requires_grad_() for n in heads]

    def hidden(self, length: int) -> Tensor | None:
        if self.mask == "none":
            return None
        place = torch.arange(length)
        padded = (place >= length - 5).expand(BATCH, 1, 1, -1)
        pairs = (place[:, None] - place) % 3 == 1
        return padded if self.mask == "padding" else padded | pairs | (place > place[:, None])


def results(module: Any, tensors: list[Tensor], hidden: Tensor | None) -> list[Tensor]:
    out = module(*tensors, hidden)
    return [out.detach(), *torch.autograd.grad(out.double().square().sum(), tensors)]


def layers() -> Iterator[Layer]:
    """Random ones of every kind of mask, window and softmax."""
    rng = random.Random(0)
    windows: list[tuple[tuple[str, Any], ...]] = [(), (("window_size", (9, 0)),), (("window_size", (4, 7)),)]
    softmaxes = [(), (("softmax_type", "off-by-one"),), (("softmax_type", "learnable"),)]
    for window, softmax in itertools.product(windows, softmaxes):
        ranks = rng.choice((1, 2))
        kind, mask = rng.choice(((CAUSAL, "none"), (CAUSAL, "pairs"), (PADDING, "padding"), (PADDING, "none")))
        scaling = (("apply_query_key_layer_scaling", True),) * rng.randrange(2)
        yield Layer(kind, rng.choice((HEADS, 2 * ranks)), ranks, mask, (*window, *softmax, *scaling))


@pytest.mark.parametrize("layer", [*layers()], ids=str)
def test_results_are_those_of_megatrons_class(layer: Layer) -> None:
    """In float32 and bfloat16, compiled by itself and in a graph, against Megatron's class in double precision."""
    ours, theirs = layer.made(DotProductAttention), layer.made(dot_product_attention.DotProductAttention)
    for length, dtype, tolerance in ((40, torch.float32, 1e-4), (33, torch.bfloat16, 6e-2)):
        tensors, hidden = layer.tensors(length, dtype), layer.hidden(length)
        expected = results(theirs, [t.detach().double().requires_grad_() for t in tensors], hidden)
        compiled = torch.compile(ours, fullgraph=True)
        found = [results(ours, tensors, hidden)]
        torch.use_deterministic_algorithms(True)
        try:
            found.append(results(compiled, tensors, hidden))
        finally:
            torch.use_deterministic_algorithms(False)
        for ours_and_theirs in (zip(results_, expected, strict=True) for results_ in found):
            for mine, true in ours_and_theirs:
                torch.testing.assert_close(mine.double(), true, atol=tolerance, rtol=tolerance)
    assert {record.status for record in sites()} == {"replaced"}


def test_a_causal_layer_reads_no_mask() -> None:
    """Without a mask the kernels of a triangle run, with grouped heads and on a part of the heads."""
    layer = Layer(groups=4, ranks=2)
    results(layer.made(DotProductAttention), layer.tensors(48, torch.bfloat16), None)
    assert [record.mask for record in sites()] == ["causal"]


def test_a_window_is_a_band() -> None:
    layer = Layer(more=(("window_size", (9, 0)),))
    results(layer.made(DotProductAttention), layer.tensors(48, torch.bfloat16), None)
    assert [record.mask for record in sites()] == ["band(0,9)"]


def test_dropout_draws_from_megatrons_generator() -> None:
    layer = Layer(more=(("attention_dropout", 0.5),))
    module, tensors = layer.made(DotProductAttention), layer.tensors(40, torch.float32)
    dropped = module(*tensors, None)
    assert len(forks) == 1
    assert not torch.equal(dropped, module.eval()(*tensors, None))
    assert len(forks) == 1
    torch.testing.assert_close(module(*tensors, None), Layer().made(DotProductAttention)(*tensors, None))


def test_a_query_without_keys_gets_zeros() -> None:
    layer = Layer(PADDING)
    hidden = torch.zeros(BATCH, 1, 40, 40, dtype=torch.bool)
    hidden[1, :, 7] = True
    out = layer.made(DotProductAttention)(*layer.tensors(40, torch.float32), hidden)
    assert not out[7, 1].any()
    assert out[7, 0].all()


@pytest.mark.parametrize("window", [None, (20, 0)], ids=str)
@pytest.mark.parametrize("kind", [AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.padding], ids=str)
def test_packed_sequences(kind: AttnMaskType, window: tuple[int, int] | None) -> None:
    layer = Layer(groups=2, more=() if window is None else (("window_size", window),))
    module = layer.made(DotProductAttention)
    for places in ((0, 30, 31, 90), (0, 64, 100)):
        starts, longest = documents(*places), max(b - a for a, b in itertools.pairwise(places))
        generator = torch.Generator().manual_seed(1)
        given = [torch.randn(places[-1], n, DIM, generator=generator).requires_grad_() for n in (HEADS, 2, 2)]
        sequences = PackedSeqParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest)
        out = module(*given, None, attn_mask_type=kind, packed_seq_params=sequences)
        expected = packed_attention(*given, starts, window or (-1, 0 if kind != PADDING else -1)).flatten(1)
        torch.testing.assert_close(out, expected)
        for ours, true in zip(*(torch.autograd.grad(t.square().sum(), given) for t in (out, expected)), strict=True):
            torch.testing.assert_close(ours, true, atol=1e-4, rtol=1e-4)
    assert {record.status for record in sites()} == {"replaced"}


def test_what_is_not_supported() -> None:
    layer = Layer()
    module, tensors = layer.made(DotProductAttention), layer.tensors(8, torch.float32)
    with pytest.raises(ArgumentError, match="attention_bias"):
        module(*tensors, None, attention_bias=torch.zeros(1))
    starts = documents(0, 8)
    sequences = PackedSeqParams("thd", starts, starts, max_seqlen_q=8, max_seqlen_kv=8)
    packed = [t[:, 0] for t in tensors]
    for wrong in (replace(sequences, qkv_format="bshd"), replace(sequences, cu_seqlens_q_padded=starts)):
        with pytest.raises(ArgumentError, match=r"packed_seq_params.*with packed sequences"):
            module(*packed, None, packed_seq_params=wrong)
    for more in (("attention_dropout", 0.1), ("softmax_type", "off-by-one")):
        with pytest.raises(ArgumentError, match=more[0]):
            Layer(more=(more,)).made(DotProductAttention)(*packed, None, packed_seq_params=sequences)
    with pytest.raises(ArgumentError, match=r"attention_mask=torch.float32"):
        module(*tensors, torch.zeros(8, 8))
    with pytest.raises(ArgumentError, match="equal lengths in a causal layer"):
        module(tensors[0][:5], *tensors[1:], None)


MODEL = """
import os
import torch

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

import dash_inductor
from dash_inductor.integrations.megatron import DotProductAttention

parallel_state.initialize_model_parallel(1)
dash_inductor.config.cpu = "reference"
spec = get_gpt_layer_local_spec()
spec.submodules.self_attention.submodules.core_attention = DotProductAttention
settings = TransformerConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, use_cpu_initialization=True,
    attention_dropout=0.0, hidden_dropout=0.0, persist_layer_norm=False, bias_activation_fusion=False,
    bias_dropout_fusion=False,
)
torch.manual_seed(0)
model = GPTModel(settings, spec, 128, 64)
tokens, places = torch.randint(0, 128, (2, 32)), torch.arange(32).expand(2, -1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(3):
    loss = model(tokens, places, None, labels=tokens).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[0] > losses[1] > losses[2], losses
print([(record.status, record.mask) for record in dash_inductor.sites()])
"""


def test_a_gpt_model_trains() -> None:
    """The layers have attention of one kind, which is compiled once."""
    assert run_python(MODEL).stdout.splitlines()[-1] == "[('replaced', 'causal')]"
