"""Forwards and backwards of a program, compiled in one of the ways that are compared, and the table of their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dash_inductor.records.records import clear_sites, sites

from . import common, turns
from .variants import Variant

DEVICE = "cuda"
Step = tuple[Callable[[], Any], Callable[[], Any]]
"""A forward, and a backward from what one forward has saved."""


def made(*shapes: Sequence[int], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    """Normally distributed tensors that want gradients."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    found = [torch.randn(*shape, device=DEVICE, generator=generator) for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in found]


def step(variant: Variant, program: Callable[..., Any], leaves: Sequence[Tensor], *, eager: bool = False) -> Step:
    """The calls of a program of leaves, whose results all have gradients.

    Args:
        variant: how it is compiled and run.
        eager: whether it is run as it is written.
    """
    function = program if eager else variant.compile(program)

    def forward() -> tuple[Tensor, ...]:
        found = function(*leaves)
        return found if isinstance(found, tuple) else (found,)

    forward = variant.during(forward)
    results = forward()
    grads = [tensor.detach() for tensor in made(*(r.shape for r in results), seed=1)]
    grads = [grad.to(result.dtype) for grad, result in zip(grads, results, strict=True)]
    backward = variant.during(lambda: torch.autograd.grad(results, leaves, grads, retain_graph=True))
    backward()
    return forward, backward


def fates_of() -> str:
    """What has become of the attention since records were cleared."""
    return ", ".join(
        f"not replaced: {record.reason}: {record.detail}" if record.plan is None else f"{record.mask} {record.plan}"
        for record in sites()
    )


def measure(
    site: str, steps: Mapping[str, Callable[[], Step]], *, repeats: int = 20, same: bool = True
) -> list[dict[str, Any]]:
    """A row for every contender: times of forward and backward in us, and the first one's part of each.

    Args:
        steps: what makes the contenders; the first one is ours.
        same: whether all compute the same, so that their gradients are compared with the first one's.
    """
    common.watchdog(300)
    torch._dynamo.reset()
    ready: dict[str, Step] = {}
    fates, reasons = {}, {}
    for name, make in steps.items():
        clear_sites()
        try:
            ready[name] = make()
        except (RuntimeError, ValueError, TypeError) as error:  # not supported, not compiled, or out of memory
            reasons[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        fates[name] = fates_of()
    spent = [common.time_ms(*(s[i] for s in ready.values()), repeats=repeats) for i in (0, 1)]
    times = {name: (spent[0][i] * 1e3, spent[1][i] * 1e3) for i, name in enumerate(ready)}
    ours = next(iter(steps))
    expected = ready[ours][1]() if same and ours in ready else []
    rows = []
    for name in steps:
        row: dict[str, Any] = {"site": site, "contender": name, "forward us": None, "backward us": None}
        row |= {"ours/it forward": None, "backward": None, "both": None, "difference": None, "fate": fates[name]}
        if name in times:
            forward, backward = times[name]
            row |= {"forward us": forward, "backward us": backward}
            if ours in times:
                first = times[ours]
                row |= {"ours/it forward": first[0] / forward, "backward": first[1] / backward}
                row |= {"both": sum(first) / (forward + backward)}
        if name in ready and expected and name != ours:
            pairs = zip(ready[name][1](), expected, strict=True)
            row["difference"] = max(turns.relative_difference(theirs, mine) for theirs, mine in pairs)
        rows.append({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()})
        rows[-1]["not run"] = reasons.get(name, "")
    common.table([{key: value for key, value in row.items() if key not in ("fate", "not run")} for row in rows])
    for row in rows:
        said = "; ".join(filter(None, (row["fate"], row["not run"])))
        if said:
            print(f"  {row['contender']}: {said}", flush=True)
    ready.clear()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return rows
