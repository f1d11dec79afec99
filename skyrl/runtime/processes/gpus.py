"""The memory of this machine's GPUs, as NVIDIA's own program tells it. Imports no torch, and needs no driver library.

Not run on a GPU: tested with what the program prints.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

COMMAND = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.used", "--format=csv,noheader,nounits")
TIMEOUT_S = 20.0
MIB = 2**20


@dataclass(frozen=True)
class GpuMemory:
    """In bytes. `used`: by all programs."""

    total: float
    used: float


def gpu_memory() -> dict[str, GpuMemory]:
    """Of each GPU, by its number and by its UUID, as CUDA_VISIBLE_DEVICES may name it. Empty where the program is
    missing or fails."""
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse(done.stdout)


def parse(printed: str) -> dict[str, GpuMemory]:
    """What `COMMAND` prints. A GPU that does not tell its memory ("[N/A]") is left out, and so is a line that is no
    GPU's, such as a warning."""
    found: dict[str, GpuMemory] = {}
    for line in printed.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and all(number.isdecimal() for number in fields[2:]):
            index, uuid, total, used = fields
            memory = GpuMemory(float(total) * MIB, float(used) * MIB)
            found |= {index: memory, uuid: memory}
    return found
