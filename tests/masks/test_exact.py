"""The mask reader assumes nothing: ranges, signs, types and lengths are proved, or the tensor is read as it is."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from dash_inductor.masks import verification
from dash_inductor.masks.recognition import MaskResult, recognise
from dash_inductor.model.mask import Band

from ..support.attention_masks import masks_in_joint_graph
from ..support.distribution import ROOT
from ..support.mask_graphs import read_as, read_mask, trace_mask
from ..support.processes import run_python
from .test_recognition import columns, rows

BOTTOM_RIGHT = Band(0, None, "bottom_right")


def assert_no_band(found: MaskResult) -> None:
    """Nothing is said of a band: the graph's own numbers of all queries are read, or its truth values of all pairs."""
    assert str(found.components) in ("interval", "dense")


def compiled_mask(make, q_len=40, kv_len=96, dynamic=(), bounds=None, **inputs) -> str:
    """The mask read of ``make(q, k, **inputs)`` in the joint graph of its SDPA; lengths in `dynamic` are symbols."""

    class Model(torch.nn.Module):
        def forward(self, q, k, **inputs):
            return F.scaled_dot_product_attention(q, k, k, attn_mask=make(q, k, **inputs))

    q, k = (torch.randn(2, 2, n, 8, requires_grad=True) for n in (q_len, kv_len))
    for tensor in [{"q": q, "kv": k}[name] for name in dynamic]:
        torch._dynamo.mark_dynamic(tensor, 2, **({"max": 1 << 20} | bounds if bounds else {}))
    ((_, text),) = masks_in_joint_graph(Model(), q=q, k=k, **inputs)
    return text


# Masks that differ in a number


@pytest.mark.parametrize(
    "position",
    [
        lambda q, k, c: torch.arange(k.shape[2] - q.shape[2] - c, k.shape[2] - c),
        lambda q, k, c: torch.arange(q.shape[2]) + torch.full((q.shape[2],), k.shape[2] - q.shape[2] - c),
        lambda q, k, c: torch.arange(q.shape[2]) + torch.scalar_tensor(k.shape[2] - q.shape[2] - c, dtype=torch.int64),
        lambda q, k, c: torch.arange(q.shape[2]) + torch.arange(q.shape[2]).new_full((), k.shape[2] - q.shape[2] - c),
    ],
    ids=["arange", "full", "scalar_tensor", "new_full"],
)
def test_masks_that_differ_in_a_size_are_told_apart(position) -> None:
    def two_masks(q, k):
        return torch.stack([columns(k) <= position(q, k, c)[:, None] for c in (0, 5)])

    module = trace_mask(two_masks, q_len=12, kv_len=20, dynamic=True)
    query, key = (n for n in module.graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], torch.Tensor))
    masks = [n for n in module.graph.nodes if str(n.target) == "aten.le.Tensor"]
    found = [recognise(mask, query=query, key=key) for mask in masks]
    assert found == [read_as(BOTTOM_RIGHT), read_as(Band(5, None, "bottom_right"))]


# Where a slice starts


def last_rows(q, k):
    return torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril()[-q.shape[2] :]


def test_a_slice_from_the_end_starts_at_the_end() -> None:
    assert compiled_mask(last_rows, dynamic=("q", "kv")) == str(BOTTOM_RIGHT)
    assert compiled_mask(last_rows, dynamic=("q", "kv"), bounds={"min": 33}) == str(BOTTOM_RIGHT)
    assert compiled_mask(last_rows, dynamic=("kv",), bounds={"min": 64}) == str(BOTTOM_RIGHT)


def test_a_branch_on_the_length_changes_nothing() -> None:
    def make(q, k):
        return last_rows(q, k) if k.shape[2] > 50 else last_rows(q, k).logical_not()

    assert compiled_mask(make, dynamic=("q", "kv")) == str(BOTTOM_RIGHT)


@pytest.mark.parametrize(("start", "band"), [(-20, Band(0, None)), (-25, Band(0, None)), (-18, Band(-2, None))])
def test_slices_that_start_before_the_beginning(start, band) -> None:
    def make(q, k):
        return torch.ones(20, 20, dtype=torch.bool).tril()[start:][: q.shape[2]]

    assert read_mask(make, q_len=18) == read_as(band)


@pytest.mark.parametrize("length", [2, 19, 20, 21, 40])
def test_a_slice_from_the_end_of_a_dynamic_length_is_not_guessed(length) -> None:
    """``[-20:]`` starts at 0 or behind it: which one, the guards of the trace say, and nothing else."""
    found = read_mask(
        lambda q, k: columns(k) <= torch.arange(2 * k.shape[2])[-20:][:1], q_len=1, kv_len=length, dynamic=True
    )
    if found.band is not None:
        start = max(2 * length - 20, 0)
        assert found.band.resolve(1, length) == Band(-start, None).resolve(1, length)


# Lengths at which real values are checked


@pytest.mark.parametrize("bounds", [{"min": 2}, {"min": 64}, {"min": 20, "max": 100}, {"min": 38, "max": 97}])
def test_lengths_are_checked_within_their_range(bounds, monkeypatch) -> None:
    checked = []
    real = verification._compare

    def compare(node, band, plane, values, sizes):
        checked.append(tuple(int(values.size(n)) for n in plane[-2:]))
        return real(node, band, plane, values, sizes)

    monkeypatch.setattr(verification, "_compare", compare)
    assert compiled_mask(lambda q, k: columns(k) <= rows(q), 70, 96, dynamic=("q", "kv"), bounds=bounds) == "causal"
    assert all(bounds["min"] <= n <= bounds.get("max", n) for lengths in checked for n in lengths)
    assert len(set(checked)) >= 5
    assert any(q < kv for q, kv in checked)
    assert any(q > kv for q, kv in checked)


# Arithmetic that may overflow, or change its sign


@pytest.mark.parametrize(
    ("dtype", "factor", "longest"),
    [
        (torch.int32, 20_000_000, 108),
        (torch.int16, 300, 110),
        (torch.int8, 3, 43),
        (torch.uint8, 3, 86),
        (torch.int64, 2**56, 128),
    ],
)
def test_products_that_overflow_are_not_compared(dtype, factor, longest) -> None:
    def make(q, k):
        return rows(q).to(dtype) * factor >= columns(k).to(dtype) * factor

    assert read_mask(make, q_len=longest, kv_len=longest) == read_as(Band(0, None))
    for length in (longest + 1, longest + 30):
        assert_no_band(read_mask(make, q_len=length, kv_len=length))
    assert_no_band(read_mask(make, dynamic=True))


@pytest.mark.parametrize("w", [2, 3, 5, -3])
def test_the_sign_of_a_size_is_not_assumed(w) -> None:
    def make(q, k, w):
        return (rows(q) >= columns(k)) & (rows(q) * w >= 0)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        specialize_int=False, automatic_dynamic_shapes=False, assume_static_by_default=False
    ):
        found = compiled_mask(make, 20, 20, w=w)
    assert found == "dense"


def test_int32_positions_of_dynamic_lengths_are_exact() -> None:
    def make(q, k):
        i, j = rows(q).to(torch.int32), columns(k).to(torch.int32)
        return (j <= i) & (j > i - 100) & (i - j + 5 >= 0)

    assert read_mask(make, dynamic=True) == read_as(Band(0, 99))


@pytest.mark.parametrize(
    "make",
    [
        lambda q, k: rows(q).to(torch.uint8) - 1 >= columns(k),
        lambda q, k: rows(q).to(torch.uint8) >= torch.full((), -1).to(torch.uint8) + 0 * columns(k).to(torch.uint8),
        lambda q, k: rows(q).to(torch.uint8) >= columns(k).to(torch.uint8) - 3,
        lambda q, k: -rows(q).to(torch.uint8) <= -columns(k).to(torch.uint8),
        lambda q, k: (rows(q).to(torch.uint8) >= -1) & (columns(k) <= rows(q)),
        lambda q, k: columns(k).to(torch.int8) <= 200 + rows(q).to(torch.int8),
    ],
)
def test_small_integers_that_wrap_around_are_not_read(make) -> None:
    assert_no_band(read_mask(make))


@pytest.mark.parametrize(
    "make",
    [
        lambda q, k: columns(k).to(torch.float16) / 3 * 3 <= rows(q).to(torch.float16),
        lambda q, k: columns(k) * 0.1 <= rows(q) * 0.1,
        lambda q, k: torch.arange(0, 0.1 * k.shape[2], 0.1)[:20] <= rows(q),
        lambda q, k: columns(k).float() + 2.0**24 <= rows(q).float() + 2.0**24,
        lambda q, k: (columns(k).float() - columns(k).float() * torch.inf) <= rows(q),
    ],
)
def test_rounded_arithmetic_is_not_read(make) -> None:
    assert_no_band(read_mask(make))


def test_a_running_sum_converts_before_it_adds() -> None:
    """Halves become 0 in an integer sum; ones stay ones."""

    def make(value):
        def mask(q, k):
            count = torch.full((k.shape[2],), value).cumsum(0, dtype=torch.int64)
            return count[None, :] <= rows(q) + 1

        return mask

    assert read_mask(make(0.5)) == read_as(Band())
    assert read_mask(make(1.5)) == read_as(Band(0, None))


def test_an_integer_range_with_a_step_of_floats_is_not_read() -> None:
    def make(q, k):
        return columns(k) <= rows(q) + torch.arange(0, 10, 2.5, dtype=torch.int64)[3] - 6

    assert make(torch.zeros(1, 1, 20, 4), torch.zeros(1, 1, 20, 4)).equal(torch.ones(20, 20).tril().bool())
    assert read_mask(make).band in (None, Band(0, None))


# Ordinary masks that are compared and divided


@pytest.mark.parametrize(
    ("make", "band"),
    [
        (lambda c, w: c <= w, Band(None, 4)),
        (lambda c, w: ~(c < w), Band()),
        (lambda c, w: c >= ~c, Band(0, None)),
        (lambda c, w: c > torch.zeros((), dtype=torch.bool), Band(0, None)),
        (lambda c, w: w < c, Band(5, None)),
        (lambda c, w: w <= c, Band()),
        (lambda c, w: c + w, Band(0, None)),
        (lambda c, w: c * w, Band(0, 4)),
        (lambda c, w: c == (w == w), Band(0, None)),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_comparisons_of_bools(make, band, dynamic) -> None:
    def mask(q, k):
        causal = columns(k) <= rows(q)
        return make(causal, causal & (columns(k) > rows(q) - 5))

    found = read_mask(mask, dynamic=dynamic)
    assert found == read_as(band)


@pytest.mark.parametrize(
    ("make", "band"),
    [
        (lambda i, j: i + torch.full((), -7) // 2 >= j, Band(4, None)),
        (lambda i, j: i + torch.full((), -7) % 3 >= j, Band(-2, None)),
        (lambda i, j: i + torch.full((), 7) // -2 >= j, Band(4, None)),
        (lambda i, j: i + torch.full((), 7) % -3 >= j, Band(2, None)),
        (lambda i, j: i + torch.div(torch.full((), -7), 2, rounding_mode="trunc") >= j, Band(3, None)),
        (lambda i, j: (2 * i - 40) // 2 >= j - 20, Band(0, None)),
        (lambda i, j: torch.div(4 * i - 40, -4, rounding_mode="trunc") <= 10 - j, Band(0, None)),
        (lambda i, j: (i - j) // 4 >= 0, "dense"),
        (lambda i, j: (i - j) % 5 >= 0, Band()),
        (lambda i, j: i // 0 >= j, "interval"),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_division_of_negative_numbers(make, band, dynamic) -> None:
    assert str(read_mask(lambda q, k: make(rows(q), columns(k)), dynamic=dynamic).components) == str(band)


def test_bits_of_another_type_are_not_read() -> None:
    assert_no_band(read_mask(lambda q, k: columns(k) <= rows(q).float().view(torch.int32)))
    found = read_mask(lambda q, k: rows(q).float().view(torch.int32) - columns(k).int())
    assert (found.components, found.reason) == (None, "not_a_band")


def test_empty_parts() -> None:
    def nothing_in_front(q, k):
        empty = torch.arange(0)
        return F.pad(torch.cat([empty, empty]), (20, 0))[None] + columns(k) <= rows(q)

    assert read_mask(nothing_in_front) == read_as(Band(0, None))
    assert_no_band(read_mask(lambda q, k: columns(k)[:, :0].sum(1) + columns(k) <= rows(q)))


def test_a_mask_in_too_many_steps_is_not_replaced() -> None:
    def make(q, k):
        position = rows(q)
        for _ in range(350):
            position = position + 1
        return columns(k) <= position - 350

    assert read_mask(make) in (
        read_as(Band(0, None)),
        MaskResult(None, "unknown_op", "le is computed in too many steps"),
    )


# Threads


def test_no_thread_is_woken_and_no_setting_touched() -> None:
    """With 7 threads to spare and masks of 2**26 elements, the process stays as it was."""
    program = """
        import os
        import torch
        torch.set_num_threads(1)  # what the trace itself computes
        from tests.support.mask_graphs import read_graph, trace_mask
        from tests.masks.test_recognition import packed_sequence_chain, window_additive

        def refuse(*args):
            raise AssertionError("set_num_threads was called")

        makers = (lambda q, k: packed_sequence_chain(q, k), window_additive)
        modules = [trace_mask(make, q_len=8192, kv_len=8192, batch=12) for make in makers]
        torch.set_num_threads(8)
        torch.set_num_threads = refuse
        before = len(os.listdir("/proc/self/task"))
        for module in modules:
            assert read_graph(module).band is not None
            assert len(os.listdir("/proc/self/task")) == before
        torch.ones(1 << 20).add(1)
        print(len(os.listdir("/proc/self/task")) - before)
    """
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("threads are counted in /proc")
    assert int(run_python(program, path=ROOT).stdout.split()[-1]) >= 1


# Masks as models write them


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_repeated_positions(dynamic) -> None:
    """The decoder of Whisper repeats its position ids for every batch entry."""

    def make(q, k):
        position = torch.arange(q.shape[2]).unsqueeze(0).repeat(q.shape[0], 1)
        entry = torch.arange(q.shape[0])[:, None, None, None]
        return position[entry, rows(q)] >= position[entry, columns(k)]

    assert read_mask(make, dynamic=dynamic) == read_as(Band(0, None))
    assert_no_band(read_mask(lambda q, k: columns(k) <= torch.arange(10).repeat(2)[:, None]))
    assert read_mask(lambda q, k: columns(k)[:, :1].repeat(3, 20)[:1] + columns(k) <= rows(q)).band == Band(0, None)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("reduce", "band"),
    [
        (lambda x: x.sum(dim=(-1, -2)) > 0, Band()),
        (lambda x: x.sum(dim=(-1, -2)) == 16, Band()),
        (lambda x: x.sum(dim=(-1, -2)) > 16, None),
        (lambda x: x.any(-1).any(-1), Band()),
        (lambda x: x.all(-1).all(-1), Band()),
        (lambda x: x.float().amax((-1, -2)) >= x.float().amin((-1, -2)), Band()),
    ],
)
def test_reductions_of_ones(reduce, band, dynamic) -> None:
    """Idefics 3 and SmolVLM reduce a mask of pixels, all ones, to one of patches."""

    def make(q, k):
        pixels = torch.ones(q.shape[0], 16, 20, dtype=torch.bool)
        patches = pixels.unfold(1, 4, 4).unfold(2, 4, 4)
        return reduce(patches).view(q.shape[0], -1)[:, None, None, :1]

    assert read_mask(make, dynamic=dynamic).band == band


def test_reductions_of_other_things_are_data() -> None:
    assert_no_band(read_mask(lambda q, k: (columns(k) <= rows(q)).sum(1, keepdim=True) > 3))
    assert str(read_mask(lambda q, k: (columns(k) <= rows(q)).any(0, keepdim=True)).components) == "keys"


def test_masks_of_unknown_use_are_no_error() -> None:
    """A number of the graph that is no integer is not read, and nothing fails."""
    assert read_mask(lambda q, k: columns(k) * 0.5 <= rows(q) * 0.5).reason in (None, "not_a_band")


@pytest.mark.parametrize(
    ("farthest", "band"),
    [
        (-(2**40), Band()),
        (-(2**30), Band()),
        (-(2**30) + 1, Band()),
        (-(2**29), Band(-(2**29), None)),
        (2**30, "dense"),
    ],
)
def test_bounds_beyond_the_longest_sequence(farthest, band) -> None:
    """For lengths that are not known: the kernels take bounds as int32."""
    found = read_mask(lambda q, k: rows(q).long() - columns(k).long() >= farthest, dynamic=True)
    assert str(found.components) == str(band)
