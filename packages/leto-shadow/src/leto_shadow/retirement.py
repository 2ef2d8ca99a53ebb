"""A node that lost its ranks to a spare because a device is not operable: what it waits for (design: fatal
failures; "the replaced node becomes the spare").

Nothing of its ranks may be left, so that the device can be reset. Then its devices are looked at now and
then, until they are operable again and the node can be a spare, or until nobody has repaired them for too
long. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leto_shadow.operability import DeviceFacts, has_fatal_xid, healed

__all__ = ["SPARE_CHECK_S", "Retirement", "why_not_ready"]

CHECK_S = 5.0
"""Between two looks."""

SPARE_CHECK_S = 10.0
"""Between two looks of a spare at devices that it may need at any time."""


def why_not_ready(found: Iterable[DeviceFacts]) -> str:
    """Why a spare with such devices cannot take a place; empty if it can: nothing is given anew to a device
    whose driver asks for anything."""
    judged = [healed(facts, after_xid=False) for facts in found]
    return "; ".join(reason for one in judged if not one.operable for reason in one.reasons)


@dataclass
class Retirement:
    """Of one node, since ``since``. ``after_xid``: devices that had reported a fatal Xid; None: nobody knows,
    so all of them count as such."""

    reason: str
    since: float
    after_xid: frozenset[str] | None = None
    injected_until: float = -math.inf
    """So long its device is said to be unfit, whatever it says itself (`leto inject fatal`)."""
    asked: bool = False
    next_look: float = -math.inf
    found: str = ""
    """Why it was not fit when it was looked at last."""

    @classmethod
    def begin(cls, reason: str, now: float, seen: Iterable[DeviceFacts], injected_until: float) -> Retirement:
        """``seen``: what was wrong with the devices when their trainers had ended."""
        after_xid = frozenset(facts.device for facts in seen if has_fatal_xid(facts))
        return cls(reason, now, after_xid, injected_until)

    def due(self, now: float) -> bool:
        """Whether to look at the devices now."""
        return not self.asked and now >= max(self.next_look, self.injected_until)

    def look(self) -> None:
        """Its devices are being looked at."""
        self.asked = True

    def checked(self, found: Sequence[DeviceFacts], now: float) -> bool:
        """Take what was seen; return True if all devices are operable again."""
        self.asked, self.next_look = False, now + CHECK_S
        judged = [
            healed(facts, after_xid=self.after_xid is None or facts.device in self.after_xid)
            for facts in found
        ]
        self.found = "; ".join(reason for one in judged if not one.operable for reason in one.reasons)
        return all(one.operable for one in judged)
