"""Settings of Hypothesis for all packages, and folders with short paths.

CI draws the same examples every time, so that it fails only for a reason that is in the commit. Elsewhere
the examples are new on every run, and a failure prints the decorator that repeats it. They have no deadline:
a machine under load is not a bug.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "leto",
    deadline=None,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("leto")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder of this test, in place of pytest's: the name of a socket has room for 107 bytes, of which
    TMPDIR, the name of the user, the name of the test and that of xdist's worker took what they liked."""
    with tempfile.TemporaryDirectory(prefix="leto-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
