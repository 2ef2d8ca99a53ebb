"""torchrun, but with the agent's own exit code at the end.

torchrun answers every failure of a worker with status 1 and a page of its own; a user of Leto needs the code
that says who has to act (`leto_shadow.exit_codes`). Everything else is torchrun's.

    python -m leto_shadow.launcher [torchrun's options] -m leto_shadow.agent_main ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run torchrun with ``argv``; return the exit code of the agent that failed first, or 0."""
    try:
        torchrun(list(argv))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = int(failure.exitcode)
        return 128 - code if code < 0 else code
    except SignalException as signal:
        return 128 + int(signal.sigval)  # torchrun has passed it on to the agent and waited for its end
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
