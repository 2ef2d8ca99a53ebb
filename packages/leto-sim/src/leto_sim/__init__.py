"""Simulator of training under failures: iteration time, recovery time and ETTR up to 131,072 GPUs.

Three answers to one question: the paper's closed form (`ettr`, `predict`), an exact chain for Poisson
failures (`renewal`) and a discrete-event simulation over any schedule (`des`). Inputs are profiles
(`profile`), systems (`systems`) and schedules (`failures`). Depends on numpy alone.
"""

from leto_sim._version import __version__
from leto_sim.advise import Advice, Question, Range, advise
from leto_sim.des import Lane, Result, simulate
from leto_sim.errors import (
    MissingDependencyError,
    ProfileError,
    RecoveryTooSlowError,
    ReportError,
    SimError,
    TraceError,
)
from leto_sim.failures import Schedule, poisson_schedule, read_trace
from leto_sim.interval import best_interval, best_interval_exact, tuned_interval, young_interval
from leto_sim.iteration import IterationTime, iteration_time
from leto_sim.predict import Estimate, evaluate, simulate_poisson
from leto_sim.profile import Profile, load_profile
from leto_sim.renewal import exact_ettr
from leto_sim.sweep import Grid, Row, run_sweep
from leto_sim.systems import System, gemini, jit_ckpt, leto, moevement

__all__ = [
    "Advice",
    "Estimate",
    "Grid",
    "IterationTime",
    "Lane",
    "MissingDependencyError",
    "Profile",
    "ProfileError",
    "Question",
    "Range",
    "RecoveryTooSlowError",
    "ReportError",
    "Result",
    "Row",
    "Schedule",
    "SimError",
    "System",
    "TraceError",
    "__version__",
    "advise",
    "best_interval",
    "best_interval_exact",
    "evaluate",
    "exact_ettr",
    "gemini",
    "iteration_time",
    "jit_ckpt",
    "leto",
    "load_profile",
    "moevement",
    "poisson_schedule",
    "read_trace",
    "run_sweep",
    "simulate",
    "simulate_poisson",
    "tuned_interval",
    "young_interval",
]
