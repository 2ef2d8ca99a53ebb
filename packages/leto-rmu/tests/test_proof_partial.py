"""Proof scripts that are stopped, or fail, keep what they have proven, and say how much that is."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
INSIDE = ("PROTECTED", "SYNCED", "UPDATED")


def check_kills(page: Path) -> int:
    """Hold what a page of kills says against its data; kills with AdamW that are done."""
    text, data = page.with_suffix(".md").read_text(), json.loads(page.with_suffix(".json").read_text())
    found = re.search(r"^(\*\*Partial\.\*\* )?Done of what was planned: (\d+) of (\d+) kills", text, re.M)
    assert found is not None, "the page does not say how much is done"
    done, planned = int(found[2]), int(found[3])
    proven = sum(run["phases"].get(name, 0) for run in data["runs"] for name in INSIDE)
    compared = sum(run["seen"]["compared"] for run in data["runs"])
    assert done == proven, f"the page says that {done} are done, and {proven} are"
    assert done <= compared - len(data["runs"]), "more kills than states that were compared after one"
    assert bool(found[1]) == (done < planned), "less than planned, and the page does not say so"
    return done


def written(page: Path) -> int:
    """How many kills the page says are done; also while it is written anew, when its data may be ahead."""
    text = page.with_suffix(".md").read_text() if page.with_suffix(".md").exists() else ""
    found = re.search(r"Done of what was planned: (\d+) of", text)
    return int(found[1]) if found else 0


def result_of(kills: int) -> dict[str, Any]:
    """What a run has told after so many kills, each of them compared, one elsewhere besides."""
    return {
        "optimizer": "adamw",
        "scheme": "slots",
        "seed": 1,
        "parameters": 100,
        "kills inside the update": kills,
        "phases": {"SYNCED": kills, "ITERATION": 1, "none": 1},
        "seen": {"compared": kills + 2, "killed in an update": kills + 2},
        "losses": [],
    }


def write_page(kills: Any, page: Path, done: int) -> None:
    spec = {"optimizer": "adamw", "scheme": "slots", "kills": 200, "seed": 1}
    spent = {name: [0.1] for name in kills.PARTS}
    job = kills.Job(spec, {**result_of(done), "spent": spent})
    found, text = kills.pages({"processor": "x"}, [job], kills.total, kills.markdown)()
    sys.modules["proof_place"].keep(found, text, page)  # as `do` does after every comparison


def test_a_page_says_how_much_of_the_plan_is_done(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kills, page = scripts("gpu_kills"), tmp_path / "page"
    for done in (3, 200):
        write_page(kills, page, done)
        assert check_kills(page) == done
    assert not list(tmp_path.glob("*.new"))

    def planned(parts: Any) -> tuple[bool, str]:  # the mutant: what was wanted is taken for what was done
        return True, f"Done of what was planned: {parts[0][1]} of {parts[0][1]} {parts[0][2]}."

    monkeypatch.setattr(kills, "done_of", planned)
    write_page(kills, page, 3)
    with pytest.raises(AssertionError, match="says that 200 are done, and 3 are"):
        check_kills(page)


def test_fewer_than_planned_are_said(scripts: Any) -> None:
    kills = scripts("gpu_kills")

    def job(optimizer: str, done: int | None) -> Any:
        spec = {"optimizer": optimizer, "scheme": "slots", "kills": 5}
        return kills.Job(spec, None if done is None else {"kills inside the update": done})

    enough, text = kills.total([job("adamw", 5), job("adamw", 4), job("sgd", 5), job("muon", None)])
    assert not enough
    assert text.startswith("**Partial.** Done of what was planned: 9 of 10 kills with adamw (slots), 5 of 5")
    assert "0 of 5 kills with muon (slots)" in text
    assert kills.total([job("adamw", 5), job("sgd", 6)])[0]


def test_figure_12_is_held_against_the_reference_as_far_as_both_have_got(scripts: Any) -> None:
    page = scripts("figure12_page")
    states = {str(t): f"state {t}" for t in (9, 10, 19, 20)}
    reference = {"losses": [float(t) for t in range(20)], "states": states}
    good = {"losses": reference["losses"][:10], "recovered": [[10, "state 10"]], "kills": [[9, 1]]}
    result = {"iterations": 20, "reference": reference, "with_updater": good}
    assert page.held(result, "with_updater") == {
        "equal": 10,
        "of": 10,
        "first": None,
        "states": 1,
        "recovered": 1,
        "end": None,
    }
    assert page.verdict(result) == []
    enough, text = page.total(result)
    assert not enough
    assert (
        "1 of 2 kills recovered from and compared (RMP and RMU), 0 of 1 ends compared (RMP and RMU)" in text
    )
    assert "0 of 2 kills recovered from and compared (RMP alone)" in text
    wrong = {**result, "with_updater": {**good, "recovered": [[10, "another state"]]}}
    assert page.verdict(wrong)
    assert page.verdict({**result, "with_updater": {**good, "losses": [*good["losses"][:9], -1.0]}})
    alone = {"losses": reference["losses"], "recovered": [[10, "x"]], "kills": [], "end": "state 20"}
    assert page.verdict({**result, "parity_alone": alone}) == ["RMP alone has to go wrong, and did not"]
    assert not page.verdict({**result, "parity_alone": {**alone, "end": "x"}})
    nothing = {key: value for key, value in result.items() if key != "reference"}
    assert "0 of 2 kills" in page.total(nothing)[1]


LANES = """
import json, os, select, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import proof_children
from proof_place import Place
Place.device = "cpu"
page, mode = Path(sys.argv[2]), sys.argv[3]
jobs = [proof_children.Job({"n": n}) for n in range(3)]

def task(command, channel):
    channel.note(7)
    channel.hear(3600)

def work(lane, spec, tell):
    child = lane.warm.take()
    child.begin("task")
    child.noted(7)
    tell({"done": spec["n"], "child": child.pid})
    if spec["n"] == 0 and mode == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if spec["n"] == 1 and mode == "fail":
        raise RuntimeError("no good")
    if spec["n"] == 2 and mode == "stop":
        print("three jobs have told", flush=True)
    if spec["n"] == 2 and mode in ("stop", "between", "late"):
        child.channel.hear(3600)
    if spec["n"] < 2:
        child.kill()
    tell({"done": spec["n"], "more": True})

if mode == "between":  # SIGTERM arrives after a line was read and before it is kept
    keep = proof_children._Lanes.take_in
    def take_in(lanes, lane, told):
        if told.get("result", {}).get("done") == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        keep(lanes, lane, told)
    proof_children._Lanes.take_in = take_in
if mode == "late":  # before it is read, and the lanes' time is over before this process goes on
    proof_children.GRACE_S, listen = 0.0, proof_children._Lanes.hear
    def hear(lanes, timeout_s, wake=None):
        if 2 not in lanes.doing.values():
            return listen(lanes, timeout_s, wake)
        select.select([lane.channel.socket for lane in lanes.doing], [], [])
        os.kill(os.getpid(), signal.SIGTERM)
        return True
    proof_children._Lanes.hear = hear

def changed():
    page.write_text(json.dumps([[job.result, job.error] for job in jobs]))

all_of_it = proof_children.in_lanes(jobs, 1 if mode != "crash" else 2, work, {"task": task}, 1, changed)
done = [job.result and job.result["done"] for job in jobs]
print(json.dumps([all_of_it, done, [job.error for job in jobs]]))
"""


def lanes(tmp_path: Path, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LANES, str(BENCHMARKS), str(tmp_path / "page.json"), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)


@pytest.mark.parametrize("mode", ["stop", "between", "late"])
def test_sigterm_ends_lanes_and_keeps_what_they_told(tmp_path: Path, mode: str) -> None:
    process = lanes(tmp_path, mode)
    if mode == "stop":  # otherwise the script asks itself, and may end its lane before that says anything
        assert process.stdout is not None
        assert process.stdout.readline() == "three jobs have told\n"
        process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=300)  # until no lane and no child holds the pipe any more
    assert process.returncode == 0
    assert json.loads(out) == [False, [0, 1, 2], ["", "", ""]]
    first, second, third = json.loads((tmp_path / "page.json").read_text())
    assert first[0]["more"]
    assert second[0]["more"]
    assert "more" not in third[0], "it was told before"


@pytest.mark.parametrize(
    ("mode", "error"), [("fail", "RuntimeError: no good"), ("crash", "its lane ended with status 9")]
)
def test_a_job_or_a_lane_that_fails_leaves_the_others(tmp_path: Path, mode: str, error: str) -> None:
    process = lanes(tmp_path, mode)
    out, _ = process.communicate(timeout=300)
    all_of_it, done, errors = json.loads(out)
    assert all_of_it
    assert done == [0, 1, 2]
    assert [error in e for e in errors] == [mode == "crash", mode == "fail", False]


FORKS = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import proof_children, proof_place
proof_place.stop_at_sigterm()
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
try:
    proof_children.Child({}, lambda: None)
except proof_place.Stopped:
    print("stopped")
"""


def test_a_lane_that_is_asked_to_end_while_it_forks_hears_it() -> None:
    """Python ignores what is raised in its hooks after a fork, where a signal of that time is handled."""
    command = [sys.executable, "-c", FORKS, str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("stopped\n", "")


def test_a_folder_is_removed_after_those_who_write_there(scripts: Any, tmp_path: Path) -> None:
    """And the error of a job stays its own: the removal of a folder in use fails with one of its own."""
    place, ended = scripts("proof_place"), []

    def end_users() -> None:
        ended.append([path.is_dir() for path in tmp_path.iterdir()])

    for error in (RuntimeError, place.Stopped):
        with pytest.raises(error), place.folder("job-", end_users, str(tmp_path)):
            raise error
    with place.folder("job-", end_users, str(tmp_path)) as made:
        assert made.parent == tmp_path
    assert ended == [[True], [True]], "after errors only, and while the folder is there"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_script_that_is_stopped_has_a_page_of_what_it_compared(tmp_path: Path) -> None:
    page = tmp_path / "page"
    options = ["--device", "cpu", "--kills", "1000", "--runs", "1", "--others", "0", "--pool", "1"]
    command = [sys.executable, str(BENCHMARKS / "gpu_kills.py"), *options, "--seconds", "3000"]
    process = subprocess.Popen(
        [*command, f"--output={page}"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:  # of lanes, whose news may reach the page later
            if written(page) >= 2:
                break
            found = re.search(r"life \d+ left \w+, (\d+) done", line)
            assert found is None or int(found[1]) < 60, "the page was not written after each comparison"
        else:
            raise AssertionError("the script ended by itself")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 2
    assert "a lane is stopped" in err, "it was killed, and has left its folder behind"
    assert 2 <= check_kills(page) < 1000
    assert out.startswith("# Killed inside the update\n")
    assert "**Partial.**" in out


@pytest.mark.slow
def test_a_kill_counts_only_when_its_recovery_has_been_compared(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """States that differ are no proof, whatever was killed before; the page says what failed."""
    kills, lab, page = scripts("gpu_kills"), scripts("proof_lab"), tmp_path / "page"
    compare = lab.compare

    def differs(training: Any, up: Any, path: Path) -> None:
        compare(training, up, path)
        assert up.iteration == 0, "as if a bit of it were wrong"

    monkeypatch.setattr(lab, "compare", differs)
    options = ["--kills=2", "--runs=1", "--others=0", "--pool=1", "--seconds=500", "--losses=0"]
    monkeypatch.setattr(sys, "argv", ["gpu_kills.py", "--device=cpu", f"--output={page}", *options])
    assert kills.main() == 1
    assert check_kills(page) == 0
    text = page.with_suffix(".md").read_text()
    assert "**Partial.** Done of what was planned: 0 of 2 kills with adamw (slots)." in text
    assert "**Failed**, seed 1: AssertionError" in text
    assert "as if a bit of it were wrong" in text
