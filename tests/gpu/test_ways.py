"""Ways of running a model on GPUs: modes, checkpointing, the Trainer, and two processes: records, bits of two runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dash_inductor.records.records import clear_sites, sites

from ..models.test_parallel import TRAINER, facts_of
from ..support.hf_models import build, inputs_of
from ..support.model_table import agree, line
from ..support.ways import MODES, WAYS, Way

pytest.importorskip("transformers", reason="the models come from the extra 'hf'")
pytestmark = pytest.mark.gpu

ALL = WAYS | MODES


def run(way: Way) -> dict[str, Tensor]:
    """The gradients after the last of three steps, from the start: CUDA graphs are recorded in the first two."""
    torch._dynamo.reset()
    model = build("Llama", head_dim=64).to("cuda", torch.bfloat16)
    inputs = {name: tensor.cuda() for name, tensor in inputs_of("Llama", "right", length=200).items()}
    with way.step(model, torch.compile) as step:
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            model.zero_grad()
            step(inputs)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ALL)
def test_way(name: str, deterministic: None) -> None:
    way = ALL[name]
    first = run(way)
    records = sites()
    assert line(records, calls=len(records)) == way.expected
    clear_sites()
    second = run(way)
    assert first.keys() == second.keys()
    assert all(tensor.isfinite().all() for tensor in first.values())
    if not name.startswith("max-autotune"):  # two compilations may choose two kernels for a product
        assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("kind", TRAINER)
def test_trainer(kind: str) -> None:
    pytest.importorskip("accelerate")
    assert facts_of("tests.support.trainer", "cuda", kind) == [{"sites": TRAINER[kind], "equal": True, "finite": True}]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("way", ["ddp", "fsdp", "heads"])
@pytest.mark.parametrize("kind", ["plain", "right"])
def test_two_processes(way: str, kind: str) -> None:
    from ..support.parallel import EXPECTED, PROCESSES

    found = facts_of("tests.support.parallel", "cuda", way, kind)
    assert len(found) == PROCESSES
    for facts in found:
        assert agree(facts["sites"], EXPECTED[f"{way} {kind}"])
        assert facts["equal"]
        assert facts["finite"]
