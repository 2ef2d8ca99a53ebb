"""Messages between the coordinator and the node agents (paper section 3.4).

Each one carries the generation, world or epoch that it belongs to, so that a late one is recognised,
rejected and counted instead of believed (case 7). They travel inside `leto_shadow.link` frames, which
make delivery exactly-once and in order per agent; `Beat` alone is sent bare, because only the newest counts.

Three counters name everything:

* ``generation`` fences promotions: trainers of an older generation are dead before a newer one writes (I-4);
* ``world`` names one set of trainers with their process groups; ``sid`` one trainer process;
* ``epoch`` names one set of state managers: a new epoch means fresh memory for all ranks (I-5).
"""

from __future__ import annotations

import msgspec

from leto_shadow.config import BEAT_S
from leto_shadow.operability import DeviceFacts

__all__ = [
    "PROTOCOL",
    "ActiveFailed",
    "Adopt",
    "AdvanceShadow",
    "Beat",
    "Bye",
    "Decide",
    "DiscardShadow",
    "Fence",
    "Fenced",
    "FinishedOf",
    "Fired",
    "Fit",
    "FootprintOf",
    "FromAgent",
    "Held",
    "Join",
    "ManagerFailed",
    "ManagersReady",
    "MemoryOf",
    "Promote",
    "RankProgress",
    "Reclaimed",
    "Repair",
    "RepairFailed",
    "Repaired",
    "ResumedOf",
    "Retire",
    "Retired",
    "ShadowAt",
    "ShadowFailed",
    "ShadowReclaimed",
    "Shutdown",
    "SpareUnfit",
    "SpawnShadow",
    "StartManagers",
    "SummaryOf",
    "Survivor",
    "SurvivorAt",
    "ToAgent",
    "Unfit",
    "Welcome",
    "decode_from_agent",
    "decode_to_agent",
    "encode",
]

PROTOCOL = 6
"""Version of the messages; an agent of another version is refused when it joins."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


# --- coordinator to agent -------------------------------------------------------------------------


class Welcome(_Message, frozen=True, tag="welcome"):
    """The agent's place in the job: its ranks are ``first_rank .. first_rank + local_ranks - 1``.

    ``beat_s``: seconds between two signs of life; longer in a very large job (`leto_shadow.config.beat_s`).
    """

    first_rank: int
    world_size: int
    beat_s: float = BEAT_S
    spare: bool = False
    """No ranks yet: the node waits to take the place of another one."""
    fired: tuple[str, ...] = ()
    """All drills and injections of the job that have struck (`leto_shadow.fired`)."""
    trained_s: float | None = None
    """Seconds since the job trained for the first time, which is when its schedule's clock began."""


class StartManagers(_Message, frozen=True, tag="start_managers"):
    """Stop the managers of older epochs, if any, and start fresh ones for every local rank."""

    epoch: int


class Adopt(_Message, frozen=True, tag="adopt"):
    """Go on with the managers found: fence all writers below ``generation`` and answer as to `Fence`."""

    generation: int
    epoch: int


class SpawnShadow(_Message, frozen=True, tag="spawn"):
    rank: int
    sid: int
    world: int


class AdvanceShadow(_Message, frozen=True, tag="advance"):
    """Bring the shadow to ``level`` in ``world``; a lower level than it has means: give up what is above.
    ``waits``: it is to stand at L3 until something fails; False: a recovery waits for it."""

    rank: int
    sid: int
    world: int
    level: int
    store_host: str = ""
    store_port: int = 0
    waits: bool = False


class DiscardShadow(_Message, frozen=True, tag="discard"):
    rank: int
    sid: int


class Fence(_Message, frozen=True, tag="fence"):
    """End every promoted trainer of a generation below ``generation``; answer when none can write any more.

    Those of the ranks in ``retire`` may be asked to give up writing and to become shadows again, within
    ``retire_s``; all others are killed.
    """

    generation: int
    retire: tuple[int, ...] = ()
    retire_s: float = 0.0


class Repair(_Message, frozen=True, tag="repair"):
    """Carry out the losses of fired drills, then localize and remap in every local manager."""

    generation: int
    epoch: int


class Promote(_Message, frozen=True, tag="promote"):
    """Every local shadow of ``world`` becomes the active trainer of its rank in ``generation``."""

    generation: int
    world: int
    epoch: int


class Decide(_Message, frozen=True, tag="decide"):
    generation: int
    payload: bytes


class Retire(_Message, frozen=True, tag="retire"):
    """Another node gets the ranks of this one, whose device is not operable: end all that is left of them,
    say `Retired`, and say `Fit` when the devices are fit."""

    generation: int
    reason: str


class Shutdown(_Message, frozen=True, tag="shutdown"):
    exit_code: int
    reason: str


ToAgent = (
    Welcome
    | StartManagers
    | Adopt
    | SpawnShadow
    | AdvanceShadow
    | DiscardShadow
    | Fence
    | Repair
    | Promote
    | Decide
    | Retire
    | Shutdown
)


# --- agent to coordinator -------------------------------------------------------------------------


class Held(_Message, frozen=True):
    """A state manager that outlived its agent, and that this agent owns now."""

    rank: int
    epoch: int
    generation: int
    """Newest generation that its memory has heard of; -1 before the first."""


class Join(_Message, frozen=True, tag="join"):
    """An agent reports in. Whatever its predecessor had started but the managers is dead by then (I-4)."""

    node: int
    local_ranks: int
    host: str
    protocol: int = PROTOCOL
    shadow_level: int = 3
    """Highest level at which shadows may wait on this node (`leto_shadow.oom_hook.choose`)."""
    held: tuple[Held, ...] = ()
    reached: tuple[tuple[int, int], ...] = ()
    """Ranks, and the iterations that trainers of dead agents had come to."""
    unfit: str = ""
    """Why this node had to give up its ranks, if it is not known to be fit again."""
    fired: tuple[str, ...] = ()
    """Drills and injections that have struck, as this node's event log says."""
    trained_s: float | None = None
    """Seconds since its schedule's clock began, likewise."""


class ManagersReady(_Message, frozen=True, tag="managers_ready"):
    epoch: int


class ManagerFailed(_Message, frozen=True, tag="manager_failed"):
    rank: int
    epoch: int
    detail: str
    iteration: int = 0


class ShadowAt(_Message, frozen=True, tag="shadow_at"):
    rank: int
    sid: int
    world: int
    level: int


class ShadowFailed(_Message, frozen=True, tag="shadow_failed"):
    rank: int
    sid: int
    detail: str
    secondary: bool = False
    memory: bool = False
    """The device had no memory left for it."""


class ShadowReclaimed(_Message, frozen=True, tag="shadow_reclaimed"):
    """The shadow was ended, at or on its way to ``level``, because training of generation ``taken_by`` needs
    its memory. (Not a message *of* that generation: the shadow is gone whatever generation it finds.)"""

    rank: int
    sid: int
    level: int
    taken_by: int


class Reclaimed(_Message, frozen=True, tag="reclaimed"):
    """What a reclaim brought, as the allocator hook measured it. ``whole``: the shadow stood at ``level``,
    so that ``freed_bytes`` is the footprint of that level."""

    rank: int
    generation: int
    level: int
    whole: bool
    size_bytes: int
    freed_bytes: int
    free_bytes: int
    total_bytes: int
    waited_s: float
    satisfied: bool


class FootprintOf(_Message, frozen=True, tag="footprint_of"):
    """A shadow of ``rank`` holds so much of its device at ``level``: measured when it reached it; 0: nobody
    can say. ``parked_bytes``: what its promotion takes besides."""

    rank: int
    level: int
    held_bytes: int
    parked_bytes: int = 0


class MemoryOf(_Message, frozen=True, tag="memory_of"):
    """A measurement of the device of ``rank`` while its shadow stood at ``held_level`` (0: none)."""

    rank: int
    generation: int
    free_bytes: int
    total_bytes: int
    spare_bytes: int
    held_level: int


class Unfit(_Message, frozen=True):
    """The device of ``rank`` is not operable: found when its trainer had ended, whoever failed first."""

    rank: int
    facts: DeviceFacts


class Survivor(_Message, frozen=True):
    """A trainer of an old generation that has given up writing, and lives on. ``level``: where it stands as
    a shadow; 0 while it is on its way there (`SurvivorAt` follows, or `ShadowFailed`)."""

    rank: int
    sid: int
    level: int = 0


class Fenced(_Message, frozen=True, tag="fenced"):
    generation: int
    unfit: tuple[Unfit, ...] = ()
    survivors: tuple[Survivor, ...] = ()


class SurvivorAt(_Message, frozen=True, tag="survivor_at"):
    """The survivor that `Fenced` named has become a shadow, at ``level``."""

    rank: int
    sid: int
    level: int


class Repaired(_Message, frozen=True, tag="repaired"):
    generation: int
    epoch: int
    lost_pages: int


class RepairFailed(_Message, frozen=True, tag="repair_failed"):
    rank: int
    generation: int
    epoch: int
    detail: str


class SummaryOf(_Message, frozen=True, tag="summary"):
    rank: int
    generation: int
    payload: bytes


class ResumedOf(_Message, frozen=True, tag="resumed"):
    rank: int
    generation: int
    iteration: int
    source: str
    breakdown: dict[str, float]


class ActiveFailed(_Message, frozen=True, tag="active_failed"):
    """An active trainer is gone without having finished. ``facts``: what was observed of its device."""

    rank: int
    generation: int
    iteration: int
    detail: str
    facts: DeviceFacts | None = None
    detected_s: float = 0.0
    secondary: bool = False
    """It failed because a peer was gone or did not come: another rank is the culprit; its own report is on
    the way, or it stands still."""
    drill: bool = False
    """It was made to fail by a drill or by `leto inject`."""
    reported: bool = False
    """The trainer itself said why; ``detail`` ends with its words."""
    refused_bytes: int = 0
    """It had so much of its device parked as a shadow, and ran out of memory before it trained."""


class FinishedOf(_Message, frozen=True, tag="finished"):
    rank: int
    generation: int
    iteration: int


class Fired(_Message, frozen=True, tag="fired"):
    """A drill, or an injection of a schedule, strikes now, and never again (`leto_shadow.fired`)."""

    what: str


class SpareUnfit(_Message, frozen=True, tag="spare_unfit"):
    """The devices of this spare are not operable: it can take no place, until it says `Fit`."""

    reason: str


class Retired(_Message, frozen=True, tag="retired"):
    """Nothing is left of the ranks that this node had."""

    generation: int


class Fit(_Message, frozen=True, tag="fit"):
    """The devices of a node that had to retire are operable again, and nothing of its ranks is left on it."""

    node: int


class Bye(_Message, frozen=True, tag="bye"):
    node: int
    exit_code: int = 0


FromAgent = (
    Join
    | ManagersReady
    | ManagerFailed
    | ShadowAt
    | ShadowFailed
    | ShadowReclaimed
    | Reclaimed
    | MemoryOf
    | FootprintOf
    | Fenced
    | SurvivorAt
    | Repaired
    | RepairFailed
    | SummaryOf
    | ResumedOf
    | ActiveFailed
    | FinishedOf
    | Fired
    | SpareUnfit
    | Retired
    | Fit
    | Bye
)


class RankProgress(_Message, frozen=True):
    """Progress of one active trainer as its agent sees it; times are of the agent's own clock."""

    rank: int
    generation: int
    iteration: int
    phase: int
    waiting: bool
    counter: int
    changed_s: float
    age_s: float


class Beat(_Message, frozen=True, tag="beat"):
    """Sign of life, both ways; from an agent also the progress of its trainers. Not retransmitted."""

    node: int
    generation: int
    progress: tuple[RankProgress, ...] = ()


_to_agent: msgspec.msgpack.Decoder[ToAgent | Beat] = msgspec.msgpack.Decoder(ToAgent | Beat)
_from_agent: msgspec.msgpack.Decoder[FromAgent | Beat] = msgspec.msgpack.Decoder(FromAgent | Beat)


def encode(message: ToAgent | FromAgent | Beat) -> bytes:
    """Return the msgpack form of one message."""
    return msgspec.msgpack.encode(message)


def decode_to_agent(data: bytes) -> ToAgent | Beat:
    """Decode what an agent may receive; `msgspec.ValidationError` for anything else."""
    return _to_agent.decode(data)


def decode_from_agent(data: bytes) -> FromAgent | Beat:
    """Decode what the coordinator may receive; `msgspec.ValidationError` for anything else."""
    return _from_agent.decode(data)
