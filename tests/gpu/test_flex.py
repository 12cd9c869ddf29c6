"""FlexAttention through torch.compile on a GPU: values against fp64, bits of repetitions, forwards, dynamic lengths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from dash_inductor import clear_sites, sites

from ..support.flex import Case, Data, Sizes, block_mask, mask_mods, score_mods
from ..support.hf_models import tiny_flex_llama
from ..support.repeats import differing_runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-4}
"""Largest norm of an error, relative to the norm of the result."""

SHAPES = [
    (Sizes(3, 8, 2, 1000, 1000, 128), torch.bfloat16),
    (Sizes(2, 4, 4, 700, 1000, 64), torch.float16),
]

MASKS = {
    "causal": "causal",
    "window": "band(0,6)",
    "documents of rows": "causal & segments(0,0)",
    "torchtitan": "causal & interval(0,none,none)",
    "torchtitan in batches": "causal & interval(0,none,1)",
    "transformers": "segments(0,0) & interval(none,1,1)",
    "transformers, windows": "segments(0,0) & interval(1,2,3)",
    "lengths": "causal & keys(0)",
    "dilated": "causal & dilated(0,1)",
    "heads": "dense(0)",
    "windows of heads": "causal & head_interval(0,none)",
}
OF_TWO_LENGTHS = {
    "documents of rows": "causal & segments(0,1)",
    "transformers": "segments(0,1) & interval(none,2,3)",
    "transformers, windows": "segments(0,1) & interval(2,3,4)",
}
"""Masks where there are more keys than queries: vectors that both have in common have two lengths then."""
SCORES = ("softcap", "alibi", "of distances", "of places", "softcap, then alibi", "hidden")


def step(case: Case) -> Callable[[list[Tensor]], list[Tensor]]:
    """Runs a compiled call with its backward."""
    torch._dynamo.reset()
    clear_sites()
    function = torch.compile(case.function("cuda"), dynamic=False)
    for tensor in case.wanted:
        tensor.requires_grad_()

    def run(inputs: list[Tensor]) -> list[Tensor]:
        output = function(*inputs[:3])
        return [output.detach(), *torch.autograd.grad(output, [*inputs[:3], *case.wanted], inputs[3])]

    return run


def check(case: Case, dtype: torch.dtype, repetitions: int = 50) -> None:
    run = step(case)
    inputs = case.sizes.tensors(dtype, "cuda")
    found = run(inputs)
    for number, (ours, true) in enumerate(zip(found, case.exact(inputs), strict=True)):
        error = (ours.double() - true.double()).norm() / true.double().norm()
        assert error < TOLERANCES[dtype] * (1 if number < 4 else 6), f"result {number}: {error}"
    assert not differing_runs(lambda: run(inputs), repetitions)


@pytest.mark.parametrize(("sizes", "dtype"), SHAPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, sizes: Sizes, dtype: torch.dtype) -> None:
    mod = mask_mods(Data.of(sizes, "cuda"))[name][0]
    check(Case(mask_mod=mod, sizes=sizes, batch=sizes.batch), dtype)
    (site,) = sites()
    masks = MASKS if sizes.q_len == sizes.kv_len else MASKS | OF_TWO_LENGTHS
    assert (site.status, site.mask) == ("replaced", masks[name]), site
    narrow = name == "window"  # of few keys, which the portable kernels take less time for
    on_hopper = torch.cuda.get_device_capability() == (9, 0) and not narrow
    assert not on_hopper or str(site.plan).startswith("hopper"), site


@pytest.mark.parametrize("wanted", [False, True], ids=["", "with its gradient"])
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, wanted: bool) -> None:
    """On portable kernels; biases are fp32 beside operands of 16 bits."""
    sizes = Sizes(2, 4, 2, 500, 500, 64)
    data = Data.of(sizes, "cuda")
    mod, tensor = score_mods(data)[name]
    if wanted and tensor is None:
        return
    mask = mask_mods(data)["documents of rows"][0]
    check(Case(mod, mask, sizes, (tensor,) if wanted and tensor is not None else (), sizes.batch), torch.bfloat16, 20)
    (site,) = sites()
    assert site.status == "replaced", site


@pytest.mark.parametrize("dim", [64, 128])
def test_biases_of_fp32_fit(dim: int) -> None:
    """Beside operands of 16 bits, tiles of a bias take twice the shared memory."""
    sizes = Sizes(2, 8, 8, 512, 512, dim)
    data = Data.of(sizes, "cuda")
    mod, tensor = score_mods(data)["of places"]
    assert tensor is not None
    check(Case(mod, mask_mods(data)["causal"][0], sizes, (tensor,)), torch.bfloat16, 3)


def test_float32() -> None:
    sizes = Sizes(2, 4, 2, 300, 300, 64)
    data = Data.of(sizes, "cuda")
    mask = mask_mods(data)["torchtitan"][0]
    check(Case(score_mods(data)["softcap"][0], mask, sizes, batch=sizes.batch), torch.float32, 5)


@pytest.mark.parametrize("name", ["causal", "torchtitan", "heads"])
def test_forwards_alone(name: str) -> None:
    sizes, dtype = SHAPES[0]
    case = Case(mask_mod=mask_mods(Data.of(sizes, "cuda"))[name][0], sizes=sizes, batch=sizes.batch)
    inputs = sizes.tensors(dtype, "cuda")
    trained = step(case)(inputs)[0]
    clear_sites()
    torch._dynamo.reset()
    with torch.no_grad():
        output = torch.compile(case.function("cuda"))(*inputs[:3])
    (site,) = sites()
    assert (site.status, site.kind) == ("replaced", "forward only")
    assert torch.equal(output, trained)


@pytest.mark.parametrize("name", ["causal", "documents of rows", "dilated"])
def test_dynamic_lengths(name: str) -> None:
    """One compile; every length has the bits that it has alone."""
    data = Data.of(Sizes(q_len=600, kv_len=600), "cuda")
    mod = mask_mods(data)[name][0]

    def program(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    torch._dynamo.reset()
    clear_sites()
    function = torch.compile(program, dynamic=True)
    for length in (512, 300, 555):
        sizes = Sizes(q_len=length, kv_len=length, dim=64)
        inputs = sizes.tensors(torch.bfloat16, "cuda")
        output = function(*inputs[:3], block_mask(mod, sizes, "cuda", sizes.batch))
        found = [output.detach(), *torch.autograd.grad(output, inputs[:3], inputs[3])]
        for ours, true in zip(found, Case(mask_mod=mod, sizes=sizes).exact(inputs), strict=True):
            assert (ours.double() - true).norm() / true.norm() < TOLERANCES[torch.bfloat16]
    assert {site.status for site in sites()} == {"replaced"}


def test_bits_do_not_depend_on_the_batch() -> None:
    sizes = Sizes(3, 8, 2, 600, 600, 128)
    mod = mask_mods(Data.of(sizes, "cuda"))["documents"][0]
    inputs = sizes.tensors(torch.bfloat16, "cuda")
    whole = step(Case(mask_mod=mod, sizes=sizes))(inputs)
    alone = Sizes(1, 8, 2, 600, 600, 128)
    run = step(Case(mask_mod=mod, sizes=alone))
    for b in range(sizes.batch):
        of_one = [*(t[b : b + 1].detach().requires_grad_() for t in inputs[:3]), inputs[3][b : b + 1]]
        for ours, theirs in zip(run(of_one), whole, strict=True):
            assert torch.equal(ours, theirs[b : b + 1])


@pytest.mark.parametrize("packed", [False, True])
def test_transformers(packed: bool) -> None:
    pytest.importorskip("transformers")
    model, inputs = tiny_flex_llama(packed)
    model.cuda()
    on_gpu = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    torch._dynamo.reset()
    clear_sites()
    compiled = torch.compile(model)

    def run() -> list[Tensor]:
        loss = compiled(**on_gpu).loss
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    assert all(tensor.isfinite().all() for tensor in run())
    assert not differing_runs(run, 10)
    assert [site.status for site in sites()] == ["replaced"] * 2, sites()
