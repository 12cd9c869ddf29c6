"""Dilated masks: the reference in fp64, and the Hopper kernels compiled and as plain Python on numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.common.device.relations.congruent import LARGEST_STEP, PROGRESSIONS, encoded
from dash_inductor.kernels.common.mask_data import MaskData
from dash_inductor.kernels.common.relations import vectors
from dash_inductor.kernels.families import FAMILIES
from dash_inductor.kernels.hopper.backward import build as backward
from dash_inductor.kernels.hopper.forward import build as forward
from dash_inductor.kernels.hopper.forward.data import ForwardData
from dash_inductor.kernels.reference import tables as reference_tables
from dash_inductor.model import AttentionSpec, Band, Mask, Operand, Site
from dash_inductor.model.components import Dilated

from ..support import forward_tables
from ..support.hopper_builds import TILES
from ..support.table_words import dilation_of, values_of
from .hopper.forward.test_data_glue import BLOCK_KV, ROWS, Launch
from .reference.test_scores import BATCH, DIM, KV, LENGTH, Q, check

STEPS = (1, 2, 3, 64, 100, 1000)
COMPONENT = Dilated(Operand(0), Operand(1))


def by_definition(number: Tensor, step: Tensor, kv_len: int) -> Tensor:
    """Who sees whom, in Python's integers: bool [batch, q_len, kv_len]."""
    rows = [
        [[(n - j) % (s or 1) == 0 for j in range(kv_len)] for n, s in zip(*of_element, strict=True)]
        for of_element in zip(number.tolist(), step.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.bool)


@pytest.mark.parametrize("band", [Band(), Band(0), Band(-20, 40)], ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("offset", [0, -37, 5])
def test_the_reference_against_fp64(step: int, offset: int, band: Band) -> None:
    number = (torch.arange(LENGTH) + offset).expand(BATCH, -1)
    shown = ((Q + offset - KV) % step == 0).expand(BATCH, 1, -1, -1)
    shown = shown & (band.lo is None or band.lo <= Q - KV) & (band.hi is None or band.hi >= Q - KV)
    spec = AttentionSpec(Mask(band, COMPONENT), DIM**-0.5)
    check(spec, [number, torch.full((BATCH, LENGTH), step, dtype=torch.int32)], shown)


@pytest.mark.parametrize("seed", range(40))
def test_vectors_against_the_definition(seed: int) -> None:
    """Any lengths, numbers of either sign, steps of either sign and zero."""
    rng = random.Random(seed)
    band, q_len, kv_len = Band(rng.choice((None, 0, -9))), rng.choice((1, 7, 40)), rng.choice((1, 9, 130))
    data = MaskData(band, 2, 2, 1, q_len, kv_len, values_of(torch.ones(2, kv_len, dtype=torch.bool)))
    number, step = dilation_of(rng, data)
    shown = by_definition(number, step, kv_len)
    data = replace(data, values=values_of(dilated=(number, step)))
    inside = reference_tables._shown(replace(data, values=values_of(torch.ones(2, kv_len, dtype=torch.bool))))
    assert torch.equal(reference_tables._shown(data)[:, 0], shown & inside[:, 0])
    (of,) = vectors(data)
    assert of.form is PROGRESSIONS
    assert torch.equal(seen(of.form.vectors(of, data)[0].unbind(1), torch.arange(kv_len)), shown)


def seen(found: Sequence[Tensor], keys: Tensor) -> Tensor:
    """The element test as the kernels compute it, with numbers of 32 bits: bool [*vectors, *keys]."""
    queries = tuple(vector.view(*vector.shape, *[1] * keys.ndim) for vector in found)
    assert {vector.dtype for vector in found} == {torch.int32}
    return PROGRESSIONS.test.fn(torch.tensor(True), queries, (keys.to(torch.int32),))


def steps_of(kind: str, rng: random.Random) -> list[int]:
    """Steps from 1 to 2**30, of a kind."""
    powers = [2**n for n in range(31)]
    if kind == "small":
        return list(range(1, 3000))
    if kind == "powers of two and beside":
        return sorted({step for power in powers for step in range(power - 3, power + 4) if 1 <= step <= 2**30})
    if kind == "odd multiples of powers of two":
        return [odd * power for power in powers for odd in (3, 5, 7, 683, 65535, 2**20 + 7) if odd * power <= 2**30]
    return [rng.randint(1, 2 ** rng.randint(1, 30)) for _ in range(1500)]


STEPS_OF = ["small", "powers of two and beside", "odd multiples of powers of two", "random"]


@pytest.mark.parametrize("kind", STEPS_OF)
def test_the_divisibility_of_every_step_against_remainders(kind: str) -> None:
    """Keys beside all multiples near both ends and in the middle, small ones, large ones, random ones and powers."""
    rng = random.Random(kind)
    generator = torch.Generator().manual_seed(1)
    step = torch.tensor(steps_of(kind, rng)).repeat(4)
    first = (torch.rand(step.shape, generator=generator, dtype=torch.float64) * step).long()
    first[: len(step) // 4], first[len(step) // 4 : len(step) // 2] = 0, (step - 1)[len(step) // 4 : len(step) // 2]
    vectors = encoded(first, step)
    powers = 2 ** torch.arange(31)
    fixed = torch.cat([torch.arange(300), 2**30 - 1 - torch.arange(300), powers, powers - 1, powers + 1])
    fixed = torch.cat([fixed, torch.randint(0, 2**30, (500,), generator=generator)])
    most = (2**30 - 1 - first) // step
    index = torch.stack([torch.zeros_like(most), most // 3, most // 2, most - 1, most, most + 1, most // 7])
    beside = (first + index * step)[:, :, None] + torch.tensor([-1, 0, 1, 2**16, -(2**29)])
    own = beside.permute(1, 0, 2).reshape(len(step), -1)
    for keys in (fixed.expand(len(step), -1), own):
        keys = keys.clamp(0, 2**30 - 1)
        queries = tuple(vector[:, None] for vector in vectors)
        found = PROGRESSIONS.test.fn(torch.tensor(True), queries, (keys.to(torch.int32),))
        assert torch.equal(found, (keys >= first[:, None]) & ((keys - first[:, None]) % step[:, None] == 0))


def test_one_key_beside_the_largest_step() -> None:
    """First positions that are not below the step: of queries that see no key."""
    first = torch.tensor([0, 1, 5, 2**29 + 1, 2**30 - 1, 2**30])
    keys = torch.tensor([0, 1, 5, 6, 2**29, 2**29 + 1, 2**30 - 1])
    found = seen(encoded(first, torch.full_like(first, LARGEST_STEP)), keys)
    assert torch.equal(found, keys == first[:, None])


@pytest.mark.parametrize("step", [1, 2, 3, 12, 1000, 4096, 99999])
def test_every_key(step: int) -> None:
    keys, first = torch.arange(300_000), torch.tensor([0, 1, step // 2, step - 1]).clamp(max=step - 1)
    found = seen(encoded(first, torch.full_like(first, step)), keys)
    assert torch.equal(found, (keys >= first[:, None]) & ((keys - first[:, None]) % step == 0))


MASKS = [
    "dilated(0,1)",
    "causal & dilated(0,1)",
    "band(-5,70) & dilated(0,1)",
    "causal & keys(2) & dilated(0,1)",
    "segments(2,3) & interval(4,none,none) & dilated(0,1)",
]


@pytest.mark.parametrize("text", MASKS)
def test_hopper_kernels_compile(text: str) -> None:
    spec = AttentionSpec(Mask.parse(text), 0.1)
    site = Site("cuda", "bfloat16", 2, 4, 2, 1000, 1000, 64, 64, spec)
    assert [family.name for family in FAMILIES if family.covers(site, "sm_90")] == ["portable", "hopper"]
    of = forward.Specialisation("bfloat16", 64, 64, spec.traits, False)
    assert of.layout.reads_positions
    assert forward.Kernels(of).main.metadata.shared > 0
    main = backward.Kernels(
        backward.Specialisation("bfloat16", 64, 64, 1, "spt", spec.traits, False, TILES[64, 64])
    ).main
    assert main.metadata.shared > 0


@dataclass(frozen=True)
class DilatedLaunch(Launch):
    """A launch of the forward under one step, or of any numbers and steps where it is 0."""

    step: int = 0

    def __str__(self) -> str:
        return f"{self.step} {super().__str__()}"

    @property
    def values(self) -> tuple[Tensor, Tensor]:
        if self.step:
            return torch.arange(self.q_len).expand(self.batch, -1) - 30, torch.full((self.batch, self.q_len), self.step)
        return dilation_of(random.Random(4), self.of_mask(torch.ones(self.batch, self.kv_len, dtype=torch.bool)))

    def of_mask(self, valid: Tensor | None = None, dilated: tuple[Tensor, Tensor] | None = None) -> MaskData:
        sizes = self.batch, self.heads, self.kv_heads, self.q_len, self.kv_len
        return MaskData(self.band, *sizes, values_of(valid, dilated=dilated))

    @property
    def keep(self) -> Tensor:
        shown = by_definition(*self.values, self.kv_len)[:, None] & self.band_keep
        return shown.expand(-1, self.heads, -1, -1)

    def data(self) -> tuple[ForwardData, int]:
        keep, data = self.keep[:, 0], self.of_mask(dilated=self.values)
        has_lo, consumers = self.tables.resolved.band.lo is not None, forward.FORWARD_CONFIGS[self.columns].consumers
        (of,) = vectors(data)
        q_vectors, _ = of.form.vectors(of, data)
        words = forward_tables.tables(keep, has_lo, consumers, BLOCK_KV, ROWS)
        return ForwardData(q_vectors, None, keep.any(1, keepdim=True), *words), 1

    def problem(self, listed: bool) -> forward.Specialisation:
        found = super().problem(listed)
        return replace(found, traits=replace(found.traits, components=("dilated",)))


LAUNCHES = [
    DilatedLaunch(None, Band(), 40, 48, step=3),
    DilatedLaunch(None, Band(), 33, 70, (128, 128), group=2, step=64),
    DilatedLaunch(None, Band(0), 90, 90, kv_heads=2, step=2),
    DilatedLaunch(None, Band(0, None, "bottom_right"), 70, 90, step=100),
    DilatedLaunch(None, Band(0, 20), 100, 100, (128, 128), group=3, step=7),
    DilatedLaunch(None, Band(-20, 20), 60, 75, step=1),
    DilatedLaunch(None, Band(None, -5), 33, 70, step=1000),
    DilatedLaunch(None, Band(), 90, 83, group=2),
    DilatedLaunch(None, Band(0), 64, 64, (192, 128)),
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_roles_of_the_forward_compute_attention(launch: DilatedLaunch) -> None:
    launch.run(late=True).check()
    launch.run(seed=1, resident=1).check()
