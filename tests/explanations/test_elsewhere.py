"""`explain` for a GPU that is not there: what devices in the program do, and that nothing is guessed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import dash_inductor
from dash_inductor import cli
from dash_inductor.config import config
from dash_inductor.explanations.elsewhere import Untraceable, device, moving, sdpa, stand_in
from dash_inductor.explanations.explanation import Explanation
from dash_inductor.upstream import compat, devices

from ..support.fakecuda import compiler
from ..support.forks import FAKE_GPU, run_forked

pytestmark = pytest.mark.usefixtures("deterministic")
LENGTH = 128
DOCUMENTS = torch.tensor([0, 28, LENGTH], dtype=torch.int32)

Three = Callable[[Tensor, Tensor, Tensor], Tensor]


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def qkv(dim: int = 64, value_dim: int | None = None, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [leaf(2, 4, LENGTH, size, dtype=dtype) for size in (dim, dim, value_dim or dim)]


def on_h100(fn: Callable[..., Any], *args: Any, arch: str = "sm_90", **kwargs: Any) -> Explanation:
    return dash_inductor.explain(fn, *args, arch=arch, **kwargs)


def fates(explanation: Explanation) -> list[str]:
    """The fate of every site: its mask, or why it is not replaced."""
    assert not explanation.unknown, explanation.unknown
    return [site.fallback.reason.value if site.fallback else site.record.mask for site in explanation.sites]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# ---- What the CPU computes otherwise


def test_dropout() -> None:
    explanation = on_h100(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1), *qkv())
    assert fates(explanation) == ["full"]
    (site,) = explanation.sites
    assert site.record.op == "aten::_scaled_dot_product_flash_attention_backward"
    assert site.record.tensors is not None
    assert site.record.tensors.device == "cuda:0"
    assert site.site is not None
    assert site.site.spec.dropout is not None


def test_bias_with_a_gradient() -> None:
    def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    assert fates(on_h100(biased, *qkv(), leaf(1, 4, LENGTH, LENGTH))) == ["full + bias"]


def test_another_head_dimension_of_value() -> None:
    assert fates(on_h100(causal, *qkv(192, 128))) == ["causal"]


def test_grouped_heads_with_a_mask() -> None:
    """No fused kernel of PyTorch before 2.14 reads both: its math implementation is replaced as attention by hand is.

    What later versions do is not known here.
    """

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], attn_mask=mask, enable_gqa=True)

    explanation = on_h100(grouped, *qkv())
    if dash_inductor.upstream.compat.TORCH < (2, 14):
        assert fates(explanation) == ["causal"]
    else:
        assert "grouped heads" in explanation.unknown


# ---- Devices


def mask_of_the_device(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[2], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=place[:, None] >= place)


def constant_that_is_moved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cpu").tril().to("cuda")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def constant_moved_by_method(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().cuda()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def only_on_a_gpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.is_cuda and q.device.type == "cuda":
        return causal(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


def only_on_hopper(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and torch.cuda.is_bf16_supported():
        return causal(q, k, v)
    return F.scaled_dot_product_attention(q, k, v)


def to_the_cpu_and_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q.to("cpu").to("cuda"), k, v)


def data_of_an_empty_cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the caches of transformers begin."""
    keys = torch.tensor([], dtype=k.dtype, device=k.device)
    return causal(q, torch.cat([keys, k], dim=-2), v)


@pytest.mark.parametrize(
    "program",
    [
        mask_of_the_device, constant_that_is_moved, constant_moved_by_method, only_on_a_gpu, only_on_hopper,
        to_the_cpu_and_back, data_of_an_empty_cache,
    ],
    ids=lambda program: program.__name__,
)  # fmt: skip
def test_devices_of_the_program(program: Three) -> None:
    assert fates(on_h100(program, *qkv())) == ["causal"]


DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.tensor": lambda q: torch.tensor([2.0], device=q.device),
    "a number": lambda q: torch.tensor(2.0, device="cuda"),
    "torch.as_tensor": lambda q: torch.as_tensor([2.0], device=q.device),
    "a number by torch.as_tensor": lambda q: torch.as_tensor(2.0, device="cuda:0"),
    "torch.asarray": lambda q: torch.asarray([2.0], device=q.device),
    "Tensor.new_tensor": lambda q: q.new_tensor([2.0]),
    "Tensor.new": lambda q: q.new([2.0]),
    "Tensor.cuda": lambda q: torch.tensor([2.0]).cuda(),
    "Tensor.to": lambda q: torch.tensor([2.0]).to(q.device),
    "a number that stays": lambda q: torch.tensor(2.0),
}
"""Ways to make a tensor from Python data."""


@pytest.mark.parametrize("way", DATA)
def test_tensors_from_python_data(way: str) -> None:
    """They are where the program makes them: on another device, nothing could be computed with them."""

    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q * DATA[way](q).to(q.dtype), k, v)

    assert fates(on_h100(scaled, *qkv())) == ["causal"]


@pytest.mark.parametrize("ampere", ["sm_80", "a100", "A100"])
def test_the_capability_is_that_of_the_architecture(ampere: str) -> None:
    assert fates(on_h100(only_on_hopper, *qkv(), arch=ampere)) == ["full"]
    assert not torch.cuda.is_available()


def constant_that_stays(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cpu").tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def on_the_cpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q.cpu(), k.cpu(), v.cpu())


def value_in_python(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = causal(q, k, v)
    return causal(out, k, v) if out.sum().item() > 0 else out


def branch_on_a_value(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q, k, v) if (q == 0).all() else F.scaled_dot_product_attention(q, k, v)


def memory_of_the_device(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    large = torch.cuda.get_device_properties(0).total_memory > 1 << 36
    return F.scaled_dot_product_attention(q, k, v, is_causal=large)


def on_another_cpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q.to("cpu:1"), k.to("cpu:1"), v.to("cpu:1"))


def on_the_stand_in(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q.to(f"cpu:{stand_in.FIRST}").to("cuda"), k, v)


@torch.library.custom_op("dash_inductor_tests::only_for_gpus", mutates_args=())
def only_for_gpus(x: Tensor) -> Tensor:
    return x.clone()


@only_for_gpus.register_fake
def fake_only_for_gpus(x: Tensor) -> Tensor:
    if x.device.type != "cuda":  # as on the stand-in
        raise RuntimeError(f"no kernel for {x.device}, not even beside cpu:1")
    return torch.empty_like(x)


def operator_that_knows_the_stand_in(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(only_for_gpus(q), k, v)


@torch.library.custom_op("dash_inductor_tests::without_a_fake", mutates_args=())
def without_a_fake(x: Tensor) -> Tensor:
    return x.clone()


def operator_without_a_fake(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(without_a_fake(q), k, v)


UNKNOWN = {
    constant_that_stays: "device mismatch" if compat.TORCH > (2, 12) else "two different devices",
    on_the_cpu: "test_elsewhere.py",
    on_another_cpu: "runs on cpu:1, not on a GPU",
    on_the_stand_in: f"CPUs from number {stand_in.FIRST} on stand for GPUs here, and the program uses one, at ",
    operator_that_knows_the_stand_in: "no kernel for cuda:0, not even beside cpu:1, at ",
    value_in_python: "reads the value of a tensor in Python, and a fake one has none, at ",
    branch_on_a_value: "reads the value of a tensor in Python, and a fake one has none, at ",
    memory_of_the_device: "total_memory",
    operator_without_a_fake: "without_a_fake",
}
"""Programs of which nothing is known, and a part of the reason."""


@pytest.mark.parametrize("program", UNKNOWN, ids=lambda program: program.__name__)
def test_unknown(program: Three) -> None:
    explanation = on_h100(program, *qkv())
    assert UNKNOWN[program] in explanation.unknown
    assert f"{Path(__file__).name}:" in explanation.unknown
    assert not explanation.all_replaced
    text = str(explanation)
    assert text.splitlines()[0] == "what becomes of every attention is unknown"
    assert " ".join(explanation.unknown.split()[:3]) in " ".join(text.split())
    assert explanation.to_dict()["unknown"] == explanation.unknown
    assert "Unknown: " in explanation.to_html()


def test_a_tensor_of_an_unknown_kind() -> None:
    explanation = on_h100(lambda x: x.to_dense(), torch.zeros(3, 3).to_sparse())
    assert "cannot be moved" in explanation.unknown


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a build for CUDA has what is missing here")
def test_a_build_that_is_laid_out_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.let_autograd_know_cuda.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert "not laid out as expected" in on_h100(causal, *qkv()).unknown
    monkeypatch.undo()
    assert fates(on_h100(causal, *qkv())) == ["causal"]


def test_a_version_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_get_sdp_priority_order")
    assert "_get_sdp_priority_order" in on_h100(causal, *qkv()).unknown


# ---- What is moved


class Block(nn.Module):
    """Attention with a mask that is a buffer; its plain tensor stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(128, 2, dropout=0.1, batch_first=True, dtype=torch.bfloat16)
        self.register_buffer("below", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
        self.plain = torch.ones(1, dtype=torch.bfloat16)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = x * self.plain.to(x.device) * scale
        out: Tensor = self.attention(x, x, x, attn_mask=~self.below, need_weights=False)[0]
        return out

    def method(self, x: Tensor) -> Tensor:
        out: Tensor = self(x)
        return out


BLOCK, X = Block(), torch.zeros(2, LENGTH, 128, dtype=torch.bfloat16)


def reads_globals() -> Tensor:
    return BLOCK(X)  # type: ignore[no-any-return]  # a module


def calls_what_reads_globals() -> Tensor:
    return reads_globals()


class Trainer:
    def __init__(self) -> None:
        self.block, self.batch = BLOCK, {"x": [X]}

    def step(self) -> Tensor:
        return self.block(self.batch["x"][0])  # type: ignore[no-any-return]  # a module


def ways() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    block, x = BLOCK, X
    return {
        "module": (block, (x,)),
        "method": (block.method, (x,)),
        "closure": (lambda: block(x), ()),
        "globals": (reads_globals, ()),
        "globals of a function beside it": (calls_what_reads_globals, ()),
        "nested arguments": (lambda parts, batch: parts[0](batch["x"][0]), ([block], {"x": (x,)})),
        "attributes": (Trainer().step, ()),
    }


@pytest.mark.parametrize("way", ways())
def test_everything_that_a_function_reads_is_moved_and_put_back(way: str) -> None:
    fn, args = ways()[way]
    parameters, buffers, seed = dict(BLOCK.named_parameters()), dict(BLOCK.named_buffers()), torch.get_rng_state()
    arguments = copy.copy(args)
    assert fates(on_h100(fn, *args)) == ["dense(0)"]  # what is in the buffer is known when it runs
    assert all(parameter is parameters[name] for name, parameter in BLOCK.named_parameters())
    assert all(buffer is buffers[name] for name, buffer in BLOCK.named_buffers())
    assert all(old is new for old, new in zip(arguments, args, strict=True))
    assert (type(X), X.device.type, type(BLOCK.plain)) == (Tensor, "cpu", Tensor)
    assert torch.equal(seed, torch.get_rng_state())
    assert fn(*args).device.type == "cpu"  # it runs as before


def test_a_model_without_memory() -> None:
    with torch.device("meta"):
        block, x = Block(), torch.zeros(2, LENGTH, 128, dtype=torch.bfloat16)
    block.plain = torch.ones(1, dtype=torch.bfloat16)
    assert fates(on_h100(block, x)) == ["dense(0)"]


def test_what_is_moved_looks_as_before() -> None:
    shared = torch.zeros(1, 1, 1, 5).expand(2, 1, 3, 5)
    late = torch.zeros(10, dtype=torch.float16)[2:].view(2, 4).t()
    weight = nn.Parameter(torch.zeros(3), requires_grad=False)
    torch._dynamo.mark_dynamic(late, 0)  # type: ignore[no-untyped-call]  # of PyTorch
    with (
        device.pretended("sm_90") as mode,
        moving.moved(mode, lambda: None, (shared, late, weight, shared), {}) as (moved, _),
    ):
        assert moved[0] is moved[3]
        for old, new in zip((shared, late, weight), moved[:3], strict=True):
            assert (new.shape, new.stride(), new.storage_offset()) == (old.shape, old.stride(), old.storage_offset())
            assert (new.dtype, new.requires_grad, str(new.device)) == (old.dtype, old.requires_grad, "cuda:0")
        assert isinstance(moved[2], nn.Parameter)
        assert moved[1]._dynamo_dynamic_indices == {0}


def test_lengths_that_are_marked_dynamic_stay_so() -> None:
    tensors = qkv()
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 2)  # type: ignore[no-untyped-call]  # of PyTorch
    (site,) = on_h100(causal, *tensors).sites
    assert site.site is not None
    assert site.site.q_len is None


# ---- Autocast


def autocast_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return causal(q @ k.mT @ k, k, v)


@pytest.mark.parametrize("around", [None, torch.bfloat16, torch.float16], ids=str)
def test_autocast(around: torch.dtype | None) -> None:
    """Inside the program; and around it, where a program without a GPU asks for the CPU."""
    with torch.autocast("cpu", around or torch.bfloat16, enabled=around is not None):
        inside = on_h100(autocast_inside, *qkv(dtype=torch.float32))
        outside = on_h100(causal, *qkv(dtype=torch.float32))
    dtypes = [explanation.sites[0].site.dtype for explanation in (inside, outside) if explanation.sites[0].site]
    assert dtypes == ["bfloat16", str(around or torch.float32).removeprefix("torch.")]


# ---- Other entries


def test_varlen() -> None:
    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attn(q, k, v, DOCUMENTS, DOCUMENTS, 100, 100, window_size=(-1, 0))

    explanation = on_h100(packed, *[leaf(LENGTH, 4, 64) for _ in range(3)])
    assert [fate.split(":")[0] for fate in fates(explanation)] == ["causal & segments(0,1)"]


@pytest.mark.parametrize("made", ["inside", "outside", "outside without bounds"])
def test_nested_tensors(made: str) -> None:
    bounds = {} if made.endswith("bounds") else {"min_seqlen": 28, "max_seqlen": 100}

    def nested(x: Tensor, offsets: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x, offsets, **bounds)

    def attend(x: Tensor, offsets: Tensor) -> Tensor:
        q = (nested(x, offsets) if made == "inside" else x).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).values()

    x = leaf(LENGTH, 4, 64)
    given = x if made == "inside" else nested(x.detach(), DOCUMENTS.long()).detach().requires_grad_()
    explanation = on_h100(attend, given, DOCUMENTS.long())
    assert [fate.split(":")[0] for fate in fates(explanation)] == ["causal & segments(0,1)"]
    assert explanation.sites[0].record.op == "aten::_flash_attention_backward"


def test_flex_attention() -> None:
    documents = torch.zeros(LENGTH, dtype=torch.int64)
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]), None, None, LENGTH, LENGTH, "cpu"
    )
    explanation = on_h100(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), *qkv())
    assert fates(explanation) == ["causal & segments(0,0)"]
    assert mask.kv_indices.device.type == "cpu"


def test_gradients_of_what_a_score_mod_reads() -> None:
    slopes = torch.ones(8, requires_grad=True)
    explanation = on_h100(
        lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i)), *qkv()
    )
    assert fates(explanation) == ["full + bias"]


def test_attention_that_inductor_recognises() -> None:
    """It traces a pattern once more, with its backward, where it finds one."""

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) / 8.0, -1) @ v

    assert fates(on_h100(by_hand, *qkv())) == ["full"]


# ---- The rules of PyTorch


def choice(arch: str = "sm_90", **changed: Any) -> str:
    arguments: dict[str, Any] = dict(zip(("query", "key", "value"), qkv(), strict=True))
    return sdpa.choose(sdpa.Call(**arguments | changed), arch)


def of(dim: int, **options: Any) -> dict[str, Tensor]:
    return dict(zip(("query", "key", "value"), qkv(dim, **options), strict=True))


MASK = torch.zeros(LENGTH, LENGTH, dtype=torch.bfloat16)
CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (sdpa.FLASH, {}),
    "dropout": (sdpa.FLASH, {"dropout": 0.1}),
    "a mask": (sdpa.EFFICIENT, {"attn_mask": MASK}),
    "a mask that is expanded along the keys": (sdpa.MATH, {"attn_mask": MASK[:, :1].expand(-1, LENGTH)}),
    "float32": (sdpa.EFFICIENT, of(64, dtype=torch.float32)),
    "float64": (sdpa.MATH, of(64, dtype=torch.float64)),
    "head dimension 20": (sdpa.FLASH, of(20)),
    "head dimension 20, a mask": (sdpa.MATH, of(20) | {"attn_mask": MASK}),
    "head dimension 20, float32": (sdpa.EFFICIENT, of(20, dtype=torch.float32)),
    "head dimension 256": (sdpa.FLASH, of(256)),
    "head dimension 264": (sdpa.EFFICIENT, of(264)),
    "another one of value": (sdpa.EFFICIENT, of(192, value_dim=128)),
    "other lengths, causal": (sdpa.EFFICIENT, {"query": leaf(2, 4, 64, 64), "is_causal": True}),
    "other lengths": (sdpa.FLASH, {"query": leaf(2, 4, 64, 64)}),
    "no keys": (sdpa.MATH, {"key": leaf(2, 4, 0, 64), "value": leaf(2, 4, 0, 64)}),
    "grouped heads": (sdpa.FLASH, {"query": leaf(2, 8, LENGTH, 64), "enable_gqa": True}),
    "strided": (sdpa.MATH, {"query": leaf(2, 4, 64, LENGTH).mT}),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choice(name: str) -> None:
    expected, changed = CHOICES[name]
    assert choice(**changed) == expected


def test_choice_of_other_architectures() -> None:
    assert choice("sm_75") == sdpa.MATH  # bfloat16 begins with sm_80
    assert choice("sm_75", **of(64, dtype=torch.float16)) == sdpa.EFFICIENT
    assert {choice(arch, **of(256)) for arch in ("sm_80", "sm_90", "sm_100")} == {sdpa.FLASH}
    assert {choice(arch, **of(208)) for arch in ("sm_86", "sm_89", "sm_120")} == {sdpa.EFFICIENT}
    assert (choice("sm_89", **of(256)), choice("sm_89", **of(256), dropout=0.1)) == (sdpa.FLASH, sdpa.EFFICIENT)
    with torch.no_grad():
        assert choice("sm_89", **of(208)) == sdpa.FLASH


def test_choice_of_the_program() -> None:
    for backend, expected in (
        (SDPBackend.MATH, sdpa.MATH), (SDPBackend.EFFICIENT_ATTENTION, sdpa.EFFICIENT),
        (SDPBackend.FLASH_ATTENTION, sdpa.FLASH),
    ):  # fmt: skip
        with sdpa_kernel(backend):
            assert choice() == expected
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choice() == sdpa.EFFICIENT
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        choice(attn_mask=MASK)


def test_an_address_at_which_the_kernel_may_not_read() -> None:
    late = torch.zeros(2 * 4 * LENGTH * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 4, LENGTH, 64)
    assert choice(query=late) == sdpa.FLASH
    if dash_inductor.upstream.compat.TORCH < (2, 14):
        with pytest.raises(Untraceable, match="address"):
            choice(query=late, attn_mask=MASK)
    else:
        assert choice(query=late, attn_mask=MASK) == sdpa.MATH


def test_cudnn_may_be_chosen_where_the_flag_only_warns() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert choice() == sdpa.FLASH
    with pytest.raises(Untraceable, match="cuDNN"):
        choice(attn_mask=MASK[:, :1].expand(-1, LENGTH))


OPERATORS = """
    import json

    from tests.support import fakecuda
    from tests.explanations.test_elsewhere import operators_of_all_calls

    print(json.dumps(operators_of_all_calls(lambda name: fakecuda.choose(fakecuda.Backend[name.upper()]))))
"""


@pytest.mark.skipif(compiler() is None, reason="the fake CUDA device needs a C++ compiler")
def test_operators_are_those_of_pytorch() -> None:
    """For each call PyTorch's own code, told what to choose, calls the same operators with the same arguments."""
    calls = json.loads(run_forked(FAKE_GPU, OPERATORS).stdout.splitlines()[-1])
    assert len(calls) >= 10
    for name, (theirs, ours) in calls.items():
        assert theirs == ours, name
        assert any("attention" in operator or "softmax" in operator for operator in theirs), name


def operators_of_all_calls(choose: Callable[[str], None]) -> dict[str, list[list[str]]]:
    """The operators that PyTorch and `sdpa.attention` call, for every call of `CHOICES`, on fake CUDA tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    found = {}
    for name, (chosen, changed) in CHOICES.items():
        if changed.get("enable_gqa") or name == "no keys" or name.startswith("a mask that"):
            continue  # the fake device chooses by itself
        arguments: dict[str, Any] = dict(zip(("query", "key", "value"), qkv(), strict=True)) | changed
        arguments["dropout_p"] = arguments.pop("dropout", 0.0)
        choose(chosen)
        for mask in (None, "bool", "odd") if "attn_mask" in changed else (None,):
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = {k: _there(mode, v) if isinstance(v, Tensor) else v for k, v in arguments.items()}
                if mask == "bool":
                    fake["attn_mask"] = fake["attn_mask"].bool()
                if mask == "odd":
                    fake |= {name: fake[name][:, :, 1:] for name in ("key", "value")}
                    fake["attn_mask"] = fake["attn_mask"][:, 1:]
                theirs = _operators(lambda fake=fake: F.scaled_dot_product_attention(**fake))  # type: ignore[misc]  # bound
                ours = _operators(lambda fake=fake: sdpa.attention(**fake, arch="sm_90"))  # type: ignore[misc]  # bound
            found[f"{name} {mask or ''}"] = [theirs, ours]
    return found


def _there(mode: Any, tensor: Tensor) -> Tensor:
    with mode:
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
        return new.requires_grad_(tensor.requires_grad)


_OF_A_BOOL_MASK = ("logical_not", "scalar_tensor", "where")
"""Versions of PyTorch turn a bool mask into a bias in other orders."""


def _operators(call: Callable[[], object]) -> list[str]:
    """The operators of a call below autograd, with what they are given."""
    from torch.utils._python_dispatch import TorchDispatchMode

    lines: list[str] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = torch.utils._pytree.tree_map_only(Tensor, lambda t: f"{t.dtype}{list(t.shape)}", (args, kwargs))
            if func.namespace != "prim" and func._opname not in _OF_A_BOOL_MASK:
                lines.append(f"{func} {given}")
            return func(*args, **(kwargs or {}))

    with Look():
        call()
    return lines


# ---- The command


SCRIPT = """
import sys
import torch
import torch.nn.functional as F

torch.use_deterministic_algorithms("--eager" not in sys.argv)
q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16, requires_grad=True)

def attend(q, scale=None):
    out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, scale=scale)
    return out if "--item" not in sys.argv or out.sum().item() < 0 else out + 1

class Model(torch.nn.Module):
    def forward(self, q):
        return attend(q)

model = Model()
if "--module" in sys.argv:
    run = torch.compile(model)
elif "--in-place" in sys.argv:
    model.compile()
    run = model
elif "--decorated" in sys.argv:
    run = torch.compile(dynamic=False)(attend)
else:
    run = torch.compile(attend)
if "--no-grad" in sys.argv:
    with torch.no_grad():
        run(q)
else:
    for _ in range(2):
        run(q).sum().backward()
assert q.grad is None or type(q.grad) is torch.Tensor
"""


def explained(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    status = cli.main(["explain", "--json", "--arch", "sm_90", str(script), *words])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("word", ["", "--module", "--in-place", "--decorated"])
def test_script(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its dropout is a site on a GPU, and none on the CPU."""
    before = torch.compile
    status, document = explained(tmp_path, capsys, word)
    (graph,) = document["graphs"]
    (site,) = graph["sites"]
    assert (status, site["tensors"]["device"], site["decision"]["arch"]) == (0, "cuda:0", "sm_90")
    assert (document["unknown"], document["notes"]) == ("", [])
    assert torch.compile is before


def test_script_of_which_nothing_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = explained(tmp_path, capsys, "--item")
    assert status == 1
    assert "reads the value of a tensor" in document["unknown"]
    assert f"{tmp_path / 'train.py'}:11" in document["unknown"]


def test_script_without_compiled_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = explained(tmp_path, capsys, "--eager")
    assert (status, document["unknown"]) == (1, "")
    assert document["notes"]
    assert not [site for graph in document["graphs"] for site in graph["sites"]]


def test_script_without_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = explained(tmp_path, capsys, "--no-grad")
    found = [(site["status"], site["kind"]) for graph in document["graphs"] for site in graph["sites"]]
    assert (status, document["unknown"], set(found)) == (0, "", {("replaced", "forward only")})


def test_graphs_that_no_call_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("import torch\n", "import torch\nfrom torch._dynamo import optimize\n", 1))
    script.write_text(script.read_text().replace("torch.compile(attend)", "optimize('inductor')(attend)"))
    script.write_text(script.read_text().replace("dropout_p=0.1", "dropout_p=0.0"))
    assert cli.main(["explain", "--json", "--arch", "sm_90", str(script)]) == 1
    assert "otherwise than by a call" in json.loads(capsys.readouterr().out)["unknown"]


def test_dump_for_an_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert cli.main(["dump", "-o", str(tmp_path / "out"), "--arch", "sm_90", "--json", str(script)]) == 0
    document = json.loads(capsys.readouterr().out)
    (page,) = Path(document["index"]).parent.glob("*/index.html")
    before = (page.parent / "joint_before.py").read_text()
    assert "_scaled_dot_product_flash_attention_backward" in before
    assert "cuda:0" in before
    assert config.dump == ""
