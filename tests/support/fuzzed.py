"""Random programs that are compiled with rewrites and without them: results, gradients, errors and memory beside.

A program goes through autograd's tracing, Inductor's passes over joint graphs and its partitioner, and its graphs then
run as they are, on the CPU, where rewrites are let loose.  `DASH_FUZZ_CASES` gives the number of cases of each family.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor
from torch._dynamo.compiled_autograd import _enable as enable_compiled_autograd
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.fx import GraphModule

import dash_inductor
import dash_inductor.passes.base.runner  # before single rewrites: what imports torch's compiler imports all of them
from dash_inductor.config import config
from dash_inductor.model.reasons import Reason
from dash_inductor.passes.ops import (
    embeddings,
    index_sums,
    indices,
    known_masks,
    pad_mm,
    sorted_values,
    tied_embeddings,
    unrolled_reductions,
)
from dash_inductor.records.records import AnyRecord, Record, SiteRecord, all_records, clear_sites

from .graphs import partition_with
from .shown_memory import WRITES, Layout, Program, after, copies, has_overlaps, layouts, results_of, same

aten = torch.ops.aten


def cases(of_the_suite: int) -> range:
    """The seeds of a family: so many in the suite, or as many as `DASH_FUZZ_CASES` says."""
    return range(int(os.environ.get("DASH_FUZZ_CASES", of_the_suite)))


@dataclass(frozen=True)
class Case:
    """A program and the tensors that it is called with.

    Attributes:
        name: what it is, for messages.
        program: takes the tensors; gives a tensor or a tuple of them.
        dynamic: whether sizes are dynamic.
        exact: whether results are bit for bit those without rewrites; else they are as near to those of fp64.
        meaning: the same program for fp64, which is not compiled; None for `program` itself.
        rounding: units in the last place of the largest element of a result, by which it may miss that of fp64.
        written: the place of a result, or of an input (negative), that is written to before a second backward.
    """

    name: str
    program: Program
    tensors: Sequence[Tensor]
    dynamic: bool = False
    exact: bool = False
    meaning: Program | None = None
    rounding: int = 8
    written: tuple[int, str] | None = None


class _Hopper:
    """A device that all kernels of ours support."""

    is_supported = staticmethod(lambda device: True)
    allow_tf32 = staticmethod(lambda device: True)


@contextlib.contextmanager
def everything_on_the_cpu(few_products: int = 0) -> Iterator[None]:
    """Rewrites take place on the CPU, and programs of any size are worth it."""
    with contextlib.ExitStack() as stack:

        def put(module: Any, **values: object) -> None:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(module, name, value))

        for module in (indices, index_sums, known_masks, pad_mm, unrolled_reductions, sorted_values):
            put(module, DEVICES=("cpu",))
        put(index_sums, LEAST=0, ONE_HOT_LEAST=few_products)
        put(tied_embeddings, LEAST=0)
        put(unrolled_reductions, LEAST=0, LEAST_COLUMNS=1)
        put(pad_mm, LEAST_OPERATIONS=0, OPERATIONS_PER_BYTE=0, OF_AN_ODD_RESULT=0, arch=_Hopper)
        put(embeddings, _is_new=lambda node: embeddings._RECORDED not in node.meta)
        yield


def compiled(program: Program, dynamic: bool = False) -> Program:
    """A program as graphs that have gone through Inductor's joint passes, ours among them, and its partitioner."""

    def run(part: GraphModule, _: Any) -> Any:
        return make_boxed_func(part.forward)

    def infer(part: GraphModule, inputs: Any) -> Any:
        with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            return run(compile_fx._recursive_joint_graph_passes(part), inputs)

    def partition(joint: GraphModule, inputs: Any, **options: Any) -> Any:
        with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            return compile_fx.partition_fn(joint, inputs, **options)

    found: Program = aot_function(
        program, fw_compiler=run, bw_compiler=run, inference_compiler=infer, partition_fn=partition,
        decompositions=_decompositions(), keep_inference_input_mutations=True, dynamic=dynamic,
    )  # fmt: skip
    return found


def _decompositions() -> dict[Any, Callable[..., Any]]:
    table = {**select_decomp_table()}
    table.pop(aten.embedding_dense_backward.default, None)  # as graphs on CUDA have it
    return table


def rewritten() -> list[str]:
    """The names of the rewrites that have replaced something since the records were cleared."""
    return [r.rewrite for r in all_records() if isinstance(r, (Record, SiteRecord)) and r.status == "replaced"]


Outcome = list[Tensor | None] | str
"""Results and gradients, None for none, or the kind of the error that was raised."""


@dataclass(frozen=True)
class Way:
    """How programs are compiled and run.

    Attributes:
        compile: takes a program and whether its sizes are dynamic.
        around: a context in which a compiled program and its backward run.
    """

    compile: Callable[[Program, bool], Program] = compiled
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def _compiled_by_dynamo(program: Program, dynamic: bool) -> Program:
    torch._dynamo.reset()
    found: Program = torch.compile(program, backend=_backend(), dynamic=dynamic, fullgraph=True)
    return found


def _backend() -> Callable[[GraphModule, list[Any]], Any]:
    return partition_with(lambda graph: None, _decompositions())


BY_DYNAMO = Way(_compiled_by_dynamo)
"""As `torch.compile` does, which knows higher-order operators."""
COMPILED_AUTOGRAD = Way(_compiled_by_dynamo, lambda: enable_compiled_autograd(torch.compile(backend=_backend())))
"""The same, and what backwards do outside of compiled graphs is compiled as well."""


def outcome(program: Program, tensors: Sequence[Tensor]) -> Outcome:
    given = copies(tensors)
    try:
        results = results_of(program, given)
        wanted, ends = ([t for t in of if t.requires_grad] for of in (given, results))
        if not ends or not wanted:
            return [*results]
        grads = [
            torch.linspace(0.5, 1.5, end.numel(), dtype=torch.float64).reshape(end.shape).to(end.dtype) for end in ends
        ]
        found = torch.autograd.grad(ends, wanted, grads, allow_unused=True)
    except Exception as error:
        return type(error).__name__
    return [None if t is None else t.detach() for t in (*results, *found)]


def compare(case: Case, way: Way = Way()) -> list[str]:
    """Compare a program with rewrites and without them; returns the names of the rewrites.

    Raises:
        AssertionError: with rewrites the program differs.
    """
    with dash_inductor.disabled(), way.around():
        plain = way.compile(case.program, case.dynamic)
        expected = outcome(plain, case.tensors)
        fails = isinstance(expected, str)
        shown = layouts(plain, case.tensors) if not fails else []
        unwritten, written = ([], []) if fails else _after_writes(case, plain)
    clear_sites()
    with way.around():
        ours = way.compile(case.program, case.dynamic)
        found = outcome(ours, case.tensors)
        names = rewritten()
        failed = [r for r in all_records() if _has_failed(r)]
        assert not failed, (case.name, failed)
        if names and not fails:
            _assert_layouts(case, layouts(ours, case.tensors), shown)
            after_ours = _after_writes(case, ours)[1]
            fine = same(after_ours, written) or same(after_ours, unwritten)
            assert fine, (case.name, case.written, after_ours, written)
    _assert_same(case, found, expected)
    return names


def _has_failed(record: AnyRecord) -> bool:
    """Whether a record tells of something that may run PyTorch's kernel for no other reason than an error."""
    if isinstance(record, Record):
        return record.status != "replaced"
    return isinstance(record, SiteRecord) and record.reason is Reason.INTERNAL_ERROR


def _after_writes(case: Case, program: Program) -> tuple[list[Tensor] | str, list[Tensor] | str]:
    """Gradients without a write, and with the one of the case; empty where there is none."""
    wanted = [t for t in case.tensors if t.requires_grad]
    if case.written is None or not wanted or any(t.dtype.itemsize == 2 for t in wanted):
        return [], []  # gradients of half precision differ by more than a write may change
    place, how = case.written
    if place < 0 and has_overlaps(case.tensors[-1 - place]):  # PyTorch refuses the write
        return [], []
    return after(program, case.tensors, 0, lambda tensor: None), after(program, case.tensors, place, WRITES[how])


def _assert_layouts(case: Case, found: list[Layout], expected: list[Layout]) -> None:
    assert found == expected, (case.name, found, expected)


def _assert_same(case: Case, found: Outcome, expected: Outcome) -> None:
    if isinstance(found, str) or isinstance(expected, str):
        assert type(found) is type(expected), (case.name, found, expected)
        return
    true = None if case.exact else outcome(case.meaning or case.program, [_wide(t) for t in case.tensors])
    assert not isinstance(true, str), (case.name, true)
    assert len(found) == len(expected), case.name
    for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        where = case.name, number
        if ours is None or plain is None:
            assert ours is plain, (*where, ours, plain)
            continue
        assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype), where
        if ours.numel() and all(size > 1 for size in ours.shape):
            assert ours.stride() == plain.stride(), (*where, ours.stride(), plain.stride())
        if true is None or not ours.is_floating_point():
            assert torch.equal(ours.nan_to_num(7.0), plain.nan_to_num(7.0)), (*where, ours, plain)
            continue
        one = true[number] if number < len(true) else None  # no gradient, where that of zeros would do as well
        exact = torch.zeros(()) if one is None else one.double()
        assert torch.equal(ours.isfinite(), plain.isfinite()), (*where, ours, plain)
        assert torch.equal(ours.isnan(), plain.isnan()), (*where, ours, plain)
        a, b, c = (torch.where(plain.isfinite(), t.double(), 0) for t in (ours, plain, exact))
        floor = case.rounding * torch.finfo(ours.dtype).eps * max(float(c.abs().max()) if c.numel() else 0.0, 1e-3)
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + floor if a.numel() else True, (*where, a, b)


def _wide(tensor: Tensor) -> Tensor:
    wide = tensor.double() if tensor.is_floating_point() else tensor
    return wide.detach().requires_grad_(tensor.requires_grad)


def drawn(seed: int, family: str) -> random.Random:
    """The random choices of a case, the same in every run; tensors get theirs from the same seed."""
    torch.manual_seed(seed)
    return random.Random(f"{family} {seed}")


def check(make: Callable[[random.Random], Case], family: str, seeds: range, least: float, way: Way = Way()) -> None:
    """Compare the cases of a family.

    Args:
        least: the part of the cases in which something must have been rewritten, for the family to mean anything.
    """
    some = 0
    with everything_on_the_cpu(), config.patch(cpu="reference"):
        for seed in seeds:
            case = make(drawn(seed, family))
            try:
                some += bool(compare(case, way))
            except AssertionError as error:
                raise AssertionError(f"{family} {seed}: {case.name}: {error}") from error
    assert some >= least * len(seeds), f"{some} of {len(seeds)} cases were rewritten"
