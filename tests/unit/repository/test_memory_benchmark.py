"""benchmarks.real_memory: what it measures of a process."""

from __future__ import annotations

import os

from benchmarks.processes import MIB
from benchmarks.real_memory import measure


def test_the_peak_of_a_case_counts_and_not_what_was_before_or_after() -> None:
    def case() -> None:
        assert sum(bytearray(b"x" * 80 * MIB)[::4096])

    pids = {"vLLM": [], "trainer": [os.getpid()]}
    case()
    before, peak, after = measure(pids, case)["trainer"]
    assert 75 * MIB < peak - before < 250 * MIB
    assert after - before < 20 * MIB
    assert measure(pids, case)["vLLM"] == (0, 0, 0)
    _, peak, _ = measure(pids, lambda: None)["trainer"]
    assert peak - before < 20 * MIB
