"""What happened in a run, built from its event log: iterations, levels, failures and recoveries.

Role in the whole: `leto report`, and the display and the report of leto-megatron's demo, read the same
`Timeline`. Pure: events in, state and lines of text out; no clock, no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from leto_shadow.classifier import last_words

__all__ = [
    "NOT_SECONDS",
    "TITLES",
    "FailureRow",
    "RepairRow",
    "Sample",
    "Timeline",
    "detail_words",
    "refused_words",
]

NOT_SECONDS = frozenset({"pages_reconstructed", "verified"})
"""What a trainer's breakdown of its recovery holds besides seconds."""

TITLES = {
    "exit": "trainer died",
    "hang": "trainer hung",
    "manager": "state manager died",
    "recovery": "failure in a recovery",
    "decision": "no common state",
    "agent": "agent died",
    "node": "node lost",
    "device": "device not operable",
}

_CLASSES = {"hof": "hardware-operable", "ff": "fatal", "abort": "fatal, once too often"}


def detail_words(event: Mapping[str, Any]) -> str:
    """What a failure (`failure`) was about, in one line of at most 300 characters."""
    return last_words(str(event.get("detail", "")).strip())[:300]


def refused_words(event: Mapping[str, Any]) -> str:
    """A takeover that found less memory than its shadow had parked (`takeover_refused`), in words."""
    mib = int(event.get("parked_bytes", 0)) >> 20
    return (
        f"rank {event.get('rank')}: the shadow that took over in generation {event.get('generation')} did "
        f"not get back the {mib} MiB that it had parked: {event.get('detail')}"
    )


@dataclass
class Sample:
    """One finished iteration of the run: seconds since the job started; the loss, if any rank reports one."""

    seconds: float
    iteration: int
    loss: float | None
    generation: int


@dataclass
class RepairRow:
    """What a rank reconstructed in a recovery, by its own count.

    `verified`: spare parity confirmed each page that was solved for; false where none was left to do it with.
    A lost page of the half-written chunk comes from the undo buffer: it is counted, and takes no parity.
    """

    rank: int
    pages_reconstructed: int
    verified: bool

    @property
    def text(self) -> str:
        """The repair in words."""
        how = "verified" if self.verified else "no spare parity was left to verify with"
        return f"rank {self.rank}: {self.pages_reconstructed} pages reconstructed, {how}"


@dataclass
class FailureRow:
    """One failure and what became of it. Times in seconds.

    `detected_s`: from the failure to its detection. `recovered_s`: from the failure to training resumed.
    `seconds`: when it was, since the job started. `breakdown`: parts of the recovery, as the coordinator
    measured them; `rank_parts`: what ranks did within those, each part of the slowest one. `lost`: what a
    drill took away, in words; `lost_pages`: what the state managers then found missing, on all ranks;
    `repairs`: what the ranks that missed pages made of it. `verdict`: hof, ff or abort, by leto or by the
    operator's hook, and the `reasons` that Leto had.
    """

    kind: str
    title: str
    rank: int
    iteration: int
    seconds: float
    detected_s: float
    recovered_s: float | None = None
    iterations_lost: int | None = None
    source: str | None = None
    detail: str = ""
    drill: str | None = None
    lost: str = ""
    lost_pages: int = 0
    repairs: list[RepairRow] = field(default_factory=list)
    generation: int = 0
    verdict: str = ""
    verdict_by: str = ""
    reasons: list[str] = field(default_factory=list)
    breakdown: dict[str, float] = field(default_factory=dict)
    rank_parts: dict[str, float] = field(default_factory=dict)

    @property
    def verdict_text(self) -> str:
        """The verdict in words; empty if none was recorded."""
        if not self.verdict:
            return ""
        whose = "" if self.verdict_by == "leto" else f", by the operator's {self.verdict_by}"
        return f"{_CLASSES.get(self.verdict, self.verdict)}{whose} ({'; '.join(self.reasons)})"

    def as_dict(self) -> dict[str, Any]:
        """Keys and plain values, for JSON."""
        return asdict(self)


class Timeline:
    """Feed with events in their order.

    Parameters
    ----------
    drills
        Drill id -> kind of failure, for those that the run inflicts on itself.
    titles
        Kind of failure -> words, for kinds that leto-shadow does not know.
    clock
        Field of an event that holds its time: "mono", or "t" where events of several hosts are mixed.
    """

    def __init__(
        self,
        drills: Mapping[str, str] | None = None,
        titles: Mapping[str, str] | None = None,
        clock: str = "mono",
    ) -> None:
        self.drills = dict(drills or {})
        self.titles = {**TITLES, **(titles or {})}
        self._clock = clock
        self.generation = 0
        self.iteration = -1
        self.loss: float | None = None
        self.tokens_per_s: float | None = None
        self.state = "starting"
        self.levels: dict[int, int] = {}
        self.samples: list[Sample] = []
        self.failures: list[FailureRow] = []
        self.finished = False
        self.failed: str | None = None
        self._start: float | None = None
        self._began: float | None = None
        self._ended: float | None = None
        self._repairs: dict[int, RepairRow] = {}
        self._rank_parts: dict[str, float] = {}
        self._fired: tuple[str, float] | None = None
        self._last = 0.0  # time of the last event
        self._silent_since = 0.0  # and of the last one before the job was started again
        self._rates: list[float] = []

    def feed(self, event: Mapping[str, Any]) -> list[str]:
        """Take one event; return lines that tell a reader what is new."""
        now = float(event.get(self._clock, 0.0))
        if self._start is None:
            self._start = now
        handler = getattr(self, "_on_" + str(event.get("event")), None)
        lines: list[str] = [] if handler is None else handler(event, now - self._start) or []
        self._last = now - self._start
        return lines

    @property
    def open_failure(self) -> FailureRow | None:
        """The failure that is being recovered from."""
        if self.failures and self.failures[-1].recovered_s is None:
            return self.failures[-1]
        return None

    @property
    def training_s(self) -> float:
        """Seconds from the start of the first iteration to the end of the last one, recoveries included."""
        if self._began is None or self._ended is None:
            return 0.0
        return self._ended - self._began

    # --- events ---------------------------------------------------------------------------------------

    def _on_job_started(self, _event: Mapping[str, Any], _now: float) -> list[str]:
        self._silent_since = self._last
        return []

    def _on_adopted(self, _event: Mapping[str, Any], now: float) -> list[str]:
        """The launcher started a dead agent again. Nobody saw the death: it followed the last event."""
        return self._agent_died(now)

    def _on_memory_given_up(self, _event: Mapping[str, Any], now: float) -> list[str]:
        return self._agent_died(now)

    def _agent_died(self, now: float) -> list[str]:
        if self.open_failure is not None:
            return []  # it said why it ended
        began = self._silent_since
        row = FailureRow(
            "agent",
            self.titles["agent"],
            -1,
            self.iteration + 1,
            began,
            now - began,
            generation=self.generation,
        )
        self.failures.append(row)
        self.state = "recovering"
        return [f"{now:6.1f} s  {row.title}; {row.detected_s:.2f} s until it was started again"]

    def _on_shadow_level(self, event: Mapping[str, Any], _now: float) -> list[str]:
        self.levels[int(event["rank"])] = int(event["level"])
        return []

    def _on_promoted(self, event: Mapping[str, Any], _now: float) -> list[str]:
        self.generation = int(event["generation"])
        # What ranks report from now on is of this attempt; memory was waited for and repaired before it.
        kept = ("memory_free", "localize", "lose")
        self._rank_parts = {k: v for k, v in self._rank_parts.items() if k in kept}
        self.levels = dict.fromkeys(self.levels, 0)  # those that were shadows train now; new ones start at 0
        return []

    def _on_started(self, event: Mapping[str, Any], now: float) -> list[str]:
        self.state = "training"
        if self._began is None:
            self._began = now
        self._repairs.clear()
        # Failures that ended the job before, if the launcher started it again.
        self._close_failures(now, event, [])
        return [f"{now:6.1f} s  training begins at iteration {event['iteration']}"]

    def _on_metrics(self, event: Mapping[str, Any], now: float) -> list[str]:
        self._ended = now  # of the slowest rank, as the newest report is
        iteration, loss = int(event["iteration"]), event.get("loss")
        last = self.samples[-1] if self.samples else None
        if last is not None and (last.iteration, last.generation) == (iteration, self.generation):
            if last.loss is not None or loss is None:
                return []  # another rank's report of the same iteration
            last.loss = float(loss)
        else:
            self.samples.append(
                Sample(now, iteration, None if loss is None else float(loss), self.generation)
            )
        self.iteration = iteration
        if loss is None:
            return []
        self.loss = float(loss)
        seconds = event.get("seconds")
        if seconds and event.get("tokens"):
            self._rates = [*self._rates[-9:], float(event["tokens"]) / float(seconds)]
            self.tokens_per_s = sum(self._rates) / len(self._rates)
        return []

    def _on_drill_fired(self, event: Mapping[str, Any], now: float) -> list[str]:
        self._fired = (str(event["id"]), now)
        return []

    def _on_pages_lost(self, event: Mapping[str, Any], _now: float) -> list[str]:
        text = str(event.get("detail", "")).split(": ", 1)[-1]
        if self.open_failure is not None:
            self.open_failure.lost = text
        # No part of what a failure costs: a drill destroys pages only while the recovery is under way.
        if seconds := float(event.get("seconds") or 0.0):
            self._took("lose", seconds)
        return [f"          rank {event.get('rank')}: {text}"]

    def _on_failure(self, event: Mapping[str, Any], now: float) -> list[str]:
        fired, self._fired = self._fired, None
        kind, began = str(event["kind"]), now - float(event.get("detected_s") or 0.0)
        drill = None
        if fired is not None:
            drill, began = fired[0], fired[1]
            kind = self.drills.get(drill, kind)
        row = FailureRow(
            kind=kind,
            title=self.titles.get(kind, kind),
            rank=int(event["rank"]),
            iteration=max(int(event["iteration"]), self.iteration + 1),
            seconds=began,
            detected_s=max(0.0, now - began),
            detail=detail_words(event),
            drill=drill,
            generation=self.generation,
        )
        self.failures.append(row)
        self.state = "recovering"
        return [
            f"{now:6.1f} s  {row.title}: rank {row.rank}, iteration {row.iteration}; "
            f"detected after {row.detected_s:.2f} s"
        ]

    def _on_takeover_refused(self, event: Mapping[str, Any], now: float) -> list[str]:
        return [f"{now:6.1f} s  {refused_words(event)}"]

    def _on_verdict(self, event: Mapping[str, Any], now: float) -> list[str]:
        rank = int(event["rank"])
        row = next((one for one in reversed(self.failures) if one.rank == rank and not one.verdict), None)
        if row is None:
            return []
        row.verdict, row.verdict_by = str(event["verdict"]), str(event["by"])
        row.reasons = [str(one) for one in event["reasons"]]
        return [f"{now:6.1f} s  rank {rank}: {row.verdict_text}"]

    def _on_classify_hook_failed(self, event: Mapping[str, Any], now: float) -> list[str]:
        return [f"{now:6.1f} s  the operator's hook: {event.get('detail')}"]

    def _took(self, part: str, seconds: float) -> None:
        """A rank's part of the recovery under way; that of the slowest one counts."""
        self._rank_parts[part] = max(self._rank_parts.get(part, 0.0), seconds)

    def _on_memory_free(self, event: Mapping[str, Any], _now: float) -> list[str]:
        waited_s = float(event.get("waited_s") or 0.0)
        self._took("memory_free", waited_s)
        return []

    def _on_localized(self, event: Mapping[str, Any], _now: float) -> list[str]:
        seconds = float(event.get("seconds") or 0.0)
        self._took("localize", seconds)
        return []

    def _on_resumed(self, event: Mapping[str, Any], _now: float) -> list[str]:
        parts = event.get("breakdown") or {}
        for name, seconds in parts.items():
            if name not in NOT_SECONDS:
                self._took(name, float(seconds))
        pages = int(parts.get("pages_reconstructed", 0))
        if not pages:
            return []
        # A recovery that fails itself is tried again: what an earlier attempt made good stays good.
        rank, verified = int(event["rank"]), bool(parts.get("verified", 0))
        before = self._repairs.get(rank)
        if before is not None:
            pages, verified = pages + before.pages_reconstructed, verified and before.verified
        self._repairs[rank] = repair = RepairRow(rank, pages, verified)
        return [f"          {repair.text}"]

    def _on_recovered(self, event: Mapping[str, Any], now: float) -> list[str]:
        self.state = "training"
        iteration, source = int(event["iteration"]), str(event["source"])
        repairs = [repair for _rank, repair in sorted(self._repairs.items())]
        self._repairs = {}
        row = self.open_failure
        if row is None:
            return []
        self._close_failures(now, event, repairs)
        return [
            f"{now:6.1f} s  generation {event['generation']} goes on at iteration {iteration} ({source}), "
            f"{row.recovered_s:.2f} s after the failure; lost: {row.iterations_lost}"
        ]

    def _close_failures(self, now: float, event: Mapping[str, Any], repairs: list[RepairRow]) -> None:
        """Failures on the way (a second one during a recovery) end with the same recovery."""
        for row in self.failures:
            if row.recovered_s is None:
                row.recovered_s = now - row.seconds
                row.source = str(event["source"])
                row.iterations_lost = max(0, self.iteration + 1 - int(event["iteration"]))
                row.lost_pages = int(event.get("lost_pages", 0))
                row.repairs = list(repairs)
                row.breakdown = {k: float(v) for k, v in (event.get("breakdown") or {}).items()}
                row.rank_parts = dict(self._rank_parts)
        self._rank_parts = {}

    def _on_survived(self, event: Mapping[str, Any], now: float) -> list[str]:
        whose = f"rank {event['rank']}: the trainer of generation {event['generation']}"
        return [
            f"{now:6.1f} s  {whose} gave up writing in {float(event['gave_up_s']):.3f} s, is a shadow now"
        ]

    def _on_survivor_lost(self, event: Mapping[str, Any], now: float) -> list[str]:
        detail = str(event.get("detail", "")).strip().split("\n")[-1][:300]
        return [f"{now:6.1f} s  rank {event['rank']}: the trainer that survived is replaced: {detail}"]

    def _on_finished(self, event: Mapping[str, Any], now: float) -> list[str]:
        self.finished, self.state = True, "finished"
        return [f"{now:6.1f} s  finished at iteration {event.get('iteration')}"]

    def _on_job_failed(self, event: Mapping[str, Any], now: float) -> list[str]:
        self.failed, self.state = str(event.get("reason", "unknown")), "failed"
        return [f"{now:6.1f} s  the job failed: {self.failed.splitlines()[0]}"]
