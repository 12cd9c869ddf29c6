"""Benchmarks of whole steps: processes and rows, names of kernels, and a training of a small model on the CPU."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import common, step, step_child, step_kernels
from benchmarks.step_variants import VARIANTS
from benchmarks.whole_models import LONG
from benchmarks.whole_models.long import DOCUMENTS, PADDED, Layers

WORKER = """
import json, sys
model, variant = sys.argv[1:3]
if variant == "flash":
    raise RuntimeError("No available kernel.  Aborting execution.")
print("what a compiler says")
print(json.dumps({"memory": 100.0, "finite": True, "sites": {}}), flush=True)
ms = {"default": 4.0, "cudnn": 2.0, "dash": 3.0}[variant]
for line in sys.stdin:
    kernels = {"forward": "cuDNN", "forward ms": 0.5, "backward": "", "backward ms": 0.0, "busy ms": 1.5}
    answers = {"turn": ms, "host": ms / 2, "kernels": kernels, "bits": variant == "dash"}
    print(json.dumps(answers[line.strip()]), flush=True)
"""


def test_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(step, "CHILD", (sys.executable, "-c", WORKER))
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    arguments = ["--models", "decoder", "--variants", "default", "flash", "cudnn", "dash", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["step", *arguments])
    step.main()
    default, flash, cudnn, dash = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert (default["relative"], cudnn["relative"], dash["relative"]) == (1.0, 0.5, 0.75)
    assert (default["relative_to_best"], cudnn["relative_to_best"], dash["relative_to_best"]) == (2.0, 1.0, 1.5)
    assert (default["equal"], dash["equal"]) == (False, True)
    assert flash == {
        "model": "decoder", "variant": "flash", "error": "RuntimeError: No available kernel.  Aborting execution.",
    }  # fmt: skip
    assert default["host"] == round(1 - 1.5 / 4, 3)
    assert default["host_ms"] == default["host_ms_busy"] == 2.0
    decoder = next(of for made, of in LONG.items() if made.__name__ == "decoder")
    assert default["forward_tflops"] == round(decoder.forward_flops / 0.5 / 1e9, 1)
    assert "backward_tflops" not in default
    assert dash["turns"] == [3.0, 3.0]


def test_a_training_on_the_cpu() -> None:
    torch.manual_seed(0)
    training = step_child.Training((Layers(1, 128, is_causal=True), {"x": torch.randn(1, 16, 128)}))
    first = step_child.first_answer(training, "cpu")
    assert first["finite"]
    asked = step_child.answers(training)
    assert asked["turn"]() > 0
    assert 0 < asked["host"]() < 1e3
    assert asked["bits"]() is True
    assert asked["kernels"]()["busy ms"] == 0


def test_bits_that_differ_are_seen() -> None:
    class Noisy(torch.nn.Linear):
        calls = 0

        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Noisy.calls += 1
            return super().forward(x).square().sum() * (1 + 1e-3 * Noisy.calls)

    training = step_child.Training((Noisy(4, 4), {"x": torch.ones(2, 4)}))
    assert step_child.answers(training)["bits"]() is False


@pytest.mark.parametrize(
    ("kernels", "way", "mask", "said"),
    [
        (["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3i"], 0, "causal", "cuDNN, causal"),
        (["cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16"], 1, "no mask", "cuDNN, no mask"),
        (["void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>"], 0, "causal", "FlashAttention-2, causal"),
        (["pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel"], 1, "", "FlashAttention-2"),
        (["fmha_cutlassF_bf16_aligned_64x128_rf_sm80"], 0, "bias of all pairs", "memory-efficient, bias of all pairs"),
        (["fmha_cutlassB_bf16_aligned_128x64_k64_sm80"], 1, "bias of keys", "memory-efficient, bias of keys"),
        (["hopper_forward"], 0, "causal", "dash_inductor"),
        (["prepare", "hopper_backward", "finish"], 1, "", "dash_inductor"),
        (["triton_tem_fused_flex_attention_0"], 0, "", "FlexAttention"),
        (["triton_tem_fused_flex_attention_backward_1"], 0, "", ""),
        (["triton_tem_fused_flex_attention_backward_1"], 1, "", "FlexAttention"),
        (["nvjet_sm90_tst_128x256", "triton_poi_fused_0"], 0, "causal", ""),
    ],
)
def test_names_of_kernels(kernels: list[str], way: int, mask: str, said: str) -> None:
    found = step_kernels.direction([(name, 1.0) for name in kernels], way, mask)
    assert found.name == said
    assert found.ms == (len(kernels) if said else 0)


@pytest.mark.parametrize(
    ("name", "shapes", "values", "said"),
    [
        ("aten::_scaled_dot_product_cudnn_attention", [[1]] * 3, ["", "", "", "", "True", "0.", "True"], "causal"),
        ("aten::_scaled_dot_product_cudnn_attention", [[1]] * 3, ["", "", "", "", "True", "0.", "False"], "no mask"),
        ("aten::_scaled_dot_product_cudnn_attention", [*[[1]] * 3, [2, 1, 8, 8]], [], "bias of all pairs"),
        ("aten::_scaled_dot_product_efficient_attention", [*[[1]] * 3, [2, 1, 1, 8]], [], "bias of keys"),
        ("aten::_scaled_dot_product_flash_attention", [[1]] * 3, ["", "", "", "0.", "True"], "causal"),
        ("aten::mm", [[1]], [], ""),
    ],
)
def test_masks_of_calls(name: str, shapes: list[Any], values: list[str], said: str) -> None:
    assert step_kernels.mask_of([("aten::mm", [], []), (name, shapes, values)]) == said


def test_busy_time_counts_overlaps_once() -> None:
    ranges = [SimpleNamespace(start=start, end=end) for start, end in ((0, 1000), (500, 2000), (5000, 6000))]
    assert step_kernels.busy(ranges) == 3.0


def test_inputs_of_long_models() -> None:
    assert sum(DOCUMENTS) == 16384
    assert max(PADDED) < 8192
    assert set(step.COMPARED) <= set(VARIANTS)
