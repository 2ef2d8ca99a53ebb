"""What distinguishes the recovery systems, as numbers (section 8.1 and appendix C.3).

Role: the closed form, the exact chain and the discrete-event simulation all read a `System`, so that they
can only differ in mathematics, never in what a system is.

Baselines restore a checkpoint after every failure; the plain ones start in place on a HOF and on a spare on
an FF, the "+" ones on a preinitialised spare in both cases. Leto retains state in place on a HOF (nothing but
the iteration in flight is lost) and is its fallback system on an FF.

Times without a unit suffix do not exist here: ``_s`` is seconds, ``_iterations`` is iterations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from leto_sim.errors import SimError

__all__ = ["System", "gemini", "jit_ckpt", "leto", "moevement"]


@dataclass(frozen=True)
class System:
    """Recovery behaviour of one system.

    Attributes:
        name: display name, e.g. ``gemini+``.
        detection_s: T_det, failure to its detection.
        initialize_hof_s: T_init after a HOF: process state, and loading of model state.
        initialize_ff_s: the same after an FF.
        checkpoint_stall_s: T_ckpt, excess time of an iteration that commits a checkpoint.
        overhead_fraction: omega, cost of every iteration as a share of it (RMU).
        retains_on_hof: True if a HOF loses only the elapsed part of the iteration in flight (L = 1/2).
        commit_lag_iterations: iterations until a checkpoint taken at a boundary is usable: 1 for Gemini,
            which transfers during the next iteration (L = I/2 + 1); 0 if usable at once (L = I/2).
        conversion_iterations: replayed iterations beyond the rollback, as a multiple of the interval
            (MoEvement replays a window to make sparse snapshots dense).
        fixed_interval_iterations: interval imposed by the design (1 for JIT-Ckpt), or None to tune it.
        interval_max_iterations: largest interval considered; used where Young's formula has no finite answer.
        interval_counts_hof: True if every failure rolls back, so that Young's formula takes the MTTF of all
            failures; False for Leto, which takes that of the fatal ones.
        spare_on_hof: True if a HOF also moves to a spare (the "+" systems).
        initialize_hof_cold_s: T_init of a HOF when no prepared trainer is at hand (no spare free, or Leto's
            next shadow not ready); None: wait for a spare, or the same as initialize_hof_s.
    """

    name: str
    detection_s: float
    initialize_hof_s: float
    initialize_ff_s: float
    checkpoint_stall_s: float
    overhead_fraction: float = 0.0
    retains_on_hof: bool = False
    commit_lag_iterations: int = 1
    conversion_iterations: float = 0.0
    fixed_interval_iterations: int | None = None
    interval_max_iterations: int = 1024
    interval_counts_hof: bool = True
    spare_on_hof: bool = False
    initialize_hof_cold_s: float | None = None

    def __post_init__(self) -> None:
        for field in ("detection_s", "initialize_hof_s", "initialize_ff_s", "checkpoint_stall_s"):
            value = getattr(self, field)
            if not 0 <= value < float("inf"):
                raise SimError(f"{self.name}.{field}: expected a finite number >= 0 s, found {value}")
        if not 0 <= self.overhead_fraction < float("inf"):
            raise SimError(
                f"{self.name}.overhead_fraction: expected a number >= 0, found {self.overhead_fraction}"
            )
        if self.commit_lag_iterations not in (0, 1):
            raise SimError(
                f"{self.name}.commit_lag_iterations: expected 0 or 1, found {self.commit_lag_iterations}"
            )
        if self.interval_max_iterations < 1:
            raise SimError(
                f"{self.name}.interval_max_iterations: expected >= 1, found {self.interval_max_iterations}"
            )
        if self.conversion_iterations < 0:
            raise SimError(
                f"{self.name}.conversion_iterations: expected >= 0, found {self.conversion_iterations}"
            )

    def with_name(self, name: str) -> System:
        """Return a copy under another name."""
        return replace(self, name=name)


def gemini(
    *,
    initialize_s: float,
    checkpoint_stall_s: float,
    detection_s: float = 1.0,
    plus: bool = False,
    initialize_ff_s: float | None = None,
    initialize_hof_cold_s: float | None = None,
    interval_max_iterations: int = 1024,
) -> System:
    """Gemini (in-memory checkpoints) or Gemini+ (with preinitialised spares, for HOF and FF alike)."""
    return System(
        name="gemini+" if plus else "gemini",
        detection_s=detection_s,
        initialize_hof_s=initialize_s,
        initialize_ff_s=initialize_s if initialize_ff_s is None else initialize_ff_s,
        checkpoint_stall_s=checkpoint_stall_s,
        spare_on_hof=plus,
        initialize_hof_cold_s=initialize_hof_cold_s,
        interval_max_iterations=interval_max_iterations,
    )


def jit_ckpt(
    *,
    initialize_s: float,
    detection_s: float = 1.0,
    plus: bool = False,
    initialize_ff_s: float | None = None,
    initialize_hof_cold_s: float | None = None,
) -> System:
    """JIT-Ckpt: the surviving data-parallel replica is the checkpoint, taken after the failure.

    The paper gives the interval (1) and no formula. A replica holds the last completed iteration at once, so
    we take no lag and no steady cost: L = 1/2. Its transfer belongs to ``initialize_s``. Needs replicated
    optimizer state, which the caller has to know.
    """
    return System(
        name="jit-ckpt+" if plus else "jit-ckpt",
        detection_s=detection_s,
        initialize_hof_s=initialize_s,
        initialize_ff_s=initialize_s if initialize_ff_s is None else initialize_ff_s,
        checkpoint_stall_s=0.0,
        commit_lag_iterations=0,
        fixed_interval_iterations=1,
        spare_on_hof=plus,
        initialize_hof_cold_s=initialize_hof_cold_s,
    )


def moevement(
    *,
    initialize_s: float,
    checkpoint_stall_s: float,
    window_iterations: int,
    detection_s: float = 1.0,
    plus: bool = False,
    initialize_ff_s: float | None = None,
    conversion_iterations: float = 1.0,
    initialize_hof_cold_s: float | None = None,
) -> System:
    """MoEvement: every iteration saves a part of the operators, a window of W iterations saves all.

    ``checkpoint_stall_s`` is the cost of a whole window. The paper selects W with "a calibrated sparse-window
    model" that it does not print. Ours: the rollback of an interval W, plus ``conversion_iterations`` * W
    replayed iterations (default: one window) to turn the sparse snapshots into one dense state.
    """
    return System(
        name="moevement+" if plus else "moevement",
        detection_s=detection_s,
        initialize_hof_s=initialize_s,
        initialize_ff_s=initialize_s if initialize_ff_s is None else initialize_ff_s,
        checkpoint_stall_s=checkpoint_stall_s,
        conversion_iterations=conversion_iterations,
        fixed_interval_iterations=window_iterations,
        spare_on_hof=plus,
        initialize_hof_cold_s=initialize_hof_cold_s,
    )


def leto(
    fallback: System,
    *,
    initialize_s: float,
    overhead_fraction: float,
    interval_max_iterations: int | None = None,
    initialize_cold_s: float | None = None,
    detection_s: float | None = None,
) -> System:
    """Leto over a fallback system: retained state and shadow on a HOF, the fallback's recovery on an FF.

    Whatever is not given is the fallback's, so that at a HOF ratio of 0 Leto is the fallback plus
    ``overhead_fraction`` by construction of the parameters (a property test holds the formulas to it).
    """
    return replace(
        fallback,
        name="leto",
        detection_s=fallback.detection_s if detection_s is None else detection_s,
        initialize_hof_s=initialize_s,
        overhead_fraction=overhead_fraction,
        retains_on_hof=True,
        interval_counts_hof=False,
        interval_max_iterations=interval_max_iterations or fallback.interval_max_iterations,
        spare_on_hof=False,
        initialize_hof_cold_s=initialize_cold_s,
    )
