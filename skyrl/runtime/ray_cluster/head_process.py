"""Becomes `ray start`, and leaves a small process behind that kills what Ray has started when `ray start` has ended.

When `ray start --block` is killed, the kernel kills the processes that it has started itself. The two agents of the
raylet are no such processes: they went on for more than a minute. They are in the process group of `ray start`, which
is therefore killed as a whole. Knows nothing of the cluster; the arguments are the command.
"""

from __future__ import annotations

import os
import subprocess
import sys

# Python without any packages: 6 MB.
_KILL_GROUP_LATER = """
import os, select, signal, sys
group = int(sys.argv[1])
try:
    select.select([os.pidfd_open(group)], [], [])
except ProcessLookupError:
    pass
try:
    os.killpg(group, signal.SIGKILL)
except ProcessLookupError:
    pass
"""


def main() -> None:
    """Must be called in a process that leads its group."""
    watching = (sys.executable, "-I", "-S", "-c", _KILL_GROUP_LATER, str(os.getpid()))
    subprocess.Popen(watching, start_new_session=True, stdin=subprocess.DEVNULL)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
