"""Pipeline time from brackets (appendix C.1.1).

A *bracket* is a contiguous chunk of layers of one pipeline stage, measured alone, forward and backward, for
one microbatch, with its tensor-parallel and all-to-all communication inside the timed interval. A stage with
v virtual chunks has v brackets. Then

    T_pipeline = (M + (S - 1) / v) * max_s stage(s)

with M microbatches, S stages and stage(s) = brackets + point-to-point transfers + embedding (first stage) or
output head and loss (last stage). The paper's text extraction breaks the fraction over three lines; this
form follows from the interleaved 1F1B bubble: S - 1 fill and drain slots, each a v-th of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leto_sim.errors import SimError

__all__ = ["Bracket", "Stage", "pipeline_s", "stage_s", "stage_transfers", "stages_of"]


@dataclass(frozen=True)
class Bracket:
    """One measured chunk of layers; times of one microbatch.

    ``parameters`` and ``expert_parameters`` are counts held by one rank; ``alltoall_backward_ms`` is the part
    of ``backward_ms`` spent in MoE all-to-all (0 for dense), needed for the interference term of C.1.3.
    """

    name: str
    forward_ms: float
    backward_ms: float
    parameters: float
    expert_parameters: float = 0.0
    alltoall_backward_ms: float = 0.0

    @property
    def total_s(self) -> float:
        """Forward and backward of one microbatch, in seconds."""
        return (self.forward_ms + self.backward_ms) * 1e-3


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: its v brackets, and what only the first or the last stage does, in seconds."""

    brackets: tuple[Bracket, ...]
    extra_s: float = 0.0

    @property
    def compute_s(self) -> float:
        return sum(b.total_s for b in self.brackets) + self.extra_s

    @property
    def backward_s(self) -> float:
        """Backward of one microbatch through the whole stage: the window W of the overlap queue."""
        return sum(b.backward_ms for b in self.brackets) * 1e-3


def stages_of(
    chunks: Sequence[Bracket], count: int, embedding_s: float = 0.0, head_s: float = 0.0
) -> list[Stage]:
    """Return ``count`` stages with the same brackets: the extrapolation from one profiled stage."""
    if count < 1 or not chunks:
        raise SimError(f"expected at least one stage and one bracket, found {count} and {len(chunks)}")
    extra = [0.0] * count
    extra[0] += embedding_s
    extra[-1] += head_s
    return [Stage(tuple(chunks), e) for e in extra]


def stage_transfers(index: int, stages: int, virtual: int) -> int:
    """Sends of one microbatch by stage ``index``: an activation and a gradient per chunk.

    The last chunk of the last stage sends no activation, the first chunk of the first stage no gradient.
    """
    if stages == 1:
        return 0
    return 2 * virtual - (index == 0) - (index == stages - 1)


def stage_s(stage: Stage, index: int, stages: int, transfer_s: float) -> float:
    """Seconds that one microbatch occupies a stage: brackets, transfers, embedding or head."""
    return stage.compute_s + stage_transfers(index, stages, len(stage.brackets)) * transfer_s


def pipeline_s(stages: Sequence[Stage], microbatches: int, transfer_s: float = 0.0) -> float:
    """Return T_pipeline in seconds. All stages must have the same number v of brackets.

    Interleaving (v > 1) needs the microbatches to be a multiple of the stages, as in Megatron's schedule.
    """
    count = len(stages)
    if count == 0 or microbatches < 1:
        raise SimError(f"expected at least one stage and one microbatch, found {count} and {microbatches}")
    virtual = len(stages[0].brackets)
    if any(len(s.brackets) != virtual for s in stages):
        raise SimError(
            f"expected {virtual} brackets in every stage, found {[len(s.brackets) for s in stages]}"
        )
    if virtual > 1 and count > 1 and microbatches % count:
        raise SimError(
            f"interleaving needs microbatches to be a multiple of {count} stages, found {microbatches}"
        )
    slowest = max(stage_s(s, i, count, transfer_s) for i, s in enumerate(stages))
    return (microbatches + (count - 1) / virtual) * slowest
