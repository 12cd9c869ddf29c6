"""The operators listed in the documentation of `torch.use_deterministic_algorithms`, as dispatcher operators.

The backwards of PyTorch's own attention are included, too: their kernels read the flag, although they are not listed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


class Under(enum.Enum):
    """What an operator of PyTorch's list of nondeterministic operators does while the determinism flag is on."""

    VARIANT = "it has a deterministic kernel"
    """It runs this kernel under ``warn_only``, too."""
    STRICT = "it has a deterministic kernel, and with warn_only it keeps the other one"
    RAISES = "it raises an error, and with warn_only it runs and only warns"
    NOTHING = "its kernel does not ask for the flag; PyTorch only chooses another one, unless warn_only is set"


Arguments = Mapping[str, Any]
"""The arguments of an operator by name: tensors, or their values in a graph, and plain values."""


@dataclass(frozen=True)
class Operator:
    """An operator in PyTorch's list of nondeterministic operators.

    Attributes:
        names: the names of its dispatcher operators, without namespace, overload and the underscore of in-place
            variants.
        listed: its name in PyTorch's list.
        under: what it does while the flag is on.
        devices: the device types for which it is listed; () for all.
        when: whether it is listed for these arguments.
        in_graphs: whether it is listed only in compiled graphs, because Inductor generates code other than PyTorch's
            kernel.
    """

    names: tuple[str, ...]
    listed: str
    under: Under
    devices: tuple[str, ...] = ("cuda",)
    when: Callable[[Arguments], bool] = lambda given: True
    in_graphs: bool = False


def _accumulates(given: Arguments) -> bool:
    return bool(given.get("accumulate", False))


def _overwrites(given: Arguments) -> bool:
    return not _accumulates(given)


def _reduces(*names: str) -> Callable[[Arguments], bool]:
    return lambda given: given.get("reduce") in names


def _is_floating(given: Arguments) -> bool:
    dtype = given.get("dtype") or getattr(given.get("self"), "dtype", None)
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def _is_sparse(given: Arguments) -> bool:
    return bool(getattr(given.get("self"), "is_sparse", False))


def _has(name: str) -> Callable[[Arguments], bool]:
    return lambda given: given.get(name) is not None


_VARIANTS, _, _RAISING = str(torch.use_deterministic_algorithms.__doc__).partition("will throw a")
"""The two lists in the documentation of the installed PyTorch; newer versions move operators from the second to the
first."""


def _by_version(entry: str) -> Under:
    return Under.VARIANT if f"{entry}`" in _VARIANTS else Under.RAISES


def _if_listed(entry: str) -> Callable[[Arguments], bool]:
    return lambda given: f"{entry}`" in _VARIANTS + _RAISING


_CPU, _CUDA, _ALL = ("cpu",), ("cuda",), ()
_MAX = 2  # `mode` of EmbeddingBag

_CONVOLUTIONS = (
    "convolution", "convolution_backward", "_convolution", "cudnn_convolution", "cudnn_convolution_transpose",
)  # fmt: skip
CONVOLUTION = Operator(_CONVOLUTIONS, "convolution", Under.VARIANT)
"""The only operator that `torch.backends.cudnn.deterministic` affects, too."""

OPERATORS = (
    CONVOLUTION,
    Operator(tuple(f"replication_pad{n}d_backward" for n in (1, 2, 3)), "backward of ReplicationPad", Under.VARIANT),
    Operator(("bmm",), "bmm of a sparse tensor", Under.VARIANT, _CUDA, _is_sparse),
    Operator(("index_put", "_index_put_impl"), "index_put with accumulate=False", Under.VARIANT, _ALL, _overwrites),
    Operator(("index_put", "_index_put_impl"), "index_put with accumulate=True", Under.VARIANT, _CPU, _accumulates),
    Operator(
        ("index_put",), "index_put with accumulate=True", Under.VARIANT, _CUDA, _accumulates, in_graphs=True
    ),
    Operator(("put",), "put_ with accumulate=True", Under.VARIANT, _CPU, _accumulates),
    Operator(("put",), "put_ with accumulate=True", Under.RAISES, _CUDA, _accumulates),
    Operator(("put",), "put_ with accumulate=False", Under.RAISES, _ALL, _overwrites),
    Operator(("scatter_add",), "scatter_add", Under.VARIANT),
    Operator(("index_add",), "index_add", Under.VARIANT),
    Operator(("index_copy",), "index_copy", Under.VARIANT, ("cpu", "cuda")),
    Operator(("scatter",), "scatter of a tensor", Under.VARIANT, _CUDA, _has("src")),
    Operator(("scatter_reduce",), "scatter_reduce", Under.VARIANT, _CUDA, _reduces("sum", "mean")),
    Operator(("scatter_reduce",), "scatter_reduce with reduce='prod'", Under.RAISES, _CUDA, _reduces("prod")),
    Operator(("max_pool3d_with_indices_backward",), "backward of MaxPool3d", _by_version("torch.nn.MaxPool3d")),
    Operator(("avg_pool3d_backward",), "backward of AvgPool3d", Under.RAISES),
    Operator(
        ("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"), "backward of AdaptiveAvgPool", Under.RAISES
    ),
    Operator(("adaptive_max_pool2d_backward",), "backward of AdaptiveMaxPool2d", Under.RAISES),
    Operator(
        ("fractional_max_pool2d_backward", "fractional_max_pool3d_backward"), "backward of FractionalMaxPool",
        Under.RAISES,
    ),
    Operator(("max_unpool2d", "max_unpool3d"), "MaxUnpool", Under.RAISES, _ALL),
    Operator(
        tuple(f"upsample_{mode}_backward" for mode in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
        "backward of interpolate", Under.RAISES,
    ),
    Operator(tuple(f"reflection_pad{n}d_backward" for n in (1, 2, 3)), "backward of ReflectionPad", Under.RAISES),
    Operator(("nll_loss2d_forward",), "NLLLoss of images", Under.RAISES),
    Operator(("_ctc_loss_backward",), "backward of CTCLoss", Under.RAISES),
    Operator(
        ("embedding_dense_backward",), "backward of Embedding", _by_version("torch.nn.Embedding"), _CUDA,
        _if_listed("torch.nn.Embedding"),
    ),
    Operator(
        ("_embedding_bag_dense_backward",), "backward of EmbeddingBag with mode='max'", Under.RAISES, _CUDA,
        lambda given: given.get("mode") == _MAX,
    ),
    Operator(("histc",), "histc", Under.RAISES, _CUDA, _is_floating),
    Operator(("bincount",), "bincount with weights", Under.RAISES, _CUDA, _has("weights")),
    Operator(("median", "nanmedian"), "median with indices", Under.RAISES, _CUDA, _has("dim")),
    Operator(("grid_sampler_2d_backward", "grid_sampler_3d_backward"), "backward of grid_sample", Under.RAISES),
    Operator(("cumsum",), "cumsum", _by_version("torch.cumsum"), _CUDA, _is_floating),
    Operator(
        ("_scaled_dot_product_flash_attention_backward", "_flash_attention_backward"), "backward of FlashAttention",
        Under.STRICT,
    ),
    Operator(
        ("_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward"),
        "backward of memory-efficient attention", Under.STRICT,
    ),
    Operator(
        ("_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward"), "backward of cuDNN attention",
        Under.NOTHING,
    ),
)  # fmt: skip
"""The listed operators, in the order of PyTorch's list."""

_BY_NAME: dict[str, list[Operator]] = {}
for _operator in OPERATORS:
    for _name in _operator.names:
        _BY_NAME.setdefault(_name, []).append(_operator)


def listed(
    operator: Any, args: Iterable[Any], kwargs: Arguments, device: Callable[[Any], str], in_graph: bool = False
) -> Operator | None:
    """Returns the entry of PyTorch's list of nondeterministic operators for a call; None if the call is not listed.

    Args:
        operator: an `OpOverload`.
        args: the positional arguments.
        kwargs: the keyword arguments.
        device: returns the device type of an argument; "" if it is not a tensor.
        in_graph: whether the call is in a graph that is compiled.
    """
    candidates = _BY_NAME.get(_plain_name(operator), ())
    if not candidates:
        return None
    given = named(operator, args, kwargs)
    devices = {device(value) for value in given.values()} - {""}
    for candidate in candidates:
        if candidate.in_graphs and not in_graph:
            continue
        if (not candidate.devices or devices.intersection(candidate.devices)) and candidate.when(given):
            return candidate
    return None


def named(operator: Any, args: Iterable[Any], kwargs: Arguments) -> dict[str, Any]:
    """Returns the arguments of an operator call by name, without those that the call omits."""
    names = (argument.name for argument in operator._schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _plain_name(operator: Any) -> str:
    if getattr(operator, "namespace", "") != "aten":
        return ""
    name: str = operator._schema.name.removeprefix("aten::")
    return name.removesuffix("_")
