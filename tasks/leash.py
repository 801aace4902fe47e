"""python -m tasks.leash CMD...: get SIGTERM when the thread that started us ends, then become CMD.

The parent-death signal survives exec, so a trainer never outlives a killed flow by more than its own saving.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Put on the leash and become the command."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent or parent == 1:
        sys.exit(128 + signal.SIGTERM)  # the parent died before the leash was on
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
