"""Cores that threads share by the kernel's time slices.

A thread does one piece of work after the other. It holds a core until it has no more work, or for a slice while other
threads wait. Next is the thread that was woken first; threads that have used up a slice come after all woken ones, as
their deadlines in Linux's scheduler are later. A thread that had nothing to do first pays for its
wake-up: the kernel's switch, the turn of its event loop, and cold caches. So its work is cheaper under load, when much
of it waits already while the thread waits for a core.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from benchmarks.simulation.events import Activity, Clock, Signal

NEVER = float("inf")


@dataclass(slots=True)
class _Piece:
    left_s: float
    done: Signal


class Cores:
    """`count` cores. `others` is the share of each that other programs take. While more than one is busy, work takes
    `crowded` times as much CPU: cores of a virtual machine are often threads of one real core."""

    def __init__(
        self, clock: Clock, count: float, *, slice_s: float = 0.003, crowded: float = 1.0, others: float = 0.0
    ) -> None:
        self._clock, self._count, self._free = clock, count, count
        self._slice_s, self._crowded, self._others = slice_s, crowded, others
        self._woken: deque[Thread] = deque()
        self._used_up: deque[Thread] = deque()
        """Threads that have used up a slice and have more to do."""

    def wake(self, thread: Thread) -> None:
        """The thread has work now."""
        if self._free:
            self._free -= 1
            self._run(thread, self._slice_s)
        else:
            self._woken.append(thread)

    def _run(self, thread: Thread, slice_s: float) -> None:
        run_s = min(thread.pieces[0].left_s, slice_s)
        cpu_s = run_s * (self._crowded if self._count - self._free > 1 else 1.0)
        thread.busy_s += cpu_s
        end = self._clock.now + cpu_s / (1 - self._others)
        self._clock.at(end, lambda: self._ran(thread, run_s, slice_s - run_s))

    def _ran(self, thread: Thread, run_s: float, slice_s: float) -> None:
        piece = thread.pieces[0]
        piece.left_s -= run_s
        if piece.left_s < 1e-9:
            thread.pieces.popleft()
            piece.done.set()  # this may give the thread more work
        waiting = self._woken or self._used_up
        if thread.pieces and (slice_s or not waiting):
            self._run(thread, slice_s or self._slice_s)
            return
        if thread.pieces:
            self._used_up.append(thread)
        else:
            thread.awake = False
        if waiting := self._woken or self._used_up:
            self._run(waiting.popleft(), self._slice_s)
        else:
            self._free += 1


class Thread:
    """One thread of a process. `wake_s` are the CPU seconds of a wake-up. A dead thread never ends what it has."""

    def __init__(self, cores: Cores, wake_s: float = 0.0) -> None:
        self._cores, self._wake_s = cores, wake_s
        self.pieces: deque[_Piece] = deque()
        self.awake = self.dead = False
        self.busy_s = 0.0
        """CPU seconds so far, with those of its wake-ups."""
        self.wakes = 0

    def add(self, seconds: float) -> Signal:
        """One more piece of work. The signal is set at its end."""
        done = Signal()
        if not self.awake:
            seconds += self._wake_s
            self.wakes += 1
        self.pieces.append(_Piece(seconds, done))
        if not self.awake:
            self.awake = True
            self._cores.wake(self)
        return done

    def work(self, seconds: float) -> Activity:
        """Use with `yield from`."""
        if not (yield from self.try_work(seconds)):
            yield NEVER

    def try_work(self, seconds: float) -> Activity:
        """As `work`, but its value is False if the thread is dead."""
        if not self.dead:
            yield self.add(seconds)
        return not self.dead
