"""The demo's verdict on its rewards, and its output in a pipe."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from skyrl.cli.demo.rl import Settings
from skyrl.cli.demo.run import JUDGED_STEPS, Demo, Findings, print_report
from skyrl.cli.demo.tenants import Run


def run_of(steps: int, last: float) -> Run:
    return Run(rewards=[0.2] * (steps - steps // 2) + [last] * (steps // 2))


def test_a_full_run_fails_if_a_tenants_reward_does_not_rise() -> None:
    findings = Findings(runs={"A": run_of(JUDGED_STEPS, 0.9), "B": run_of(JUDGED_STEPS, 0.25)})
    assert findings.failures() == ["tenant B: reward rose by 0.05, less than 0.15"]
    assert findings.notes() == []


def test_a_short_run_notes_that_its_rewards_were_not_judged() -> None:
    findings = Findings(runs={"A": run_of(2, 0.0), "B": run_of(2, 0.0)})
    assert findings.failures() == []
    assert findings.notes() == ["rewards were not judged: 2 steps are too few, 26 (the default) are enough"]
    findings.engine_served = 3
    assert findings.failures() == ["3 samples went through the engine loop"]
    print_report(Console(file=io.StringIO()), findings)


class QuickTenant:
    """A tenant whose run ends at once."""

    name = "A"

    def start(self, *_: object) -> None: ...

    def follow(self, run: Run, _: object) -> None:
        run.seconds = 0.0


class Server:
    url = "http://127.0.0.1:1"

    @staticmethod
    def status() -> dict[str, object]:
        return {}


def test_each_view_of_a_piped_demo_begins_on_a_line_of_its_own(tmp_path: Path) -> None:
    output = io.StringIO()
    demo = Demo(Console(file=output, width=60), tmp_path, Settings(), compare=False)
    for title in ("first", "second"):
        demo._follow(Server(), [QuickTenant()], {"A": Run()}, title)  # type: ignore[arg-type]
    lines = output.getvalue().splitlines()
    assert [line for line in lines if line.startswith("╭")], output.getvalue()
    assert not [line for line in lines if "╯╭" in line]
