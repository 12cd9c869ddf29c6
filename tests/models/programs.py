"""The attention of real programs: models of other packages, compiled as those packages do it, for an H100.

``python -m tests.models.programs`` writes tests/golden/programs.json anew, and prints what changed; ``--only`` takes
the names of some programs.  The packages of requirements/programs.txt are installed into .programs by
``make model-table`` and ``make test-models``.  Forwards and backwards are traced, partitioned and rewritten as in a
training; no kernel is compiled, and graphs run on fake tensors.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule

from dash_inductor.frontends.decomposed.frontend import OP
from dash_inductor.records.records import clear_sites, sites

from ..support import diffusers_models, hf_programs
from ..support.flash_attn import HUB
from ..support.hf_models import build, token_ids
from ..support.model_table import line
from ..support.processes import run_python
from . import flash_attention, megatron, modded_nanogpt, prime_rl, sources, titan, xcit

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "programs.json"
PACKAGES = ROOT / ".programs"
BATCH, LENGTH = 2, 256


@dataclass(frozen=True)
class Program:
    """A model of a package, and how that calls attention.

    Attributes:
        package: as the registry names it.
        model: a name for readers.
        attention: what the model calls.
        train: compiles a model and calls it, with tensors that want gradients.
        needs: another package, "" if it needs none.
    """

    package: str
    model: str
    attention: str
    train: Callable[[], object]
    needs: str = ""

    def __str__(self) -> str:
        return f"{self.package} {self.model} {self.attention}"


# ---- torchtitan: by its own trainer, with the configurations that it has for debugging ----


def _titan(model: str, attention: str, *, compiled: bool = True) -> Callable[[], object]:
    return functools.partial(titan.step, model, attention, compiled=compiled, batch=BATCH, length=LENGTH)


# ---- transformers: FlexAttention ----


def _transformers(family: str, *, packed: bool = False) -> Callable[[], object]:
    def train() -> object:
        model: Any = build(family, head_dim=64)
        model.set_attn_implementation("flex_attention")
        tokens = token_ids(BATCH, LENGTH).to("cuda")
        inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
        if packed:
            inputs["position_ids"] = torch.arange(LENGTH // 2).repeat(BATCH, 2)
        return torch.compile(model, backend=traced)(**inputs)

    return train


def _small(model: hf_programs.Model) -> Callable[[], object]:
    def train() -> object:
        """Swin V2 reads numbers from tensors while it is built: fake ones have none."""
        with unset_fake_temporarily(), torch.device("cpu"):
            made: Any = model.model()
        return torch.compile(titan.to_empty(made, device="cuda"), backend=traced)(**model.tensors())

    return train


# ---- Megatron-Core ----


def _megatron(*, own: bool) -> Callable[[], object]:
    def train() -> object:
        with megatron.gpt(LENGTH, own=own) as model:
            tokens = torch.randint(0, 128, (BATCH, LENGTH))
            places = torch.arange(LENGTH).expand(BATCH, -1)
            hidden = torch.ones(1, 1, LENGTH, LENGTH).triu(1) > 0 if own else None
            return torch.compile(model, backend=traced)(tokens, places, hidden, labels=tokens)

    return train


# ---- nanoGPT and nanochat: the files of their models, with the sizes that they have by default but two layers ----


def _nanogpt() -> object:
    nanogpt = sources.module("nanoGPT", "model")
    model = nanogpt.GPT(nanogpt.GPTConfig(n_layer=2, vocab_size=128))
    tokens = torch.randint(0, 128, (BATCH, LENGTH))
    return torch.compile(model, backend=traced)(tokens, tokens)


def _nanochat(*, flash_attn: bool) -> Callable[[], object]:
    """With FlashAttention-3, which it takes from the kernels hub, or with the SDPA that it calls without it."""

    def train() -> object:
        nanochat = sources.module("nanochat", "nanochat.gpt")
        attention = sources.module("nanochat", "nanochat.flash_attention")
        settings = nanochat.GPTConfig(sequence_len=LENGTH, n_layer=2, vocab_size=128, window_pattern="SL")
        model = nanochat.GPT(settings)
        tokens = torch.randint(0, 128, (BATCH, LENGTH))
        found = {"_fa3": SimpleNamespace(flash_attn_func=_flash_attn_3), "USE_FA3": True} if flash_attn else {}
        with mock.patch.multiple(attention, **found) if found else nullcontext():
            return torch.compile(model, backend=traced, dynamic=False)(tokens, tokens)

    return train


def _flash_attn_3(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int]) -> Any:
    return HUB(q, k, v, causal, window_size)


# ---- flash-attn: its own layer, and a model of transformers that calls it ----


def _flash_attn(**settings: Any) -> Callable[[], object]:
    return lambda: flash_attention.layer(lambda layer: torch.compile(layer, backend=traced), **settings)


def _flash_attn_llama(*, packed: bool) -> Callable[[], object]:
    return lambda: flash_attention.llama(lambda model: torch.compile(model, backend=traced), packed=packed)


# ---- timm: XCiT ----


def _xcit(patch: int) -> Callable[[], object]:
    return lambda: xcit.step(lambda model: torch.compile(model, backend=traced), patch)


# ---- prime-rl and modded-nanogpt: their attention layers, for which flash-attn's operators stand in ----


def _modded_nanogpt(*, key_offset: bool) -> Callable[[], object]:
    return lambda: modded_nanogpt.step(lambda layer: torch.compile(layer, backend=traced), key_offset=key_offset)


def _prime_rl(version: int) -> Callable[[], object]:
    return lambda: prime_rl.step(version, lambda layer: torch.compile(layer, backend=traced))


# ---- diffusers ----


def _diffusers(family: diffusers_models.Family) -> Callable[[], object]:
    def train() -> object:
        return torch.compile(family.model(), backend=traced)(**family.tensors(), return_dict=False)

    return train


PROGRAMS = (
    Program("torchtitan", "llama3", "flex", _titan("llama3", "flex")),
    Program("torchtitan", "llama3", "flex, blocks not compiled", _titan("llama3", "flex", compiled=False)),
    Program("torchtitan", "llama3", "varlen", _titan("llama3", "varlen")),
    Program("torchtitan", "qwen3", "flex", _titan("qwen3", "flex")),
    Program("torchtitan", "qwen3", "varlen", _titan("qwen3", "varlen")),
    Program("torchtitan", "qwen3 moe", "flex", _titan("qwen3 moe", "flex")),
    Program("torchtitan", "deepseek_v3", "flex", _titan("deepseek_v3", "flex")),
    Program("torchtitan", "kimi_k2_7", "flex", _titan("kimi_k2_7", "flex")),
    Program("torchtitan", "gpt_oss", "flex", _titan("gpt_oss", "flex")),
    Program("torchtitan", "gpt_oss", "varlen", _titan("gpt_oss", "varlen")),
    Program("transformers", "Llama", "flex", _transformers("Llama")),
    Program("transformers", "Llama", "flex, packed", _transformers("Llama", packed=True)),
    Program("transformers", "GptOss", "flex", _transformers("GptOss")),
    Program("transformers", "Gemma2", "flex, packed", _transformers("Gemma2", packed=True)),
    Program("transformers", "LongT5", "by hand", _small(hf_programs.LONG_T5)),
    Program("transformers", "Perceiver", "by hand", _small(hf_programs.PERCEIVER)),
    Program("transformers", "Swin V2", "by hand", _small(hf_programs.SWIN_V2)),
    Program("transformers", "SAM", "SDPA", _small(hf_programs.SAM)),
    Program("transformers", "Q-Former (BLIP-2)", "SDPA", _small(hf_programs.Q_FORMER)),
    Program("transformers", "WavLM", "by hand", _small(hf_programs.WAVLM)),
    Program("transformers", "Wav2Vec2-Conformer, relative", "SDPA", _small(hf_programs.CONFORMER)),
    Program("transformers", "Wav2Vec2-Conformer, rotary", "SDPA", _small(hf_programs.CONFORMER_ROTARY)),
    Program("transformers", "XLNet", "by hand", _small(hf_programs.XLNET)),
    Program("transformers", "Parakeet", "SDPA", _small(hf_programs.PARAKEET)),
    Program("transformers", "DeepSeek-V3.2", "SDPA", _small(hf_programs.DEEPSEEK_V32)),
    Program("transformers", "DeepSeek-V4", "by hand", _small(hf_programs.DEEPSEEK_V4)),
    Program("transformers", "Llama", "flash_attention_2", _flash_attn_llama(packed=False), "flash-attn"),
    Program("transformers", "Llama", "flash_attention_2, packed", _flash_attn_llama(packed=True), "flash-attn"),
    Program("flash-attn", "MHA", "flash_attn_qkvpacked_func", _flash_attn()),
    Program("flash-attn", "MHA, grouped heads", "flash_attn_kvpacked_func", _flash_attn(num_heads_kv=2)),
    Program("flash-attn", "MHA, windows", "flash_attn_qkvpacked_func", _flash_attn(window_size=(127, 0))),
    Program("flash-attn", "MHA, ALiBi", "flash_attn_qkvpacked_func", _flash_attn(use_alibi=True)),
    Program("timm", "XCiT, 196 patches", "SDPA", _xcit(16)),
    Program("timm", "XCiT, 784 patches", "SDPA", _xcit(8)),
    Program("megatron-core", "GPT", "dash_inductor.integrations.megatron", _megatron(own=False)),
    Program("megatron-core", "GPT", "its DotProductAttention", _megatron(own=True)),
    Program("nanoGPT", "GPT", "SDPA", _nanogpt),
    Program("nanochat", "GPT", "SDPA", _nanochat(flash_attn=False)),
    Program("nanochat", "GPT", "FlashAttention-3", _nanochat(flash_attn=True)),
    Program("modded-nanogpt", "layer", "varlen", _modded_nanogpt(key_offset=False)),
    Program("modded-nanogpt", "layer with shifted keys", "varlen", _modded_nanogpt(key_offset=True)),
    Program("prime-rl", "layer of flash-attn 2", "varlen", _prime_rl(2)),
    Program("prime-rl", "layer of flash-attn 3", "varlen", _prime_rl(3)),
    Program("diffusers", "UNet (Stable Diffusion)", "SDPA", _diffusers(diffusers_models.UNET)),
    Program("diffusers", "SD 3", "SDPA", _diffusers(diffusers_models.SD3)),
    Program("diffusers", "Flux", "SDPA", _diffusers(diffusers_models.FLUX)),
    Program("diffusers", "CogVideoX", "SDPA", _diffusers(diffusers_models.COGVIDEOX)),
    Program("diffusers", "Wan", "SDPA", _diffusers(diffusers_models.WAN)),
)


def traced(module: GraphModule, inputs: list[Tensor], **options: Any) -> Any:
    """A backend: Inductor up to the forward and the backward that it would generate code for, which run as they are."""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def as_it_is(graph: GraphModule, inputs: list[Tensor], **settings: Any) -> Any:
        return make_boxed_func(graph.forward)

    return compile_fx(module, inputs, inner_compile=as_it_is)


@contextmanager
def _settings() -> Iterator[None]:
    """Constants are not folded and products are not padded, because that computes; no graph is taken from a cache."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    import dash_inductor.lowering

    settings = {"joint_graph_constant_folding": False, "shape_padding": False, "force_disable_caches": True}
    with (
        mock.patch.object(dash_inductor.lowering, "compile_kernels"),
        inductor.patch(settings),
        dynamo.patch(capture_scalar_outputs=dynamo.capture_scalar_outputs),  # torchtitan changes it
    ):
        yield


def lines_of_h100(names: Iterable[str]) -> dict[str, str]:
    """The fates of the attention of some programs, in a process whose CUDA device is a fake one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.bfloat16)
    found = {}
    for program in PROGRAMS:
        if str(program) not in names:
            continue
        torch._dynamo.reset()
        clear_sites()
        with _settings(), FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
            program.train()
        found[str(program)] = line(sites(), sum(record.op != OP for record in sites()))
    return found


_ON_H100 = """
    import json
    import sys

    from tests.support import fakecuda, mockgpu

    mockgpu.install_driver()
    fakecuda.install()
    from tests.models.programs import lines_of_h100

    mockgpu.install_torch()
    json.dump(lines_of_h100(sys.argv[1:]), sys.stdout)
"""


def h100_lines(names: Iterable[str]) -> dict[str, str]:
    """As `lines_of_h100`, in a process of its own."""
    sources = os.pathsep.join(map(str, (ROOT, PACKAGES)))
    found: dict[str, str] = json.loads(run_python(_ON_H100, *names, PYTHONPATH=sources).stdout.splitlines()[-1])
    return found


def golden() -> dict[str, Any]:
    """The versions that the lines were made with, and the lines by program."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def versions() -> dict[str, str]:
    """The versions of torch and of the packages, without the label of a build."""
    sys.path.append(str(PACKAGES))
    names = dict.fromkeys(("torch", *(program.package for program in PROGRAMS)))
    commits = sources.versions()
    return {name: commits.get(name) or importlib.metadata.version(name).split("+")[0] for name in names}


def main() -> None:
    names = list(map(str, PROGRAMS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="PROGRAM")
    before = golden()["lines"] if GOLDEN.exists() else {}
    only = parser.parse_args().only
    missing = dict.fromkeys(program.package for program in PROGRAMS if not sources.fetched(program.package))
    if missing:
        print(f"not fetched, so that their lines stay: {', '.join(missing)}", flush=True)
    found = before | h100_lines([str(p) for p in PROGRAMS if str(p) in only and p.package not in missing])
    for name in names:
        if before.get(name) != found.get(name):
            print(f"{name}: {found.get(name)}", flush=True)
    table = {"versions": versions(), "lines": {name: found[name] for name in names if name in found}}
    GOLDEN.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
