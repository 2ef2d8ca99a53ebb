"""Prometheus metrics of one agent: what its node does, and, on node rank 0, what the job went through.

Role in the whole: the operator's view from a monitoring system (`leto run --metrics-port`). `JobMetrics`
takes the same events that go into the event log, and looks at the agent for what has no event; it never asks
trainers or managers anything. prometheus-client is an optional dependency: ``leto-shadow[metrics]``.

The agent's thread writes; threads of `leto_shadow.metrics_server` read. prometheus-client locks every value.
Labels are ranks of this node and words of this package, and at most `REPORTED_NAMES_MAX` names of a script.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Any

from leto_shadow._version import __version__
from leto_shadow.agent_core import AgentCore, ManagerStatus
from leto_shadow.classifier import FailureKind
from leto_shadow.events import Event
from leto_shadow.timeline import NOT_SECONDS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["INSTALL", "REPORTED_NAMES_MAX", "JobMetrics", "available"]

INSTALL = "metrics need prometheus-client: pip install 'leto-shadow[metrics]'"

_log = logging.getLogger("leto_shadow.metrics")

REPORTED_NAMES_MAX = 64
"""So many names of values that a script reports become metrics; more would be a mistake of the script."""

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_OWN_FIELDS = frozenset({"t", "mono", "event", "node", "rank", "iteration", "generation"})


def available() -> bool:
    """Whether prometheus-client is installed."""
    return importlib.util.find_spec("prometheus_client") is not None


class JobMetrics:
    """The metrics, in a registry of their own. Raises ImportError if prometheus-client is missing."""

    def __init__(self, job_id: str, node: int) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

        self.registry: CollectorRegistry = CollectorRegistry()
        self._reported_names: set[str] = set()
        self._stale_seen: dict[str, int] = {}
        self._watched = range(0)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"leto_{name}", text, labels, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"leto_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"leto_{name}", text, labels, registry=self.registry, buckets=_BUCKETS)

        info = Info("leto_job", "The job and the agent that tells this.", registry=self.registry)
        info.info({"job": job_id, "node": str(node), "version": __version__})
        # of this node
        self._generation = gauge("generation", "Generation that this agent is in.")
        self._epoch = gauge("epoch", "Set of state managers; grows with each fatal failure.")
        self._managers = gauge("managers_alive", "State managers of this node that live.")
        self._trainers = gauge("trainers", "Living trainers of this node.", "role")
        self._level = gauge("shadow_level", "Level of the rank's shadow; 0 while there is none.", "rank")
        self._iteration = gauge("iteration", "Iteration that the rank's active trainer is in.", "rank")
        self._reported = gauge("reported", "What the script last reported, by its own names.", "rank", "name")
        self._iteration_s = histogram("iteration_seconds", "Iterations, where reported as `seconds`.", "rank")
        self._update_s = histogram(
            "update_seconds", "Optimizer updates with their protection, where reported as `update_s`.", "rank"
        )
        self._resume_s = histogram("resume_seconds", "Parts of a rank's own recovery.", "part")
        self._reclaimed_bytes = counter("reclaimed_bytes", "Memory that shadows gave back.", "rank")
        self._reclaims = counter("reclaims", "How often a shadow gave its memory back.", "rank")
        self._out_of_memory = counter("out_of_memory", "Allocations that no reclaim could help.", "rank")
        self._survived = counter("survived", "Trainers that survived a failure and became shadows.", "rank")
        self._survivors_lost = counter("survivors_lost", "Survivors that had to be replaced.", "rank")
        self._stale = counter("stale_messages", "Messages of older generations, refused.", "kind")
        # of the job, on node rank 0
        self._training = gauge("training", "1 while all ranks train (node rank 0).")
        self._failures = counter("failures", "Failures found (node rank 0).", "kind")
        self._fatals = counter("fatal_failures", "Failures that were not recovered in place (node rank 0).")
        self._shadow_failures = counter("shadow_failures", "Shadows lost (node rank 0).", "collateral")
        self._refused = counter(
            "takeovers_refused", "Takeovers that did not get back what a shadow had parked (node rank 0)."
        )
        self._recoveries = counter("recoveries", "Recoveries (node rank 0).", "source")
        self._recovery_s = histogram(
            "recovery_seconds", "Detection to training on all ranks (node rank 0).", "source"
        )
        self._phase_s = histogram(
            "recovery_phase_seconds", "Parts of recoveries (node rank 0).", "source", "phase"
        )
        self._detect_s = histogram("detection_seconds", "Failure to detection (node rank 0).", "kind")
        self._iterations_lost = counter("iterations_lost", "Iterations computed again (node rank 0).")
        self._lost_pages = counter("lost_pages", "Pages found missing and replaced (node rank 0).")
        if node == 0:
            for kind in FailureKind:
                self._failures.labels(kind.value)
            for source in ("in-place", "checkpoint", "fresh"):
                self._recoveries.labels(source)

    def watch(self, ranks: range) -> None:
        """Show the ranks of this node from the start on, at zero: a rate needs something to grow from."""
        for rank in ranks:
            for metric in (self._reclaimed_bytes, self._reclaims, self._out_of_memory, self._level):
                metric.labels(str(rank))
            for metric in (self._survived, self._survivors_lost):
                metric.labels(str(rank))

    # --- what the agent is ------------------------------------------------------------------------

    def look(self, agent: AgentCore) -> None:
        """Take what has no event from the agent."""
        if self._watched != agent.ranks:
            self._watched = agent.ranks
            self.watch(agent.ranks)
        self._generation.set(agent.generation)
        self._epoch.set(agent.epoch)
        self._managers.set(sum(one.status is ManagerStatus.UP for one in agent.managers.values()))
        levels = dict.fromkeys(agent.ranks, 0)
        roles = {"active": 0, "shadow": 0, "spare": 0}
        for trainer in agent.trainers.values():
            if trainer.rank < 0:
                roles["spare"] += 1
                continue
            roles["shadow" if trainer.generation is None else "active"] += 1
            if trainer.generation is None:
                levels[trainer.rank] = max(levels.get(trainer.rank, 0), trainer.level)
            else:
                self._iteration.labels(str(trainer.rank)).set(trainer.iteration)
        for role, count in roles.items():
            self._trainers.labels(role).set(count)
        for rank, level in levels.items():
            self._level.labels(str(rank)).set(level)
        for kind, count in agent.stale.items():
            self._stale.labels(kind).inc(count - self._stale_seen.get(kind, 0))
            self._stale_seen[kind] = count

    # --- what happened ----------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Count one event; those that have no metric are nothing. A mistake costs a number, not the job."""
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is None:
            return
        try:
            handler(event)
        except (KeyError, TypeError, ValueError) as error:
            kind = type(error).__name__
            _log.error("event %r is not in the metrics: %s: %s", event["event"], kind, error)

    def _on_metrics(self, event: Event) -> None:
        rank = str(event["rank"])
        for name, value in event.items():
            if name in _OWN_FIELDS or not isinstance(value, (int, float)):
                continue
            if name not in self._reported_names:
                if len(self._reported_names) == REPORTED_NAMES_MAX:
                    continue
                self._reported_names.add(name)
            self._reported.labels(rank, name).set(value)
        for name, metric in (("seconds", self._iteration_s), ("update_s", self._update_s)):
            if isinstance(event.get(name), (int, float)):
                metric.labels(rank).observe(event[name])

    def _on_resumed(self, event: Event) -> None:
        for part, seconds in _seconds(event, without=NOT_SECONDS):
            self._resume_s.labels(part).observe(seconds)

    def _on_started(self, _event: Event) -> None:
        self._training.set(1)

    def _on_failure(self, event: Event) -> None:
        self._training.set(0)
        self._failures.labels(event["kind"]).inc()
        self._detect_s.labels(event["kind"]).observe(event["detected_s"])

    def _on_fatal(self, _event: Event) -> None:
        self._fatals.inc()

    def _on_takeover_refused(self, _event: Event) -> None:
        self._refused.inc()

    def _on_shadow_failed(self, event: Event) -> None:
        self._shadow_failures.labels("yes" if event["collateral"] else "no").inc()

    def _on_recovered(self, event: Event) -> None:
        source = event["source"]
        self._training.set(1)
        self._recoveries.labels(source).inc()
        self._recovery_s.labels(source).observe(event["breakdown"]["total"])
        for phase, seconds in _seconds(event, without={"total"}):
            self._phase_s.labels(source, phase).observe(seconds)
        self._iterations_lost.inc(event["iterations_lost"])
        self._lost_pages.inc(event["lost_pages"])

    def _on_reclaimed(self, event: Event) -> None:
        rank = str(event["rank"])
        self._reclaims.labels(rank).inc()
        self._reclaimed_bytes.labels(rank).inc(event["bytes"])

    def _on_out_of_memory(self, event: Event) -> None:
        self._out_of_memory.labels(str(event["rank"])).inc()

    def _on_survived(self, event: Event) -> None:
        self._survived.labels(str(event["rank"])).inc()

    def _on_survivor_lost(self, event: Event) -> None:
        self._survivors_lost.labels(str(event["rank"])).inc()

    def _on_finished(self, _event: Event) -> None:
        self._training.set(0)

    def _on_job_failed(self, _event: Event) -> None:
        self._training.set(0)


def _seconds(event: Event, without: Any) -> list[tuple[str, float]]:
    return [(k, float(v)) for k, v in (event.get("breakdown") or {}).items() if k not in without]
