"""Settings of Hypothesis for all packages.

CI draws the same examples every time, so that it fails only for a reason that is in the commit. Elsewhere
the examples are new on every run, and a failure prints the decorator that repeats it. They have no deadline:
a machine under load is not a bug.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "leto",
    deadline=None,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("leto")
