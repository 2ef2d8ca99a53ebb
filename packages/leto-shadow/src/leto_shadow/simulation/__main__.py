"""Replay or search: ``python -m leto_shadow.simulation --seed N [--count K] [--trace]``."""

from __future__ import annotations

import argparse
import collections
import time

from leto_shadow.simulation.cluster import run_seed
from leto_shadow.simulation.plan import Scenario, make_plan


def main() -> None:
    """Run ``count`` schedules from ``seed`` on and print a summary."""
    parser = argparse.ArgumentParser(prog="python -m leto_shadow.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--scenario", choices=[scenario.name for scenario in Scenario])
    parser.add_argument("--trace", action="store_true", help="print every event")
    options = parser.parse_args()
    scenario = Scenario[options.scenario] if options.scenario else None
    if options.trace:
        print(make_plan(options.seed, scenario))
    started = time.perf_counter()
    ends: collections.Counter[int] = collections.Counter()
    generations = events = 0
    for seed in range(options.seed, options.seed + options.count):
        outcome = run_seed(seed, scenario, print if options.trace else None)
        ends[outcome.exit_code] += 1
        generations += outcome.generations
        events += outcome.events
    spent = time.perf_counter() - started
    print(f"{options.count} schedules, {events} events, {generations} generations in {spent:.1f} s")
    print("exit codes:", dict(sorted(ends.items())))


if __name__ == "__main__":
    main()
