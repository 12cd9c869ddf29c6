"""No machine is accused of what a program does: real processes that differ on a rank, or write their own state."""

from __future__ import annotations

from typing import Any

import pytest

from .support.innocent import FAULTS, ODD, PROGRAMS, besides, flags, models, weights
from .support.innocent.run import run

DETAILED = [*flags.PROGRAMS, *weights.PROGRAMS, *models.PROGRAMS]
"""Programs of which more is asked than that nobody is accused."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By name of the program; one start of the processes serves all that are asked for."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    names = [name for name in PROGRAMS if name in DETAILED or name in asked]
    return run([*names, *FAULTS], tmp_path_factory.mktemp("innocent"))


def told(result: dict[str, Any]) -> list[str]:
    return [f"{f['severity']} {f['kind']} {f['ranks']} {f['cause']}: {f['sentence']}" for f in result["findings"]]


def no_machine_is_accused(result: dict[str, Any], name: str) -> None:
    """And the weights are the same without the guard."""
    findings = result["findings"]
    if name != "unrepeatable operator":
        assert not result["differ"], "ranks whose weights are others without the guard"
    assert not [f for f in findings if f["cause"] == "machine" or "out of service" in f["advice"]], told(result)
    if "clamped" not in name:
        assert not [f for f in findings if f["severity"] == "confirmed"], told(result)


@pytest.mark.parametrize("name", DETAILED)
def test_no_machine_is_accused(results: dict[str, Any], name: str) -> None:
    no_machine_is_accused(results[name], name)


@pytest.mark.parametrize("name", besides.PROGRAMS)
def test_who_does_something_besides_training_is_no_suspect(results: dict[str, Any], name: str) -> None:
    no_machine_is_accused(results[name], name)
    findings = results[name]["findings"]
    assert {f["severity"] for f in findings} <= {"note"}, told(results[name])
    if name.startswith("frozen"):
        (found,) = [f for f in findings if f["kind"] == "bits"]
        assert "2.layer.weight; no majority says which is right; the program writes frozen" in found["sentence"]


@pytest.mark.parametrize("name", flags.PROGRAMS)
def test_a_flag_on_one_rank_is_named_and_explains_what_the_rank_computes(results: dict[str, Any], name: str) -> None:
    findings = results[name]["findings"]
    foreign = [f for f in findings if f["kind"] == "foreign"]
    assert [f["ranks"] for f in foreign] == [[ODD]], told(results[name])
    fact = {"mkldnn": "settings.mkldnn", "precision": "settings.float32_matmul_precision", "variable": "TORCH_SOME"}
    assert fact[name.split()[1]] in foreign[0]["sentence"]
    assert len(flags.FLAGS) == len(fact)
    effects = [f for f in findings if f["kind"] == "cross_rank_recompute"]
    assert effects or "mkldnn" not in name, told(results[name])
    assert all(f["cause"] == "unknown" and "settings." in f["sentence"] for f in effects), told(results[name])


@pytest.mark.parametrize("name", [name for name in weights.PROGRAMS if name.split()[0] in ("evaluation", "averages")])
def test_who_evaluates_or_averages_weights_is_no_suspect(results: dict[str, Any], name: str) -> None:
    """Weights are exchanged on rank 0 and put back; at most a note says so."""
    assert {f["severity"] for f in results[name]["findings"]} <= {"note"}, told(results[name])
    notes = [f["sentence"] for f in results[name]["findings"]]
    assert len(notes) == (name.startswith("evaluation") and "copy" not in name), notes
    assert all("exchanged on rank 0" in note for note in notes), notes


@pytest.mark.parametrize("name", [name for name in weights.PROGRAMS if name.startswith("clamped")])
def test_what_is_cut_on_one_rank_is_said_to_be_the_program_or_the_machine(results: dict[str, Any], name: str) -> None:
    found = [f for f in results[name]["findings"] if f["kind"] == "at_rest"]
    often = name.endswith("every 1")
    assert [f["severity"] for f in found] == (["suspect", "suspect", "note"] if often else ["suspect"]), told(
        results[name]
    )
    assert all("the program did" in f["sentence"] and f["ranks"] == [ODD] for f in found if f["severity"] != "note")


def test_a_bit_of_weights_that_the_program_averages_itself_is_found(results: dict[str, Any]) -> None:
    (found,) = results["flipped average"]["findings"]
    assert (found["kind"], found["ranks"], found["step"]) == ("bits", [ODD], 8), found
    assert "of 0.weight that the program keeps" in found["tensor"]


@pytest.mark.parametrize("name", ["adversarial", "adversarial 3:1"])
def test_optimizers_that_take_turns_cause_no_finding(results: dict[str, Any], name: str) -> None:
    assert not results[name]["findings"], told(results[name])
    assert results[name]["coverage"]["cross_rank_recompute"]["counts"]["calls"] > 6


@pytest.mark.parametrize("which", ["generator", "discriminator"])
def test_a_layer_of_one_of_two_models_that_computes_wrongly_is_named(results: dict[str, Any], which: str) -> None:
    found = [f for f in results[f"broken {which}"]["findings"] if f["kind"] == "cross_rank_recompute"]
    assert {tuple(f["ranks"]) for f in found} == {(ODD,)}, told(results[f"broken {which}"])
    assert found[0]["severity"] == "confirmed"
    assert 4 <= found[0]["step"] <= 6


def test_a_pipeline_is_told_that_nothing_checks_its_forward(results: dict[str, Any]) -> None:
    (found,) = results["pipeline"]["findings"]
    assert (found["severity"], found["step"]) == ("note", 1)
    assert "nothing checks the forward and the backward here: ranks call different modules" in found["sentence"]


@pytest.mark.parametrize("why", models.UNREPEATABLE)
def test_what_is_not_repeated_is_not_deterministic_or_cannot_be_run_again(results: dict[str, Any], why: str) -> None:
    (found,) = results[f"unrepeatable {why}"]["findings"]
    assert models.UNREPEATABLE[why] in found["sentence"], told(results[f"unrepeatable {why}"])
    assert found["severity"] == "note"
    assert (found["kind"] == "nondeterminism") == (why == "operator")
