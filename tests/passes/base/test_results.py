"""Results of graphs that are rewritten: memory, strides and sharing as without rewrites, and what writes to them do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

import dash_inductor
from dash_inductor.records.records import clear_sites

from ...fuzz import rewritten_programs
from ...fuzz.rewritten_programs import PROGRAMS
from ...support import attention_frontends, by_hand
from ...support.attention_frontends import ENTRIES
from ...support.flex import Mod, Sizes, block_mask, causal, training_on_the_cpu
from ...support.fuzzed import BY_DYNAMO, compiled, everything_on_the_cpu, rewritten
from ...support.graphs import capture
from ...support.graphs import tensors as normal
from ...support.shown_memory import WRITES, Layout, Program, after, layouts, same

pytestmark = pytest.mark.usefixtures("deterministic")

Found = dict[tuple[int, str], list[Tensor] | str]


def _seen(program: Program, tensors: Sequence[Tensor]) -> tuple[list[Layout], Found]:
    """The layouts of a program's results, and its gradients after each write to one of them or to an input."""
    shown = layouts(program, tensors)
    places = range(-len(tensors), len(shown))
    return shown, {
        (place, how): after(program, tensors, place, write) for place in places for how, write in WRITES.items()
    }


def _hold(
    ours: tuple[list[Layout], Found], plain: tuple[list[Layout], Found], right: list[Tensor] | str, inputs: bool
) -> None:
    """Hold what is seen of a program with rewrites against it without them.

    Args:
        right: the gradients without a write.
        inputs: whether writes to inputs count; else autograd may notice them, as in eager mode.
    """
    assert ours[0] == plain[0]
    for (place, how), found in ours[1].items():
        expected = plain[1][place, how]
        fine = same(found, expected) or same(found, right)
        if place < 0 and not inputs:
            fine |= isinstance(found, str) or how == "through .data"
        assert fine, (place, how, found, expected)


def _nothing(tensor: Tensor) -> None:
    """Write nothing."""


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, dynamic: bool) -> None:
    case, tensors = PROGRAMS[name], rewritten_programs.tensors_of(name)
    with everything_on_the_cpu():
        clear_sites()
        program = compiled(case.program, dynamic)
        ours = _seen(program, tensors)
        assert dynamic or not case.rewrite or case.rewrite in rewritten()
        with dash_inductor.disabled():
            plain = compiled(case.program, dynamic)
            _hold(ours, _seen(plain, tensors), after(plain, tensors, 0, _nothing), inputs=True)


def _returned_otherwise(function: Callable[..., Tensor], how: str) -> Program:
    def program(*tensors: Tensor) -> tuple[Tensor, ...]:
        out = function(*tensors)
        return {
            "alone": (out,),
            "with what reads it": (out, out * 2),
            "as a part": (out[:1],),
            "with a product": (out, out.flatten(-2).sum(-1)),
            "with its memory again": (out, out.detach()),
        }[how]

    return program


HOWS = ["alone", "with what reads it", "as a part", "with a product", "with its memory again"]
NO_MEMORY_TWICE = ("returned as a view", "blocks", "keys first", "grouped", "grouped with a temperature")
"""Plain PyTorch raises if such a program returns its output twice: it cannot repeat their views."""


def _possible(name: str, how: str) -> bool:
    return how != "with its memory again" or name not in NO_MEMORY_TWICE


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in ENTRIES if ENTRIES[name].exact is None for how in HOWS if _possible(name, how)],
)
def test_attention(name: str, how: str) -> None:
    """A write to an input is noticed where a backward of ours reads it, as in eager mode."""
    function, tensors = (
        _returned_otherwise(ENTRIES[name].function, how),
        [*attention_frontends.tensors_of(ENTRIES[name]).values()],
    )
    with capture():
        ours = _seen(compiled(function), tensors)
        with dash_inductor.disabled():
            plain = compiled(function)
            _hold(ours, _seen(plain, tensors), after(plain, tensors, 0, _nothing), inputs=False)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (name, how)
        for number, name in enumerate(by_hand.PROGRAMS)
        for how in (HOWS[number % (len(HOWS) - 1)], HOWS[-1])
        if _possible(name, how)
    ],
)
def test_attention_by_hand(name: str, how: str) -> None:
    """Also beside biases, sinks and softcaps."""
    program = by_hand.PROGRAMS[name]
    function, tensors = _returned_otherwise(program.function, how), normal(*program.shapes)
    with capture():
        ours = _seen(compiled(function), tensors)
        assert "attention" in rewritten()
        with dash_inductor.disabled():
            plain = compiled(function)
            _hold(ours, _seen(plain, tensors), after(plain, tensors, 0, _nothing), inputs=False)


SIZES = Sizes(q_len=24, kv_len=24)


def _by_flex(score: Callable[[Tensor], Mod] | None, mask: Mod | None, log_sum_exp: bool) -> Program:
    """FlexAttention of query, key, value and a tensor that a score_mod reads."""
    hidden = block_mask(mask, SIZES)

    def program(query: Tensor, key: Tensor, value: Tensor, read: Tensor) -> tuple[Tensor | None, ...]:
        score_mod = None if score is None else score(read)
        out, aux = flex_attention(
            query, key, value, score_mod, hidden, enable_gqa=True, return_aux=AuxRequest(lse=log_sum_exp)
        )
        return (out, aux.lse) if log_sum_exp else (out,)

    return program


SCORES: dict[str, tuple[Callable[[Tensor], Mod] | None, tuple[int, ...]]] = {
    "as they are": (None, (1,)),
    "softcap": (lambda read: lambda s, b, h, q, k: 3 * torch.tanh(s / 3), (1,)),
    "alibi": (lambda read: lambda s, b, h, q, k: s + read[h] * (k - q), (SIZES.heads,)),
    "of places": (lambda read: lambda s, b, h, q, k: s + read[h, q, k], (SIZES.heads, SIZES.q_len, SIZES.kv_len)),
    "of distances": (lambda read: lambda s, b, h, q, k: s + read[q - k + SIZES.kv_len], (2 * SIZES.kv_len,)),
    "softcap and places": (
        lambda read: lambda s, b, h, q, k: 3 * torch.tanh(s / 3) + read[h, q, k],
        (SIZES.heads, SIZES.q_len, SIZES.kv_len),
    ),
}


@pytest.mark.parametrize(
    ("score", "mask", "log_sum_exp"),
    [(score, (None, causal, causal)[number % 3], bool(number % 2)) for number, score in enumerate(SCORES)],
)
def test_flex_attention(score: str, mask: Mod | None, log_sum_exp: bool) -> None:
    make, shape = SCORES[score]
    tensors = [*SIZES.tensors()[:3], *normal(shape)]
    program = _by_flex(make, mask, log_sum_exp)
    with training_on_the_cpu(), capture():
        ours = _seen(BY_DYNAMO.compile(program, False), tensors)
        assert "attention" in rewritten()
        with dash_inductor.disabled():
            plain = BY_DYNAMO.compile(program, False)
            _hold(ours, _seen(plain, tensors), after(plain, tensors, 0, _nothing), inputs=False)
