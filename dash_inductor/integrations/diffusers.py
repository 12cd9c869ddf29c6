"""The attention backend "dash_inductor" of diffusers: deterministic attention for models that are not compiled.

    import dash_inductor.integrations.diffusers

    model.set_attention_backend("dash_inductor")

Importing this module makes the name known to diffusers, for `set_attention_backend` of models and modules, for the
context manager `attention_backend`, and for `AttentionBackendName`.  It changes nothing else.

Only processors that dispatch by backend (Flux, Wan, Qwen-Image, HunyuanVideo and most newer ones) heed the method.
Others call PyTorch's `scaled_dot_product_attention` and ignore it (the UNets of Stable Diffusion, SD 3, CogVideoX,
PixArt, Sana); `set_attention_backend` of this module reaches both:

    dash_inductor.integrations.diffusers.set_attention_backend(model)

In a compiled model the attention is a part of the graph, and as deterministic as the rest of it: if
`torch.use_deterministic_algorithms` is on.
"""

from __future__ import annotations

from typing import Any

from diffusers.models import attention_dispatch
from torch import Tensor, nn

from ..eager.sdpa import Handles, in_place, scaled_dot_product_attention
from ..errors import ArgumentError

NAME = "dash_inductor"
"""The name of the backend."""


def set_attention_backend(model: nn.Module) -> Handles:
    """Lets all attention of a model of diffusers be computed by dash_inductor.

    It calls the model's own `set_attention_backend("dash_inductor")`, and reaches the attention modules whose
    processors ignore that, by hooks.

    Args:
        model: a model of diffusers, such as `pipeline.transformer` or `pipeline.unet`.

    Returns:
        A handle, whose `remove` removes the hooks; `model.reset_attention_backend()` undoes the rest.

    Raises:
        ArgumentError: `model` is no model of diffusers.
    """
    by_name: Any = getattr(model, "set_attention_backend", None)
    if by_name is None:
        raise ArgumentError("model", type(model).__name__, "a model of diffusers")
    by_name(NAME)
    processors = [(module, getattr(module, "processor", None)) for module in model.modules()]
    return in_place(m for m, processor in processors if processor is not None and not _dispatches(processor))


def _dispatches(processor: object) -> bool:
    """Whether a processor calls attention by the name of a backend; diffusers asks the same."""
    return hasattr(processor, "_attention_backend")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_attn_probs: bool = False,
    deterministic: bool = True,
    _parallel_config: Any = None,
) -> Tensor:
    """The backend's function, with the arguments that diffusers gives: [batch, length, heads, head dimension].

    Masks have the meaning that "native" gives them: [batch, keys] hides keys, all others broadcast to
    [batch, heads, queries, keys].  `window_size` and `softcap`, which flash-attn's backends take in `attention_kwargs`,
    have flash-attn's meaning.

    Raises:
        ArgumentError: context parallelism, the log-sum-exp or the weights are asked for, or `attn_mask` is no tensor.
    """
    refused = {"parallel_config": _parallel_config, "return_lse": return_lse, "return_attn_probs": return_attn_probs}
    for name, asked in refused.items():
        if asked:
            shown = asked if asked is True else type(asked).__name__
            raise ArgumentError(name, shown, f'None or False with the attention backend "{NAME}"')
    mask = attn_mask
    if isinstance(mask, Tensor) and mask.shape == (query.shape[0], key.shape[1]):
        mask = mask[:, None, None]
    window = tuple(window_size)
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask,
        dropout_p,
        is_causal,
        scale,
        window=None if window == (-1, -1) else window,
        softcap=softcap or None,
    )
    return out.transpose(1, 2)


def _register() -> None:
    """Adds the name to diffusers' enumeration of backends, and the function to its registry.

    Neither has a public function for that; all private names of diffusers are here and in `_dispatches`.
    """
    names: Any = attention_dispatch.AttentionBackendName
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        setattr(names, NAME.upper(), member)
        names._member_names_.append(NAME.upper())
        names._member_map_[NAME.upper()] = names._value2member_map_[NAME] = member
    attention_dispatch._AttentionBackendRegistry.register(names(NAME))(_attention)


_register()
