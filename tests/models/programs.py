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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule

from dash_inductor.frontends.decomposed.frontend import OP
from dash_inductor.records.records import clear_sites, sites

from ..support import diffusers_models
from ..support.hf_models import build, token_ids
from ..support.model_table import line
from ..support.processes import run_python
from . import titan

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
    """

    package: str
    model: str
    attention: str
    train: Callable[[], object]

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
    return {name: importlib.metadata.version(name).split("+")[0] for name in names}


def main() -> None:
    names = list(map(str, PROGRAMS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="PROGRAM")
    before = golden()["lines"] if GOLDEN.exists() else {}
    found = before | h100_lines(parser.parse_args().only)
    for name in names:
        if before.get(name) != found.get(name):
            print(f"{name}: {found.get(name)}", flush=True)
    table = {"versions": versions(), "lines": {name: found[name] for name in names if name in found}}
    GOLDEN.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
