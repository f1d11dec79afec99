"""The demo's verdict on its rewards, its report, and its output in a pipe."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from skyrl.cli.demo.rl import Settings
from skyrl.cli.demo.run import GAIN_WINDOW, JUDGED_STEPS, Demo, print_report, verdict
from skyrl.cli.demo.tenants import Run

LATENCY = {"idle_p50_s": 0.05, "idle_p95_s": 0.06, "busy_p50_s": 0.1, "busy_p95_s": 0.2}
FIGURES = {
    "samples_forwarded": 3,
    "samples_through_engine": 0,
    "phases_s": {"A beside B": 10.0},
    "latency": LATENCY | {"busy_samples": 9, "stream_s": 2.0, "ratio": 0.05},
    "walls": {"a_then_b_s": 20.0, "a_beside_b_s": 10.0, "speedup": 2.0},
    "forwarded_over_colocated_beside": 1.5,
}


def run_of(steps: int, last: float) -> Run:
    return Run(rewards=[0.2] * (steps - steps // 2) + [last] * (steps // 2))


def test_a_full_run_fails_if_a_tenants_reward_does_not_rise() -> None:
    runs = {"A": run_of(JUDGED_STEPS, 0.9), "B": run_of(JUDGED_STEPS, 0.25)}
    assert verdict(runs, 0) == (["tenant B: reward rose by 0.05, less than 0.15"], [])


def test_a_short_run_notes_that_its_rewards_were_not_judged() -> None:
    failures, notes = verdict({"A": run_of(2, 0.0), "B": run_of(2, 0.0)}, 3)
    assert failures == ["3 samples went through the engine loop"]
    assert notes == ["rewards were not judged: 2 steps are too few, 26 (the default) are enough"]


def test_the_report_has_every_figure() -> None:
    output = io.StringIO()
    print_report(Console(file=output), FIGURES | {"reward": {"A": run_of(26, 0.5).figures(GAIN_WINDOW)}})
    for shown in ("0.20 → 0.50", "50 / 60 ms", "100 / 200 ms", "(9 samples)", "20.0 / 10.0 s", "2.00×", "1.50×"):
        assert shown in output.getvalue()


class QuickTenant:
    """A tenant whose run ends at once."""

    name = "A"

    def start(self, *_: object) -> None: ...

    def follow(self, run: Run) -> None:
        run.seconds = 0.0


class Server:
    url = "http://127.0.0.1:1"

    @staticmethod
    def status() -> dict[str, object]:
        return {}


def test_a_piped_demo_prints_one_line_for_each_run(tmp_path: Path) -> None:
    output = io.StringIO()
    demo = Demo(Console(file=output, width=60), tmp_path, Settings(), compare=False)
    for title in ("first", "second"):
        demo._train(title, Server(), [QuickTenant()], Settings())  # type: ignore[arg-type]
    assert [line.partition(":")[0] for line in output.getvalue().splitlines()] == ["first", "second"]
