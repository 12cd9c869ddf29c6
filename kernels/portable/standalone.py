"""The portable kernels without Inductor: render the template text for given tensors, compile it for a GPU architecture.

Used to pin registers, spills and shared memory where there is no GPU, to show what a model compiles to, and to measure
tile shapes.  `compile_for` needs neither driver nor GPU: the assembler is inside the triton wheel.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from ...errors import ArgumentError
from ...model.mask import ROW_BLOCK
from ...model.operands import OPERANDS
from ...model.plan import Plan, Tiles
from ...model.relations import Axis
from ...model.site import Site
from ...schedule import schedules
from ...upstream import toolchain
from . import templates
from .family import FAMILY

_TYPES = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}
_DIRECTORY = tempfile.TemporaryDirectory(prefix="dash_inductor_")


@dataclass(frozen=True)
class Rendered:
    """The text of a kernel, ready to be compiled, and how it is launched.

    Attributes:
        names: the pointer arguments in order.
        types: Triton's type of each of them, such as "*bf16".
        grid: the number of programs.
        tiles: the tile sizes, warps and stages.
    """

    text: str
    names: tuple[str, ...]
    types: tuple[str, ...]
    grid: int
    tiles: Tiles

    def load(self) -> Any:
        """Returns the `triton.jit` function that the text defines, imported from a temporary file."""
        path = Path(_DIRECTORY.name) / f"kernel_{hashlib.sha256(self.text.encode()).hexdigest()[:16]}.py"
        path.write_text(self.text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.kernel


@dataclass(frozen=True)
class Resources:
    """A compiled kernel's registers per thread, spilled bytes per thread, and shared memory per CTA in bytes."""

    registers: int
    spill_stores: int
    spill_loads: int
    shared_memory: int


def render(plan: Plan, site: Site, strides: dict[str, Sequence[int]] | None = None) -> list[Rendered]:
    """Renders the kernels of a plan's backward in launch order, for static sizes.

    Where a bias has a gradient, this includes both the dq kernel that also computes it, summed over the batch, and the
    separate kernel; a call uses one of them.

    Args:
        plan: a plan of the portable family.
        site: the site; batch and lengths must be static.
        strides: strides of tensors that are not contiguous: (batch, head, row, column) of Q, K, V, DO, OUT, DV, DQ_OUT,
            DK_OUT; (batch, head, row) of LSE; (batch, head, key) of KEYS; of optional operands, by `OPERANDS`; and of
            the operands of mask components, by `templates.operand_names`.
    """
    if plan.kernel != FAMILY.name:
        raise ArgumentError("plan", str(plan), "a plan of the portable kernel")
    batch, q_len, kv_len = _sizes(site)
    site = replace(site, spec=site.spec.of_backward)
    schedule = schedules.define(plan.schedule, site.band)
    kernels = []
    gradient = site.spec.bias is not None and site.spec.bias.gradient
    if plan.dq is not None and gradient:
        kernels.append(render_dq_bias(plan, site, strides))
    elif plan.dq is not None:
        programs = batch * site.q_heads * -(-q_len // plan.dq.block_q)
        text = templates.dq_template(site.spec.traits)
        kernels.append(_render(text, plan, plan.dq, site, strides or {}, "DQ_OUT", programs, templates.dq_constants()))
    else:
        programs = batch * site.q_heads * -(-q_len // plan.dkdv.block_q)
        text = templates.delta_template(site.mask.varlen_layout is not None, site.spec.traits.reads("grad_logsumexp"))
        kernels.append(_render(text, plan, plan.dkdv, site, strides or {}, "DELTA", programs, {}))
    kv_tiles = -(-kv_len // plan.dkdv.block_kv)
    ctas_per_head = -(-kv_tiles // schedule.parts)
    extra = {"ORDERED": plan.dq is None, "PARTS": schedule.parts}
    text = templates.dkdv_template(plan.schedule, site.spec.traits)
    programs = batch * site.kv_heads * ctas_per_head
    kernels.append(_render(text, plan, plan.dkdv, site, strides or {}, "DK_OUT", programs, extra))
    if gradient:
        kernels.append(render_bias_gradient(plan, site, strides))
    return kernels


def render_dq_bias(
    plan: Plan,
    site: Site,
    strides: dict[str, Sequence[int]] | None = None,
    *,
    summed: Sequence[int] = (0,),
    interpret: bool = False,
) -> Rendered:
    """Renders the two-pass dq kernel that also computes the bias gradient, for static sizes.

    Args:
        plan, site, strides: as for `render`.
        summed: the dimensions, batch elements (0) and heads (1), over which the gradient is summed.
        interpret: whether the kernel is for Triton's interpreter.
    """
    _, q_len, _ = _sizes(site)
    tiles = templates.dq_bias_tiles(plan)
    text = templates.dq_bias_template(site.spec.traits, adds=bool(summed))
    programs = _planes(site, summed) * -(-q_len // tiles.block_q)
    extra = templates.dq_constants(summed)
    return _render(text, plan, tiles, site, strides or {}, "DQ_OUT", programs, extra, interpret=interpret)


def render_bias_gradient(
    plan: Plan,
    site: Site,
    strides: dict[str, Sequence[int]] | None = None,
    *,
    summed: Sequence[int] = (0,),
    interpret: bool = False,
) -> Rendered:
    """Renders the kernel that computes only the bias gradient, for static sizes; arguments as for `render_dq_bias`."""
    _, q_len, kv_len = _sizes(site)
    tiles = templates.bias_gradient_tiles(plan, site.spec.traits)
    text = templates.bias_gradient_template(site.spec.traits)
    programs = _planes(site, summed) * -(-q_len // tiles.block_q) * -(-kv_len // tiles.block_kv)
    extra = templates.bias_gradient_constants(summed)
    return _render(text, plan, tiles, site, strides or {}, "DBIAS", programs, extra, interpret=interpret)


def _planes(site: Site, summed: Sequence[int]) -> int:
    """Returns the number of [q_len, kv_len] planes of a bias gradient that is summed over these dimensions."""
    batch, _, _ = _sizes(site)
    return (1 if 0 in summed else batch) * (1 if 1 in summed else site.q_heads)


def render_forward(
    plan: Plan,
    site: Site,
    strides: dict[str, Sequence[int]] | None = None,
    *,
    interpret: bool = False,
) -> Rendered:
    """Renders the portable forward, for static sizes.

    Args:
        plan: a plan; only its forward tiles, head chunk and tf32 are used.
        site: the site; batch and lengths must be static.
        strides: (batch, head, row, column) of Q, K, V, OUT where they are not contiguous, and of data as for `render`.
        interpret: whether the kernel is for Triton's interpreter.
    """
    tiles = plan.forward_tiles
    if plan.forward != FAMILY.name or tiles is None:
        raise ArgumentError("plan", str(plan), "a plan with the portable forward and its tiles")
    batch, q_len, _ = _sizes(site)
    site = replace(site, spec=site.spec.of_forward)
    text = templates.forward_template(site.spec.traits)
    extra = templates.forward_constants(site.spec)
    programs = batch * site.q_heads * -(-q_len // tiles.block_q)
    return _render(text, plan, tiles, site, strides or {}, "OUT", programs, extra, interpret=interpret)


def _sizes(site: Site) -> tuple[int, int, int]:
    if site.batch is None or site.q_len is None or site.kv_len is None:
        raise ArgumentError("site", site, "a site whose batch, q_len and kv_len are known")
    return site.batch, site.q_len, site.kv_len


def _tensors(site: Site) -> dict[str, tuple[Sequence[int], str]]:
    """Returns shape and Triton pointer type of every tensor that a kernel may name.

    With a varlen layout, for which a site has no other lengths, there are as many tokens as padded rows.
    """
    batch, q_len, kv_len = _sizes(site)
    rows, keys = (batch, site.q_heads, q_len), (batch, site.kv_heads, kv_len)
    q_shape, kv_shape = (*rows, site.head_dim), (*keys, site.head_dim)
    out_shape, v_shape = (*rows, site.value_dim), (*keys, site.value_dim)
    dtype, fp32 = _TYPES[site.dtype], "*fp32"
    sums = (*rows[:2], 2 * q_len if site.spec.traits.biased else q_len)
    return {
        "Q": (q_shape, dtype), "K": (kv_shape, dtype), "V": (v_shape, dtype), "DO": (out_shape, dtype),
        "LSE": (sums, fp32), "DELTA": (rows, fp32), "OUT": (out_shape, dtype), "DV": (v_shape, dtype),
        "DQ": (q_shape, fp32),
        "DQ_OUT": (q_shape, dtype), "DK_OUT": (kv_shape, dtype),
        "KEYS": (keys, "*i32"),
        "DBIAS": ((*rows, kv_len), dtype), "SUMS": ((1,), fp32), "TOKEN_OFFSETS": ((q_len // ROW_BLOCK,), "*i32"),
        "TOKEN_COUNTS": ((q_len // ROW_BLOCK,), "*i32"), **_of_operands(site), **_of_components(site),
    }  # fmt: skip


def _of_operands(site: Site) -> dict[str, tuple[Sequence[int], str]]:
    """Returns the same as `_tensors`, for optional operands; a bias has the dtype of the inputs."""
    sizes, types = _axes(site), {"float": _TYPES[site.dtype], "float32": "*fp32", "int64": "*i64"}
    return {
        kind.argument: (tuple(sizes[axis] for axis in kind.axes) or (1,), types[kind.dtype])
        for kind in OPERANDS.values()
    }


def _axes(site: Site) -> dict[Axis, int]:
    batch, q_len, kv_len = _sizes(site)
    return {"b": batch, "h": site.q_heads, "q": q_len, "kv": kv_len}


def _of_components(site: Site) -> dict[str, tuple[Sequence[int], str]]:
    """Returns the same as `_tensors`, for the operands of mask components."""
    sizes = _axes(site)
    kinds = [kind.RELATION for kind in site.spec.traits.kinds if not kind.RELATION.is_of_keys]
    return {
        name: (tuple(sizes[axis] for axis in relation.axes(role)), "*i1" if relation.truths else "*i64")
        for relation, names in zip(kinds, templates.operand_names(site.spec.traits), strict=True)
        for name, role in names
    }


def _render(
    text: str,
    plan: Plan,
    tiles: Tiles,
    site: Site,
    strides: dict[str, Sequence[int]],
    output: str,
    programs: int,
    extra: dict[str, Any],
    *,
    interpret: bool = False,
) -> Rendered:
    shapes = _tensors(site)
    _, q_len, kv_len = _sizes(site)
    sizes = templates.Sizes(q_len, kv_len, site.head_dim, site.value_dim, site.group)
    even = q_len % tiles.block_q == 0, kv_len % tiles.block_kv == 0 and extra.get("PARTS", 1) == 1
    values = templates.compile_time_values(
        plan, tiles, site.spec, sizes, even=even, interpret=interpret, sums_keys=extra.get("ORDERED", True)
    )
    arguments: list[str] = []

    def def_kernel(*names: str) -> str:
        tensors = (*names, output)
        arguments.extend((*tensors, *(["ws_ptr"] if "ws_ptr" in text else [])))
        is_wide = any(_last(shapes[name][0], strides.get(name)) >= 1 << 31 for name in tensors)
        constants = {"INDEX_DTYPE": f"tl.int{64 if is_wide else 32}"} | extra | values
        head = f"import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel({', '.join(arguments)}):\n"
        return head + "".join(f"    {name}: tl.constexpr = {value}\n" for name, value in constants.items())

    def stride(name: str, index: int | None = None) -> str:
        values = strides.get(name) or _contiguous(shapes[name][0])
        return ", ".join(map(str, values)) if index is None else str(values[index])

    def store_output(indices: Sequence[str], value: str, mask: str, **_: Any) -> str:
        offset = " + ".join(f"{i} * {s}" for i, s in zip(indices, stride(output).split(", "), strict=True))
        return f"tl.store({output} + {offset}, {value}.to({output}.dtype.element_ty), mask={mask})"

    rendered = (
        jinja2.Environment()
        .from_string(text)
        .render(
            def_kernel=def_kernel,
            stride=stride,
            store_output=store_output,
            size=lambda name, i: str(shapes[name][0][i]),
        )
    )
    types = tuple("*i32" if name == "ws_ptr" else shapes[name][1] for name in arguments)
    return Rendered(rendered, tuple(arguments), types, programs, tiles)


def _last(shape: Sequence[int], strides: Sequence[int] | None) -> int:
    """Returns the offset of a tensor's last element, from which Inductor, too, chooses the dtype of indices."""
    return sum((size - 1) * step for size, step in zip(shape, strides or _contiguous(shape), strict=True))


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides


def compile_for(kernel: Rendered, arch: str) -> tuple[Any, Resources]:
    """Compiles a rendered kernel for "sm_80", ... without a GPU; returns Triton's compiled kernel and its resources."""
    compiled = build(kernel, arch)
    return compiled, resources(compiled, arch)


def build(kernel: Rendered, arch: str) -> Any:
    """Compiles a rendered kernel for "sm_80", "sm_90", ... without a GPU; returns Triton's compiled kernel."""
    import triton

    from ...upstream.triton_compiler import ASTSource, GPUTarget

    capability = int(arch.removeprefix("sm_"))
    function = kernel.load()
    signature = dict(zip(kernel.names, kernel.types, strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(kernel.names))}
    options = {**toolchain.OPTIONS, "num_warps": kernel.tiles.num_warps, "num_stages": kernel.tiles.num_stages}
    return triton.compile(
        ASTSource(fn=function, signature=signature, constexprs={}, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )


def resources(compiled: Any, arch: str) -> Resources:
    """Returns registers, spills and shared memory of Triton's compiled kernel on `arch`, as the assembler reports."""
    from ...upstream.triton_compiler import get_ptxas

    # the assembler that Triton itself used: Inductor may have pointed it at another one, whose PTX version differs
    ptxas = get_ptxas(int(arch.removeprefix("sm_")))
    target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
    assert target is not None
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [ptxas.path, "-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert registers is not None, report
    assert spills is not None, report
    return Resources(int(registers[1]), int(spills[1]), int(spills[2]), compiled.metadata.shared)
