"""The process that decodes pictures: python -m skyrl.runtime.pictures.worker CPU_S MEMORY_BYTES NICE.

Reads files from its standard input, each behind a header (`HEADER`), and answers each with a line of JSON:
{"size": [width, height]} or {"bad": reason}; before the first file it says {}. Ends with its input, so with the process
that started it. A file that takes too much processor time ends the process by SIGPROF.

Imports Pillow, and neither torch nor a model. Has no sockets but the one to the process that started it.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import warnings
from typing import Any

import msgspec

from skyrl.base.pictures.decoding import size_of
from skyrl.base.pictures.picture import FORMATS, BadPicture
from skyrl.runtime.pictures import HEADER


def main(cpu_s: float, memory_bytes: int, nice: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the asking one decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # of what Pillow forgives
    _limit_memory(memory_bytes)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(nice)
    _answer({})
    while header := sys.stdin.buffer.read(HEADER.size):
        place, length = HEADER.unpack(header)
        data = sys.stdin.buffer.read(length)
        if len(data) < length:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            answer: dict[str, Any] = {"size": size_of(data, FORMATS[place])}
        except BadPicture as bad:
            answer = {"bad": str(bad)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(answer)


def _limit_memory(most_bytes: int) -> None:
    """Of the address space. The operator may have set a lower limit, which stays. Only Linux has such a limit."""
    if sys.platform == "linux":
        _, allowed = resource.getrlimit(resource.RLIMIT_AS)
        most = most_bytes if allowed == resource.RLIM_INFINITY else min(most_bytes, allowed)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(values: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(values) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
