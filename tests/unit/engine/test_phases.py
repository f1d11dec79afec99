"""The time of the engine's phases, on a clock of the test."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry

from skyrl.engine.metrics import PhaseMetrics


def test_a_step_within_a_pass_counts_in_its_own_phase_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    registry = CollectorRegistry()
    phases = PhaseMetrics(registry)
    with phases.phase("pass"):
        now = 3.0
        with phases.phase("pass"):
            now = 4.0
        with phases.phase("step"):
            now = 6.0
            with phases.phase("snapshot"):
                now = 6.5
        now = 10.0
    with phases.phase("pass"):
        now = 11.0
    spent = {
        phase: registry.get_sample_value("skyrl_engine_busy_seconds_total", {"phase": phase})
        for phase in ("pass", "step", "snapshot")
    }
    assert spent == {"pass": 3.0 + 1.0 + 3.5 + 1.0, "step": 2.0, "snapshot": 0.5}
