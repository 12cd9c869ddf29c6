"""XCiT of timm, whose attention is over channels: its head dimension is the number of patches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

_PARTS = ("datasets", "models", "models.feature_extraction", "ops", "ops.misc", "transforms", "transforms.functional")
_TORCHVISION = ("torchvision", *(f"torchvision.{part}" for part in _PARTS))
"""Modules that timm imports, and whose package is not needed here."""


def step(compile_: Callable[[Any], Any], patch: int) -> object:
    """One call of a compiled model with two layers over channels and one of its class token, on images of 224 x 224.

    Args:
        compile_: compiles the model.
        patch: the size of a patch, 16 or 8.
    """
    missing = [name for name in _TORCHVISION if name not in sys.modules]
    sys.modules.update({name: mock.MagicMock() for name in missing})
    try:
        import timm
    finally:
        for name in missing:
            del sys.modules[name]
    model = timm.create_model(f"xcit_nano_12_p{patch}_224", depth=2, cls_attn_layers=1)
    return compile_(model.train())(torch.randn(2, 3, 224, 224))
