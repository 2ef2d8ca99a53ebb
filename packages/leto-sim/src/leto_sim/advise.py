"""Should I turn Leto on for my cluster? A range, a verdict and what to measure to narrow it.

Role: ``leto-sim advise``. From GPU count, MTTF, HOF share, iteration time and model size it predicts the ETTR
of the fallback system alone and of Leto over it, with everything unknown drawn from a range. The ranges come
from the paper and from what this package infers from it (`docs/inference.md`); each can be replaced. Uses the
exact chain, which is valid also where recovery is close to the MTTF.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from leto_sim.errors import SimError
from leto_sim.interval import tuned_interval
from leto_sim.renewal import exact_ettr
from leto_sim.systems import System, gemini, jit_ckpt, leto

__all__ = ["Advice", "Question", "Range", "advise"]

STATE_BYTES_PER_PARAMETER = 14.0
"""fp32 master and two moments (12) and the bf16 parameter (2), sharded over all GPUs."""

MATTERS = 0.005
"""A difference in ETTR below half a percentage point is called small."""


@dataclass(frozen=True)
class Range:
    """An uncertain input in [low, high]; drawn by logarithm if ``log``, evenly otherwise."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        finite = math.isfinite(self.low) and math.isfinite(self.high)
        if not finite or self.low > self.high or (self.log and self.low <= 0):
            raise SimError(
                f"expected low <= high{' and low > 0' if self.log else ''}, found {self.low}:{self.high}"
            )

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        """Map numbers in [0, 1) to the range."""
        if self.log:
            return np.asarray(self.low * (self.high / self.low) ** uniform)
        return self.low + (self.high - self.low) * uniform

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2


def spread(value: float, factor: float) -> Range:
    """A logarithmic range of ``value`` over and times ``factor``."""
    return Range(value / factor, value * factor, log=True)


@dataclass(frozen=True)
class Question:
    """A user's cluster. Ranges default to what the paper reports (in the comments)."""

    gpus: int
    iteration_s: Range
    parameters: float
    mttf_s: Range
    hof_ratio: Range = Range(0.227, 0.73)  # section 2.1: two production studies
    fallback: str = "gemini+"
    detection_s: Range = Range(0.5, 2.0, log=True)  # section 8.1: under 1 s; ours a little wider
    leto_initialize_s: Range = Range(
        1.0, 20.0, log=True
    )  # table 3: 13 and 15 s; this implementation aims below 1
    leto_overhead: Range = Range(0.003, 0.009)  # table 1: 0.6 %; inferred for figure 14: 0.35-0.40 %
    fallback_initialize_s: Range | None = (
        None  # table 3: 59 s, with preinitialised spares 35 s; inferred: 31 s
    )
    host_gb_per_s: Range = Range(
        0.65, 2.6, log=True
    )  # inferred: about 1.3 GB/s a GPU of visible stall on AWS
    checkpoint_fixed_s: Range = Range(
        0.3, 2.0, log=True
    )  # inferred: 1.2-1.9 s where the state of a GPU is tiny
    checkpoint_stall_s: Range | None = None  # replaces the two above
    draws: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        if self.gpus < 1 or not self.parameters > 0 or self.draws < 2:
            found = f"{self.gpus}, {self.parameters:g}, {self.draws}"
            raise SimError(f"expected gpus >= 1, parameters > 0, draws >= 2, found {found}")
        if self.fallback not in ("gemini", "gemini+", "jit-ckpt", "jit-ckpt+"):
            raise SimError(f"expected fallback gemini[+] or jit-ckpt[+], found {self.fallback!r}")
        if not 0 <= self.hof_ratio.low <= self.hof_ratio.high <= 1:
            raise SimError(
                f"expected a HOF share in [0, 1], found {self.hof_ratio.low}:{self.hof_ratio.high}"
            )
        if self.iteration_s.low <= 0 or self.mttf_s.low <= 0:
            raise SimError("expected an iteration time and an MTTF above 0 s")

    def ranges(self) -> dict[str, Range]:
        """The uncertain inputs by name."""
        start = self.fallback_initialize_s or (
            Range(26, 40) if self.fallback.endswith("+") else Range(45, 75)
        )
        shared = {
            "iteration_s": self.iteration_s,
            "mttf_s": self.mttf_s,
            "hof_ratio": self.hof_ratio,
            "detection_s": self.detection_s,
            "leto_initialize_s": self.leto_initialize_s,
            "leto_overhead": self.leto_overhead,
            "fallback_initialize_s": start,
        }
        if self.fallback.startswith("jit"):
            return shared
        if self.checkpoint_stall_s is not None:
            return {**shared, "checkpoint_stall_s": self.checkpoint_stall_s}
        return {**shared, "host_gb_per_s": self.host_gb_per_s, "checkpoint_fixed_s": self.checkpoint_fixed_s}


@dataclass(frozen=True)
class Advice:
    """The answer. Triples are the 5th, 50th and 95th percentile; ETTR and gain as fractions."""

    verdict: str
    fallback_ettr: tuple[float, float, float]
    leto_ettr: tuple[float, float, float]
    gain: tuple[float, float, float]
    share_better: float
    break_even_hof: float | None
    gpu_hours_per_day: tuple[float, float, float]
    most_uncertain: str
    middle: Mapping[str, float] = field(default_factory=dict)


def advise(question: Question) -> Advice:
    """Answer ``question``; deterministic in its seed."""
    ranges = question.ranges()
    uniform = np.random.default_rng([question.seed, 4]).random((len(ranges), question.draws))
    drawn = {name: r.draw(u) for (name, r), u in zip(ranges.items(), uniform, strict=True)}
    pairs = np.array(
        [_pair(question, {n: float(v[k]) for n, v in drawn.items()}) for k in range(question.draws)]
    )
    gain = pairs[:, 1] - pairs[:, 0]
    better = float((gain > 0).mean())
    middle = {name: r.middle for name, r in ranges.items()}
    saved = gain * question.gpus * 24
    return Advice(
        verdict=_verdict(better, float(np.median(gain))),
        fallback_ettr=_percentiles(pairs[:, 0]),
        leto_ettr=_percentiles(pairs[:, 1]),
        gain=_percentiles(gain),
        share_better=better,
        break_even_hof=_break_even(question, middle),
        gpu_hours_per_day=_percentiles(saved),
        most_uncertain=max(drawn, key=lambda name: abs(_rank_correlation(drawn[name], gain))),
        middle=middle,
    )


def _systems(question: Question, v: Mapping[str, float]) -> tuple[System, System]:
    """(fallback alone, Leto over it) for one draw of the inputs."""
    plus = question.fallback.endswith("+")
    if question.fallback.startswith("jit"):
        base = jit_ckpt(initialize_s=v["fallback_initialize_s"], detection_s=v["detection_s"], plus=plus)
    else:
        stall_s = v.get("checkpoint_stall_s")
        if stall_s is None:
            gigabytes = STATE_BYTES_PER_PARAMETER * question.parameters / question.gpus / 1e9
            stall_s = v["checkpoint_fixed_s"] + gigabytes / v["host_gb_per_s"]
        base = gemini(
            initialize_s=v["fallback_initialize_s"],
            checkpoint_stall_s=stall_s,
            detection_s=v["detection_s"],
            plus=plus,
        )
    return base, leto(base, initialize_s=v["leto_initialize_s"], overhead_fraction=v["leto_overhead"])


def _pair(question: Question, v: Mapping[str, float]) -> tuple[float, float]:
    """ETTR of the fallback and of Leto."""
    setting = (v["iteration_s"], v["mttf_s"], v["hof_ratio"])
    base, ours = (exact_ettr(s, *setting, tuned_interval(s, *setting)) for s in _systems(question, v))
    return base, ours


def _break_even(question: Question, middle: Mapping[str, float]) -> float | None:
    """HOF share from which Leto wins, at the middle of all ranges; None if it never does."""

    def gain(ratio: float) -> float:
        base, ours = _pair(replace(question), {**middle, "hof_ratio": ratio})
        return ours - base

    if gain(1.0) <= 0:
        return None
    low, high = 0.0, 1.0
    if gain(low) >= 0:
        return 0.0
    for _ in range(20):
        half = (low + high) / 2
        low, high = (half, high) if gain(half) < 0 else (low, half)
    return high


def _verdict(better: float, median: float) -> str:
    if abs(median) < MATTERS:
        return "it hardly matters"
    if better >= 0.95:
        return "yes"
    if better <= 0.05:
        return "no"
    return "probably yes" if better >= 0.5 else "probably no"


def _percentiles(values: NDArray[np.float64]) -> tuple[float, float, float]:
    low, middle, high = np.percentile(values, [5, 50, 95]).tolist()
    return low, middle, high


def _rank_correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    first, second = (np.argsort(np.argsort(v)).astype(np.float64) for v in (a, b))
    first, second = first - first.mean(), second - second.mean()
    return float(first @ second / np.sqrt((first @ first) * (second @ second)))
