"""The attention backend of diffusers, on the CPU: calls of its dispatcher and small models, against "native"."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dash_inductor
from dash_inductor import config, sites
from dash_inductor.eager.sdpa import in_place, scaled_dot_product_attention
from dash_inductor.errors import ArgumentError
from dash_inductor.records.records import clear_sites

from ..support import diffusers_models

pytest.importorskip("diffusers", reason="one environment alone has the tools that integrations join")

import diffusers
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from dash_inductor.integrations import diffusers as door

BATCH, DIM = 2, 16


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    torch._dynamo.reset()
    clear_sites()
    with config.patch(cpu="reference", strict=True), diffusers.attention_backend("native"):
        yield


def tensors(heads: int, key_heads: int, queries: int, keys: int) -> list[Tensor]:
    """Query, key and value: [batch, length, heads, head dimension]."""
    generator = torch.Generator().manual_seed(queries)
    sizes = (queries, heads), (keys, key_heads), (keys, key_heads)
    return [torch.randn(BATCH, *size, DIM, generator=generator).requires_grad_() for size in sizes]


def results(run: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """The output and the gradients."""
    out = run(*given)
    return [out.detach(), *torch.autograd.grad(out.double().square().sum(), given)]


def doubled(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().double().requires_grad_(value.requires_grad) if floats else value


def assert_close(ours: list[Tensor], exact: list[Tensor], tolerance: float = 1e-4) -> None:
    """Each tensor differs little, beside its largest element."""
    for a, b in zip(ours, exact, strict=True):
        assert (a.double() - b.double()).abs().max() <= tolerance * b.abs().max() + 1e-8


def masks(heads: int, queries: int, keys: int) -> dict[str, Tensor | None]:
    """Every kind that "native" takes; each query sees the first key."""
    generator = torch.Generator().manual_seed(keys)
    valid = torch.arange(keys) < torch.tensor([[keys], [keys // 2]])
    pairs = torch.rand(BATCH, heads, queries, keys, generator=generator) < 0.7
    pairs[..., 0] = True
    bias = torch.randn(BATCH, 1, queries, keys, generator=generator)
    return {
        "none": None,
        "keys": valid,
        "keys as floats": torch.zeros(BATCH, keys).masked_fill(~valid, -1e4),
        "keys, four dimensions": valid[:, None, None],
        "shared pairs": pairs[0, 0],
        "pairs": pairs,
        "bias": bias,
    }


CASES = [
    (kind, *rng.choice(((4, 4), (4, 2))), *rng.choice(((40, 40), (33, 77))), rng.choice((None, 0.3)), causal)
    for rng in [random.Random(0)]
    for kind, causal in ((*((kind, False) for kind in masks(1, 1, 1)), ("none", True)))
]


@pytest.mark.parametrize(("mask", "heads", "key_heads", "queries", "keys", "scale", "causal"), CASES)
def test_a_call(
    mask: str, heads: int, key_heads: int, queries: int, keys: int, scale: float | None, causal: bool
) -> None:
    """By its name, and in the context manager; in an eager program and a compiled one; against "native" in float64."""
    given, attn_mask = tensors(heads, key_heads, queries, keys), masks(heads, queries, keys)[mask]
    options = {"scale": scale, "is_causal": causal, "enable_gqa": heads != key_heads}

    def call(*tensors: Tensor, mask: Tensor | None = attn_mask, backend: Any = door.NAME) -> Tensor:
        found: Tensor = dispatch_attention_fn(*tensors, attn_mask=mask, backend=backend, **options)
        return found

    def by_context(*tensors: Tensor) -> Tensor:
        with diffusers.attention_backend(door.NAME):
            return call(*tensors, backend=None)

    exact = results(lambda *t: call(*t, mask=doubled(attn_mask), backend="native"), list(map(doubled, given)))
    eager = results(call, given)
    assert_close(eager, exact)
    assert all(map(torch.equal, results(by_context, given), eager))
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert_close(results(torch.compile(call, fullgraph=True), given), exact)
    assert {record.status for record in sites()} == {"replaced"}


def test_masks_are_read() -> None:
    """Those of keys and of documents do not become masks of all pairs."""
    for attn_mask, causal in ((masks(4, 40, 40)["keys"], False), (None, True)):
        dispatch_attention_fn(*tensors(4, 4, 40, 40), attn_mask=attn_mask, is_causal=causal, backend=door.NAME)
    assert [record.mask for record in sites()] == ["keys(0)", "causal"]


def test_options_of_flash_attn() -> None:
    """A window on both sides, and a softcap, as backends of flash-attn take them."""
    given = tensors(4, 4, 40, 40)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    for options, expected in (
        ({"window_size": (9, 9)}, {"attn_mask": distance.abs() <= 9}),
        ({"window_size": (-1, -1), "deterministic": False, "softcap": 0.0}, {}),
    ):
        found = dispatch_attention_fn(*given, backend=door.NAME, attention_kwargs=options)
        torch.testing.assert_close(found, dispatch_attention_fn(*given, backend="native", **expected))
    q, k, v = (t.transpose(1, 2) for t in given)
    capped = (torch.tanh(q @ k.mT / 4 / 3.0) * 3.0).softmax(-1) @ v
    found = dispatch_attention_fn(*given, backend=door.NAME, attention_kwargs={"softcap": 3.0})
    torch.testing.assert_close(found, capped.transpose(1, 2))
    assert {record.status for record in sites()} == {"replaced"}


def test_dropout() -> None:
    given = tensors(4, 4, 40, 40)
    dropped = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        dropped.append(results(lambda *t: dispatch_attention_fn(*t, dropout_p=0.5, backend=door.NAME), given))
    assert all(map(torch.equal, *dropped[:2]))
    assert not torch.equal(dropped[0][0], dropped[2][0])


def test_what_is_not_supported() -> None:
    given = tensors(4, 4, 8, 8)
    for name, options in (
        ("return_lse", {"attention_kwargs": {"return_lse": True}}),
        ("return_attn_probs", {"attention_kwargs": {"return_attn_probs": True}}),
        ("parallel_config", {"parallel_config": object()}),
        ("attn_mask", {"attn_mask": object()}),
        ("is_causal", {"attn_mask": torch.ones(8, 8, dtype=torch.bool), "is_causal": True}),
    ):
        with pytest.raises(ArgumentError, match=f"{name}="):
            dispatch_attention_fn(*given, backend=door.NAME, **options)
    with pytest.raises(ArgumentError, match="model="):
        door.set_attention_backend(nn.Linear(1, 1))


def test_context_parallelism_is_refused_by_diffusers() -> None:
    model: Any = diffusers_models.FLUX.model()
    next(iter(model.attn_processors.values()))._parallel_config = object()
    with pytest.raises(ValueError, match="'dash_inductor' does not support context parallelism"):
        model.set_attention_backend(door.NAME)


def test_the_name_is_a_member_as_others_are() -> None:
    names: Any = diffusers.AttentionBackendName
    (member,) = [name for name in names if name.value == door.NAME]
    assert names(door.NAME) is names["DASH_INDUCTOR"] is names.DASH_INDUCTOR is member
    assert member == door.NAME
    assert copy.deepcopy(member) is pickle.loads(pickle.dumps(member)) is member
    assert member in attention_dispatch._AttentionBackendRegistry.list_backends()


def step(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The output of a step, and the gradients of the parameters."""
    model.zero_grad()
    out = model(**inputs, return_dict=False)[0]
    out.double().square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


FAMILIES = {name: family for name, family in vars(diffusers_models).items() if name.isupper() and name[0] != "_"}
FAMILIES.pop("BATCH")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model(name: str) -> None:
    """Against "native" in float64, with equal bits in a second step; and back to "native", bit by bit."""
    torch.manual_seed(0)
    model: Any = FAMILIES[name].model()
    inputs = FAMILIES[name].tensors()
    exact = step(copy.deepcopy(model).double(), {key: tensor.double() for key, tensor in inputs.items()})
    native = step(model, inputs)
    assert not sites()
    handle = door.set_attention_backend(model)
    first, second = step(model, inputs), step(copy.deepcopy(model), inputs)
    assert_close(first, exact, 2e-5)
    assert all(map(torch.equal, first, second))
    assert {(record.status, record.mask) for record in sites()} == {("replaced", "full")}
    assert not torch.are_deterministic_algorithms_enabled()
    clear_sites()
    model.reset_attention_backend()
    handle.remove()
    with diffusers.attention_backend("native"):
        assert all(map(torch.equal, step(model, inputs), native))
    assert not sites()


@pytest.mark.parametrize("name", ["FLUX", "SD3"])
def test_the_models_own_method(name: str) -> None:
    """It reaches processors that dispatch, and no others."""
    model: Any = FAMILIES[name].model()
    model.set_attention_backend(door.NAME)
    model(**FAMILIES[name].tensors(), return_dict=False)
    assert bool(sites()) == (name == "FLUX")


@pytest.mark.parametrize("name", ["FLUX", "SD3"])
def test_a_compiled_layer(name: str) -> None:
    """Hooks and names are traced; attention is replaced in the graph, which does not break."""
    torch.manual_seed(0)
    model: Any = FAMILIES[name].model()
    given = [torch.randn(BATCH, length, 128).requires_grad_() for length in (64, 77)]

    def run(layer: Any) -> Callable[..., Tensor]:
        return lambda *tensors: torch.cat(layer(*tensors), 1)

    exact = results(run(copy.deepcopy(model).double().transformer_blocks[0].attn), list(map(doubled, given)))
    door.set_attention_backend(model)
    torch.use_deterministic_algorithms(True)
    layer = torch.compile(model.transformer_blocks[0].attn, fullgraph=True)
    assert_close(results(run(layer), given), exact)
    assert {record.status for record in sites()} == {"replaced"}


@pytest.mark.parametrize("name", ["FLUX", "UNET"])
def test_gradient_checkpointing(name: str) -> None:
    """Forwards that run again run the same attention."""
    torch.manual_seed(0)
    model: Any = FAMILIES[name].model()
    inputs = FAMILIES[name].tensors()
    door.set_attention_backend(model)
    plain = step(model, inputs)
    model.enable_gradient_checkpointing()
    assert all(map(torch.equal, step(model, inputs), plain))


def test_switched_off() -> None:
    """Then it computes what "native" computes."""
    model, inputs = diffusers_models.SD3.model(), diffusers_models.SD3.tensors()
    native = step(model, inputs)
    door.set_attention_backend(model)
    with dash_inductor.disabled():
        assert all(map(torch.equal, step(model, inputs), native))
    assert not sites()


@pytest.mark.parametrize("shape", [(33, 8), (3, 33, 8), (2, 3, 4, 33, 8)], ids=len)
@pytest.mark.parametrize("mask", ["pairs", "shared pairs", "causal"])
def test_shapes_of_scaled_dot_product_attention(shape: tuple[int, ...], mask: str) -> None:
    """Any number of leading dimensions, as PyTorch's function takes."""
    generator = torch.Generator().manual_seed(len(shape))
    given = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
    pairs = torch.rand(*shape[:-1], 33, generator=generator) < 0.7
    pairs[..., 0] = True
    attn_mask = {"pairs": pairs, "shared pairs": pairs.flatten(0, -3)[0] if len(shape) > 2 else pairs}.get(mask)
    options: Any = {"attn_mask": attn_mask, "is_causal": mask == "causal"}
    exact = results(lambda *t: F.scaled_dot_product_attention(*t, **options), list(map(doubled, given)))
    assert_close(results(lambda *t: scaled_dot_product_attention(*t, **options), given), exact)


class Own(nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, q: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, q, q)
        if self.fails:
            raise ValueError("after attention")
        return out


def test_hooks_leave_nothing_behind() -> None:
    """Neither after an error, nor in modules beside; a second call of `in_place` is harmless."""
    q = torch.randn(1, 2, 33, 8)
    failing, fine = Own(fails=True), Own()
    handles = [in_place([failing, fine]), in_place([fine])]
    with pytest.raises(ValueError, match="after attention"):
        failing(q)
    assert len(sites()) == 1
    clear_sites()
    Own()(q)
    assert not sites()
    fine(q)
    copy.deepcopy(fine)(q)
    assert pickle.loads(pickle.dumps(fine))(q).shape == q.shape
    for handle in handles:
        handle.remove()
    torch._dynamo.reset()
    clear_sites()
    fine(q)
    assert not sites()
