"""The GPU tests for NVIDIA's compute-sanitizer: every array in memory of its own, so that a byte too far is
seen.

    compute-sanitizer --tool memcheck --error-exitcode 9 python packages/leto-ec/tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python packages/leto-ec/tests/sanitize.py

The exit code is that of pytest, or 9 if the sanitizer found something.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cupy
import pytest

# Small enough for instrumented kernels, and every kernel is in them.
TESTS = "golden or destroyed or streaming or inconsistency or absent or (plans_of and not refuse)"


def main() -> int:
    cupy.cuda.set_allocator(None)  # no pool
    selection = " ".join(sys.argv[1:]) or TESTS
    file = Path(__file__).with_name("test_cuda.py")
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-o", "timeout=0", "--tb=short", "-W", "default"]
    return int(pytest.main([str(file), "-k", selection, *options]))


if __name__ == "__main__":
    sys.exit(main())
