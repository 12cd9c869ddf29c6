"""Settings: typed, checked everywhere, part of the cache keys."""

from __future__ import annotations

import pydoc
from pathlib import Path

import pytest

import dash_inductor
from _dash_inductor_state import BOOLEANS
from dash_inductor.config import REWRITES, SETTINGS, Config, config
from dash_inductor.errors import ArgumentError, DashError
from dash_inductor.passes import all as passes
from dash_inductor.schedule import schedules
from dash_inductor.upstream import toolchain

NAMES = ", ".join(map(repr, REWRITES))
SCHEDULES = "'auto', 'ascending', 'descending', 'shift', 'symmetric_shift', 'spt', 'bent_fold', 'two_pass'"


def test_defaults() -> None:
    fresh = Config({})
    assert (fresh.strict, fresh.cpu, fresh.schedule, fresh.forward) == (False, "off", "auto", "auto")
    assert (fresh.profile, fresh.blocks, fresh.fill_uninitialized_memory) == (False, True, False)
    assert fresh.rewrites == REWRITES


def test_environment() -> None:
    environ = {"DASH_INDUCTOR_STRICT": "1", "DASH_INDUCTOR_CPU": "reference", "DASH_INDUCTOR_SCHEDULE": "shift"}
    fresh = Config({**environ, "DASH_INDUCTOR_FORWARD": "keep", "DASH_INDUCTOR_PROFILE": "yes"})
    assert (fresh.strict, fresh.cpu, fresh.schedule, fresh.forward) == (True, "reference", "shift", "keep")
    assert fresh.profile is True
    assert Config({"DASH_INDUCTOR_CPU": ""}).cpu == "off"  # empty is not set


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("DASH_INDUCTOR_STRICT", "maybe", "one of '0', '1', 'false', 'true', 'no', 'yes', 'off', 'on'"),
        ("DASH_INDUCTOR_CPU", "Reference", "one of 'off', 'reference'"),
        ("DASH_INDUCTOR_FORWARD", "fast", "one of 'auto', 'keep'"),
        ("DASH_INDUCTOR_BLOCKS", "never", "one of '1', 'true', 'yes', 'on', '0', 'false', 'no', 'off'"),
        ("DASH_INDUCTOR_REWRITES", "pad_gemm", f"'all', or names separated by commas out of {NAMES}"),
        ("DASH_INDUCTOR_REWRITES", "pad_mm,", f"'all', or names separated by commas out of {NAMES}"),
    ],
)
def test_bad_environment(variable: str, text: str, allowed: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        Config({variable: text})
    assert str(raised.value) == f"{variable}={text!r} is not allowed: expected {allowed}"


@pytest.mark.parametrize("spelling", BOOLEANS)
def test_spellings_of_booleans(spelling: str) -> None:
    for text in (spelling, spelling.upper(), spelling.capitalize()):
        assert Config({"DASH_INDUCTOR_STRICT": text}).strict is BOOLEANS[spelling]
        config.strict = not BOOLEANS[spelling]
        config.strict = text  # type: ignore[assignment]  # the point of the test
        assert config.strict is BOOLEANS[spelling]


@pytest.mark.parametrize("value", [0, 1, False, True])
def test_numbers_are_booleans_and_leave_one_cache_key(value: int) -> None:
    config.strict = not value
    config.strict = value  # type: ignore[assignment]  # the point of the test
    assert config.strict is bool(value)
    assert ("strict", bool(value)) in config.cache_key()


def test_help_does_not_show_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASH_TEST_TOKEN", "a-secret-of-the-notebook")
    for thing in (dash_inductor.config, Config, config, toolchain):
        assert "a-secret-of-the-notebook" not in pydoc.render_doc(thing)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("strict", 2, "False, True"),
        ("strict", "maybe", "False, True"),
        ("strict", None, "False, True"),
        ("cpu", True, "'off', 'reference'"),
        ("schedule", "best", SCHEDULES),
    ],
)
@pytest.mark.parametrize("settings", [config, dash_inductor.config], ids=["object", "module"])
def test_bad_assignment(settings: object, name: str, value: object, allowed: str) -> None:
    before = config.cache_key()
    with pytest.raises(ArgumentError) as raised:
        setattr(settings, name, value)
    assert str(raised.value) == f"config.{name}={value!r} is not allowed: expected one of {allowed}"
    assert config.cache_key() == before


def test_rewrites_are_those_that_exist() -> None:
    """`user_kernels` rewrites nothing: its records are always there."""
    assert list(REWRITES) == sorted({each.name for each in passes.REWRITES} - {"user_kernels"})
    for name in REWRITES:
        config.rewrites = [name]
        on = {each.name for each in passes.REWRITES if each.is_on(config)}
        assert on == {"attention", "user_kernels", name}, name


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("all", REWRITES),
        (REWRITES, REWRITES),
        ("attention", ("attention",)),
        (set(), ("attention",)),
        ("pad_mm", ("attention", "pad_mm")),
        ("pad_mm, index_sums", ("attention", "index_sums", "pad_mm")),
        ({"pad_mm", "attention", "index_sums"}, ("attention", "index_sums", "pad_mm")),
        (frozenset({"pad_mm", "index_sums"}), ("attention", "index_sums", "pad_mm")),
        (["pad_mm", "index_sums", "pad_mm"], ("attention", "index_sums", "pad_mm")),
    ],
)
def test_sets_of_rewrites(given: str | set[str] | list[str], value: tuple[str, ...]) -> None:
    """Equal sets leave equal keys, however they are given."""
    with config.patch(rewrites=given):
        assert config.rewrites == value
        assert ("rewrites", value) in config.cache_key()
        assert config.rewrites_more() is (value != ("attention",))
        config.rewrites = config.rewrites  # what is read may be assigned
        assert config.rewrites == value
    if isinstance(given, str):
        assert Config({"DASH_INDUCTOR_REWRITES": given}).rewrites == value


@pytest.mark.parametrize("value", [{"pad_gemm"}, ["pad_mm", 3], None, True, 3, {"pad_mm": True}])
def test_bad_sets_of_rewrites(value: object) -> None:
    before = config.cache_key()
    with pytest.raises(ArgumentError) as raised:
        config.rewrites = value  # type: ignore[assignment]  # the point of the test
    assert str(raised.value) == (
        f"config.rewrites={value!r} is not allowed: expected 'all', or a set of names out of {NAMES}"
    )
    assert config.cache_key() == before


@pytest.mark.parametrize("name", ["pad_gemm", "permutations", "few_indices", "index_sums", "tied_embeddings", "fill"])
def test_former_names_are_none(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"setting='{name}' is not allowed"):
        setattr(config, name, "off")


def test_schedules_are_those_that_exist() -> None:
    assert sorted(SETTINGS["schedule"].allowed) == sorted(["auto", *schedules.NAMES])


def test_unknown_setting() -> None:
    with pytest.raises(ArgumentError, match=", ".join(map(repr, SETTINGS))):
        config.strcit = True  # type: ignore[attr-defined]  # the point of the test
    with pytest.raises(AttributeError, match=f"the settings are {', '.join(SETTINGS)}"):
        _ = config.strcit  # type: ignore[attr-defined]  # the point of the test


def test_patch_restores() -> None:
    config.cpu = "reference"
    with config.patch(strict=True, cpu="off") as patched:
        assert patched is config
        assert (config.strict, config.cpu) == (True, "off")
    assert (config.strict, config.cpu) == (False, "reference")
    with pytest.raises(ZeroDivisionError), config.patch(strict=True):
        _ = 1 / 0
    assert config.strict is False


def test_patch_with_a_bad_value_changes_nothing() -> None:
    with pytest.raises(ArgumentError), config.patch(strict=True, cpu="gpu"):
        pytest.fail("the block must not run")
    assert config.strict is False


def test_every_setting_of_code_changes_the_cache_key() -> None:
    for name, setting in SETTINGS.items():
        seen = set()
        values = set(setting.allowed.values()) if setting.allowed else {"", "folder"}
        for value in values:
            with config.patch(**{name: value}):
                seen.add(config.cache_key())
        assert len(seen) == (len(values) if setting.of_code else 1), name


def test_a_folder(tmp_path: Path) -> None:
    assert Config({}).dump == Config({"DASH_INDUCTOR_DUMP": ""}).dump == ""
    assert Config({"DASH_INDUCTOR_DUMP": "dump"}).dump == "dump"
    config.dump = tmp_path  # type: ignore[assignment]  # a path stands for its text
    assert config.dump == str(tmp_path)
    with pytest.raises(ArgumentError, match=r"config\.dump=3 is not allowed: expected a path"):
        config.dump = 3  # type: ignore[assignment]  # the point of the test


def test_attribute_of_the_package() -> None:
    dash_inductor.config.strict = True
    assert config.strict is True
    with dash_inductor.config.patch(cpu="reference"):
        assert config.cpu == "reference"
    with pytest.raises(DashError):
        dash_inductor.config.cpu = "fast"  # type: ignore[assignment]  # the point of the test
    values = {name: setting.default for name, setting in SETTINGS.items()} | {"strict": True}
    expected = f"Config({', '.join(f'{name}={value!r}' for name, value in values.items())})"
    assert repr(dash_inductor.config) == expected
