"""A step of torchtitan's own trainer on its models for debugging, with fake tensors of a GPU that is not there.

`step` builds its `Trainer` from the configuration that torchtitan has for the model, and trains: the model is built on
the meta device, recomputation is applied, blocks and loss are compiled, masks are made of the positions of tokens, and
forward, backward, clipping and optimizer run.  What is left out, or stands in its place:

- FSDP, which needs streams of a GPU, and is what would make parameters of float32 be read as bfloat16: they are
  bfloat16.  There is one rank, with torchtitan's backend "fake_backend".
- CUDA graphs, checkpoints, validation, profiles and reports of memory.
- Data and tokenizer, which are not in the package: tokens are random.  Initial values.
- What reads a number from a tensor gets 1, and the starts of documents for varlen are given, as fake tensors have
  no values.
- Parameters get memory by assignment, because fake tensors cannot be swapped; timeouts of groups stay, because torch
  2.13 cannot change them.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import unset_fake_temporarily

_OTHERS = ("datasets", "datasets.distributed", "torch.utils.tensorboard")
"""Modules that torchtitan imports and whose packages are not needed here."""

_CONFIGS = {
    "llama3": ("llama3", "llama3_debugmodel"),
    "qwen3": ("qwen3", "qwen3_debugmodel"),
    "qwen3 moe": ("qwen3", "qwen3_moe_debug"),
    "deepseek_v3": ("deepseek_v3", "deepseek_v3_debugmodel"),
    "gpt_oss": ("gpt_oss", "gpt_oss_debugmodel"),
    "kimi_k2_7": ("deepseek_v3", "deepseek_v3_debugmodel"),  # its own asks for packages for images
}
"""The family and the name of a configuration in its registry, by model."""


def step(
    model: str, attention: str, *, compiled: bool = True, batch: int = 2, length: int = 256,
    change: Callable[[Any], object] = lambda config: None,
) -> None:  # fmt: skip
    """Train a model for one step, inside of a fake tensor mode with a fake CUDA device as the default one.

    Args:
        model: a key of the configurations.
        attention: "flex" or "varlen".
        compiled: whether blocks and loss are compiled; FlexAttention always is.
        batch, length: of the tokens; every row is one document.
        change: changes the configuration of the trainer.
    """
    with _stand_ins_of_modules(), ExitStack() as stack:
        from torchtitan.components import metrics

        config = _config(model, attention)
        config.compile.enable = compiled
        config.training.local_batch_size, config.training.seq_len, config.training.steps = batch, length, 1
        monitor = mock.MagicMock(device_name="NVIDIA H100 80GB HBM3")
        monitor.get_peak_stats.return_value = metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)
        stack.enter_context(mock.patch.object(metrics, "build_device_memory_monitor", return_value=monitor))
        config.dump_folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(_on_fake_tensors(batch, length))
        change(config)
        trainer = config.build()
        try:
            trainer.train()
        finally:
            trainer.close()
            torch.distributed.destroy_process_group()


@contextmanager
def _stand_ins_of_modules() -> Iterator[None]:
    missing = [name for name in _OTHERS if name not in sys.modules]
    sys.modules.update({name: mock.MagicMock() for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def _config(model: str, attention: str) -> Any:
    """The configuration of a trainer."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *args: Any, **kwargs: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            raise NotImplementedError

    class Loader(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.sizes = local_batch_size, seq_len

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            positions = torch.arange(self.sizes[1]).expand(self.sizes).contiguous()
            while True:
                tokens = torch.randint(0, 2000, self.sizes)
                yield {"input": tokens, "positions": positions}, tokens

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    family, name = _CONFIGS[model]
    config = getattr(importlib.import_module(f"torchtitan.models.{family}.config_registry"), name)()
    own = config.model_spec.flavor if model != "kimi_k2_7" else "debugmodel"
    of = family if model != "kimi_k2_7" else model
    registry = importlib.import_module(f"torchtitan.models.{of}").model_registry
    config.model_spec = registry(own, attn_backend=attention)
    config.tokenizer, config.dataloader = Tokenizer.Config(), Loader.Config()
    config.validator.enable = False
    config.training.disable_cuda_graphs = True
    config.training.dtype = "bfloat16"
    config.comm.mode = "fake_backend"
    config.debug.deterministic = True
    return config


@contextmanager
def _on_fake_tensors(batch: int, length: int) -> Iterator[None]:
    """What of torchtitan needs a GPU or values has a stand-in."""
    from torchtitan.distributed import ParallelDims, fsdp
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common import attention
    from torchtitan.models.common import decoder as decoders
    from torchtitan.models.gpt_oss import model as gpt_oss
    from torchtitan.protocols.module import Module
    from torchtitan.tools import utils

    from .programs import traced

    build_mesh = ParallelDims.build_mesh

    def mesh(dims: Any) -> Any:
        with unset_fake_temporarily(), torch.device("cpu"):
            return build_mesh(dims)

    def documents(positions: Tensor) -> Any:
        starts = torch.arange(batch + 1, dtype=torch.int32) * length
        return attention.VarlenMetadata(starts, starts, length, length)

    def compile_(wrapper: object, graph: Any, inputs: list[Tensor]) -> Any:
        return traced(graph, inputs)

    scalar = torch.ops.aten._local_scalar_dense.default
    known = fake_impls.op_implementations_dict[scalar]

    def number(mode: Any, operator: Any, tensor: Tensor) -> Any:
        if mode.shape_env is not None:  # of a graph that is traced
            return known(mode, operator, tensor)
        return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1

    variables = dict.fromkeys(("NGPU", "WORLD_SIZE"), "1") | dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    of = mock.patch.object
    patches = [
        mock.patch.dict(os.environ, variables),
        mock.patch.dict(fake_impls.op_implementations_dict, {scalar: number}),
        of(torch._TorchCompileInductorWrapper, "__call__", compile_),
        of(utils, "get_cuda_flash_attention_impl", return_value=None),  # FlashAttention-3 is not there
        of(attention, "_compiled_create_block_mask", attention.create_block_mask),
        *(of(module, "create_varlen_metadata_for_document", documents) for module in (decoders, gpt_oss)),
        of(ParallelDims, "build_mesh", mesh),
        of(fsdp, "fully_shard", lambda module, **_: module),
        of(distributed, "set_pg_timeouts"),
        of(Module, "_init_self_parameters"),
        of(nn.Module, "to_empty", to_empty),
        torch.autograd.set_multithreading_enabled(True),  # which torchtitan changes for the process
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def to_empty(model: nn.Module, *, device: str, recurse: bool = True) -> nn.Module:
    """Memory on a device for all parameters and buffers."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None:
                    continue
                if old not in made:
                    new = torch.empty_like(old, device=device)
                    made[old] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                tensors[name] = made[old]
    return model
