"""Becomes a program of the embedded server: drops root, ties its life to its owner's, and executes it.

`embedded_launch.py OWNER_PID UID:GID PROGRAM ARGUMENT...`, with `-` for UID:GID to keep the user.
It is a program of its own, because none of this may run between the fork and the exec of an owner
that has threads.  It must be started by the thread whose end is the owner's end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    owner, user, program, *arguments = sys.argv[1:]
    if user != "-":
        uid, gid = user.split(":")
        os.setgroups([])
        os.setgid(int(gid))
        os.setuid(int(uid))
    # After the change of user, which clears it; the exec keeps it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
    if os.getppid() != int(owner):
        sys.exit("the owner is gone")
    os.umask(0o077)
    os.execv(program, [program, *arguments])  # noqa: S606 - becoming that program is the purpose


if __name__ == "__main__":
    main()
