"""The demo end to end on a tiny model, and how it fails when it has to."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import POOL, settings
from rich.console import Console
from stories import DRILLS, KINDS, four_failures

from leto_megatron import demo
from leto_megatron.compare import Comparison
from leto_megatron.demo import DemoFailed
from leto_megatron.folders import SENTINEL, FolderTaken, claim
from leto_megatron.plan import TITLES, Pool
from leto_megatron.promises import PROMISES
from leto_shadow.timeline import Timeline

SEEDS = [pytest.param(7, id="seed7", marks=pytest.mark.slow)]
MORE_SEEDS = [
    pytest.param(seed, id=f"seed{seed}", marks=[pytest.mark.slow, pytest.mark.nightly])
    for seed in (1234, *range(1000, 1020))
]


@pytest.mark.job
@pytest.mark.timeout(900)  # on a busy machine
@pytest.mark.parametrize("seed", SEEDS + MORE_SEEDS)
def test_four_failures_and_an_exact_verdict(seed: int, tmp_path: Path) -> None:
    """Any seed passes: it moves weights, data, and the place and time of every failure."""
    output = io.StringIO()
    config = settings(iterations=40, checkpoint_interval=6, dropout=0.1, seed=seed)
    exact = demo.run_demo(config, tmp_path, Console(file=output, width=100), POOL)
    text = output.getvalue()
    assert exact, f"repeat with: pytest {__file__} -k seed{seed}\n{text}"
    assert "EXACT" in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exact"] is True
    kinds = [row["kind"] for row in report["failures"]]
    assert kinds == ["kill-forward", "kill-update", "hang", "manager"], text
    assert [row["source"] for row in report["failures"]] == ["in-place"] * 3 + ["checkpoint"]
    assert [row["iterations_lost"] for row in report["failures"][:3]] == [0, 0, 0]
    assert 0 <= report["failures"][3]["iterations_lost"] <= 6
    promises = report["compared"][PROMISES]
    assert promises["equal"] == promises["of"] == 4 * 3 + 3 + 2
    update = report["failures"][1]
    assert update["lost_pages"] >= POOL.tier1_pages + 1
    (repair,) = (repair for repair in update["repairs"] if repair["rank"] == update["rank"])
    assert repair["pages_reconstructed"] >= POOL.tier1_pages
    # Pages lost from the half-written chunk come from the undo buffer, and leave parity to verify the rest.
    assert ("no spare parity was left to verify with" in text) is not repair["verified"]
    for run in ("reference", "run"):
        assert report[run]["iterations"] == 40
        assert report[run]["elapsed_s"] > 0
    assert (tmp_path / "report.html").stat().st_size > 10_000


# --- the verdict wants the promised recoveries ----------------------------------------------------------


def tell(out: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[list[dict[str, Any]]], None]) -> Any:
    """`run_demo` with runs that agree in every bit and the made-up story, changed."""
    events = four_failures()
    change(events)
    timeline = Timeline(KINDS, TITLES)
    for event in events:
        timeline.feed(event)

    def reference(_config: object, folder: Path, _pool: object, _display: object) -> None:
        (folder / "final-rank0.json").write_text('{"elapsed_s": 1.0}')

    def equal(*_arguments: object) -> Comparison:
        comparison = Comparison()
        comparison.count("parameters", True, "")
        return comparison

    monkeypatch.setattr(demo, "_run_reference", reference)
    monkeypatch.setattr(demo, "_run_leto", lambda *_arguments: timeline)
    monkeypatch.setattr(demo, "_owned_numel", lambda _folder: 1)
    monkeypatch.setattr(demo, "make_drills", lambda *_arguments: DRILLS)
    monkeypatch.setattr(demo, "compare_runs", equal)
    output = io.StringIO()
    verdict = demo.run_demo(settings(iterations=40), out, Console(file=output, width=120), Pool())
    return verdict, json.loads((out / "report.json").read_text()), output.getvalue()


def test_the_story_as_it_should_be_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, report, text = tell(tmp_path, monkeypatch, lambda _events: None)
    assert verdict, text
    assert report["exact"] is True
    assert "EXACT: bit for bit" in text
    assert "6 pages reconstructed, no spare parity was left to verify with" in text


def nth(events: list[dict[str, Any]], kind: str, number: int) -> dict[str, Any]:
    return [event for event in events if event["event"] == kind][number]


def repaired(events: list[dict[str, Any]], **values: Any) -> None:
    """Change what rank 0 said of its repair after the second failure (two reports a recovery)."""
    event = nth(events, "resumed", 2)
    assert event["breakdown"]["pages_reconstructed"] == 6
    event.update({k: v for k, v in values.items() if k == "rank"})
    event["breakdown"].update({k: v for k, v in values.items() if k != "rank"})


def without(events: list[dict[str, Any]], kind: str, number: int) -> None:
    events.remove(nth(events, kind, number))


MUTANTS: dict[str, tuple[Callable[[list[dict[str, Any]]], None], str]] = {
    **{
        f"{kind} fell back": (
            lambda events, n=number: nth(events, "recovered", n).update(source="checkpoint"),
            f"{kind}: source checkpoint instead of in-place",
        )
        for number, kind in enumerate(list(KINDS)[:3])
    },
    "fatal one in place": (
        lambda events: nth(events, "recovered", 3).update(source="in-place"),
        "manager: source in-place instead of checkpoint",
    ),
    **{
        f"{kind} on another rank": (
            lambda events, n=number: nth(events, "failure", n).update(rank=1 - DRILLS[list(KINDS)[n]].rank),
            f"{kind}: rank {1 - DRILLS[kind].rank} was blamed instead of rank {DRILLS[kind].rank}",
        )
        for number, kind in enumerate(KINDS)
    },
    "an iteration lost": (
        lambda events: nth(events, "recovered", 2).update(iteration=29),
        "hang: 1 iterations lost instead of 0",
    ),
    "no pages lost": (
        lambda events: nth(events, "recovered", 1).update(lost_pages=0),
        "kill-update: 0 pages were missing instead of 6 data and 1 parity pages",
    ),
    "the parity page not lost": (
        lambda events: nth(events, "recovered", 1).update(lost_pages=6),
        "kill-update: 6 pages were missing",
    ),
    "nothing reconstructed": (
        lambda events: repaired(events, pages_reconstructed=0.0),
        "kill-update: rank 0 reconstructed 0 pages instead of 6 at least",
    ),
    "too little reconstructed": (
        lambda events: repaired(events, pages_reconstructed=5.0),
        "kill-update: rank 0 reconstructed 5 pages",
    ),
    "reconstructed by another rank": (
        lambda events: repaired(events, rank=1),
        "kill-update: rank 0 reconstructed 0 pages",
    ),
    "never struck": (
        lambda events: without(events, "drill_fired", 2),
        "hang: struck 0 times instead of once",
    ),
    "never recovered": (
        lambda events: without(events, "recovered", 3),
        "manager: source None instead of checkpoint",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_promise_fails_the_verdict(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, said = MUTANTS[name]
    verdict, report, text = tell(tmp_path, monkeypatch, change)
    assert not verdict
    assert report["exact"] is False
    assert any(line.startswith(f"{PROMISES}: {said}") for line in report["differences"]), text
    assert "NOT AS PROMISED" in text
    assert "EXACT" not in text
    assert "Not as promised." in (tmp_path / "report.html").read_text()


# --- the output folder --------------------------------------------------------------------------------


def test_folders_of_others_are_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "leto" / "__init__.py"
    source.parent.mkdir()
    source.write_text("precious = True\n")
    with pytest.raises(SystemExit) as caught:
        demo.main(["--out", str(tmp_path)])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert str(source.parent) in said
    assert "choose another folder with --out" in said
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*")] == [
        Path("leto"),
        Path("leto/__init__.py"),
    ]
    assert source.read_text() == "precious = True\n"


def make_link(place: Path) -> None:
    (place.parent / "elsewhere").mkdir()
    (place.parent / "elsewhere" / SENTINEL).write_text("Made by hand.\n")
    place.symlink_to("elsewhere")


def make_false_mark(place: Path) -> None:
    place.mkdir()
    (place / SENTINEL).write_text("another program's\n")


@pytest.mark.parametrize(
    "occupy",
    [
        make_link,
        make_false_mark,
        lambda place: place.write_text("a file"),
        lambda place: place.symlink_to("nowhere"),
        lambda place: (place.parent / "report.html").write_text("my own report"),
    ],
)
def test_whatever_no_demo_made_is_refused(occupy: Callable[[Path], object], tmp_path: Path) -> None:
    occupy(tmp_path / "leto")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FolderTaken, match="choose another folder"):
        claim(tmp_path, ["reference", "leto"], ["report.html"])
    assert sorted(tmp_path.rglob("*")) == before


def test_an_earlier_demo_is_replaced_and_neighbours_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "leto").mkdir()  # empty: nothing to lose
    reference, run = claim(tmp_path, ["reference", "leto"], ["report.html"])
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (run / "deep" / "er").mkdir(parents=True)
    (run / "deep" / "er" / "file").touch()
    (run / "link").symlink_to(outside, target_is_directory=True)
    (tmp_path / "report.html").touch()
    (reference / SENTINEL).unlink()
    reference.rmdir()
    claim(tmp_path, ["reference", "leto"], ["report.html"])
    assert [path.name for path in run.iterdir()] == [SENTINEL]
    assert [path.name for path in reference.iterdir()] == [SENTINEL]
    assert (outside / "kept").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


# --- failing runs -------------------------------------------------------------------------------------


def test_a_failing_run_shows_the_end_of_its_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with pytest.raises(DemoFailed, match=re.compile("exit status 3.*the reason", re.DOTALL)):
        demo._supervise("trial", command, log, lambda: False)


def test_a_silent_run_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_SILENCE_S", 0.5)
    command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    log = tmp_path / "log"
    with pytest.raises(DemoFailed, match="no progress"):  # it counts from its first word on
        demo._supervise("trial", command, log, lambda: not log.exists() or not log.read_text())
    pid = int(log.read_text())
    assert not Path(f"/proc/{pid}").exists(), "the child was left behind"


@pytest.mark.parametrize("words", [["--iterations", "10"], ["--seed", "-1"], ["--seed", "x"]])
def test_wrong_arguments_end_with_status_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(words)
    assert caught.value.code == 2
    assert "error" in capsys.readouterr().err
