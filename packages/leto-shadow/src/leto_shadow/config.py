"""Limits and deadlines of one job: what the protocol waits for, for how long, and how often it tries again.

Every phase of the recovery (paper section 3.4) has one entry in `Deadlines`; what happens when it passes
is stated beside it and carried out by `leto_shadow.coordinator`. All times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from leto_shadow.preinit import PreinitPolicy

__all__ = ["BEAT_S", "Deadlines", "HangPolicy", "JobPolicy", "Limits", "beat_s"]

BEAT_S = 0.2
"""Seconds between two signs of life; also the resolution of hang detection."""

_BEATS_PER_S = 5000  # so many cost the coordinator a quarter of a core (docs/benchmarks/shadow-scale.md)


def beat_s(nodes: int) -> float:
    """Seconds between two signs of life in a job of so many nodes: `BEAT_S` up to a thousand of them."""
    return max(BEAT_S, nodes / _BEATS_PER_S)


@dataclass(frozen=True)
class Deadlines:
    """How long each phase may take; the comment states the consequence of passing it."""

    join_s: float = 300.0  # agents missing: the job fails with AGENT_LOST
    managers_s: float = 60.0  # managers not up: a new epoch of managers, then CANNOT_START
    classify_s: float = 2.0  # the operator's hook does not answer: the built-in verdict stands
    # Also for what an unfit node has left of its ranks, in the same 60 s, before a spare gets them.
    fence_s: float = 60.0  # a trainer cannot be proven dead: the job fails with CANNOT_FENCE
    repair_s: float = 60.0  # localization or remapping stuck: the failure becomes fatal
    prepare_s: float = 600.0  # a shadow does not come up: it is replaced, then CANNOT_START
    demote_s: float = 10.0  # a shadow does not give up its communicators: it is killed and replaced
    summary_s: float = 120.0  # promoted trainers silent: a failure of the missing ranks
    decide_s: float = 60.0  # the decision function does not return: a fatal failure
    resume_s: float = 600.0  # recovery stuck inside a trainer: a failure of the missing ranks
    stop_s: float = 20.0  # agents silent at the end: the coordinator ends without them
    exit_s: float = 10.0  # a trainer that finished or failed does not exit: it is killed
    culprit_s: float = 0.5  # a rank blames a peer: how long the peer's own failure may take to arrive
    farewell_s: float = 2.0  # an agent is silent at the end of an attempt: it is not waited for
    grace_s: float = 300.0  # no agent takes over a dead one's managers: they end, and the memory is gone
    heal_s: float = 3600.0  # the devices of a node that lost its place stay unfit: the node leaves
    agent_s: float = 30.0  # silence between agent and coordinator: the agent counts as lost; a recovery that
    # waits for the store of a helper that has opened one before: so does the coordinator


@dataclass(frozen=True)
class Limits:
    """How many failures are worth another attempt, and of which sort."""

    hofs_per_rank: int = 5  # in `window_s`; one more is treated as fatal
    hofs_same_iteration: int = 3  # failures without one finished iteration in between; one more is fatal
    fatals: int = 3  # without one finished iteration in between; one more fails the job
    window_s: float = 600.0
    start_failures: int = 3  # of a shadow that is waited for, or alike before training: the job fails
    manager_starts: int = 3
    shadow_backoff_s: float = 1.0  # doubles with each failure of a shadow while training goes on
    shadow_backoff_max_s: float = 60.0


@dataclass(frozen=True)
class HangPolicy:
    """Deadlines of progress: `factor` times the longest dwell seen in a phase, within [min_s, max_s]."""

    initial_s: float = 120.0  # first iterations of a generation, and phases never seen
    min_s: float = 5.0
    max_s: float = 600.0
    factor: float = 5.0
    warmup_iterations: int = 1


@dataclass(frozen=True)
class JobPolicy:
    """Everything the coordinator needs to know besides the ranks."""

    deadlines: Deadlines = field(default_factory=Deadlines)
    limits: Limits = field(default_factory=Limits)
    hang: HangPolicy = field(default_factory=HangPolicy)
    preinit: PreinitPolicy = field(default_factory=PreinitPolicy)
    retire_s: float = 0.0
    """How long a survivor of a failure may take to give up writing; 0: it is killed."""
    classify_hook: bool = False
    """An operator's hook is asked about each verdict that it may overrule."""
    shadow_level: int = 3
    """Highest level at which shadows wait while training goes on: 0 (none: cold recovery), 1, 2 or 3."""
