"""Attention with bounded scores: problems with fp64 results, by the operators and the kernels of either family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dash_inductor import lowering
from dash_inductor.kernels.common import mask_tables
from dash_inductor.kernels.common.mask_data import MaskData
from dash_inductor.kernels.common.relations import layout
from dash_inductor.kernels.hopper.backward import build as backward
from dash_inductor.kernels.reference import tables as reference_tables
from dash_inductor.kernels.reference.backward import visible
from dash_inductor.model import AttentionSpec, Plan, Site
from dash_inductor.operators import attention as ops
from dash_inductor.planning import plan

from ..support.calls import BSHD
from ..support.dropout import kept_pairs
from ..support.portable_plans import portable_plan

Run = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Bounded:
    """Tensors [batch, heads, length, dim] with BSHD strides, a call without orders, and the tensors that it names."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    spec: AttentionSpec
    extras: tuple[Tensor, ...] = ()

    @staticmethod
    def random(
        spec: AttentionSpec, dims: tuple[int, int], *, lengths: tuple[int, int] = (300, 421), batch: int = 2,
        kv_heads: int = 2, group: int = 2, dtype: torch.dtype = torch.bfloat16, device: str = "cuda",
        spread: float = 1.0, seed: int = 0,
    ) -> Bounded:  # fmt: skip
        """The operands of the mask by the names of its components; spread: of the scaled products."""
        generator = torch.Generator().manual_seed(seed)
        q_len, kv_len = lengths

        def tensor(heads: int, length: int, dim: int, factor: float = 1.0) -> Tensor:
            found = factor * torch.randn(batch, length, heads, dim, generator=generator)
            return found.to(dtype).to(device).transpose(1, 2)

        heads = kv_heads * group
        q = tensor(heads, q_len, dims[0], spread / (abs(spec.scale) * dims[0] ** 0.5))
        k, v, do = tensor(kv_heads, kv_len, dims[0]), tensor(kv_heads, kv_len, dims[1]), tensor(heads, q_len, dims[1])
        made: dict[int, Tensor] = {}
        for name, component in spec.mask.components.items():
            for field, operand in component.given.items():
                length = q_len if "q" in component.AXES[field] else kv_len
                made[operand.index] = _operand(name, field, (batch, heads, q_len, kv_len), length, generator)
        if spec.dropout is not None:
            made[spec.dropout.seed.index] = torch.tensor([0x0123456789ABCDEF])
        return Bounded(q, k, v, do, spec, tuple(made[i].to(device) for i in sorted(made)))

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def keep(self) -> Tensor:
        """bool [batch, q heads, q_len, kv_len]: who sees whom."""
        batch, _, q_len, kv_len = plane = (*self.q.shape[:3], self.k.shape[2])
        device = self.q.device
        queries, keys = torch.arange(q_len, device=device), torch.arange(kv_len, device=device)
        keep = visible(self.spec.mask.band.resolve(q_len, kv_len), queries, keys).expand(plane)
        shapes = {("b", "q"): (batch, 1, q_len, 1), ("b", "kv"): (batch, 1, 1, kv_len), ("b", "h", "q", "kv"): (-1,)}
        for component in self.spec.mask.components.values():
            parts = {}
            for field, operand in component.given.items():
                shape, value = shapes[component.AXES[field]], self.extras[operand.index]
                parts[field] = value if shape == (-1,) else value.reshape(shape)
            keep = keep & component.shows(parts, keys)
        return keep

    def exact(self) -> list[Tensor]:
        """out and the gradients of q, k and v in fp64; rows that see no key give zeros."""
        spec, leaves = self.spec, [t.double().requires_grad_() for t in (self.q, self.k, self.v)]
        k, v = (t.repeat_interleave(self.group, 1) for t in leaves[1:])
        s = leaves[0] @ k.mT * spec.scale
        if spec.softcap is not None:
            s = spec.softcap * torch.tanh(s / spec.softcap)
        keep = self.keep()
        rows = keep.any(3, keepdim=True)
        p = torch.where(rows, torch.where(rows, s.masked_fill(~keep, -torch.inf), 0.0).softmax(3), 0.0)
        if spec.dropout is not None:
            plane = (*self.q.shape[:3], self.k.shape[2])
            p = p * kept_pairs(spec.dropout, self.extras[spec.dropout.seed.index], *plane) * spec.dropout.rescale
        out = p @ v
        return [out.detach(), *torch.autograd.grad(out, leaves, self.do.double())]

    def site(self) -> Site:
        (batch, heads, q_len, dim), (_, kv_heads, kv_len, value_dim) = self.q.shape, self.v.shape
        dtype: Any = str(self.q.dtype).removeprefix("torch.")
        return Site("cuda", dtype, batch, heads, kv_heads, q_len, kv_len, dim, value_dim, self.spec)

    def plan(self, family: str, arch: str) -> Plan:
        """The planner's plan, which must be of this family, or of the portable one if there were no other."""
        found = portable_plan(self.site(), arch) if family == "portable" else plan(self.site(), arch)
        assert found.kernel == family, found
        return found

    def run(self, chosen: Plan) -> Run:
        """A step by the operators: eager where the family launches its kernels, else compiled."""
        of_out, of_gradients = (str(replace(self.spec, orders=(BSHD,) * n)) for n in (1, 3))
        of_forward, of_backward = self._tables(chosen)

        def step(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
            out, lse = ops.attention_forward(q, k, v, of_forward, of_out, str(chosen), "test")
            gradients = ops.attention_backward(do, q, k, v, out, lse, of_backward, of_gradients, str(chosen), "test")
            return [out, *gradients]

        if chosen.kernel == "portable" and self.q.is_cuda:
            lowering.register()
            torch._dynamo.reset()
            step = torch.compile(step, dynamic=False)
        return lambda: step(self.q, self.k, self.v, self.do)

    def _tables(self, chosen: Plan) -> tuple[list[Tensor], list[Tensor]]:
        """The operators' extras: with the tables that a family takes."""
        extras, mask, traits = list(self.extras), self.spec.mask, self.spec.traits
        if chosen.kernel != "hopper" or not mask.operands:
            return extras, extras
        sizes = self.q.shape[0], self.q.shape[1], self.k.shape[1], self.q.shape[2], self.k.shape[2]
        data = MaskData.of(mask, extras[: len(mask.operands)], sizes)
        build = mask_tables.build if self.q.is_cuda else reference_tables.build
        t = build(data, chosen)
        shape = layout(traits)
        vectors = [*([t.q_vectors] if shape.QUERIES else []), *([t.kv_vectors] if shape.KEYS else [])]
        tile_schedule = [t.keys_seen, t.counts, t.row_steps]
        forward = [*tile_schedule, t.seen_bits] if traits.of_pairs else [*vectors, *tile_schedule]
        backward = [t.keys_seen, t.visits, t.steps, t.contributions]
        backward = [*backward, t.backward_bits] if traits.of_pairs else [*vectors, *backward]
        return [*extras, *forward], [*extras, *backward]

    def of(self, b: int) -> Bounded:
        """Batch element b alone."""
        q, k, v, do = (t[b : b + 1] for t in (self.q, self.k, self.v, self.do))
        seed = None if self.spec.dropout is None else self.spec.dropout.seed.index
        extras = (t if i == seed else t[b : b + 1] for i, t in enumerate(self.extras))
        return Bounded(q, k, v, do, self.spec, tuple(extras))


def compile_backward(of: backward.Specialisation) -> None:
    """Fill Triton's cache."""
    kernels = backward.Kernels(of)
    _ = kernels.prepare, kernels.main, kernels.finish


def _operand(name: str, field: str, plane: Sequence[int], length: int, generator: torch.Generator) -> Tensor:
    """An operand of a component: a few hidden keys, documents, intervals that end some keys later, or bools."""
    batch, heads, q_len, kv_len = plane
    if name == "keys":
        return torch.rand(batch, length, generator=generator) < 0.9
    if name == "segments":
        return (torch.arange(length) // 150).expand(batch, -1).contiguous()
    if name == "dense":
        return torch.rand(batch, heads, q_len, kv_len, generator=generator) < 0.6
    starts = torch.randint(0, kv_len // 2, (batch, 1), generator=generator).expand(-1, length)
    return (starts if field == "lo" else starts + kv_len // 3).contiguous()
