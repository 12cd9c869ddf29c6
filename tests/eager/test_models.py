"""Models of transformers that are not compiled, with ``attn_implementation="dash_inductor"``."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import dash_inductor
from dash_inductor.config import config
from dash_inductor.records.records import sites

from ..support.distribution import ROOT
from ..support.graphs import CPU_BACKWARD, CPU_FORWARD
from ..support.hf_models import build, inputs_of, padding, token_ids
from ..support.processes import run_python

pytest.importorskip("transformers", reason="the models come from the extra 'hf'")

NAME = "dash_inductor"
BY_HAND = ("Gemma2", "GptOss")
"""Families with a softcap or sinks, whose attention `scaled_dot_product_attention` does not have."""
WITHOUT_DROPOUT = {
    "Bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "T5": {"dropout_rate": 0.0, "num_layers": 1, "num_decoder_layers": 1},
}
LENGTHS = (24, 17, 20)


@pytest.fixture(autouse=True)
def registered() -> Any:
    dash_inductor.register()
    counters.clear()
    with config.patch(cpu="reference"):
        yield


def model_of(family: str, implementation: str = NAME, **settings: Any) -> Any:
    return build(family, attn_implementation=implementation, **WITHOUT_DROPOUT.get(family, {}), **settings)


def step(model: Any, inputs: dict[str, Tensor], run: Any = None) -> list[Tensor]:
    """The loss of a step, and the gradients of the parameters."""
    model.zero_grad()
    loss = (model if run is None else run)(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Each tensor differs little, beside its largest element."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max() + 1e-8


def masks() -> list[str]:
    return [record.mask for record in sites()]


@pytest.mark.parametrize(
    ("family", "kind", "found"),
    [
        ("Llama", "plain", ["causal"]),
        ("Llama", "left", ["causal & keys(0)"]),
        ("Mistral", "packed", ["band(0,7) & segments(0,0)"]),
        ("Bert", "plain", ["full"]),
        ("Gemma2", "right", ["band(0,7) & keys(0)", "causal & keys(0)"]),
        ("GptOss", "right", ["band(0,7) & keys(0)", "causal & keys(0)"]),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("Llama", "right", ["causal & keys(0)"]),
                ("Qwen3", "packed", ["causal & segments(0,0)"]),
                ("Mistral", "plain", ["band(0,7)"]),
                ("ModernBert", "right", ["keys(0)", "band(-8,8) & keys(0)"]),
                ("Bert", "right", ["keys(0)"]),
                ("T5", "right", None),
            )
        ),
    ],
)
def test_numbers_and_gradients(family: str, kind: str, found: list[str] | None) -> None:
    """Each kind of layer is compiled for two shapes at most: the first one, and those of other lengths.

    Transformers' "eager" lets a query without keys see all of them, where PyTorch lets it see none.
    """
    ours, theirs = model_of(family), model_of(family, "eager" if family in BY_HAND else "sdpa")
    for length in LENGTHS if found else LENGTHS[:2]:
        inputs = inputs_of(family, kind, length=length)
        assert_close(step(ours, inputs), step(theirs, inputs))
    if found is not None:
        assert sorted(masks()) == sorted(found * 2)
        assert all(record.status == "replaced" for record in sites())
    assert counters["stats"]["unique_graphs"] == 2 * (len(found or ()) or {"T5": 3}.get(family, 2))
    assert not torch.are_deterministic_algorithms_enabled()


def test_steps_of_a_training_recompile_nothing() -> None:
    """Masks are made anew for every step, of functions that are made anew too; batches and lengths vary."""
    model = model_of("Mistral")
    for length in (24, 17, 20, 31):
        for batch in (2, 3):
            step(model, inputs_of("Mistral", "right", length=length, batch=batch))
    compiled = counters["stats"]["unique_graphs"]
    assert compiled <= 3
    for length in (12, 19, 40):
        step(model, inputs_of("Mistral", "right", length=length, batch=4))
    assert counters["stats"]["unique_graphs"] == compiled


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    """Also with dropout, whose random numbers are drawn again."""
    settings = {"attention_dropout": 0.3}
    inputs = inputs_of("Llama", "left", length=24)
    plain, checkpointed = model_of("Llama", **settings), model_of("Llama", **settings)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        checkpointed.enable_input_require_grads()
    found = []
    for model in (plain, checkpointed):
        torch.manual_seed(1)
        found.append(step(model, inputs))
    assert_close(*found)
    assert not torch.equal(found[0][0], step(model_of("Llama"), inputs)[0]), "nothing was dropped"


def test_autocast() -> None:
    """Query and key are of the type that the model computes in."""
    inputs = inputs_of("Mistral", "right", length=24)
    ours, theirs = model_of("Mistral"), model_of("Mistral", "sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        found = [step(model, inputs) for model in (ours, theirs)]
    assert all((a - b).abs().max() <= 0.02 * b.abs().max() for a, b in zip(*found, strict=True))
    assert [(record.status, record.tensors.dtype) for record in sites() if record.tensors] == [("replaced", "bfloat16")]


@pytest.mark.parametrize(("family", "cache"), [("Llama", None), ("Mistral", "static"), ("Gemma2", "static")])
def test_generation_with_a_cache(family: str, cache: str | None) -> None:
    """One query against all keys so far, and against those of a window; prompts are padded on the left."""
    found = []
    for implementation in ("eager" if family in BY_HAND else "sdpa", NAME):
        model = model_of(family, implementation, use_cache=True).eval()
        model.generation_config.eos_token_id = None
        found.append(
            model.generate(
                token_ids(2, 12),
                attention_mask=padding("left", 2, 12).long(),
                max_new_tokens=6,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                cache_implementation=cache,
            )
        )
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(found[0].logits, found[1].logits, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] <= 6


@pytest.mark.parametrize("part", ["layers", pytest.param("model", marks=pytest.mark.full)])
def test_inside_of_a_compiled_program(part: str) -> None:
    """The attention is one of the graph's own; a compiled layer takes a mask that was made outside."""
    torch.use_deterministic_algorithms(True)
    ours, theirs = model_of("Mistral"), model_of("Mistral", "sdpa")
    inputs = inputs_of("Mistral", "right", length=24)
    run = ours
    if part == "model":
        run = torch.compile(ours)
    else:
        for layer in ours.model.layers:
            layer.compile(fullgraph=True)
    assert_close(step(ours, inputs, run), step(theirs, inputs))
    assert masks() == ["band(0,7) & keys(0)"] * (2 if part == "model" else 1)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_the_program(dtype: torch.dtype) -> None:
    """A mask of four dimensions is taken as it is."""
    inputs = inputs_of("Llama", "plain", length=24)
    mask = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
    mask[1, 0, :, 3:5] = False
    mask[:, :, :, 0] = True
    given = mask if dtype is torch.bool else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(dtype).min)
    inputs["attention_mask"] = given
    assert_close(step(model_of("Llama"), inputs), step(model_of("Llama", "sdpa"), inputs))
    assert [record.status for record in sites()] == ["replaced"]


def test_switched_off() -> None:
    """Then it computes what "sdpa" computes."""
    inputs = inputs_of("Llama", "right", length=24)
    with dash_inductor.disabled():
        ours = step(model_of("Llama"), inputs)
    assert_close(ours, step(model_of("Llama", "sdpa"), inputs))
    assert not sites()
    assert not counters["stats"]


def test_cross_attention_and_copies() -> None:
    """A speech model with an encoder and a decoder; a deep copy of a model and its state are as the model."""
    inputs = inputs_of("Whisper", "plain")
    ours = model_of("Whisper")
    assert_close(step(copy.deepcopy(ours), inputs), step(model_of("Whisper", "sdpa"), inputs))
    assert {record.op for record in sites()} == {CPU_BACKWARD}
    assert CPU_FORWARD not in {record.op for record in sites()}


DDP = """
    import json, tempfile
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import dash_inductor
    from tests.support.hf_models import build, inputs_of

    dash_inductor.config.cpu = "reference"
    dash_inductor.register()
    found = []
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        model = build("Mistral", attn_implementation="dash_inductor")
        for run in (model, DistributedDataParallel(model)):
            for length in (24, 17):
                model.zero_grad()
                run(**inputs_of("Mistral", "right", length=length)).loss.backward()
            found.append([p.grad.clone() for p in model.parameters()])
        dist.destroy_process_group()
    print(json.dumps([all(map(torch.equal, *found)), [record.mask for record in dash_inductor.sites()]]))
"""


def test_data_parallel_training() -> None:
    """DDP splits what is compiled at its buckets; the attention has no parameters, and the bits of the model alone."""
    equal, found = json.loads(run_python(DDP, path=ROOT).stdout.splitlines()[-1])
    assert equal
    assert set(found) == {"band(0,7) & keys(0)"}


TRAINER = """
    import json, sys, tempfile
    import torch
    from transformers import Trainer, TrainingArguments
    import dash_inductor
    from tests.support.hf_models import build, token_ids
    from tests.support.trainer import collator

    dash_inductor.config.cpu = "reference"
    dash_inductor.register()
    losses = {}
    for name in ("sdpa", "dash_inductor"):
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, use_cpu=True, max_steps=2, per_device_train_batch_size=2, report_to=[],
                save_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential",
            )
            data = [{"input_ids": token_ids(1, length)[0].tolist()} for length in (20, 13, 17, 9)]
            model = build("Llama", attn_implementation=name)
            trainer = Trainer(model, arguments, data_collator=collator("padded"), train_dataset=data)
            losses[name] = trainer.train().training_loss
    print(json.dumps([*losses.values(), sorted({record.mask for record in dash_inductor.sites()})]))
"""


def test_the_trainer_of_transformers() -> None:
    """Two steps of other lengths, without `torch_compile`."""
    sdpa, ours, found = json.loads(run_python(TRAINER, path=ROOT).stdout.splitlines()[-1])
    assert ours == pytest.approx(sdpa, rel=1e-5)
    assert found == ["causal & keys(0)"]
