"""gpu_all: what runs when, what is left of a step that is stopped, and that nothing is left out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PACKAGES = Path(__file__).parents[2]


def of_the_driver(steps: list[Any], tmp_path: Path, driver: Any, limit_s: float = 600.0) -> Any:
    return driver.Run(steps, tmp_path / "logs", limit_s, tmp_path / "out" / "all.tar.gz")


def shell(driver: Any, name: str, stage: str, code: str, limit_s: float = 300.0, **more: Any) -> Any:
    return driver.Step(name, stage, ("sh", "-c", code), limit_s, "exact", **more)


def test_a_failed_or_stopped_step_keeps_nobody_from_running(scripts: Any, tmp_path: Path) -> None:
    driver, page = scripts("gpu_all"), tmp_path / "rmu-x-y"
    steps = [
        shell(driver, "fails, early", "smoke", "sleep 600 & echo $!; exit 3"),
        shell(driver, "hangs", "smoke", "sleep 600", limit_s=0.5),
        shell(driver, "works", "full", f"echo '#' > {page}.md; echo fine", page=page),
    ]
    outcomes = {o.step.name: o for o in of_the_driver(steps, tmp_path, driver).all()}
    assert {name: o.word for name, o in outcomes.items()} == {
        "fails, early": "failed, status 3",
        "hangs": "stopped at its limit",
        "works": "ok",
    }
    pid = outcomes["fails, early"].last
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(int(pid))) as left_behind:
        assert select.select([left_behind], [], [], 60.0)[0], "the step left a process behind"
    with tarfile.open(tmp_path / "out" / "all.tar.gz") as tar:
        assert set(tar.getnames()) == {
            *("logs/fails-early.log", "logs/hangs.log", "logs/works.log"),
            *("logs/summary.json", "logs/summary.md", "pages/rmu-x-y.md"),
        }
        summary = tar.extractfile("logs/summary.json")
        assert summary is not None
        found = {row["name"]: row["last"] for row in json.load(summary)}
        assert found == {"fails, early": pid, "hangs": "", "works": "fine"}


def test_a_step_at_its_limit_is_asked_to_end_and_its_page_is_kept(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes its page when it is asked has its page in the bundle; who does not listen is killed."""
    driver, page = scripts("gpu_all"), tmp_path / "rmu-x-y"
    listens = f"trap 'echo partial > {page}.md; exit 2' TERM; echo up; sleep 600 & wait"
    deaf = "trap '' TERM; sleep 600"

    class Listening(driver.Running):  # type: ignore[misc, name-defined]
        """The limit comes when the step listens, however long its shell takes to begin."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.step.name == "listens":
                while self.log.read_text() != "up\n":
                    assert not select.select([self.pidfd], [], [], 0.01)[0], "it ended before it listened"
                self.until = self.begun

    monkeypatch.setattr(driver, "Running", Listening)
    steps = [
        shell(driver, "listens", "kills", listens, page=page),
        shell(driver, "deaf", "aborts", deaf, limit_s=0.5),
    ]
    first, second = of_the_driver(steps, tmp_path, driver).all()
    assert (first.word, first.status, first.last) == ("stopped at its limit", 2, "up")
    assert second.word == "stopped at its limit"
    assert second.status < 0
    with tarfile.open(tmp_path / "out" / "all.tar.gz") as tar:
        kept = tar.extractfile("pages/rmu-x-y.md")
        assert kept is not None
        assert kept.read() == b"partial\n"


def test_what_has_no_time_left_is_said_not_to_have_run(scripts: Any, tmp_path: Path) -> None:
    driver = scripts("gpu_all")
    steps = [driver.Step("late", "full", ("false",), 300.0, "exact")]
    (outcome,) = of_the_driver(steps, tmp_path, driver, limit_s=1.0).all()
    assert "not begun" in outcome.word


def test_nothing_runs_in_a_place_that_is_not_fit(scripts: Any, tmp_path: Path) -> None:
    driver = scripts("gpu_all")
    steps = [driver.Step(name, name, ("false",), 300.0, "exact") for name in ("place", "full")]
    assert [o.status for o in of_the_driver(steps, tmp_path, driver).all()] == [1, None]


def check_plan(steps: Any, wanted: list[Any], gpus: list[str]) -> float:
    """Hold the order of steps against its rules; when the last one ends, in seconds."""
    spans = list(steps.foreseen(wanted, gpus))
    assert [s for _, _, b in spans for s in b.steps if s not in wanted] == []
    assert sum(len(block.steps) for _, _, block in spans) == len(wanted)
    for n, (begin, end, block) in enumerate(spans):
        for other_begin, other_end, other in spans[n + 1 :]:
            if begin < other_end and other_begin < end:  # side by side
                assert not set(block.gpus) & set(other.gpus), f"{block} and {other} on one GPU"
                assert not (block.contends and other.contends), f"{block} contends with {other}"
                assert "place" not in (block.steps[0].stage, other.steps[0].stage)
    return max(end for _, end, _ in spans)


@pytest.mark.parametrize("gpus", [["0"], ["0", "1"], ["2", "5", "7"]])
def test_steps_that_contend_come_one_at_a_time(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[str]
) -> None:
    steps = scripts("proof_steps")
    wanted = [s for s in steps.all_steps("h200", tmp_path, "cuda") if s.stage in steps.USUAL]
    check_plan(steps, wanted, gpus)
    if len(gpus) > 1:  # the mutant begins whatever a GPU is free for
        careless = lambda queue, block: len(queue.free) >= queue.needed(block)  # noqa: E731
        monkeypatch.setattr(steps.Queue, "may_begin", careless)
        with pytest.raises(AssertionError, match="contends with"):
            check_plan(steps, wanted, gpus)


def test_the_calls_that_are_advised_leave_nothing_out_and_fit(scripts: Any, tmp_path: Path) -> None:
    """Each call of the docstring fits into its limit, and those for a number of GPUs run every stage."""
    driver, steps = scripts("gpu_all"), scripts("proof_steps")
    everything = steps.all_steps("h200", tmp_path, "cuda")
    calls = re.findall(r"gpu_all\.py ([^\n]*) \\\n +--stages ([^\n]*)", driver.__doc__)
    assert len(calls) == 5
    run: dict[int, set[str]] = {1: set(), 2: set()}
    for options, stages in calls:
        count = 2 if "--gpus 2" in options else 1
        limit = re.search(r"--limit (\d+)", options)
        assert limit is not None
        run[count] |= set(stages.split())
        chosen = [s for s in everything if s.stage in stages.split()]
        end = check_plan(steps, chosen, [str(k) for k in range(count)])
        assert end <= float(limit[1]) - driver.GRACE_S, f"{stages}: {end} s are predicted"
    assert run[1] == run[2] == set(steps.USUAL)
    page = (PACKAGES.parent / "docs" / "benchmarks" / "README.md").read_text()
    for _, stages in calls:
        assert f"--stages {stages}" in page, "the page of the benchmarks advises other calls"


def test_the_driver_has_a_step_for_every_script_and_every_test_of_a_gpu(scripts: Any, tmp_path: Path) -> None:
    steps = scripts("proof_steps").all_steps("h200", tmp_path, "cuda")
    commands = [" ".join(step.command) for step in steps]
    for path in sorted(BENCHMARKS.glob("gpu_*.py")):
        apart = path.name in ("gpu_all.py", "gpu_fused_adamw.py")  # itself; a study that takes minutes
        assert apart or any(path.name in command for command in commands), path.name
    found = 0
    for path in sorted(PACKAGES.glob("*/tests/**/test_*.py")):
        if "mark.gpu" not in path.read_text() or path == Path(__file__):
            continue
        found += 1
        package, name = path.relative_to(PACKAGES).parts[0], path.name
        whole = f"packages/{package}/tests"
        assert any(name in c or c.endswith(whole) for c in commands), f"no step runs {path}"
    assert found >= 10
    assert all(step.predicted and step.seconds <= step.limit_s for step in steps)
    assert all(step.seconds > 0 for step in steps)
