"""Exit codes of the node agent, and so of ``leto run`` (README, "Exit codes").

A code says who has to act: 0 nobody, 1xx a signal ended the job, 7x Leto itself gave up and says why.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["KEEPS_MEMORY", "ExitCode"]


class ExitCode(IntEnum):
    """Why the agent ended. torchrun shows the number; the reason is in the log and in ``events.jsonl``."""

    FINISHED = 0
    USAGE = 2
    """The command line or the environment is wrong; nothing was started."""
    CANNOT_START = 70
    """Trainers or managers fail again and again before training can begin (an error in the script, say)."""
    FATAL_LIMIT = 71
    """More fatal failures than the limit allows: restarting does not help."""
    AGENT_LOST = 72
    """An agent (this node's own: killed by a signal), the coordinator or torchrun is gone: torchrun may
    restart the job elsewhere."""
    INTERNAL = 73
    """A bug or a broken promise inside Leto: an event that the protocol does not allow."""
    NO_DECISION = 74
    """The ranks' summaries admit no common state, not even a checkpoint."""
    CANNOT_FENCE = 75
    """A trainer process could not be proven dead: going on would risk two writers (I-4)."""
    NODE_UNFIT = 77
    """The devices of this node are not operable, a spare has its ranks, and nobody has repaired them in time:
    this node leaves, the job goes on."""
    INTERRUPTED = 130
    TERMINATED = 143


KEEPS_MEMORY = frozenset({ExitCode.AGENT_LOST, ExitCode.INTERNAL, ExitCode.TERMINATED})
"""Ends after which torchrun may start the agents again: the state managers wait for that (torchrun itself
ends its workers by SIGTERM when another node's failed)."""
