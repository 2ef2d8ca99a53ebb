"""Telling: what `leto run` says on its terminal while training goes on.

Role in the whole: a failure that is recovered from within a second would else go by unnoticed; who wants to
know more has `leto status`, `leto report` and the event log. With JSON lines every event is a line anyway.
Pure: an event in, words or nothing out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leto_shadow.timeline import TITLES, detail_words

__all__ = ["told"]

_SOURCES = {"in-place": "in place", "checkpoint": "from a checkpoint", "fresh": "from the beginning"}


def told(event: Mapping[str, Any]) -> str | None:
    """Words for one event of `docs/reference/leto-shadow.md`; None: it is not for the terminal."""
    make = _WORDS.get(str(event.get("event")))
    return None if make is None else make(event)


def _started(event: Mapping[str, Any]) -> str:
    return f"training begins at {_place(event)}"


def _place(event: Mapping[str, Any]) -> str:
    source = str(event["source"])
    return f"iteration {event['iteration']}, {_SOURCES.get(source, source)}"


def _failure(event: Mapping[str, Any]) -> str:
    title = TITLES.get(str(event["kind"]), event["kind"])
    detail = detail_words(event)
    return f"rank {event['rank']}, iteration {event['iteration']}: {title}{detail and f' ({detail})'}"


def _recovered(event: Mapping[str, Any]) -> str:
    pages, lost = event.get("lost_pages", 0), event.get("iterations_lost", 0)
    more = [f"{_count(pages, 'lost page')} repaired"] * bool(pages)
    more.append(f"{_count(lost, 'iteration')} to be computed again" if lost else "no iteration is lost")
    seconds = float(event["breakdown"]["total"])
    return f"training goes on at {_place(event)}, {seconds:.2f} s later: {', '.join(more)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _adopted(_event: Mapping[str, Any]) -> str:
    return "an agent died and was started again; the memory of all ranks is there"


def _given_up(event: Mapping[str, Any]) -> str:
    return f"an agent died and was started again; memory could not be kept: {event['reason']}"


def _fatal(event: Mapping[str, Any]) -> str:
    return f"rank {event['rank']}: its memory is not trusted any more ({event['reason']})"


def _replaced(event: Mapping[str, Any]) -> str:
    ranks = range(int(event["first_rank"]), int(event["first_rank"]) + int(event["ranks"]))
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"node {event['lost']} is left: node {event['spare']}, a spare, takes {which}"


def _no_spare(event: Mapping[str, Any]) -> str:
    return f"node {event['lost']} should be left, but there is no spare"


_WORDS = {
    "adopted": _adopted,
    "memory_given_up": _given_up,
    "started": _started,
    "failure": _failure,
    "fatal": _fatal,
    "recovered": _recovered,
    "node_replaced": _replaced,
    "no_spare": _no_spare,
}
