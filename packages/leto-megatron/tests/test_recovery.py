"""Real jobs under `leto run`, killed and recovered: every bit as in a stock run that nothing happened to.

Each job is killed in the forward pass and in mid-update (some chunks committed, one half written), the latter
together with as many lost data pages as the group's tier-1 parity tolerates and one poisoned parity page.
CI has a divided model here, a pipeline in the test of case 6, and two replicas in that of the demo
(`test_demo`), which goes through the same kills; the nightly session has these here, and four replicas.
Cases 9, 10 and 11 (learning rate, step counts, random streams) are part of what is compared. Case 6 (a kill
while the pipeline's send and receive are in flight) has a test of its own: a kill in the forward pass of a
pipeline stage finds the peer in a send or receive only most of the time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import POOL, hold_against_reference, reference_beside, reused, run_leto, settings

from leto_megatron.compare import compare_runs
from leto_shadow.drills import Drill, Lose

pytestmark = [pytest.mark.job, pytest.mark.slow, pytest.mark.timeout(900)]  # on a busy machine

TOLERATED = Lose(allocation="arena", group=0, pages=POOL.tier1_pages, tier1=1)

JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2-distributed": (2, {"dropout": 0.1}),
    "tp2": (2, {"tensor_parallel": 2, "dropout": 0.1, "lend_bytes": 256}),
    "pp2": (2, {"pipeline_parallel": 2, "distributed_optimizer": False, "lend_bytes": 256}),
    "dp4-distributed": (4, {}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "tp2")) for name in JOBS]
)
def test_killed_in_forward_and_in_mid_update(name: str, tmp_path: Path) -> None:
    world, changes = JOBS[name]
    config = settings(iterations=14, warmup_ratio=0.4, **changes)
    drills = [
        Drill("forward", "kill", world - 1, 3, "forward"),
        Drill("update", "kill", 0, 8, "update", group=0, chunk=2, op="update", seed=3, lose=TOLERATED),
    ]
    timeline = hold_against_reference(config, world, drills, tmp_path)
    assert [row.source for row in timeline.failures] == ["in-place"] * len(drills)
    assert [row.iterations_lost for row in timeline.failures] == [0] * len(drills)
    assert timeline.failures[1].lost, "the drill's pages were not lost"
    if config.lend_bytes:
        events = json.loads((tmp_path / "leto" / "events.json").read_text())
        lenders = {event["rank"] for event in events if event.get("lent_bytes")}
        assert lenders == set(range(world)), "no activation was in lent memory"


def test_killed_before_in_and_after_the_update_without_the_distributed_optimizer(tmp_path: Path) -> None:
    """Case 9: warm-up and cosine decay, killed on every side of the scheduler's step."""
    config = settings(
        iterations=14, warmup_ratio=0.4, distributed_optimizer=False, dropout=0.1, lend_bytes=256
    )
    drills = [
        Drill("before", "kill", 0, 3, "protect"),
        Drill("in", "kill", 1, 6, "update", group=1, chunk=0, op="commit", seed=11, lose=TOLERATED),
        Drill("after", "kill", 0, 9, "commit"),
    ]
    timeline = hold_against_reference(config, 2, drills, tmp_path, ["--retire-s=300"])
    assert [row.source for row in timeline.failures] == ["in-place"] * len(drills)
    events = json.loads((tmp_path / "leto" / "events.json").read_text())
    # Who survives a generation is promoted again, in the next one or the next but one.
    assert {(1, 0), (0, 1)} <= {(rank, first) for rank, first, _ in reused(events)}


def test_killed_while_the_peer_stands_in_send_and_recv_and_in_mid_update(tmp_path: Path) -> None:
    """Case 6: both directions of a pipeline exchange are started and not finished when a rank goes.

    The kills strike between the start of an exchange and its end. In the hang the peer is certain to stand in
    its receive, for seconds: it must not be blamed for waiting, and it is ended by SIGKILL from outside, as
    no abort of the exchange can be relied on. It comes late, since the first iteration that a beat tells of
    has the deadline of first iterations, and a beat may tell of every tenth only. The last kill is that in
    mid-update of the other jobs.
    """
    config = settings(iterations=50, warmup_ratio=0.4, pipeline_parallel=2)
    drills = [
        Drill("first-stage", "kill", 0, 3, "send-recv"),
        Drill("last-stage", "kill", 1, 5, "send-recv"),
        Drill("peer-waits", "hang", 1, 45, "send-recv"),
        Drill("update", "kill", 0, 47, "update", group=0, chunk=2, op="update", seed=3, lose=TOLERATED),
    ]
    quickly = ["--hang-min-s=15", "--hang-initial-s=120", "--hang-max-s=60"]
    timeline = hold_against_reference(config, 2, drills, tmp_path, quickly)
    found = [(row.drill, row.rank) for row in timeline.failures]
    details = [row.detail for row in timeline.failures]
    assert found == [(drill.id, drill.rank) for drill in drills], details
    assert [row.source for row in timeline.failures] == ["in-place"] * len(drills)
    assert [row.iterations_lost for row in timeline.failures] == [0] * len(drills)
    assert "its main thread stands still" in details[2], "the peer was not waiting"
    assert timeline.failures[3].lost, "the drill's pages were not lost"


def test_a_new_job_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    """Case 13: a damaged checkpoint is refused once, set aside, and the one before it is used."""
    config = settings(iterations=14, warmup_ratio=0.4, checkpoint_interval=4)
    out = tmp_path / "leto"
    with reference_beside(config, 2, tmp_path / "reference"):
        run_leto(config, 2, [], out)
    folder = out / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000008", "step-00000012"]
    damaged = folder / "step-00000012" / "__1_0.distcp"
    content = bytearray(damaged.read_bytes())
    for at in range(len(content) // 3, len(content) // 2):  # a run: a single byte may be padding
        content[at] ^= 0x10
    damaged.write_bytes(content)
    for rank in (0, 1):
        (out / f"final-rank{rank}.json").unlink()
    # Killed once more before anything is committed: the memory holds no report of the iteration before.
    drills = [Drill("again", "kill", 1, 8, "forward")]
    timeline = run_leto(config, 2, drills, out)
    assert [row.source for row in timeline.failures] == ["checkpoint", "in-place"]
    assert timeline.samples[0].iteration == 8
    assert (folder / ".damaged-00000012").is_dir()
    comparison = compare_runs(tmp_path / "reference", out, 2, config.iterations)
    assert comparison.exact, comparison.differences
