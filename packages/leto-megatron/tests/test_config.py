"""The configuration: the paper's method in every preset, command line and back, nonsense refused."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from leto_megatron import pretrain
from leto_megatron.config import PRESETS, Config, ConfigError, add_arguments, from_arguments, to_arguments

METHOD = {
    "precision": "bf16",
    "recompute": True,
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "warmup_ratio": 0.1,
    "min_lr_ratio": 0.1,
    "clip": 1.0,
    "init_sigma": 0.006,
    "distributed_optimizer": True,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_keeps_the_method_of_the_paper(preset: str) -> None:
    config = dataclasses.asdict(PRESETS[preset])
    assert {name: config[name] for name in METHOD} == METHOD


def parse(words: list[str]) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(words))


@pytest.mark.parametrize("preset", PRESETS)
def test_command_line_and_back(preset: str) -> None:
    config = dataclasses.replace(PRESETS[preset], recompute=False, peak_lr=1 / 3, seed=77, precision="fp32")
    assert parse(list(to_arguments(config))) == config


def test_options_override_the_preset() -> None:
    config = parse(["--preset", "tiny", "--iterations", "9", "--no-distributed-optimizer", "--dropout=0.25"])
    assert (config.iterations, config.distributed_optimizer, config.dropout) == (9, False, 0.25)
    assert config.hidden == PRESETS["tiny"].hidden


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp16"}, "loss scale"),
        ({"hidden": 33}, "multiple of heads"),
        ({"heads": 0}, "heads must be at least 1, found 0"),
        ({"vocabulary": 0}, "vocabulary must be"),
        ({"seed": -1}, "seed must be 0 to"),
        ({"tensor_parallel": 4}, "tensor_parallel"),
        ({"pipeline_parallel": 3}, "pipeline_parallel"),
        ({"dropout": 1.0}, "dropout"),
        ({"iterations": 0}, "iterations"),
        ({"clip": -1.0}, "clip"),
        ({"layers": 0}, "layers"),
        ({"checkpoint_keep": 0}, "checkpoint_keep"),
        ({"checkpoint_interval": -1}, "checkpoint_interval"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(PRESETS["tiny"], **changes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "0"], "layers must be at least 1, found 0"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: Not a directory; give another folder"),
        ([], "expected to be started by torchrun or `leto run`"),
    ],
)
def test_mistakes_on_the_command_line_end_with_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        pretrain.main(["--preset", "tiny", "--out", str(tmp_path / "out"), *words])
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_digest_covers_what_changes_bits_and_nothing_else() -> None:
    config = PRESETS["tiny"]
    assert config.digest(2) == dataclasses.replace(config, checkpoint_interval=7).digest(2)
    assert config.digest(2) != config.digest(4)
    assert config.digest(2) != dataclasses.replace(config, seed=1).digest(2)


def test_warm_up_is_a_tenth_and_shorter_than_the_run() -> None:
    assert PRESETS["paper"].warmup_iterations == 100
    assert dataclasses.replace(PRESETS["tiny"], iterations=1, warmup_ratio=1.0).warmup_iterations == 0
