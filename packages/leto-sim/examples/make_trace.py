"""Write the bundled GCP-spot-like failure trace: python examples/make_trace.py [FILE].

Made by us from a seed, not measured; see `leto_sim.failures.spot_like_trace`. A test repeats it byte for
byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

from leto_sim.failures import spot_like_trace, write_trace

SEED = 20
TARGET = Path(__file__).parents[1] / "src" / "leto_sim" / "data" / "gcp_spot_like.csv"

if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    write_trace(
        target,
        spot_like_trace(SEED),
        ["made by examples/make_trace.py: shaped like spot evictions, not a measurement", f"seed = {SEED}"],
    )
    print(f"{target} written")
