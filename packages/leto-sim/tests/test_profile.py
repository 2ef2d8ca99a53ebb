"""Profiles: good ones load, bad ones name the field, the value and the range."""

from __future__ import annotations

import copy
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from leto_sim import ProfileError, iteration_time, load_profile
from leto_sim.fields import SCHEMA
from leto_sim.profile import bundled_profiles, parse_profile
from leto_sim.schema import Number, Table, Tables

STAGE: dict[str, Any] = tomllib.loads(
    (resources.files("leto_sim") / "data" / "example-stage.toml").read_text()
)


def changed(path: str, value: object) -> dict[str, Any]:
    """The example profile with one field set, or removed if the value is ``...``."""
    data = copy.deepcopy(STAGE)
    *heads, last = path.split("/")
    here: Any = data
    for head in heads:
        here = here[int(head)] if isinstance(here, list) else here.setdefault(head, {})
    if value is ...:
        del here[last]
    else:
        here[last] = value
    return data


@pytest.mark.parametrize("name", bundled_profiles())
def test_bundled_profiles_load_and_predict(name: str) -> None:
    profile = load_profile(name)
    assert iteration_time(profile).total_s > 0
    assert "leto" in profile.systems()
    assert list(profile.systems())[-1] == "leto"
    assert profile.mttf_s() > 0
    assert 0 <= profile.hof_ratio() <= 1


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", 2, r"schema: found 2, expected an integer in \[1, 1\]"),
        ("name", "", "name: found '', expected a non-empty string"),
        ("job/gpus", 0, r"job\.gpus: found 0, expected an integer in \[1, 1.67772e\+07\]"),
        ("job/gpus", 10.5, r"job\.gpus: found 10\.5, expected an integer"),
        ("job/gpus", 1000, r"job\.gpus: found 1000, expected data \* tensor \* pipeline = 1024"),
        ("job/gpus", "many", r"job\.gpus: found 'many', expected an integer"),
        ("job/gpus", True, r"job\.gpus: found True, expected an integer"),
        ("job/gpus", ..., r"job\.gpus: missing, expected an integer"),
        ("job/iteration_s", 0, r"job\.iteration_s: found 0, expected a number in \(0, 1e\+06\]"),
        ("job/iteration_s", float("nan"), r"job\.iteration_s: found nan, expected a number"),
        ("parallelism/expert", 7, r"parallelism\.expert: found 7, expected a divisor of .* = 64"),
        ("batch/global_sequences", 2047, r"global_sequences: found 2047, expected a multiple of .* = 32"),
        ("bracket", {}, r"bracket: found \{\}, expected at least 0"),
        (
            "bracket/1/forward_ms",
            -3,
            r"bracket\[1\]\.forward_ms: found -3, expected a number in \(0, 1e\+08\]",
        ),
        (
            "bracket/0/alltoall_backward_ms",
            99,
            r"bracket\[0\]\.alltoall_backward_ms: found 99.*backward_ms = 44",
        ),
        (
            "gradients/algorithm",
            "star",
            r"gradients\.algorithm: found 'star', expected one of 'ring', 'tree'",
        ),
        ("gradients/overlap", 1, r"gradients\.overlap: found 1, expected true or false"),
        ("gradients/moe_interference", 1.2, r"moe_interference: found 1\.2, expected a number in \[0, 1\]"),
        ("gradients/dense_interference", 0.2, r"gradients\.moe_interference: found 0\.4, expected 0 when"),
        ("gradients", ..., r"gradients: missing, expected this table beside the brackets"),
        ("failures/hof_ratio", 1.01, r"failures\.hof_ratio: found 1\.01, expected a number in \[0, 1\]"),
        ("failures/mttf_s", 600, r"failures\.mttf_s: found 600\.0, expected exactly one of"),
        ("failures/gpu_mttf_hours", ..., r"failures\.mttf_s: missing, expected exactly one of"),
        ("failures/hof_ration", 0.5, r"failures\.hof_ration: found 0\.5, .*did you mean 'hof_ratio'\?"),
        (
            "recovery/leto/initialize_s",
            -1,
            r"recovery\.leto\.initialize_s: found -1, expected a number in \[0,",
        ),
        (
            "recovery/leto/fallback",
            "none",
            r"recovery\.leto\.fallback: found 'none', expected one of 'gemini\+'",
        ),
        ("recovery/checkpoint_stall_s", ..., r"recovery\.checkpoint_stall_s: missing, expected a number"),
        ("recovery", "fast", r"recovery: found 'fast', expected a table"),
        ("moodel", 1, r"moodel: found 1, expected a field among"),
    ],
)
def test_bad_profiles_name_the_field_the_value_and_the_range(path: str, value: object, message: str) -> None:
    with pytest.raises(ProfileError, match=message) as caught:
        parse_profile(changed(path, value), "bad.toml")
    assert str(caught.value).startswith("bad.toml: ")
    assert caught.value.field.split("[")[0].split(".")[0] in {*SCHEMA, "moodel"}


def numbers(fields: Any, path: str = "") -> list[tuple[str, Number]]:
    found = []
    for name, spec in fields.items():
        here = f"{path}/{name}" if path else name
        if isinstance(spec, Number):
            found.append((here, spec))
        elif isinstance(spec, Table):
            found += numbers(spec.fields, here)
        elif isinstance(spec, Tables):
            found += numbers(spec.fields, f"{here}/0")
    return found


@pytest.mark.parametrize(("path", "spec"), numbers(SCHEMA), ids=lambda v: v if isinstance(v, str) else "")
def test_every_number_is_held_to_its_range(path: str, spec: Number) -> None:
    for value in (spec.maximum * 1.001 + 1, spec.minimum - 1, float("inf"), "1", None):
        with pytest.raises(ProfileError, match=re.escape(path.replace("/0/", "[0].").replace("/", "."))):
            parse_profile(changed(path, value))


def test_a_fallback_that_the_profile_lacks_is_named() -> None:
    profile = parse_profile(changed("recovery/gemini+", ...))
    with pytest.raises(
        ProfileError, match=r"recovery\.leto\.fallback: found 'gemini\+', expected a system of this profile"
    ):
        profile.systems()


def test_missing_sections_are_named_when_asked_for() -> None:
    profile = parse_profile({"schema": 1, "name": "n", "job": {"gpus": 8, "iteration_s": 2.0}})
    with pytest.raises(ProfileError, match="recovery: missing"):
        profile.systems()
    with pytest.raises(ProfileError, match="failures: missing"):
        profile.mttf_s()
    with pytest.raises(
        ProfileError, match=r"job\.iteration_s: missing, expected an iteration time, or brackets"
    ):
        parse_profile({"schema": 1, "name": "n", "job": {"gpus": 8}})


def test_files_that_are_not_profiles_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="expected a readable TOML file or one of deepseek-v2-1k"):
        load_profile(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ProfileError, match="expected valid TOML"):
        load_profile(tmp_path / "bad.toml")


def test_the_failure_rate_of_a_gpu_grows_into_that_of_a_job() -> None:
    profile = load_profile("example-stage")
    assert profile.mttf_s() == pytest.approx(30000 * 3600 / 1024)
    assert profile.scaled(1024).mttf_s() == pytest.approx(30000 * 3600 / 131_072)
