"""Masks of causal language models from `transformers`, as they stand in joint graphs for the CPU and for an H100."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from .support.attention_masks import masks_in_joint_graph
from .support.fakecuda import compiler
from .support.hf_models import BANDS, causal_lm, token_ids
from .support.processes import run_python

pytest.importorskip("transformers", reason="the models come from the extra 'hf'")

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("family", "dynamic"), [("Mistral", ()), ("Mistral", (1,)), ("Llama", (0, 1))])
def test_masks_on_the_cpu(family, dynamic) -> None:
    ids = token_ids(batch=2, length=24)
    for dimension in dynamic:
        torch._dynamo.mark_dynamic(ids, dimension)
    found = masks_in_joint_graph(causal_lm(family, layers=1), input_ids=ids, labels=ids)
    assert found == [("aten::_scaled_dot_product_flash_attention_for_cpu", BANDS[family])]


def test_a_padded_batch_depends_on_its_input() -> None:
    ids = token_ids(batch=2, length=24)
    found = masks_in_joint_graph(causal_lm("Llama", layers=1), input_ids=ids, attention_mask=torch.ones_like(ids))
    assert [text.split(":")[0] for _, text in found] == ["depends_on_input"]


def test_packed_positions_depend_on_their_input() -> None:
    ids = token_ids(batch=1, length=24)
    positions = torch.arange(24).remainder(12).unsqueeze(0)
    found = masks_in_joint_graph(causal_lm("Llama", layers=1), input_ids=ids, position_ids=positions)
    assert [text.split(":")[0] for _, text in found] == ["depends_on_input"]


H100 = """
    import json

    from tests.support import fakecuda, mockgpu

    mockgpu.install_driver()
    fakecuda.install()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    mockgpu.install_torch()
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
    found = json.loads(run_python(H100, path=ROOT).stdout.splitlines()[-1])
    assert found == {f: [["aten::_scaled_dot_product_efficient_attention", band]] for f, band in BANDS.items()}
