"""Ties a child to its parent and becomes it: `python tether.py PARENT_PID COMMAND [ARGUMENT...]`.

The kernel then kills the child when the parent dies, whatever the parent dies of. Doing this between fork and exec of
a process that has threads can deadlock; a program of its own cannot. Linux only: elsewhere the child is started
untied, and a parent that is killed outright leaves it behind.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv[1])
    command = sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return  # the parent died before the tie was made; nobody would ever stop this child
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
