"""No machine is accused of what a program does: real processes that differ on a rank, or write their own state."""

from __future__ import annotations

from typing import Any

import pytest

from .support.innocent import FLAGS, ODD, PROGRAMS, run


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By name of the program; one start of the processes serves all."""
    return run(list(PROGRAMS), tmp_path_factory.mktemp("innocent"))


def told(result: dict[str, Any]) -> list[str]:
    return [f"{f['severity']} {f['kind']} {f['ranks']} {f['cause']}: {f['sentence']}" for f in result["findings"]]


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_machine_is_accused(results: dict[str, Any], name: str) -> None:
    findings = results[name]["findings"]
    assert not [f for f in findings if f["cause"] == "machine" or "machine" in f["advice"]], told(results[name])
    assert not [f for f in findings if f["severity"] == "confirmed"], told(results[name])


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("flag")])
def test_a_flag_on_one_rank_is_named_and_explains_what_the_rank_computes(results: dict[str, Any], name: str) -> None:
    findings = results[name]["findings"]
    foreign = [f for f in findings if f["kind"] == "foreign"]
    assert [f["ranks"] for f in foreign] == [[ODD]], told(results[name])
    fact = {"mkldnn": "settings.mkldnn", "precision": "settings.float32_matmul_precision", "variable": "TORCH_SOME"}
    assert fact[name.split()[1]] in foreign[0]["sentence"]
    assert len(FLAGS) == len(fact)
    effects = [f for f in findings if f["kind"] == "cross_rank_recompute"]
    assert effects or "mkldnn" not in name, told(results[name])
    assert all(f["cause"] == "unknown" and "settings." in f["sentence"] for f in effects), told(results[name])
