"""Files of PyTorch's sources whose frames in a stack show that a thread compiles or handles a checkpoint."""

from __future__ import annotations

MODULE_CALLS = "torch/nn/modules/module.py"
"""The end of the name of the file whose functions call the forwards of modules."""

PHASES = {
    "torch/_dynamo/convert_frame.py": "compile",
    "torch/_inductor/compile_fx.py": "compile",
    "torch/_inductor/async_compile.py": "compile",
    "torch/serialization.py": "checkpoint",
    "torch/distributed/checkpoint/state_dict_saver.py": "checkpoint",
    "torch/distributed/checkpoint/state_dict_loader.py": "checkpoint",
}
"""Ends of file names, and what a program does that has a frame there."""
