"""Who is in the job: the nodes that joined, the ranks that each one gets, and what they bring along.

Agents that are started again (by torchrun, after the death of an agent) bring the state managers of their
predecessors along, with the memory in them. If the nodes together hold *all* ranks, in one epoch, every node
keeps the ranks whose memory it holds, and the job goes on from that memory; otherwise all of it is given up,
because ranks in memory and ranks from a checkpoint must not be mixed (I-5). Only memory of the newest
epoch counts: what is older was given up before, by a node that lost its place to a spare, for one. Nodes
without ranks are spares. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from leto_shadow.messages import Held, Join

__all__ = ["Assignment", "Roster"]


@dataclass(frozen=True)
class Assignment:
    """Ranks by node, and the memory that the job can go on from."""

    ranks_of: Mapping[int, range]
    epoch: int
    """Of the managers to be taken over, if there are any; otherwise of those that must not come back."""
    generation: int
    """Newer than every generation that ever wrote the memory found (I-4); 0 if none was found."""
    adopts: bool
    """True if all ranks go on from the memory found."""
    reason: str
    """Why not, if memory was found and is given up."""


class Roster:
    """The agents that reported in."""

    def __init__(self, nodes: int, needed: int = 0) -> None:
        self.nodes = nodes
        self.needed = needed or nodes
        """Nodes that train; the others are spares."""
        self.joined: dict[int, Join] = {}

    def assign(self) -> Assignment:
        """Give every node its ranks; all must have joined."""
        everything = [one for join in self.joined.values() for one in join.held]
        generation = max((one.generation for one in everything), default=-1) + 1
        epoch = max((one.epoch for one in everything), default=0)
        newest = {
            node: tuple(one for one in join.held if one.epoch == epoch) for node, join in self.joined.items()
        }
        kept, reason = self._keep({node: ones for node, ones in newest.items() if ones})
        return Assignment(kept or self._in_order(), epoch, generation, kept is not None, reason)

    def reached(self) -> int:
        """The iteration that the rank behind had come to before the agents were started again; 0: unknown."""
        known: dict[int, int] = {}
        for join in self.joined.values():
            for rank, iteration in join.reached:
                known[rank] = max(known.get(rank, 0), iteration)
        return min(known.values(), default=0)

    def _in_order(self, order: list[int] | None = None) -> dict[int, range]:
        ranks_of, first = {}, 0
        fit_first = sorted(range(self.nodes), key=lambda node: bool(self.joined[node].unfit))
        for node in order or sorted(fit_first[: self.needed]):
            count = self.joined[node].local_ranks
            ranks_of[node] = range(first, first + count)
            first += count
        return ranks_of

    def _keep(self, held: Mapping[int, tuple[Held, ...]]) -> tuple[dict[int, range] | None, str]:
        """Return the ranks by node such that each has the memory of its own, or why there is no such way."""
        if not held:
            return None, ""
        if len(held) != self.needed:
            without = sorted(set(range(self.nodes)) - set(held))
            return None, f"{len(held)} nodes hold some, expected {self.needed}; nodes {without} hold none"
        # Ranks of one node are neighbours: in the order of their lowest rank the nodes must cover all.
        order = sorted(held, key=lambda node: min(one.rank for one in held[node]))
        ranks_of = self._in_order(order)
        for node, ranks in ranks_of.items():
            found = sorted(one.rank for one in held[node])
            if found != list(ranks):
                return None, f"node {node} holds that of ranks {found}, expected {list(ranks)}"
        return dict(sorted(ranks_of.items())), ""
