"""How kernels are launched: the driver is given what Triton's own launcher gives it, whatever the version."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ...support.distribution import ROOT
from ...support.stubcuda import compiler

KERNELS = ("prepare", "main", "finish", "resident", "forward", "draws")


@pytest.fixture(scope="module")
def launched() -> dict[str, Any]:
    if compiler() is None:
        pytest.skip("the stub of the driver needs a C compiler")
    command = [sys.executable, "-m", "tests.kernels.common.launched"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_the_driver_is_given_what_triton_gives_it(name: str, launched: dict[str, Any]) -> None:
    """Grid, block, shared memory, stream, attributes, every parameter and every descriptor, bit by bit."""
    found = launched[name]
    assert found["equal"]
    assert not found["equal to another"]  # the stub sees a difference in any argument
    assert found["nonzero"] == found["parameters"] - 2  # all but scratch memory have numbers that could differ
    assert found["attributes"] == (name not in ("prepare", "draws"))


@pytest.mark.parametrize("name", [*KERNELS, "mixed"])
def test_launches_that_are_moved(name: str, launched: dict[str, Any]) -> None:
    """To other addresses and another stream, in memory that no other thread has: the driver is given the same."""
    assert launched[name]["moved"] == [True] * 6
    assert launched[name]["blocks"] == 2
    encoded = launched[name]["encoded to move"]
    assert encoded == (6 * 4 if name == "mixed" else 0)


@pytest.mark.parametrize("name", KERNELS)
def test_descriptors_at_other_addresses_are_made_without_the_driver(name: str, launched: dict[str, Any]) -> None:
    assert launched[name]["encoded again"] == 0


def test_a_driver_that_puts_addresses_elsewhere_encodes_all(launched: dict[str, Any]) -> None:
    assert launched["mixed"]["equal"]
    assert launched["mixed"]["encoded again"] == 4


def test_a_misaligned_address_is_refused(launched: dict[str, Any]) -> None:
    """By the driver, as the first one would be."""
    address, error = launched["misaligned"]
    assert address == "0x100000000008"
    assert "at 0x100000000008: CUDA error 1" in error


def test_a_thread_without_a_context_is_given_one(launched: dict[str, Any]) -> None:
    assert launched["contexts bound"] == launched["contexts bound to encode"] == 1


def test_the_driver_refuses(launched: dict[str, Any]) -> None:
    assert launched["error"] == "launching finish: CUDA error 720, an error of the stub"


def test_profilers_are_told(launched: dict[str, Any]) -> None:
    assert launched["hooks"] == ["before finish 77", "after finish 77"]
    assert launched["launches"] == 1


def test_an_empty_grid_is_not_launched(launched: dict[str, Any]) -> None:
    assert launched["empty"] == []


def test_other_parameters_than_the_source_has_are_refused(launched: dict[str, Any]) -> None:
    assert launched["more parameters"].startswith("finish has 19 parameters, qqqqqqiiiiiiif")
    assert launched["more parameters"].endswith("of which its source explains 18, that begin with ")
    assert "which is no TMA descriptor" in launched["another structure"]
