"""The decision function of a simulated job, made like leto_rmu's, with its summaries and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from leto_shadow.simulation.invariants import ViolationError

__all__ = ["Refused", "Verdict", "Vote", "decide"]


class Vote(msgspec.Struct, frozen=True):
    """Summary of one rank: iteration -1 means fresh memory; ``checkpoints`` are the complete ones it sees."""

    rank: int
    generation: int
    epoch: int
    iteration: int
    protected: bool
    synced: bool
    valid: bool
    """The rank can reconstruct what it knows to be lost."""
    checkpoints: tuple[int, ...]


class Verdict(msgspec.Struct, frozen=True):
    """Payload of a decision; ``generation`` is that of the summaries it was made from."""

    generation: int
    iteration: int
    source: str


@dataclass(frozen=True)
class Refused:
    """The ranks have no common state; ``payload`` is what ignoring that would lead to."""

    payload: bytes
    reason: str


def decide(summaries: Sequence[bytes], world_size: int) -> bytes | Refused:
    """Decide like leto_rmu, and check what leto_shadow owes it: all ranks, one generation, one epoch."""
    votes = [msgspec.msgpack.decode(summary, type=Vote) for summary in summaries]
    if [vote.rank for vote in votes] != list(range(world_size)):
        raise ViolationError(f"I-5: the decision saw ranks {[vote.rank for vote in votes]} of {world_size}")
    if len({vote.generation for vote in votes}) != 1:
        raise ViolationError(f"I-5: summaries of generations {sorted({vote.generation for vote in votes})}")
    if len({vote.epoch for vote in votes}) != 1:
        raise ViolationError("I-5: some ranks have fresh managers, others retained memory")
    generation = votes[0].generation
    if any(vote.iteration < 0 for vote in votes):  # a first start or a restore that was interrupted, too
        common = set.intersection(*(set(vote.checkpoints) for vote in votes))
        found = Verdict(generation, max(common), "checkpoint") if common else Verdict(generation, 0, "fresh")
        return msgspec.msgpack.encode(found)
    target = max(vote.iteration if not vote.synced else vote.iteration + 1 for vote in votes)
    for vote in votes:
        if target - vote.iteration > 1:
            raise ViolationError(
                f"I-3: rank {vote.rank} at {vote.iteration}, another one goes on at {target}"
            )
        if target - vote.iteration == 1 and not vote.protected:
            raise ViolationError(
                f"I-3: an update of {vote.iteration} began, rank {vote.rank} has no gradients"
            )
    payload = msgspec.msgpack.encode(Verdict(generation, target, "in-place"))
    invalid = [vote.rank for vote in votes if not vote.valid]
    return Refused(payload, f"too much is lost on ranks {invalid}") if invalid else payload
