"""Run the portable forward in Triton's interpreter, and the portable backward of masks that are data.

    python -m tests.interpreted.forward CASE ...

A program of its own, as it claims a GPU.  A case is words joined by commas, of which the first is one of `MODES`; one
line of output per case.
"""

from __future__ import annotations

import operator
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from ..support.mockgpu import install_driver  # Triton reads the environment when it is imported

install_driver()

import re  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from dataclasses import replace  # noqa: E402

import torch  # noqa: E402
import torch._inductor.config as inductor_config  # noqa: E402
from torch import Tensor  # noqa: E402

from dash_inductor import lowering  # noqa: E402
from dash_inductor.kernels.portable import standalone  # noqa: E402
from dash_inductor.model import Band, Plan, Tiles  # noqa: E402

from ..support import keyed  # noqa: E402
from ..support.attention import errors  # noqa: E402
from ..support.documents import among, of_document  # noqa: E402
from ..support.keyed import KeyedAttention  # noqa: E402

TILES = Tiles(32, 16, 4, 1)
FORWARD = Plan("portable", "two_pass", "portable", TILES, TILES, head_chunk=3, forward_tiles=TILES)


def problem(words: Sequence[str]) -> KeyedAttention:
    """MASK/Q_LEN/KV_LEN/HEAD_DIM/VALUE_DIM/GROUP/DTYPE/SCALE/VALID, and DOCUMENTS if there are any.

    The last two are as in `KeyedAttention.random`.
    """
    mask, q_len, kv_len, head_dim, value_dim, group, dtype, scale, valid, documents = [*words, "none"][:10]
    return KeyedAttention.random(
        int(q_len), int(kv_len), Band.parse(mask.replace(";", ",")), dims=(int(head_dim), int(value_dim)),
        kv_heads=1 if int(group) > 1 else 2, group=int(group), dtype=getattr(torch, dtype), scale=float(scale),
        valid=valid, documents=documents,
    )  # fmt: skip


def launched(p: KeyedAttention, *, head_chunk: int = 3, forget: bool = False) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) by the kernel that `standalone` renders; `forget` takes back what it knows of lengths."""
    (batch, q_heads, q_len, _), value_dim = p.q.shape, p.v.shape[3]
    strides = {"Q": p.q.stride(), "K": p.k.stride(), "V": p.v.stride()}
    keys = p.keys if p.segments is None else p.keep().any(1)
    if keys is not None:
        keys = keys[:, None].expand(-1, p.k.shape[1], -1)
        strides["KEYS"] = keys.stride()
    q_ids, kv_ids = p.segments or (None, None)
    if q_ids is not None and kv_ids is not None:
        strides |= {"SEGMENTS_Q": q_ids.stride(), "SEGMENTS_KV": kv_ids.stride()}
    plan = replace(FORWARD, head_chunk=head_chunk)
    kernel = standalone.render_forward(plan, p.site(), strides, interpret=True)
    if forget:
        text = re.sub(r"(EVEN_\w+: tl.constexpr = )True", r"\1False", kernel.text)
        if text == kernel.text:
            raise ValueError("nothing is known of these lengths")
        kernel = replace(kernel, text=text)
    out = p.q.new_full((batch, q_heads, q_len, value_dim), float("nan"))
    lse = torch.full((batch, q_heads, q_len), float("nan"))
    tensors = {
        "Q": p.q,
        "K": p.k,
        "V": p.v,
        "LSE": lse,
        "OUT": out,
        "KEYS": keys,
        "SEGMENTS_Q": q_ids,
        "SEGMENTS_KV": kv_ids,
    }
    kernel.load()[(kernel.grid,)](*[tensors[name] for name in kernel.names])
    return out, lse


def same(a: Sequence[Tensor], b: Sequence[Tensor], what: object) -> None:
    assert [torch.equal(x, y) for x, y in zip(a, b, strict=True)] == [True] * len(a), f"other bits: {what}"


def without_keys(p: KeyedAttention, out: Tensor, lse: Tensor) -> Tensor:
    """Checks the rows that see no key; which rows see one, [batch, q heads, q_len]."""
    sees = p.keep().any(2)[:, None].expand_as(lse)
    assert (out[~sees] == 0).all(), "a row without keys is not zero"
    assert (lse[~sees] == float("-inf")).all(), "a row without keys has another log-sum-exp than -inf"
    return sees


def exact(p: KeyedAttention) -> str:
    """The largest errors of out and log-sum-exp."""
    out, lse, _ = p.exact()
    got, got_lse = launched(p)
    sees = without_keys(p, got, got_lse)
    assert got_lse[sees].isfinite().all()
    return " ".join(f"{float(e.abs().max()) if e.numel() else 0.0:.1e}" for e in (got - out, (got_lse - lse)[sees]))


def poison(p: KeyedAttention) -> str:
    """Rows and keys that nobody sees may hold anything."""
    expected = launched(p.surrounded(0.0))
    assert expected[0].isfinite().all()
    for fill in (float("nan"), float("inf"), float("-inf")):
        same(expected, launched(p.surrounded(fill)), fill)
        everywhere = replace(p, q=p.q * fill, k=p.k * fill, v=p.v * fill)
        without_keys(everywhere, *launched(everywhere))
    return "unharmed"


def bits(p: KeyedAttention) -> str:
    """The bits of a (batch, head) are its own business."""
    out, lse = expected = launched(p)
    same(expected, launched(p, head_chunk=1), "other launch order")
    for b in range(len(p.q)):
        at = slice(b, b + 1)
        alone = p.for_elements(operator.itemgetter(at))
        same((out[at], lse[at]), launched(alone), "a batch element alone")
        twice = alone.for_elements(lambda t: t.expand(2, *t.shape[1:]))
        same((out[at], lse[at]), [x[1:] for x in launched(twice)], "a batch element in another batch")
    for h in range(p.k.shape[1]):
        heads = slice(h * p.group, (h + 1) * p.group)
        alone = replace(p, q=p.q[:, heads], k=p.k[:, h : h + 1], v=p.v[:, h : h + 1])
        same((out[:, heads], lse[:, heads]), launched(alone), "a group of heads alone")
    dense = replace(p, q=p.q.contiguous(), k=p.k.contiguous(), v=p.v.mT.contiguous().mT)
    same(expected, launched(dense), "other strides")
    if p.keys is None:
        everybody = torch.ones(p.k.shape[2], dtype=torch.uint8).expand(len(p.k), -1)
        same(expected, launched(replace(p, keys=everybody)), "a vector in which all keys are valid")
    if p.segments is None:
        ids = keyed.segment_ids("same", len(p.q), p.q.shape[2], p.k.shape[2])
        same(expected, launched(replace(p, segments=ids)), "segments of one id")
    if p.mask.is_full:
        same(expected, launched(longer(p)), "more keys, of which none is valid")
    try:
        same(expected, launched(p, forget=True), "nothing known of lengths")
    except ValueError:
        return "equal"
    return "equal, with nothing known of lengths too"


def longer(p: KeyedAttention) -> KeyedAttention:
    """The same problem with 20 keys more behind the others, which are not valid."""
    k, v = (torch.nn.functional.pad(t, (0, 0, 0, 20), value=float("nan")) for t in (p.k, p.v))
    valid = torch.ones(len(p.k), p.k.shape[2], dtype=torch.bool) if p.keys is None else p.keys
    segments = p.segments
    if segments is not None:
        segments = segments[0], torch.cat([segments[1], segments[1][:, :1].expand(-1, 20)], 1)
    return replace(p, k=k, v=v, keys=torch.nn.functional.pad(valid, (0, 20)), segments=segments)


def inductor(p: KeyedAttention) -> str:
    """Static and dynamic lengths through Inductor have the bits of the rendered kernel."""
    expected = launched(p)
    for dynamic in (False, True):
        torch._dynamo.reset()
        tensors = [t.clone(memory_format=torch.preserve_format) for t in (p.q, p.k, p.v)]
        if dynamic:
            for t in tensors:
                torch._dynamo.mark_dynamic(t, 2)
        extras = [t.detach() for t in p.extras]
        if dynamic:
            for t in extras:
                torch._dynamo.maybe_mark_dynamic(t, 1)
        got = torch.compile(keyed.attend, dynamic=False)(*tensors, extras, str(p.spec(1)), FORWARD)
        assert got[0].stride() == p.q.new_empty(got[0].transpose(1, 2).shape).transpose(1, 2).stride()
        same(expected, got, f"dynamic={dynamic}")
    return "equal"


def chunks(p: KeyedAttention) -> str:
    """Ids that are computed in the graph, by the places of tokens."""
    batch, length = len(p.q), p.q.shape[2]

    def ids() -> Tensor:
        return (torch.arange(length) // 8).expand(batch, -1)

    computed = ids()
    p = replace(p, segments=(computed, computed))
    spec = str(p.spec(1))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return keyed.attend(q, k, v, [ids()], spec, FORWARD)

    torch._dynamo.reset()
    same(launched(p), torch.compile(attend, dynamic=False)(p.q, p.k, p.v), "ids of the graph")
    return "equal"


def backward(p: KeyedAttention, schedule: str) -> str:
    """SCHEDULE, or SCHEDULE:dynamic for lengths that the kernels do not know.

    The largest errors of the gradients; nothing that nobody sees changes a bit, and its own gradients are zero."""
    torch._dynamo.reset()
    p = p.surrounded(0.0)
    schedule, _, lengths = schedule.partition(":")
    dynamic = lengths == "dynamic"
    dq = TILES if schedule == "two_pass" else None
    plan = Plan("portable", schedule, "portable", Tiles(16, 32, 4, 1), dq, head_chunk=3, forward_tiles=TILES)
    compiled = torch.compile(keyed.gradients, dynamic=False)
    keep = p.keep()

    def run(fill: float) -> tuple[Tensor, ...]:
        """`fill` wherever nobody looks; the log-sum-exp of rows without valid keys is the forward's."""
        out, lse, _ = p.exact()
        out = torch.where(keep.any(2)[:, None, :, None], out, fill).to(p.q.dtype)
        q = p.surrounded(fill)
        arguments = [q.do, q.q, q.k, q.v, out, lse.float()]
        extras = [t.detach() for t in p.extras]
        if dynamic:
            for t in (*arguments, *extras):
                torch._dynamo.mark_dynamic(t, 2 if t.dim() > 2 else 1)
        result: tuple[Tensor, ...] = compiled(*arguments, extras, str(p.spec(3)), plan)
        return result

    expected = run(0.0)
    for gradient, looked_at in zip(expected, (keep.any(2), keep.any(1), keep.any(1)), strict=True):
        assert (gradient.transpose(1, 2)[~looked_at] == 0).all(), "a gradient that is not zero"
    for fill in (float("nan"), float("inf")):
        same(expected, run(fill), fill)
    return " ".join(f"{e:.1e}" for e in errors(expected, p.exact()[2]))  # type: ignore[arg-type]  # three of them


def documents(p: KeyedAttention) -> str:
    """A document has the bits of forward and backward that it has alone wherever it begins with a tile of 32."""
    plan = Plan("portable", "two_pass", "portable", Tiles(16, 32, 4, 1), TILES, head_chunk=3, forward_tiles=TILES)
    length = p.q.shape[2]

    def run(p: KeyedAttention) -> list[Tensor]:
        torch._dynamo.reset()
        out, lse = launched(p)
        arguments = [t.detach() for t in (p.do, p.q, p.k, p.v, out, lse)]
        compiled = torch.compile(keyed.gradients, dynamic=False)
        return [out, lse, *compiled(*arguments, [t.detach() for t in p.extras], str(p.spec(3)), plan)]

    alone = run(p)
    for before in (0, 32):
        same(alone, of_document(run(among(p, before, others=32)), before, length), f"behind {before} tokens")
    moved = of_document(run(among(p, 21, others=32)), 21, length)
    assert not any(map(torch.equal, alone, moved)), "nothing would be seen"  # negative control
    return "equal"


MODES: dict[str, Callable[[KeyedAttention], str]] = {
    "exact": exact,
    "poison": poison,
    "bits": bits,
    "inductor": inductor,
    "chunks": chunks,
    "documents": documents,
}


def main(cases: list[str]) -> None:
    inductor_config.cpu_backend = "triton"
    lowering.register()
    for case in cases:
        mode, *words = case.split(",")
        p = problem(words)
        try:
            result = MODES[mode](p) if mode in MODES else backward(p, mode)
        except AssertionError as error:
            result = f"failed: {error}"
        print("RESULT", result, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
