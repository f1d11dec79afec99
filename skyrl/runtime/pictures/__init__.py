"""Checks the files of pictures in a process of their own, so that no file can stop or swell the process that asks.

Has what the process that asks and the worker that decodes both know, and imports nothing that either alone needs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

HEADER = struct.Struct("!BQ")
"""Before each file: the format's place in FORMATS, and how many bytes the file has."""


@dataclass(frozen=True)
class Limits:
    """What one picture may take.

    `cpu_s`: processor time, and not time on the clock, so that a busy machine refuses no picture. `wall_s`: after this
    time on the clock the worker is taken for stuck. `memory_bytes`: of the worker's address space. `nice`: how far the
    worker stands behind the process that asks when both want a processor.
    """

    cpu_s: float = 10.0
    wall_s: float = 120.0
    memory_bytes: int = 3 * 2**29
    nice: int = 10
