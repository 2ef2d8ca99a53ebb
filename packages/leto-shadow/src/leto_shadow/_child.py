"""First code of every trainer and helper: have the kernel end it with its agent, then become it (I-7).

    python -I -S _child.py AGENT_PID PROGRAM ARGUMENTS...

A death signal that is set after a script's imports protects nothing during the imports, which take seconds
and may hang. It survives exec, and so does the pid: what comes after need not know of this. Run by its path,
without site: it must not import anything but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_AGENT_GONE = 70  # leto_shadow.run.EXIT_AGENT_GONE


def main() -> None:
    """Replace this process, or end it if the agent is gone."""
    agent, program = int(sys.argv[1]), sys.argv[2]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != agent:  # it died before the call above, which says nothing of the past
        sys.exit(_AGENT_GONE)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would keep that
        signal.signal(number, signal.SIG_DFL)
    os.execv(program, sys.argv[2:])


if __name__ == "__main__":
    main()
