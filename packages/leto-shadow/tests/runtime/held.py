"""An example (HOLD_SCRIPT, else `plain_pytorch.py`) whose iterations from HOLD_AT on take HOLD_S longer until
HOLD_UNTIL exists.

So a test that does something while the job trains does it before the end, however fast the machine is and
however long the test waits for its turn.
"""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path
from typing import Any

from leto_shadow import Context

AT, LONGER_S, UNTIL = int(os.environ["HOLD_AT"]), float(os.environ["HOLD_S"]), Path(os.environ["HOLD_UNTIL"])
point = Context.point


def held(self: Context, name: str, iteration: int, **where: Any) -> None:
    over = time.monotonic() + LONGER_S
    while iteration >= AT and time.monotonic() < over and not UNTIL.exists():
        point(self, "held", iteration)  # a trainer that is to retire leaves here
        time.sleep(0.005)
    point(self, name, iteration, **where)


Context.point = held  # type: ignore[method-assign]
script = os.environ.get("HOLD_SCRIPT", "plain_pytorch.py")
runpy.run_path(str(Path(__file__).parents[2] / "examples" / script), run_name="__main__")
