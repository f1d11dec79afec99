"""The memory of a server that `skyrl capacity` has started: of its processes on a CPU, or of its GPUs.

On GPUs the sums are of whole GPUs, less what was used before the server started: torch keeps what it has freed, so what
is used after a pass is the pass's peak, too. That way has not been run on a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from skyrl.cli.capacity.client import Failed
from skyrl.runtime.processes.gpus import gpu_memory
from skyrl.runtime.processes.host_resources import free_host_bytes
from skyrl.runtime.processes.usage import (
    forget_peak_of,
    parts_of_server,
    peak_resident_bytes,
    resident_bytes,
    shared_bytes,
)

TRAINER, VLLM, SERVER = "trainer", "vLLM", "server"


class Memory(Protocol):
    """Bytes of a server. `available`: what was free before it started. `settles`: a trainer at rest gives back what it
    has freed, after a while."""

    available: float
    settles: bool
    launcher: int
    """The process id of the server's launcher, when it runs."""

    def used(self) -> dict[str, float]:
        """By part: `trainer`, which holds adapters in training, and others."""
        ...

    def watch(self) -> None:
        """The peak counts from now on."""
        ...

    def peak(self) -> float:
        """The most that the trainer has used since."""
        ...


class HostMemory:
    """Of processes. Make it before the server starts, and give it the launcher's process id then."""

    settles = True

    def __init__(self) -> None:
        self.available = free_host_bytes()
        self.launcher = 0
        self._before = 0.0
        self._resident: dict[int, int] = {}

    def used(self) -> dict[str, float]:
        parts = parts_of_server(self.launcher)
        each = shared_bytes([pid for pids in parts.values() for pid in pids])
        return {name: sum(each[pid] for pid in pids) for name, pids in parts.items()}

    def watch(self) -> None:
        self._before = self.used()[TRAINER]
        trainer = parts_of_server(self.launcher)[TRAINER]
        for pid in trainer:
            forget_peak_of(pid)
        self._resident = {pid: resident_bytes(pid) for pid in trainer}

    def peak(self) -> float:
        risen = [max(0, peak_resident_bytes(pid) - resident) for pid, resident in self._resident.items()]
        return self._before + sum(risen)


class DeviceMemory:
    """Of the GPUs of the trainer. The vLLM on them, if any, counts with the trainer: its share does not change. Raises
    Failed if the GPUs do not tell their memory."""

    settles = False

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices: Collection[str] = devices
        found = gpu_memory()
        if missing := [device for device in devices if device not in found]:
            raise Failed(f"nvidia-smi does not tell the memory of GPU {missing[0]}")
        self._others = sum(found[device].used for device in devices)
        self.available = sum(found[device].total for device in devices) - self._others
        self.launcher = 0

    def used(self) -> dict[str, float]:
        found = gpu_memory()
        return {TRAINER: sum(found[device].used for device in self._devices) - self._others}

    def watch(self) -> None:
        pass

    def peak(self) -> float:
        return self.used()[TRAINER]
