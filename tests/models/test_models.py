"""Models of `transformers`, on the CPU and for an H100: no mask and no repeated head of causal ones remains."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from dash_inductor.config import config
from dash_inductor.records.records import sites

from ..support.attention_masks import masks_in_joint_graph
from ..support.fakecuda import compiler
from ..support.forks import FAKE_GPU, run_forked
from ..support.graphs import BACKWARD, CPU_BACKWARD, CPU_FORWARD, FORWARD, capture
from ..support.hf_models import BANDS, causal_lm, encoder, padding, speech_model, token_ids, vision_language_model

pytest.importorskip("transformers", reason="the models come from the extra 'hf'")
pytestmark = pytest.mark.usefixtures("deterministic")

LENGTH, LAYERS = 72, 2  # the length is above all other sizes: only an attention mask has LENGTH x LENGTH elements


def gradients(model: Any, run: Any, ids: torch.Tensor, **inputs: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    run(input_ids=ids, labels=ids, **inputs).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def assert_accurate(model: Any, ours: list[torch.Tensor], ids: torch.Tensor, **inputs: torch.Tensor) -> None:
    """The gradients are at most twice as far from double precision's as the eager ones are.

    The floor is the error from rounding the summands of a gradient.  They are of the size of the gradient, but for the
    bias of keys: over all keys its summands cancel to zero in exact arithmetic.  The summands of the weight beside it
    are the same, each times an input that is normalised, and do not cancel.
    """
    eager = gradients(model, model, ids, **inputs)
    model = copy.deepcopy(model).double()  # the one that was compiled stays as it is
    exact = gradients(model, model, ids, **inputs)
    names = [name for name, _ in model.named_parameters()]
    sizes = {name: true.abs().max() for name, true in zip(names, exact, strict=True)}
    for name, gradient, theirs, true in zip(names, ours, eager, exact, strict=True):
        size = sizes[name.replace("key.bias", "key.weight")]
        floor = 8 * torch.finfo(torch.float32).eps * size
        assert (gradient - true).abs().max() <= 2 * (theirs - true).abs().max() + floor, name


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.full] if f == "Qwen3" else []) for f in BANDS])
def test_every_attention_is_replaced(family: str) -> None:
    model, ids = causal_lm(family, layers=LAYERS), token_ids(2, LENGTH)
    with capture(plane_length=LENGTH) as graphs, config.patch(strict=True):
        compiled = graphs.compile(model)
        first, second = gradients(model, compiled, ids), gradients(model, compiled, ids)
    assert (graphs.count_before(CPU_FORWARD), graphs.count_before(CPU_BACKWARD)) == (LAYERS, LAYERS)
    assert (graphs.count(CPU_FORWARD), graphs.count(CPU_BACKWARD)) == (0, 0)
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (LAYERS, LAYERS)
    assert graphs.planes == []
    assert [(r.mask, r.site.group) for r in sites() if r.site] == [(BANDS[family], 2)] * LAYERS
    assert {r.source.rsplit(" in ", 1)[-1] for r in sites()} == {f"model.layers.{i}.self_attn" for i in range(LAYERS)}
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert_accurate(model, first, ids)


@pytest.mark.parametrize(("family", "dtype"), [("Llama", torch.int64), ("Mistral", torch.bool), ("Bert", torch.int64)])
def test_padded_batches(family: str, dtype: torch.dtype) -> None:
    """With `attention_mask`, also where it is all ones: nothing of the size of a mask of all pairs remains.

    To one compiled model all of these are the same.
    """
    model = encoder(family, layers=LAYERS) if family == "Bert" else causal_lm(family, layers=LAYERS)
    ids = token_ids(3, LENGTH)
    masks = [padding(kind, 3, LENGTH).to(dtype) for kind in ("ones", "right", "left", "holes")]
    with capture(plane_length=LENGTH) as graphs, config.patch(strict=True):
        compiled = graphs.compile(model)
        found = [[gradients(model, compiled, ids, attention_mask=mask) for _ in range(2)] for mask in masks]
    assert (graphs.count(CPU_FORWARD), graphs.count(CPU_BACKWARD)) == (0, 0)
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (LAYERS, LAYERS)
    assert graphs.planes == []
    expected = f"{BANDS[family]} & keys(0)" if family in BANDS else "keys(0)"
    assert [record.mask for record in sites()] == [expected] * LAYERS
    for mask, (first, second) in zip(masks, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert_accurate(model, first, ids, attention_mask=mask)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_packed_batches(family: str) -> None:
    """Positions that begin anew tell where the next document does; one vector is the operand of all layers."""
    model, ids = causal_lm(family, layers=LAYERS), token_ids(1, LENGTH)
    lengths = (1, 30, 17, LENGTH - 48)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with capture(plane_length=LENGTH) as graphs, config.patch(strict=True):
        ours = gradients(model, graphs.compile(model), ids, position_ids=positions)
    assert (graphs.count(FORWARD), graphs.count(BACKWARD)) == (LAYERS, LAYERS)
    assert graphs.planes == []
    assert [record.mask for record in sites()] == [f"{BANDS[family]} & segments(0,0)"] * LAYERS
    assert_accurate(model, ours, ids, position_ids=positions)


@pytest.mark.parametrize(("family", "dynamic"), [("Mistral", (1,)), ("Llama", (0, 1))])
def test_masks_of_dynamic_sizes(family: str, dynamic: tuple[int, ...]) -> None:
    ids = token_ids(batch=2, length=24)
    for dimension in dynamic:
        torch._dynamo.mark_dynamic(ids, dimension)
    found = masks_in_joint_graph(causal_lm(family, layers=1), input_ids=ids, labels=ids)
    assert found == [(CPU_FORWARD, BANDS[family])]


PADDING = 2, {"attention_mask": torch.ones(2, 24, dtype=torch.int64)}, "causal & keys"
PLANE = 2, {"attention_mask": torch.ones(2, 1, 24, 24).tril().bool()}, "dense"
PACKING = 1, {"position_ids": torch.arange(24).remainder(12).unsqueeze(0)}, "causal & segments"


@pytest.mark.parametrize(
    ("batch", "extra", "mask", "dynamic"),
    [
        pytest.param(*PLANE, False, id="plane-static"),
        pytest.param(*PLANE, True, id="plane-dynamic"),
        pytest.param(*PADDING, True, id="padding-dynamic"),
        pytest.param(*PACKING, True, id="packing-dynamic"),
    ],
)
def test_masks_that_depend_on_an_input(batch: int, extra: dict[str, torch.Tensor], mask: str, dynamic: bool) -> None:
    """Padding and packing with static lengths are what `test_padded_batches` and `test_packed_batches` train with."""
    ids = token_ids(batch, 24)
    inputs = {name: tensor.clone() for name, tensor in extra.items()}
    for tensor in (ids, *inputs.values()) if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, tensor.dim() - 1)
    found = masks_in_joint_graph(causal_lm("Llama", layers=1), input_ids=ids, **inputs)
    assert [text.split(":")[0] for _, text in found] == [mask]


def test_masks_of_a_speech_model() -> None:
    """The encoder, the decoder with its repeated position ids, and the decoder's look at the encoder."""
    ids = token_ids(batch=2, length=24)
    found = masks_in_joint_graph(
        speech_model(), input_features=torch.randn(2, 8, 64), decoder_input_ids=ids, labels=ids
    )
    assert [mask for _, mask in found] == ["no mask", "causal", "no mask"]


@pytest.mark.parametrize("family", ["Idefics3", "SmolVLM"])
def test_masks_of_a_vision_encoder(family: str) -> None:
    """A mask of ones for the pixels becomes one of patches by a sum, after a break of the graph."""
    model = vision_language_model(family)
    found = masks_in_joint_graph(model.get_image_features, breaks=True, pixel_values=torch.randn(2, 1, 3, 32, 32))
    assert [mask for _, mask in found] == ["full"]


H100 = """
    import json

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.support.attention_masks import masks_in_joint_graph
    from tests.support.hf_models import causal_lm

    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.bfloat16)
    found = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        # 1000 is no multiple of 16: the mask is padded, and cut again
        for family, length, dynamic in (("Llama", 1000, False), ("Qwen3", 4096, False), ("Mistral", 1000, True)):
            ids = torch.zeros(2, length, dtype=torch.int64)
            if dynamic:
                torch._dynamo.mark_dynamic(ids, 1)
            found[family] = masks_in_joint_graph(causal_lm(family, layers=1, head_dim=64), input_ids=ids, labels=ids)
    print(json.dumps(found))
"""


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_masks_for_an_h100() -> None:
    found = json.loads(run_forked(FAKE_GPU, H100).stdout.splitlines()[-1])
    assert found == {f: [["aten::_scaled_dot_product_efficient_attention", band]] for f, band in BANDS.items()}
