"""Deterministic simulation of the recovery protocol: real coordinator and agents, all else made up.

One seed chooses a cluster, a network that delays, loses, repeats and reorders, and a schedule of failures;
I-4 and I-7 are checked after every event, I-3, I-5 and I-6 at every update, decision and resumption
(`invariants`). The same seed replays the same run:

    python -m leto_shadow.simulation --seed 1234 --trace

Time is simulated: a minute of protocol takes milliseconds, and thousands of schedules fit in a test run.
"""

from leto_shadow.simulation.cluster import Cluster, Outcome, run_seed
from leto_shadow.simulation.invariants import ViolationError

__all__ = ["Cluster", "Outcome", "ViolationError", "run_seed"]
