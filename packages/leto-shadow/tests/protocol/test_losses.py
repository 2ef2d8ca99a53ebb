"""A typing error in a drill or an injection costs no retained memory, and answers to an operator are true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leto_rmp import AllocationSpec, Client, Kind, PoolConfig, Role
from leto_shadow import control
from leto_shadow.control_handler import ControlHandler
from leto_shadow.drills import Lose
from leto_shadow.exit_codes import ExitCode
from leto_shadow.helper import load_decider
from leto_shadow.managers import ImpossibleLossError, ManagerHost

Start = Callable[..., Any]

IMPOSSIBLE = [
    (Lose("nosuch"), "there is no allocation 'nosuch'; there are ['arena', 'grads']"),
    (Lose("arena", group=99), "allocation 'arena' has no group 99; there are 2, counted from 0"),
    (Lose("grads"), "allocation 'grads' is transaction and has no protection groups; retained are ['arena']"),
    (Lose("arena", 1, pages=5), "group 1 of 'arena' has 4 data pages; 5 were to be lost"),
    (Lose("arena", 0, tier1=3), "group 0 of 'arena' has 2 tier-1 parity pages; 3 were to be lost"),
]


def test_a_loss_that_cannot_be_is_skipped_and_the_memory_kept(tmp_path: Path) -> None:
    config = PoolConfig(page_bytes=4096, data_pages=4, tier1_pages=2, tier2_pages=1)
    host = ManagerHost(tmp_path, "test-losses", config)
    specs = [
        AllocationSpec("arena", 4096 * 8, Kind.RETAINED),
        AllocationSpec("grads", 4096, Kind.TRANSACTION),
    ]
    try:
        manager = host.start(0)
        assert host.pid(0) == manager.pid
        with Client.connect(manager.socket_path) as writer:
            writer.attach(Role.WRITER, 1)
            writer.allocate(specs)
            for lose, why in IMPOSSIBLE:
                with pytest.raises(ImpossibleLossError) as caught:
                    host.check_loss(0, 1, lose, 10.0)
                assert str(caught.value) == why
            host.check_loss(0, 1, Lose("arena", group=1), 10.0)
            writer.release()
        losses = [(f"d{number}", lose, 1) for number, (lose, _) in enumerate(IMPOSSIBLE)]
        found = host.repair(0, 2, (*losses, ("good", Lose("arena", 1, 2), 1)), 10.0, read=False)
        assert (found.lost_pages, found.said) == (2, ("good: lost 2 pages, poisoned 0 parity pages",))
        assert found.losing_s > 0
        assert list(found.skipped) == [
            f"d{number}: loss skipped: {why}" for number, (_, why) in enumerate(IMPOSSIBLE)
        ]
    finally:
        host.end_all()
    assert host.pid(0) is None
    with pytest.raises(ImpossibleLossError, match="rank 0 has no state manager now"):
        host.check_loss(0, 2, Lose("arena"), 10.0)


def test_a_decision_that_is_no_function_is_refused_by_name() -> None:
    assert callable(load_decider("json:dumps"))
    with pytest.raises(TypeError, match="it must be a function, found str"):
        load_decider("json:__name__")


def test_kill_manager_says_what_happened() -> None:
    """No manager, one that is killed, one that is still there afterwards."""
    pids: list[int | None] = []
    shell: Any = SimpleNamespace(
        agent=SimpleNamespace(ranks=range(2), node=0, epoch=1),
        manager_pid=lambda _rank: pids.pop(0),
        carry=lambda _actions: None,
    )
    handler = ControlHandler(shell, None, "job", SimpleNamespace(now=0.0))  # type: ignore[arg-type]
    for found, ok, detail in (
        ([None], False, "rank 1 has no state manager now; try again after the recovery"),
        ([7, None], True, "the state manager of rank 1, process 7, was killed"),
        ([7, 7], False, "the state manager of rank 1, process 7, could not be killed"),
    ):
        pids[:] = found
        assert handler(control.Inject("kill_manager", 1)) == control.Reply(ok, detail)


def test_an_injection_is_checked_before_anything_is_killed(start_job: Start) -> None:
    job = start_job("inject", "--shadow-level", "0", "--", "100000")
    job.until(lambda: len(job.events("metrics")) > 4)
    actives = job.trainers("active")
    for kind in ("lose", "poison"):  # a typing error costs nothing
        assert job.ask(control.Inject(kind, 1, allocation="grad")).detail == (
            "nothing was done: there is no allocation 'grad'; there are ['arena']"
        )
        assert job.ask(control.Inject(kind, 1, group=99)).detail.startswith(
            "nothing was done: allocation 'arena' has no group 99; there are "
        )
    assert {rank: one["pid"] for rank, one in job.trainers("active").items()} == {
        rank: one["pid"] for rank, one in actives.items()
    }
    assert job.events("failure") == []
    (started,) = [one for one in job.events("manager_started") if one["rank"] == 1]
    reply = job.ask(control.Inject("kill_manager", 1))
    assert reply == control.Reply(True, f"the state manager of rank 1, process {started['pid']}, was killed")
    assert started["pid"] not in job.pids()
    job.process.terminate()
    assert job.wait() == ExitCode.TERMINATED
    job.assert_nothing_left()


def test_a_drill_that_names_no_allocation_costs_no_memory(start_job: Start, tmp_path: Path) -> None:
    drills = tmp_path / "drills.json"
    lose = '{"allocation": "nosuch"}'
    drills.write_text(f'[{{"id": "typo", "kind": "kill", "rank": 0, "iteration": 3, "lose": {lose}}}]')
    job = start_job("typo", "--shadow-level", "0", "--drills", str(drills), "--", "6", ranks=1)
    assert job.wait() == ExitCode.FINISHED, job.text()
    (skipped,) = job.events("loss_skipped")
    why = "loss skipped: there is no allocation 'nosuch'; there are ['arena']"
    assert skipped["detail"] == f"typo: {why}"
    assert why in job.text()
    (recovered,) = job.events("recovered")
    assert (recovered["source"], recovered["iteration"], recovered["fatal"]) == ("in-place", 3, False)
