"""The vocabulary: every text is read back as what it was made from."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest

from dash_inductor.errors import ArgumentError
from dash_inductor.model import (
    AttentionSpec,
    Band,
    Bias,
    Dense,
    Dropout,
    HeadInterval,
    Interval,
    Keys,
    Mask,
    Operand,
    Plan,
    Segments,
    Tiles,
    VarlenLayout,
)
from dash_inductor.model.attention_spec import MODIFIERS

from ..support.distribution import ROOT

BANDS = [Band(), Band(0), Band(0, 5), Band(None, -3), Band(-4, 9, "bottom_right"), Band(0, None, "bottom_right")]
KEYS = (None, Keys(Operand(0)), Keys(Operand(12)))
SEGMENTS = (None, Segments(Operand(0), Operand(0)), Segments(Operand(1), Operand(2)))
VARLEN = Segments(Operand(0), Operand(1), VarlenLayout(Operand(2), Operand(3)))
MASKS = [Mask(band, keys, segments) for segments in SEGMENTS for band in BANDS for keys in KEYS]
INTERVALS = [
    (Interval(Operand(0), None), "interval(0,none,none)"),
    (Interval(None, Operand(3), Operand(3)), "interval(none,3,3)"),
    (Interval(Operand(1), Operand(2), Operand(4)), "interval(1,2,4)"),
    (HeadInterval(Operand(0), None), "head_interval(0,none)"),
]
ORDERS = [(), ((0, 2, 1, 3),), ((0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0))]


@pytest.mark.parametrize(("interval", "text"), INTERVALS)
def test_intervals(interval: Interval | HeadInterval, text: str) -> None:
    mask = Mask(Band(0), Keys(Operand(9)), interval)
    assert str(mask) == f"causal & keys(9) & {text}"
    assert Mask.parse(str(mask)) == mask
    assert mask.by_query
    assert [operand.index for operand in mask.operands] == list(
        dict.fromkeys((9, *(operand.index for operand in interval.operands)))
    )
    traits = AttentionSpec(mask, 1.0).traits
    assert traits.components == tuple(sorted((interval.NAME, "keys")))
    assert (traits.numbers, traits.by_head) == (interval.has_key_numbers, isinstance(interval, HeadInterval))


def test_intervals_without_a_bound() -> None:
    for kind in (Interval, HeadInterval):
        with pytest.raises(ArgumentError, match="lo, hi"):
            kind(None, None)


def test_intervals_are_by_head_or_not() -> None:
    with pytest.raises(ArgumentError, match="one of interval and head_interval"):
        Mask(Band(), Interval(Operand(0), None), HeadInterval(Operand(0), None))


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_bounded_scores(softcap: float) -> None:
    spec = AttentionSpec(Mask(Band(0)), 0.125, bias=Bias(Operand(0)), softcap=softcap)
    assert f"/scale=0.125/softcap={softcap!r}/bias=0" in str(spec)
    assert AttentionSpec.parse(str(spec)) == spec
    assert spec.traits.scores == {"bias", "softcap"}
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ArgumentError, match="softcap"):
            replace(spec, softcap=wrong)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks(mask: Mask) -> None:
    assert Mask.parse(str(mask)) == mask
    if mask.segments is not None and mask.keys is None:
        varlen_layout = VarlenLayout(Operand(7), Operand(5))
        varlen = replace(mask, segments=replace(mask.segments, varlen_layout=varlen_layout))  # type: ignore[call-arg]
        assert Mask.parse(str(varlen)) == varlen != mask
        assert mask.varlen_layout is None
        assert [operand.index for operand in varlen.operands[-2:]] == [7, 5]


def test_a_mask_reads_as_a_conjunction() -> None:
    assert [str(mask) for mask in MASKS[:6]] == [
        "full", "keys(0)", "keys(12)", "causal", "causal & keys(0)", "causal & keys(12)",
    ]  # fmt: skip
    assert str(Mask(Band(0), Keys(Operand(1)), SEGMENTS[1])) == "causal & segments(0,0) & keys(1)"
    assert str(Mask(Band(), None, SEGMENTS[2])) == "segments(1,2)"
    assert str(Mask(Band(0), segments=VARLEN)) == "causal & segments(0,1):varlen(2,3)"
    for mask in (Mask(dense=Dense(Operand(3))), Mask(Band(0), KEYS[1], SEGMENTS[2], Dense(Operand(3)))):
        assert Mask.parse(str(mask)) == mask
        assert mask.operands[-1] == Operand(3)
    assert [operand.index for operand in MASKS[5].operands] == [12]
    assert [operand.index for operand in Mask(Band(), KEYS[2], SEGMENTS[1]).operands] == [0, 12]
    assert [operand.index for operand in Mask(Band(), KEYS[1], SEGMENTS[2]).operands] == [1, 2, 0]
    assert MASKS[3].operands == ()


def test_calls() -> None:
    seen = set()
    for mask, scale, orders in itertools.product(MASKS, (0.125, -1e-300, 1 / 3, 0.0, math.inf), ORDERS):
        spec = AttentionSpec(mask, scale, orders)
        assert AttentionSpec.parse(str(spec)) == spec
        assert hash(AttentionSpec.parse(str(spec))) == hash(spec)
        seen.add(str(spec))
    assert len(seen) == len(MASKS) * 5 * len(ORDERS)
    assert hash(AttentionSpec(Mask(), 0.0)) == hash(AttentionSpec(Mask(), -0.0))  # they are equal
    assert math.isnan(AttentionSpec.parse(str(AttentionSpec(Mask(), math.nan))).scale)


@pytest.mark.parametrize("p", [0.1, 0.5, 1e-9, 1 - 1e-9, 1 / 3])
def test_dropout(p: float) -> None:
    dropout = Dropout(p, Operand(2))
    spec = AttentionSpec(MASKS[5], 0.125, ORDERS[1], dropout=dropout)
    assert AttentionSpec.parse(str(spec)) == spec
    assert f"/dropout={p!r},2/" in str(spec)
    assert [operand.index for operand in spec.operands] == [12, 2]
    assert len({hash(c) for c in (spec, AttentionSpec(MASKS[5], 0.125, ORDERS[1]))}) == 2
    biased = replace(spec, bias=Bias(Operand(3), gradient=True))
    assert AttentionSpec.parse(str(biased)) == biased
    assert f"/bias=3+gradient/dropout={p!r},2/" in str(biased)
    assert [operand.index for operand in biased.operands] == [12, 3, 2]
    assert biased.traits.data == spec.traits.data | {"bias"} == {"keys", "bias", "dropout"}
    assert abs(dropout.threshold / 65536 - p) <= 2.0**-16
    assert (1 - dropout.threshold / 65536) * dropout.rescale == 1


@pytest.mark.parametrize("p", [0.0, 1.0, -0.1, math.nan, math.inf])
def test_what_is_no_probability(p: float) -> None:
    with pytest.raises(ArgumentError, match="p="):
        Dropout(p, Operand(0))


@pytest.mark.parametrize("text", ["0.1", "0.1,", "x,0", "0.1,-1", "0.1,0,0", "1.0,0", "1e,0"])
def test_what_is_no_dropout(text: str) -> None:
    with pytest.raises(ArgumentError):
        AttentionSpec.parse(f"full/scale=1.0/dropout={text}")


def test_plans() -> None:
    tiles = Tiles(64, 128, 8, 2)
    seen = set()
    for dq, forward_tiles, tf32 in itertools.product((None, tiles), (None, Tiles(32, 64, 4, 1)), (False, True)):
        plan = Plan("portable", "spt", "portable", tiles, dq, 4, tf32, forward_tiles)
        assert Plan.parse(str(plan)) == plan
        seen.add(str(plan))
    assert len(seen) == 8


@pytest.mark.parametrize(
    "text",
    [
        "causal &keys(0)",
        "keys(0) & keys(1)",
        "causal & full",
        "keys(-1)",
        "",
        "keys(x)",
        "segments(0)",
        "dense(0) & dense(0)",
        "dense(0,1)",
        "segments(0, 1)",
        "segments(0,1):",
        "keys(0):varlen(1,2)",
        "segments(0,1):varlen(2)",
        "segments(0,1):varlen(2,3) & keys(4)",
        "segments(0,1):varlen(2,3) & dense(4)",
        "interval(none,none,none)",
        "interval(0,1)",
        "keys(none)",
        "dense(none)",
        "segments(none,0)",
        "interval(0,1,2) & interval(0,1,2)",
        "segments(0,1) & segments(0,0)",
    ],
)
def test_what_is_no_mask(text: str) -> None:
    with pytest.raises(ArgumentError):
        Mask.parse(text)


@pytest.mark.parametrize("orders", [((0, 1, 2),), ((0, 1, 2, 2),), ((1, 2, 3, 4),)])
def test_what_is_no_order(orders: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ArgumentError, match="permutations"):
        AttentionSpec(Mask(), 1.0, orders)


def test_an_operand_has_a_place() -> None:
    with pytest.raises(ArgumentError, match="operand=-1"):
        Operand(-1)


@pytest.mark.parametrize(
    ("spec", "text", "data"),
    [
        (AttentionSpec(Mask(Band()), 0.5, (), Bias(Operand(0))), "full/scale=0.5/bias=0", {"bias"}),
        (
            AttentionSpec(Mask(Band(0), Keys(Operand(0))), -1e-5, ((0, 2, 1, 3),), Bias(Operand(1), gradient=True)),
            "causal & keys(0)/scale=-1e-05/bias=1+gradient/orders=0213",
            {"keys", "bias"},
        ),
        (AttentionSpec(Mask(dense=Dense(Operand(3))), 1.0), "dense(3)/scale=1.0", {"dense"}),
    ],
)
def test_calls_with_a_bias(spec: AttentionSpec, text: str, data: set[str]) -> None:
    assert str(spec) == text
    assert AttentionSpec.parse(text) == spec
    assert spec.traits.data == data
    assert spec.traits.band.lo == (0 if "causal" in text else None)
    assert str(spec.traits) == "_".join(["lo" if "causal" in text else "full", *sorted(data)])
    assert hash(AttentionSpec.parse(text)) == hash(spec)


def test_sinks_are_of_the_forward_and_a_gradient_of_the_sums_is_of_the_backward() -> None:
    spec = AttentionSpec(Mask(Band(0)), 0.5, bias=Bias(Operand(0)), grad_logsumexp=Operand(1), sinks=Operand(2))
    assert str(spec) == "causal/scale=0.5/bias=0/grad_logsumexp=1/sinks=2"
    assert AttentionSpec.parse(str(spec)) == spec
    assert [operand.index for operand in spec.operands] == [0, 1, 2]
    assert (str(spec.of_forward), str(spec.of_forward.traits)) == ("causal/scale=0.5/bias=0/sinks=2", "lo_bias_sinks")
    assert str(spec.of_backward) == "causal/scale=0.5/bias=0/grad_logsumexp=1"
    assert spec.of_backward.of_backward is spec.of_backward


def test_the_program_reads_the_log_sum_exp_of_a_forward() -> None:
    spec = AttentionSpec(Mask(Band(0)), 0.5, sinks=Operand(0), logsumexp=True)
    assert str(spec) == "causal/scale=0.5/sinks=0/logsumexp"
    assert AttentionSpec.parse(str(spec)) == spec
    assert spec != replace(spec, logsumexp=False)
    assert hash(spec) != hash(replace(spec, logsumexp=False))
    assert (str(spec.of_forward), str(spec.of_forward.traits)) == (str(spec), "lo_sinks_logsumexp")
    assert str(spec.of_backward) == "causal/scale=0.5"


@pytest.mark.parametrize("bias", ["bias=", "bias=x", "bias=0+grad", "bias=-1", "bias=0/bias=0"])
def test_texts_that_are_no_calls_with_a_bias(bias: str) -> None:
    with pytest.raises(ArgumentError, match="made by str"):
        AttentionSpec.parse(f"full/scale=0.5/{bias}")


def test_few_sources_know_what_a_modifier_means() -> None:
    """Beside entries and attention in eager mode, which read it from programs; all others have it by its name."""
    of_programs = tuple(f"dash_inductor/{room}/" for room in ("frontends", "eager", "integrations"))
    roots = [ROOT / name for name in ("dash_inductor", "kernels", "lowering")]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for root in roots for path in
               root.rglob("*.py")}  # fmt: skip
    for name in MODIFIERS:
        found = {path for path, text in sources.items() if re.search(rf"\b{name}\b", text, re.IGNORECASE)}
        assert {path for path in found if not path.startswith(of_programs)} == {
            "dash_inductor/model/attention_spec.py",
            "kernels/common/score.py",
            "kernels/common/device/score.py",
            "kernels/common/device/score_gluon.py",
        }
