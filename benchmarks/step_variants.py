"""Ways to train the same model that a user can choose between; settings are applied before the model is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import dash_inductor


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        title: as tables name it.
        is_deterministic: whether ``torch.use_deterministic_algorithms(True)`` is set.
        attention: the one SDPA backend that PyTorch may use; None for its own choice.
        implementation: a FlashAttention that replaces PyTorch's (`activate_flash_attention_impl`).
        dash: None without dash_inductor, else the value of ``config.rewrites``.
        mode: that of ``torch.compile``.
    """

    title: str
    is_deterministic: bool = False
    attention: SDPBackend | None = None
    implementation: str | None = None
    dash: str | None = None
    mode: str | None = None

    @contextmanager
    def set(self) -> Iterator[None]:
        """Applies the settings while the model is compiled and trained.

        Raises:
            ImportError, RuntimeError: the implementation is not installed, or does not run on this GPU.
        """
        torch.use_deterministic_algorithms(self.is_deterministic)
        if self.dash is None:
            dash_inductor.disable()
        else:
            dash_inductor.config.rewrites = self.dash
        if self.implementation is not None:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl(self.implementation)
        if self.attention is None:
            yield
        else:
            with sdpa_kernel(self.attention):
                yield


VARIANTS = {
    "default": Variant("PyTorch's default"),
    "flash": Variant("FlashAttention-2 forced", attention=SDPBackend.FLASH_ATTENTION),
    "cudnn": Variant("cuDNN forced", attention=SDPBackend.CUDNN_ATTENTION),
    "efficient": Variant("memory-efficient attention forced", attention=SDPBackend.EFFICIENT_ATTENTION),
    "deterministic": Variant("PyTorch, deterministic", is_deterministic=True),
    "FA3 deterministic": Variant(
        "FlashAttention-3, deterministic", True, SDPBackend.FLASH_ATTENTION, implementation="FA3"
    ),
    "FA4 deterministic": Variant(
        "FlashAttention-4, deterministic", True, SDPBackend.FLASH_ATTENTION, implementation="FA4"
    ),
    "attention": Variant("dash_inductor, attention alone", True, dash="attention"),
    "dash": Variant("dash_inductor", True, dash="all"),
    "default graphs": Variant("PyTorch's default in CUDA graphs", mode="reduce-overhead"),
    "dash graphs": Variant("dash_inductor in CUDA graphs", True, dash="all", mode="reduce-overhead"),
}
"""By the names of the command line and of results."""
