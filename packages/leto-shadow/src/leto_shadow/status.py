"""`leto status`: a live table of a job, made from its event log and its agents' answers.

Role: the operator's view. `JobView` is a pure reducer over events, so that it shows the same for a running
job, a finished one and a copied log; what only a living agent knows (process ids, phases) is merged in when
it answers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leto_shadow import control
from leto_shadow.events import Event, EventReader
from leto_shadow.jobs import EVENTS_FILE, add_job_arguments, agent_sockets, find_run_dir
from leto_shadow.progress import Phase
from leto_shadow.timeline import refused_words

__all__ = ["DESCRIPTION", "JobView", "RankView", "add_arguments", "execute", "render"]

DESCRIPTION = """Show a job: each rank's trainer and shadow, generation, iteration, failures, last recovery.
Without --once or --json the table is live until the job ends."""

_REFRESH_S = 0.5


@dataclass
class RankView:
    """What is known about one rank."""

    iteration: int | None = None
    """The last one that the script reported as finished; if it reports none, the one that it is in."""
    reports: bool = False
    loss: float | None = None
    shadow_level: int | None = None
    source: str = ""
    generation: int | None = None
    failures: int = 0
    active: dict[str, Any] = field(default_factory=dict)
    """The trainer as its agent sees it (pid, phase, ...); empty if there is none or no agent answers."""
    shadow: dict[str, Any] = field(default_factory=dict)
    """The same for the shadow."""
    survivor: bool = False
    """The shadow was an active trainer before (event `shadow_level`)."""


@dataclass
class JobView:
    """State of a job after the events so far."""

    job_id: str
    state: str = "starting"
    world_size: int = 0
    generation: int | None = None
    iteration: int | None = None
    started_s: float | None = None
    ended_s: float | None = None
    ranks: dict[int, RankView] = field(default_factory=dict)
    failures: list[Event] = field(default_factory=list)
    refused: Event | None = None
    """The last takeover whose shadow did not get back the memory that it had parked."""
    recovery: Event | None = None
    """The last `recovered` event."""
    recoveries: int = 0
    phase: str = ""
    """Where the coordinator is; empty if its agent does not answer."""
    recovering_s: float | None = None
    """Seconds since the recovery that is under way began."""
    metrics_urls: list[str] = field(default_factory=list)
    """Where the agents of this host answer Prometheus."""
    drills_fired: list[str] = field(default_factory=list)
    unfit: dict[int, str] = field(default_factory=dict)
    """Nodes whose devices cannot be used, and why; they have no ranks."""
    reason: str = ""
    """Why the job failed."""
    agents: int = 0
    """Agents of this host that answered."""

    def rank(self, number: int) -> RankView:
        """Return the view of a rank, made if it is new."""
        return self.ranks.setdefault(number, RankView())

    def apply(self, event: Event) -> None:
        """Take one event in. Unknown events are ignored: a newer agent may write more than this version
        knows."""
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def _of(self, event: Event) -> RankView | None:
        number = event.get("rank")
        return self.rank(number) if isinstance(number, int) and number >= 0 else None

    def _on_job_started(self, event: Event) -> None:
        self.started_s = event.get("t")
        self.state = "starting"
        self.unfit.clear()
        self.ended_s = None
        self.world_size = int(event.get("world_size") or 0)
        for number in range(self.world_size):
            self.rank(number)

    def _on_promoted(self, event: Event) -> None:
        self.generation = event.get("generation", self.generation)

    def _on_resumed(self, event: Event) -> None:
        if (rank := self._of(event)) is not None:
            rank.iteration = event.get("iteration")
            rank.source = str(event.get("source", ""))
            rank.generation = event.get("generation")
        self.state = "training"

    def _on_metrics(self, event: Event) -> None:
        iteration = event.get("iteration")
        if (rank := self._of(event)) is not None:
            rank.iteration, rank.reports = iteration, True
            rank.loss = event.get("loss", rank.loss)
        if isinstance(iteration, int):
            self.iteration = iteration
        self.state = "training"

    def _on_failure(self, event: Event) -> None:
        self.failures.append(event)
        if (rank := self._of(event)) is not None:
            rank.failures += 1
        self.state = "recovering"

    def _on_recovery_begun(self, event: Event) -> None:
        self.state = "recovering"
        self.generation = event.get("generation", self.generation)

    def _on_recovered(self, event: Event) -> None:
        self.recovery = event
        self.recoveries += 1
        self.generation = event.get("generation", self.generation)
        self.iteration = event.get("iteration", self.iteration)
        self.state = "training"

    def _on_takeover_refused(self, event: Event) -> None:
        self.refused = event

    def _on_shadow_level(self, event: Event) -> None:
        if (rank := self._of(event)) is not None:
            rank.shadow_level = event.get("level")
            rank.survivor = event.get("origin") == "survivor"

    def _on_drill_fired(self, event: Event) -> None:
        self.drills_fired.append(str(event.get("id", "?")))

    def _on_fatal(self, event: Event) -> None:
        self.state = "recovering"

    def _on_finished(self, event: Event) -> None:
        self.state = "finished"
        self.ended_s = event.get("t")
        self.iteration = event.get("iteration", self.iteration)
        for rank in self.ranks.values():
            if not rank.reports:
                rank.iteration = self.iteration

    def _on_job_failed(self, event: Event) -> None:
        self.state = "failed"
        self.reason = str(event.get("reason", ""))
        self.ended_s = event.get("t")

    def _on_internal_error(self, event: Event) -> None:
        self.state = "failed"
        self.reason = str(event.get("error", ""))
        self.ended_s = event.get("t")

    def _on_spare_unfit(self, event: Event) -> None:
        self.unfit[int(event["spare"])] = str(event.get("reason", ""))

    def _on_node_replaced(self, event: Event) -> None:
        if event.get("unfit"):
            self.unfit[int(event["lost"])] = f"the device of rank {event['unfit'][0]} is not operable"

    def _on_spare_back(self, event: Event) -> None:
        self.unfit.pop(int(event["spare"]), None)

    def _on_spare_lost(self, event: Event) -> None:
        self.unfit.pop(int(event["lost"]), None)

    def _on_shadow_failed(self, event: Event) -> None:
        if (rank := self._of(event)) is not None:
            rank.shadow_level, rank.survivor = None, False

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        """Add what a living agent knows about the trainers of its node (`control.StatusReply.status`)."""
        self.agents += 1
        for trainer in snapshot.get("trainers") or ():
            if trainer.get("role") == "spare":
                continue  # it waits for the rank of another node
            rank = self.rank(int(trainer["rank"]))
            if trainer.get("role") == "active":
                rank.active = {**trainer, "phase": Phase.word(trainer.get("phase"))}
                if not rank.reports and not self.over:
                    rank.iteration = trainer.get("iteration", rank.iteration)
            elif int(trainer.get("level") or 0) >= int(rank.shadow.get("level") or 0):
                rank.shadow = dict(trainer)  # beside a survivor that is on its way to be the next one
        if url := snapshot.get("metrics_url"):
            self.metrics_urls.append(str(url))
        job = snapshot.get("job")
        if job and not self.over:
            self.phase = str(job.get("phase", ""))
            self.recovering_s = job.get("recovering_s")
            self.generation = job.get("generation", self.generation)
            if not any(rank.reports for rank in self.ranks.values()):
                self.iteration = job.get("iteration", self.iteration)
            if job.get("phase") in ("fencing", "repairing", "preparing", "exchanging", "resuming"):
                self.state = "recovering" if self.failures else "starting"

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.state in ("finished", "failed")


def _cell(value: object, digits: int = 4) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def _phase(view: JobView) -> str:
    """What a job that does not train is waiting for."""
    if view.state not in ("recovering", "starting") or not view.phase:
        return ""
    return f" ({view.phase}, {_seconds(view.recovering_s)})"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


_COLOURS = {
    "training": "green",
    "finished": "green",
    "recovering": "yellow",
    "starting": "cyan",
    "failed": "red",
}


def render(view: JobView, now_s: float) -> RenderableType:
    """Return the table of a job, for rich. now_s: Unix seconds."""
    end_s = now_s if view.ended_s is None else view.ended_s
    age = "" if view.started_s is None else f"  {max(0.0, end_s - view.started_s):.0f} s"
    head = Text.assemble(
        ("job ", "dim"),
        (view.job_id, "bold"),
        "  ",
        (view.state, _COLOURS.get(view.state, "")),
        _phase(view),
        ("  generation ", "dim"),
        _cell(view.generation),
        ("  iteration ", "dim"),
        _cell(view.iteration),
        (age, "dim"),
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("rank", "trainer", "phase", "iteration", "loss", "source", "shadow", "failures"):
        table.add_column(name, justify="left" if name in ("trainer", "phase", "source") else "right")
    for number, rank in sorted(view.ranks.items()):
        level = rank.shadow.get("level", rank.shadow_level)
        table.add_row(
            str(number),
            _cell(rank.active.get("pid")),
            _cell(rank.active.get("phase")),
            _cell(rank.iteration),
            _cell(rank.loss),
            _cell(rank.source),
            "-" if level is None or view.over else f"L{level}{'*' if rank.survivor else ''}",
            str(rank.failures),
        )
    lines: list[RenderableType] = [head, table]
    if not view.over and any(rank.survivor for rank in view.ranks.values()):
        lines.append(Text("* trained in an earlier generation, and survived its end", style="dim"))
    if view.failures:
        last = view.failures[-1]
        lines.append(
            Text(
                f"last failure: {last.get('kind', '?')} of rank {_cell(last.get('rank'))} in iteration "
                f"{_cell(last.get('iteration'))}, detected after {_seconds(last.get('detected_s'))}"
            )
        )
    if view.recovery is not None:
        found = view.recovery
        total = (found.get("breakdown") or {}).get("total")
        lines.append(
            Text(
                f"last recovery: generation {_cell(found.get('generation'))} at iteration "
                f"{_cell(found.get('iteration'))}, {found.get('source', '?')}, in {_seconds(total)}, "
                f"{_cell(found.get('iterations_lost'))} iterations lost"
            )
        )
        parts = [(k, v) for k, v in (found.get("breakdown") or {}).items() if k != "total"]
        if parts:
            words = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in parts)
            lines.append(Text(f"    {words}; {view.recoveries} recoveries in all", style="dim"))
    if view.refused is not None:
        lines.append(Text(refused_words(view.refused), style="yellow"))
    for node, reason in sorted(view.unfit.items()) if not view.over else ():
        lines.append(Text(f"node {node} can take no place: {reason}", style="yellow"))
    if view.reason:
        lines.append(Text(view.reason, style="red"))
    if view.metrics_urls and not view.over:
        lines.append(Text(f"metrics: {', '.join(view.metrics_urls)}", style="dim"))
    if view.drills_fired:
        lines.append(Text(f"drills fired: {', '.join(view.drills_fired)}", style="dim"))
    if not view.over and not view.agents:
        lines.append(Text("no agent of this job answers on this host", style="red"))
    return Group(*lines)


class _Watcher:
    """Follows the log of one job and asks its agents."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.view = JobView(run_dir.name)
        self._reader = EventReader(run_dir / EVENTS_FILE)

    def refresh(self) -> JobView:
        for event in self._reader.poll():
            self.view.apply(event)
        self.view.agents, self.view.phase, self.view.recovering_s = 0, "", None
        self.view.metrics_urls.clear()
        for rank in self.view.ranks.values():
            rank.active, rank.shadow = {}, {}
        for path in [] if self.view.over else agent_sockets(self.run_dir):
            try:
                reply = control.ask(path, control.StatusRequest(), timeout_s=2.0)
            except control.ControlError:
                continue  # shown as an agent that does not answer
            if isinstance(reply, control.StatusReply):
                self.view.merge(reply.status)
        return self.view


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `leto status`."""
    add_job_arguments(parser)
    parser.add_argument("--once", action="store_true", help="print the table once")
    parser.add_argument("--json", action="store_true", help="print the state as JSON once")


def execute(arguments: argparse.Namespace) -> int:
    """Show the job until it ends, or once."""
    watcher = _Watcher(find_run_dir(arguments.job, arguments.run_dir))
    view = watcher.refresh()
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(asdict(view)), indent=2).decode() + "\n")
        return 0
    console = Console(soft_wrap=not sys.stdout.isatty())
    if arguments.once or not console.is_terminal:
        console.print(render(view, time.time()))
        return 0
    with Live(render(view, time.time()), console=console, auto_refresh=False) as live:
        while not view.over:
            time.sleep(_REFRESH_S)  # a display's frame rate; nothing waits for it
            view = watcher.refresh()
            live.update(render(view, time.time()), refresh=True)
    return 0
