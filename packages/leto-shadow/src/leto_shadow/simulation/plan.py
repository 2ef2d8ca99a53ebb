"""What a seed decides: the cluster, the network and the failures of one run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from enum import StrEnum

from leto_shadow.config import Deadlines, HangPolicy, JobPolicy, Limits
from leto_shadow.exit_codes import ExitCode
from leto_shadow.phases import Phase

__all__ = ["Fault", "FaultKind", "Plan", "Scenario", "make_plan"]


class FaultKind(StrEnum):
    KILL_ACTIVE = "kill active"
    KILL_TWO = "kill two actives"
    KILL_SHADOW = "kill shadow"
    HANG_ACTIVE = "hang active"
    KILL_MANAGER = "kill manager"
    KILL_AGENT = "kill agent"
    LOSE_NODE = "lose node"
    UNFIT_DEVICE = "a device is unfit"
    """With the death of its trainer. It is repaired after a while, or never."""
    UNFIT_SPARE = "the devices of a spare are unfit"
    """Nothing runs there that would tell. They are repaired after a while, or never."""
    CUT_NODE = "cut node off"
    """For longer than agents are waited for."""
    BLACKOUT = "network blackout"
    PRESSURE = "an allocation fails"


class Scenario(StrEnum):
    """Sort of run, and so how it may end."""

    RECOVERABLE = "recoverable"
    """Any number of failures that the limits allow: it must finish."""
    AGENT_DEATH = "agent death"
    """An agent dies and torchrun starts none again: the job ends with AGENT_LOST (or had finished before)."""
    ADOPTION = "adoption"
    """Agents die as well as everything else, and are started again: it must finish."""
    SPARE = "spare"
    """A node with ranks is lost, torchrun and all, and a spare takes its place: it must finish. The lost
    node may come back, to be the spare then."""
    UNFIT = "unfit"
    """Devices become unfit while their agents live, and spares take the places of their nodes, as far as
    there are any: it must finish."""
    ERROR_LOOP = "error loop"
    """Rank 0 raises at the same iteration every time: the job must give up."""
    CANNOT_START = "cannot start"
    """Every shadow of one rank fails: the job must give up."""


@dataclass(frozen=True)
class Fault:
    """``kind`` hits ``rank`` (or its node, for blackouts and agents) ``delay_s`` after ``phase`` is entered
    for the ``nth`` time; without a phase, at that time, or at the ``event``-th event of the run."""

    kind: FaultKind
    rank: int
    delay_s: float
    phase: Phase | None = None
    nth: int = 1
    event: int = 0


@dataclass(frozen=True)
class Plan:
    scenario: Scenario
    nodes: int
    local_ranks: int
    iterations: int
    checkpoint_interval: int
    policy: JobPolicy
    faults: tuple[Fault, ...]
    loss: float = 0.0
    duplication: float = 0.0
    delay_s: float = 0.05
    slow_deaths: float = 0.0
    stuck_demotions: float = 0.0
    shadow_errors: float = 0.0
    repair_errors: float = 0.0
    decision_errors: float = 0.0
    slow_decisions: float = 0.0
    page_losses: float = 0.0
    heavy_losses: float = 0.0
    peers_notice: float = 0.5
    error_at: int = -1
    doomed_rank: int = -1
    agent_death: tuple[int, float] | None = None
    spares: int = 0
    returns_s: float = 0.0
    """A node that was lost comes back after so long; 0: never."""
    retires: bool = False
    """Scripts can become shadows again."""
    deaf_survivors: float = 0.0
    """Asked to retire, they go on computing until they are killed."""
    lying_survivors: float = 0.0
    """They say that they have given up writing, and have not."""
    stuck_survivors: float = 0.0
    """They give up writing, and never become shadows."""
    dying_survivors: float = 0.0
    """They die on the way, before or after they have given up writing."""
    garbage: bool = False
    """Collectives that are aborted return without an error, with any bits, as NCCL's do; and a peer's do."""
    split: bool = False
    """Each of them is of some of the ranks: gradients of every second one, the sync of two neighbours."""
    restarts: int = 0
    """How often torchrun starts the agents again."""
    sigterm: bool = False
    """torchrun ends the other agents when one has died (c10d), or leaves them alone (static rendezvous)."""
    exit_codes: frozenset[int] = field(default_factory=lambda: frozenset({int(ExitCode.FINISHED)}))


_DEADLINES = Deadlines(
    join_s=20.0,
    managers_s=20.0,
    fence_s=30.0,
    repair_s=10.0,
    prepare_s=15.0,
    demote_s=3.0,
    summary_s=10.0,
    decide_s=10.0,
    resume_s=10.0,
    stop_s=20.0,
    exit_s=3.0,
    culprit_s=0.5,
    agent_s=12.0,
    heal_s=15.0,
)
_HANG = HangPolicy(initial_s=8.0, min_s=3.0, max_s=30.0, factor=4.0)
_PLENTY = Limits(
    hofs_per_rank=50,
    hofs_same_iteration=50,
    fatals=50,
    start_failures=50,
    manager_starts=20,
    shadow_backoff_s=0.5,
    shadow_backoff_max_s=4.0,
)


_KINDS = (
    *[FaultKind.KILL_ACTIVE] * 4,
    FaultKind.KILL_TWO,
    FaultKind.KILL_SHADOW,
    FaultKind.HANG_ACTIVE,
    FaultKind.KILL_MANAGER,
    FaultKind.BLACKOUT,
)
_DURING = (
    Phase.FENCING,
    Phase.REPAIRING,
    Phase.PREPARING,
    Phase.EXCHANGING,
    Phase.DECIDING,
    Phase.RESUMING,
    Phase.STARTING,
)
_AGENTS_DIE_IN = (*_DURING, Phase.JOINING, Phase.TRAINING, Phase.TRAINING, Phase.STOPPING)


def _make_faults(rng: random.Random, world_size: int) -> list[Fault]:
    """Episodes: a failure while training, often with another one in the recovery that it causes."""
    faults = []
    for episode in range(1, rng.choice([1, 1, 2, 2, 3, 4, 5])):
        rank = rng.randrange(world_size)
        faults.append(Fault(rng.choice(_KINDS), rank, rng.uniform(0.0, 5.0), Phase.TRAINING, episode))
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            kind, rank = rng.choice(_KINDS), rng.randrange(world_size)
            phase = rng.choice(_DURING)
            first = 1 if phase in (Phase.FENCING, Phase.REPAIRING) else 2  # the start has no such phase
            nth = episode + first - 1 if phase is not Phase.STARTING else rng.choice([1, 2])
            faults.append(Fault(kind, rank, rng.uniform(0.0, 0.6), phase, nth))
    if rng.random() < 0.3:
        faults.append(Fault(rng.choice(_KINDS), rng.randrange(world_size), rng.uniform(0.5, 10.0)))
    return faults


def _make_pressure(rng: random.Random, world_size: int) -> list[Fault]:
    """In some runs training needs the memory of shadows, also while other things go wrong."""
    if rng.random() < 0.6:
        return []
    phases = (Phase.TRAINING, Phase.TRAINING, Phase.TRAINING, Phase.RESUMING, Phase.EXCHANGING, Phase.FENCING)
    return [
        Fault(
            FaultKind.PRESSURE,
            rng.randrange(world_size),
            rng.uniform(0.0, 6.0),
            rng.choice(phases),
            rng.randint(1, 3),
        )
        for _ in range(rng.randint(1, 5))
    ]


def make_plan(seed: int, scenario: Scenario | None = None) -> Plan:
    """Derive everything from the seed."""
    rng = random.Random(f"plan-{seed}")
    if scenario is None:
        pick = rng.random()
        scenario = Scenario.RECOVERABLE if pick < 0.85 else rng.choice(list(Scenario)[1:])
    nodes, local_ranks = rng.choice([(1, 2), (1, 2), (2, 1), (2, 1), (2, 2), (3, 1)])
    world_size = nodes * local_ranks
    lossy = rng.random() < 0.5
    faults = _make_faults(rng, world_size)
    limits, codes = _PLENTY, {int(ExitCode.FINISHED)}
    death, error_at, doomed, restarts, sigterm, grace_s = None, -1, -1, 0, False, 60.0
    spares, returns_s = 0, 0.0
    if scenario is Scenario.AGENT_DEATH:
        nodes = max(nodes, 2)
        world_size = nodes * local_ranks
        death = (rng.randrange(nodes), rng.uniform(0.5, 20.0))  # node 0 takes the coordinator with it
        codes.add(int(ExitCode.AGENT_LOST))
    elif scenario is Scenario.ADOPTION:
        if rng.random() < 0.5:
            faults = []  # nothing but agents
        for _ in range(rng.choice([1, 1, 2, 3])):
            phase, nth = rng.choice(_AGENTS_DIE_IN), rng.choice([1, 1, 2])
            kind = rng.choice([FaultKind.KILL_AGENT] * 4 + [FaultKind.CUT_NODE])
            faults.append(Fault(kind, rng.randrange(world_size), rng.uniform(0.0, 1.0), phase, nth))
        restarts, sigterm = 20, rng.random() < 0.7
        grace_s = rng.choice([60.0, 60.0, 60.0, 3.0])
        codes.add(int(ExitCode.AGENT_LOST))  # only where an agent dies when others have finished already
    elif scenario is Scenario.SPARE:
        nodes = rng.choice([2, 3])
        world_size = nodes * local_ranks
        spares, restarts, sigterm = rng.choice([1, 1, 2]), 20, True
        returns_s = rng.choice([0.0, rng.uniform(5.0, 40.0)])
        if rng.random() < 0.5:
            faults = []
        phase = rng.choice(_AGENTS_DIE_IN[:-1])
        lost = rng.randrange(local_ranks, world_size)  # node 0 takes the coordinator with it
        kind = rng.choice([FaultKind.LOSE_NODE, FaultKind.LOSE_NODE, FaultKind.CUT_NODE])
        faults.append(Fault(kind, lost, rng.uniform(0.0, 1.0), phase, 1))
        codes.add(int(ExitCode.AGENT_LOST))  # only where it is lost when others have finished already
    elif scenario is Scenario.UNFIT:
        nodes = rng.choice([2, 3])
        world_size = nodes * local_ranks
        spares, restarts, sigterm = rng.choice([0, 1, 1, 2]), 20, True
        if rng.random() < 0.5:
            faults = []
        for nth in range(1, rng.choice([2, 3, 4])):
            rank, delay_s = rng.randrange(world_size), rng.uniform(0.0, 3.0)
            faults.append(Fault(FaultKind.UNFIT_DEVICE, rank, delay_s, Phase.TRAINING, nth))
        for nth in range(1, rng.choice([1, 2, 3]) if spares else 1):
            faults.append(Fault(FaultKind.UNFIT_SPARE, 0, rng.uniform(0.0, 3.0), Phase.TRAINING, nth))
        if rng.random() < 0.3:
            kind = rng.choice([FaultKind.KILL_AGENT, FaultKind.CUT_NODE])
            faults.append(Fault(kind, rng.randrange(world_size), rng.uniform(0.0, 2.0), Phase.TRAINING, 2))
        codes.add(int(ExitCode.AGENT_LOST))  # only where an agent dies when others have finished already
    elif scenario is Scenario.ERROR_LOOP:
        error_at = rng.randrange(0, 4)  # a run has at least four iterations
        limits = Limits(
            hofs_per_rank=50,
            hofs_same_iteration=rng.randint(1, 3),
            fatals=rng.randint(0, 2),
            start_failures=50,
        )
        faults = []
        codes = {int(ExitCode.FATAL_LIMIT)}
    elif scenario is Scenario.CANNOT_START:
        doomed = rng.randrange(world_size)
        limits = Limits(start_failures=rng.randint(1, 4))
        faults = []
        codes = {int(ExitCode.CANNOT_START)}
    decision_errors = rng.choice([0.0, 0.0, 0.0, 0.1]) if scenario is Scenario.RECOVERABLE else 0.0
    if decision_errors:
        codes.add(int(ExitCode.NO_DECISION))
    # Drawn apart, so that the other failures of a seed do not depend on it.
    faults += _make_pressure(random.Random(f"pressure-{seed}"), world_size)
    survival = random.Random(f"survivors-{seed}")
    retires = survival.random() < 0.7
    return Plan(
        scenario=scenario,
        nodes=nodes,
        local_ranks=local_ranks,
        iterations=rng.randint(4, 8),
        checkpoint_interval=rng.randint(2, 3),
        policy=JobPolicy(
            replace(_DEADLINES, grace_s=grace_s),
            limits,
            _HANG,
            shadow_level=rng.choice([0, 1, 2, 3, 3, 3, 3]),
            retire_s=survival.choice([0.3, 1.0]) if retires else 0.0,
        ),
        faults=tuple(faults),
        loss=rng.uniform(0.0, 0.25) if lossy else 0.0,
        duplication=rng.uniform(0.0, 0.2) if lossy else 0.0,
        delay_s=rng.choice([0.001, 0.02, 0.2]),
        slow_deaths=rng.choice([0.0, 0.0, 0.3]),
        stuck_demotions=rng.choice([0.0, 0.0, 0.3]),
        shadow_errors=rng.choice([0.0, 0.0, 0.05]) if scenario is Scenario.RECOVERABLE else 0.0,
        repair_errors=rng.choice([0.0, 0.0, 0.1]),
        decision_errors=decision_errors,
        slow_decisions=rng.choice([0.0, 0.0, 0.5]) if scenario is Scenario.RECOVERABLE else 0.0,
        page_losses=rng.choice([0.0, 0.3, 0.6]),
        heavy_losses=rng.choice([0.0, 0.0, 0.3]) if scenario is Scenario.RECOVERABLE else 0.0,
        peers_notice=rng.choice([0.0, 0.5, 1.0]),
        error_at=error_at,
        doomed_rank=doomed,
        agent_death=death,
        spares=spares,
        returns_s=returns_s,
        retires=survival.random() < 0.9,
        deaf_survivors=survival.choice([0.0, 0.3]),
        lying_survivors=survival.choice([0.0, 0.2]),
        stuck_survivors=survival.choice([0.0, 0.0, 0.3]),
        dying_survivors=survival.choice([0.0, 0.0, 0.3]),
        garbage=survival.random() < 0.4,
        split=survival.random() < 0.7,
        restarts=restarts,
        sigterm=sigterm,
        exit_codes=frozenset(codes),
    )
