"""Measures the speed of this machine: the CPU seconds of a fixed piece of work.

CPU seconds of a server on two machines can be compared after dividing them by `calibrate()` of the same run. The work
resembles a server's: Python bytecode over small objects, and messages through sockets of the kernel.
"""

from __future__ import annotations

import socket
import statistics
import time

ROUNDS = 5
LOOPS = 600
MESSAGE = bytes(4096)


def _one_round() -> int:
    """About 35 ms on a core of 2024: two thirds bytecode, one third socket calls. The sum shows that all the work was
    done."""
    total = 0
    sender, receiver = socket.socketpair()
    with sender, receiver:
        for loop in range(LOOPS):
            row = {f"key-{loop}-{field}": field * loop for field in range(48)}
            total += sum(value % 7 for value in row.values()) + len("".join(sorted(row)))
            for _ in range(8):
                sender.sendall(MESSAGE)
                total += len(receiver.recv(len(MESSAGE)))
    return total


def calibrate() -> float:
    """CPU seconds (user and system, of the calling thread) of one round of fixed work: the median of five rounds.

    Takes about 0.2 s of CPU. Time spent waiting for a core does not count. A busy neighbour on the same physical core
    can add 40 percent, to this figure and to all others of the run.
    """
    spent: list[float] = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        _one_round()
        spent.append(time.thread_time() - began)
    return statistics.median(spent)
