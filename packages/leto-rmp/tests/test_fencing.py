"""One writer (I-4): a state machine of processes that write, die, release and come late."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from leto_rmp import NotWriter, RmpError, StaleGeneration, WriterAlive
from leto_rmp.fencing import WriterFence

MUTANT = settings(
    database=None, derandomize=True, print_blob=False, report_multiple_bugs=False, phases=[Phase.generate]
)
PROCESSES = range(4)
process = st.sampled_from(PROCESSES)


class Fencing(RuleBasedStateMachine):
    """`writing` holds the processes that could store to retained memory at this moment."""

    fence_class = WriterFence

    def __init__(self) -> None:
        super().__init__()
        self.dead: set[int] = set()
        self.fence = self.fence_class(lambda pidfd: pidfd in self.dead)
        self.writing: set[int] = set()
        self.generations: list[int] = []
        self.floor = 0
        self.last_writer: int | None = None

    @rule(who=process, generation=st.integers(0, 12))
    def become_writer(self, who: int, generation: int) -> None:
        if who in self.dead:
            return
        again = self.fence.holds(who) and self.generations[-1] == generation
        oldest = max([self.floor, *(g + 1 for g in self.generations)])
        try:
            self.fence.admit(who, who, generation, pidfd=who)
        except StaleGeneration:
            assert generation < oldest
            assert not again
        except WriterAlive:
            assert self.writing, "refused for nothing"
            assert generation >= oldest
        else:
            if not again:
                assert generation >= oldest
                self.generations.append(generation)
                self.writing.add(who)
                self.last_writer = who

    @rule(who=process)
    def die(self, who: int) -> None:
        self.dead.add(who)
        self.writing.discard(who)

    @rule(who=process)
    def reborn(self, who: int) -> None:
        """Another process under the same number; its connection is another one."""
        writer = self.fence.writer
        if who in self.dead and (writer is None or writer.pidfd != who):
            self.dead.discard(who)

    @rule(who=process)
    def release(self, who: int) -> None:
        if who in self.dead:
            return
        try:
            self.fence.release(who, self.generations[-1] if who in self.writing else None)
        except RmpError:
            assert who not in self.writing
        else:
            assert who == self.last_writer, "somebody else's word was taken"
            self.writing.discard(who)

    @rule(generation=st.integers(0, 12))
    def raise_fence(self, generation: int) -> None:
        oldest = max([self.floor, *self.generations])
        try:
            self.fence.fence(generation)
        except StaleGeneration:
            assert generation < oldest
        else:
            assert generation >= oldest
            self.floor = max(self.floor, generation)

    @rule(who=process)
    def write_request(self, who: int) -> None:
        current = self.fence.holds(who) and self.generations[-1] >= self.floor
        try:
            self.fence.check_writer(who, None)
        except (NotWriter, StaleGeneration):
            assert not current
        else:
            assert current

    @invariant()
    def one_writer(self) -> None:
        assert len(self.writing) <= 1, f"two writers: {self.writing}"

    @invariant()
    def generations_grow(self) -> None:
        assert self.generations == sorted(set(self.generations))


class TrustsTheAgent(WriterFence):
    """Mutant: whoever comes with a newer generation is let in."""

    def _check_gone(self, generation: int) -> None:
        pass


class ForgetsGenerations(WriterFence):
    """Mutant: a late request of an old generation is served once the writer is gone."""

    def _check_generation(self, generation: int) -> None:
        pass


class AnybodyReleases(WriterFence):
    """Mutant: the word of somebody else counts."""

    def release(self, connection: object, generation: int | None) -> None:
        if self.writer is not None:
            self.writer.released = True


TestFencing = Fencing.TestCase
TestFencing.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("mutant", [TrustsTheAgent, ForgetsGenerations, AnybodyReleases])
def test_mutants_are_caught(mutant: type[WriterFence]) -> None:
    machine = type("Mutant", (Fencing,), {"fence_class": mutant})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=MUTANT)
