"""Which drills and injections of a job have struck already: names for them, and where they are remembered.

Each strikes once in the whole job. Its agent knows, but a rank may move to a node whose agent has read the
same drills and the same schedule, and has seen nothing: a spare. So an agent tells the coordinator *before*
it acts (`messages.Fired`), and the coordinator tells every agent that gets ranks (`messages.Welcome`). When
agents are started again, and the coordinator with them, each brings along what its event log says
(`messages.Join`).
"""

from __future__ import annotations

from collections.abc import Iterable

from leto_shadow.events import Event

__all__ = ["fired_before", "of_drill", "of_injection"]


def of_drill(drill_id: str) -> str:
    """Name of a drill, as `messages.Fired` has it."""
    return f"drill {drill_id}"


def of_injection(schedule: str, number: int) -> str:
    """Name of one injection of a schedule (`Schedule.key`), counted from 0."""
    return f"injection {schedule} {number}"


def fired_before(events: Iterable[Event], since: float) -> set[str]:
    """Return the names of all that struck since ``since`` (Unix seconds), by an event log of one or more
    nodes."""
    found = set()
    for event in events:
        if float(event.get("t", 0.0)) < since:
            continue
        if event["event"] == "drill_fired":
            found.add(of_drill(str(event.get("id"))))
        elif event["event"] == "injected":
            found.add(of_injection(str(event.get("schedule")), int(event["number"])))
    return found
