"""The command line as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from leto_sim import __version__
from leto_sim.cli import main
from leto_sim.sweep import read_rows

ADVISE = ["advise", "--gpus", "8", "--parameters", "1"]


def test_run_prints_three_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "deepseek-v4-128k", "--failures", "200"]) == 0
    text = capsys.readouterr().out
    assert "131,072 GPUs" in text
    assert "94.95 %" in text
    assert "83.06 %" in text


def test_run_as_json_is_reproducible(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in ("1", "1", "2"):
        main(
            [
                "run",
                "kimi-moe-64",
                "--json",
                "--seed",
                seed,
                "--failures",
                "100",
                "--mttf-min",
                "20",
                "--hof-ratio",
                "0.5",
            ]
        )
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0] == outputs[1] != outputs[2]
    leto = outputs[0]["systems"][-1]
    assert leto["system"] == "leto"
    assert leto["closed"] == pytest.approx(leto["exact"], abs=0.01)


def test_run_over_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "olmoe-4", "--trace", "bundled", "--repeat", "20", "--system", "leto"]) == 0
    text = capsys.readouterr().out
    assert "50 % of them HOFs" in text
    trace = tmp_path / "t.csv"
    trace.write_text("# horizon_s = 3600\ntime_s,class\n100,hof\n1000,ff\n")
    assert main(["run", "olmoe-4", "--trace", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mttf_s"] == 1800.0
    assert [s["exact"] for s in found["systems"]] == [None, None]
    assert all(0.8 < s["des"] < 1 for s in found["systems"])


def test_a_trace_without_failures_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("# horizon_s = 3600\ntime_s,class\n")
    assert main(["run", "olmoe-4", "--trace", str(tmp_path / "t.csv")]) == 2
    assert "--trace: expected at least one failure" in capsys.readouterr().err


def test_run_says_where_the_closed_form_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "deepseek-v4-128k", "--mttf-min", "1", "--hof-ratio", "0", "--no-des"]) == 0
    text = capsys.readouterr().out
    assert "refused" in text
    assert "below the mean time to failure" in text


def test_compare_lists_every_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "example-stage", "--data", "64"]) == 0
    text = capsys.readouterr().out
    for name in ("gemini", "gemini+", "jit-ckpt", "jit-ckpt+", "moevement", "moevement+", "leto"):
        assert f"\n{name} " in text
    assert main(["compare", "kimi-moe-64", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["ettr"] for r in rows] == sorted(r["ettr"] for r in rows)


def test_sweep_then_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.csv"
    arguments = [
        "sweep",
        "deepseek-v3-16k",
        "--mttf-min",
        "5:60:12",
        "--hof-ratio",
        "0.5",
        "--method",
        "closed,des",
    ]
    assert main([*arguments, "--failures", "50", "--out", str(out)]) == 0
    assert "48 settings written" in capsys.readouterr().out
    assert len(read_rows(out)) == 48
    again = tmp_path / "again.csv"
    main([*arguments, "--failures", "50", "--out", str(again)])
    assert again.read_bytes() == out.read_bytes()
    page = tmp_path / "p.html"
    assert main(["plot", str(out), "--html", str(page), "--title", "mine"]) == 0
    assert "<h1>mine</h1>" in page.read_text()


def test_reproduce_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--html", str(tmp_path / "r.html")]) == 0
    text = capsys.readouterr().out
    assert "10.6 % (paper: 10.6 %)" in text
    assert "largest difference: 0.0" in text
    assert (tmp_path / "r.html").stat().st_size > 10_000


def test_advise_answers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", "--gpus", "131072", "--iteration-s", "20:30", "--parameters", "1.6e12"]
    assert main([*arguments, "--mttf-min", "10", "--hof-share", "0.7"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Turn Leto on? yes.")
    assert "It pays from a HOF share of about" in text
    assert main([*arguments, "--gpu-mttf-hours", "21845:21846", "--json", "--leto-overhead", "0.004"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["middle"]["mttf_s"] == pytest.approx(600, rel=0.01)
    assert answer["middle"]["leto_overhead"] == 0.004


def test_validate_prints_predicted_against_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    times = {"iterations": 100, "elapsed_s": 900.0}
    run = {"iterations": 100, "elapsed_s": 960.0}
    failures = [{"recovery_s": 20.0}] * 2
    report.write_text(json.dumps({"reference": times, "run": run, "failures": failures}))
    assert main(["validate", str(report), "--profile", "kimi-moe-64"]) == 0
    text = capsys.readouterr().out
    assert "ETTR 93.75 %" in text
    assert "kimi-moe" not in text.split("\n")[0]
    assert "95.83 %" in text
    assert text.count("Kimi-MoE") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing.toml"], "nothing.toml: (file): found 'nothing.toml', expected a readable"),
        (["run", "olmoe-4", "--hof-ratio", "1.5"], "hof_ratio: expected a number in [0, 1], found 1.5"),
        (["run", "olmoe-4", "--mttf-min", "0"], "mttf_s: expected a finite number above 0 s, found 0"),
        (
            ["run", "olmoe-4", "--system", "jit-ckpt"],
            "--system: expected one of gemini+, leto, found jit-ckpt",
        ),
        (["run", "olmoe-4", "--interval", "soon"], "expected an interval rule among young, best, best-exact"),
        (["run", "olmoe-4", "--interval", "0"], "interval of at least one iteration, found 0"),
        (["run", "olmoe-4", "--data", "4"], "a stage profile (a stated time cannot be scaled)"),
        (["run", "olmoe-4", "--trace", "no.csv"], "no.csv: cannot be read"),
        (
            ["sweep", "olmoe-4", "--method", "magic", "--out", "x"],
            "--method: expected closed, exact, des, found",
        ),
        (["plot", "x.csv"], "expected --html FILE or --png FILE"),
        (["plot", "no.csv", "--html", "p"], "no.csv: cannot be read"),
        (["validate", "no.json"], "no.json: expected a readable JSON report"),
        ([*ADVISE, "--iteration-s", "x", "--mttf-min", "9"], "--iteration-s: expected a number or low:high"),
        ([*ADVISE, "--iteration-s", "1", "--mttf-min", "0"], "--mttf-min: expected a number above 0"),
        ([*ADVISE, "--iteration-s", "1", "--mttf-min", "9:3"], "--mttf-min: expected low <= high"),
        (["run", "example-stage", "--data", "0"], "parallelism.data: found 0, expected an integer of at"),
        (["sweep", "example-stage", "--data", "8,16.5", "--out", "x"], "--data: expected integers of at"),
        (["sweep", "olmoe-4", "--mttf-min", "9", "--out", "no/x.csv"], "no/x.csv: cannot be written"),
        (["reproduce", "--html", "no/x.html"], "no/x.html: cannot be written"),
    ],
)
def test_refusals_are_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith("leto-sim: ")
    assert text.count("\n") == 1
    assert message in text


@pytest.mark.parametrize("words", [[], ["run"], ["run", "olmoe-4", "--mttf-min", "x"], ["frob"]])
def test_a_wrong_command_line_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    text = capsys.readouterr().err
    assert re.match(r"leto-sim( run)?: error: ", text)
    assert text.count("\n") == 1


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_file_that_nests_too_deeply_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep"
    path.write_text(("x = " if command == "run" else "") + "[" * 100_000)
    assert main([command, str(path)]) == 2
    assert "expected a readable" in capsys.readouterr().err


def test_advise_doubts_a_model_that_fits_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--parameters", "671e9", "--iteration-s", "20", "--mttf-min", "10"]
    assert main(["advise", "--gpus", "8", *base]) == 0
    assert "Check --gpus and --parameters: 1,174 GB of model state a GPU" in capsys.readouterr().out
    assert main(["advise", "--gpus", "16384", *base]) == 0
    text = capsys.readouterr().out
    assert "Check" not in text
    assert "depends most on: the HOF share (--hof-share)." in text


def test_compare_says_where_the_closed_form_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "deepseek-v3-16k", "--mttf-min", "1"]) == 0
    assert "gemini+: expected a recovery time below the mean time to failure" in capsys.readouterr().out


def test_a_single_run_has_no_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "olmoe-4", "--trace", "bundled"]) == 0
    assert "±" not in capsys.readouterr().out


def test_the_module_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "leto_sim", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"leto-sim {__version__}\n"


def test_help_exists_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run", "compare", "sweep", "plot", "reproduce", "advise", "profile", "validate"):
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: leto-sim {name}")
