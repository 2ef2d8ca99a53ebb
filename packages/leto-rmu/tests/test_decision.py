"""decide: pure, independent of order, one source and one iteration for all (I-5)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_rmu import Action, Decision, DecisionError, Summary, SyncResult, Vote, decide
from leto_rmu.marker import Phase

YES, NO = Vote(True), Vote(False, "group 3: too much is lost")
SYNC = SyncResult(clip=0.5, inv_scale=0.25, found_inf=False, grad_norm=2.0)
AHEAD = ("ITERATION", "COMPUTE", "PROTECTED")


def rank(phase: str | None, iteration: int = 0, **more: object) -> Summary:
    sync = SYNC if phase in ("SYNCED", "UPDATED") or (phase in AHEAD and iteration > 0) else None
    values: dict[str, object] = {"restart": YES, "finish": YES, "sync": sync, **more}
    return Summary(phase, iteration, **values)  # type: ignore[arg-type]


def run(*ranks: Summary) -> Decision:
    return Decision.decode(decide([r.encode() for r in ranks]))


def actions(*ranks: Summary) -> list[Action]:
    decision = run(*ranks)
    return [r.action(decision) for r in ranks]


@pytest.mark.parametrize("phase", AHEAD)
def test_nobody_began_so_all_restart(phase: str) -> None:
    decision = run(rank("COMPUTE", 7), rank(phase, 7), rank("ITERATION", 7))
    assert (decision.action, decision.iteration) == (Action.RESTART, 7)
    assert actions(rank("COMPUTE", 7), rank(phase, 7)) == [Action.RESTART] * 2


@pytest.mark.parametrize("phase", ["SYNCED", "UPDATED"])
def test_one_rank_synced_so_all_finish(phase: str) -> None:
    ranks = [rank(phase, 7), rank("PROTECTED", 7, sync=None), rank("SYNCED", 7)]
    decision = run(*ranks)
    assert (decision.action, decision.iteration, decision.sync) == (Action.FINISH, 8, SYNC)
    assert actions(*ranks) == [Action.FINISH] * 3


@pytest.mark.parametrize("phase", AHEAD)
def test_a_rank_ahead_drops_its_partial_compute(phase: str) -> None:
    ranks = [rank(phase, 8), rank("UPDATED", 7), rank("PROTECTED", 7, sync=None)]
    assert run(*ranks).iteration == 8
    assert actions(*ranks) == [Action.NONE, Action.FINISH, Action.FINISH]
    assert run(*ranks).sync == SYNC, "the rank ahead still has the result that the protected one lacks"


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([rank("SYNCED", 9), rank("SYNCED", 7)], "two iterations apart"),
        ([rank("COMPUTE", 9), rank("PROTECTED", 7)], "two iterations apart"),
        ([rank("COMPUTE", 9), rank("COMPUTE", 8)], "before all were protected"),
        ([rank("SYNCED", 7), rank("COMPUTE", 7)], "before all were protected"),
        ([rank("SYNCED", 7), rank("ITERATION", 7)], "before all were protected"),
        ([rank("SYNCED", 7), rank("SYNCED", 7, finish=NO)], "too much is lost"),
        ([rank("COMPUTE", 7), rank("PROTECTED", 7, restart=NO)], "too much is lost"),
        ([rank("SYNCED", 7), rank("PROTECTED", 7, finish=NO)], "too much is lost"),
        ([rank("SYNCED", 7), rank("COMPUTE", 8, restart=NO)], "too much is lost"),
        ([rank("SYNCED", 7), rank(None, reason="fresh memory")], "fresh memory"),
        ([rank("COMPUTE", 7, epoch=1), rank("COMPUTE", 7, epoch=2)], "different sources"),
        (
            [rank("SYNCED", 7), rank("SYNCED", 7, sync=SyncResult(clip=0.6)), rank("PROTECTED", 7)],
            "disagree on the global synchronization",
        ),
    ],
)
def test_otherwise_all_go_to_the_newest_common_checkpoint(ranks: list[Summary], why: str) -> None:
    seen = [(10, 20, 30), (10, 20), (20, 30, 40)]
    with_checkpoints = [msgspec.structs.replace(r, checkpoints=c) for r, c in zip(ranks, seen, strict=False)]
    decision = run(*with_checkpoints)
    assert (decision.action, decision.step, decision.iteration) == (Action.CHECKPOINT, 20, 20)
    assert why in decision.reason
    assert decision.epoch > max(r.epoch for r in ranks)
    assert {r.action(decision) for r in ranks} == {Action.CHECKPOINT}
    none = run(*ranks)
    assert (none.action, none.step, none.iteration) == (Action.FRESH, None, 0)
    assert why in none.reason


def test_each_may_use_its_own_sync_when_all_have_one() -> None:
    """Only a rank without a result needs agreement; the norm is a report, not an input."""
    assert run(rank("SYNCED", 7), rank("SYNCED", 7, sync=SyncResult(clip=0.6))).action is Action.FINISH
    other_norm = msgspec.structs.replace(SYNC, grad_norm=9.0)
    assert (
        run(rank("SYNCED", 7), rank("SYNCED", 7, sync=other_norm), rank("PROTECTED", 7)).action
        is Action.FINISH
    )


def test_a_decision_made_from_other_summaries_is_refused() -> None:
    finish = run(rank("SYNCED", 7), rank("PROTECTED", 7))
    for wrong in (rank("COMPUTE", 7), rank("SYNCED", 6), rank("SYNCED", 7, epoch=3), rank(None)):
        with pytest.raises(DecisionError, match="other summaries"):
            wrong.action(finish)
    restart = run(rank("COMPUTE", 7))
    with pytest.raises(DecisionError):
        rank("SYNCED", 7).action(restart)


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"\x80", b"not a summary", Decision(Action.FRESH, 0, 1).encode()]
)
def test_what_is_no_summary_is_refused(raw: bytes) -> None:
    with pytest.raises(DecisionError):
        decide([raw])


def test_versions_sizes_and_absence_are_refused() -> None:
    with pytest.raises(DecisionError, match="version"):
        decide([msgspec.structs.replace(rank("COMPUTE"), version=99).encode()])
    with pytest.raises(DecisionError, match="more than"):
        decide([bytes(2 << 20)])
    with pytest.raises(DecisionError, match="none"):
        decide([])
    with pytest.raises(DecisionError, match="decision"):
        Decision.decode(rank("COMPUTE").encode())


syncs = st.sampled_from(
    [None, SYNC, SyncResult(clip=0.6), SyncResult(found_inf=True), SyncResult(0.5, 0.25, False, 3.0)]
)
votes = st.sampled_from([YES, YES, YES, NO])
rank_phases = [None, *(p.name for p in Phase if Phase.LOADING < p < Phase.IDLE)]
summaries = st.builds(
    Summary,
    phase=st.sampled_from(rank_phases),
    iteration=st.integers(5, 8),
    epoch=st.sampled_from([0, 0, 0, 1]),
    sync=syncs,
    restart=votes,
    finish=votes,
    checkpoints=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    reason=st.just(""),
)


@settings(max_examples=600, deadline=None)
@given(st.lists(summaries, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_decisions_are_pure_unordered_and_uniform(ranks: list[Summary], random: object) -> None:
    """I-5: whatever the ranks report, all end at one iteration from one source."""
    raw = [r.encode() for r in ranks]
    shuffled = list(raw)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    encoded = decide(raw)
    assert encoded == decide(shuffled) == decide(raw)
    decision = Decision.decode(encoded)
    taken = {r.action(decision) for r in ranks}  # never raises: it was made from these
    if decision.action in (Action.FRESH, Action.CHECKPOINT):
        assert taken == {decision.action}
        assert all(decision.step in r.checkpoints for r in ranks) or decision.step is None
        return
    assert len({r.epoch for r in ranks}) == 1
    for r in ranks:
        action = r.action(decision)
        assert (r.restart if action in (Action.RESTART, Action.NONE) else r.finish).ok, "nobody is overruled"
        reached = r.iteration + 1 if action is Action.FINISH else r.iteration
        assert reached == decision.iteration
        if action is Action.FINISH and r.phase == "PROTECTED":
            assert decision.sync is not None
            assert any(o.synced >= r.iteration for o in ranks)
    if any(r.phase in ("SYNCED", "UPDATED") for r in ranks):
        assert decision.action is Action.FINISH, "what was synchronized is finished, never discarded"
