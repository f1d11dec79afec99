"""A fixed piece of work whose CPU seconds stand for the speed of this machine.

CPU seconds of a server mean little across machines; divided by `calibrate()` of the same run they can be compared.
The work is of the kind a server does: Python bytecode over small objects, and messages through sockets of the kernel.
Usage: python benchmarks/calibration.py
"""

from __future__ import annotations

import socket
import statistics
import time

ROUNDS = 5
LOOPS = 600
MESSAGE = bytes(4096)


def _one_round() -> int:
    """Some 35 ms of a core of 2024: two thirds bytecode, one third socket calls. The sum keeps the work honest."""
    total = 0
    here, there = socket.socketpair()
    with here, there:
        for loop in range(LOOPS):
            row = {f"key-{loop}-{field}": field * loop for field in range(48)}
            total += sum(value % 7 for value in row.values()) + len("".join(sorted(row)))
            for _ in range(8):
                here.sendall(MESSAGE)
                total += len(there.recv(len(MESSAGE)))
    return total


def calibrate() -> float:
    """CPU seconds (user and system, of the calling thread) of one round of fixed work: the median of five rounds.

    Takes some 0.2 s of CPU. Waiting for a core does not count. A busy neighbour on the same physical core does: it can
    add 40 percent, to this as to everything that is measured beside it.
    """
    spent: list[float] = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        _one_round()
        spent.append(time.thread_time() - began)
    return statistics.median(spent)


if __name__ == "__main__":
    print(f"{calibrate():.4f}")
