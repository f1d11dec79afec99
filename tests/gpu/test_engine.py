"""A real engine in its own process: it is killed during training, and it ends after a fault of its device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.figures import FIGURES, Column
from tests.gpu.support import DEVICE

ROOT = Path(__file__).parents[2]
STEPS = 6
BOUND = 0.02
"""The largest allowed relative difference of the losses of two runs that agree up to rounding."""
LIMIT_S = 240


def start(directory: Path, **changes: Any) -> subprocess.Popen[str]:
    options = {
        "state_dir": str(directory / "state"),
        "out": str(directory / "out"),
        "steps": STEPS,
        "merge": False,
        "snapshot_interval_s": 1e9,
    }
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.gpu.engine_process", json.dumps(options | changes)]
    with (directory / "stderr").open("a") as stderr:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)


def run(directory: Path, **changes: Any) -> list[dict[str, Any]]:
    """The JSON lines that the process printed. The process must end with exit code 0."""
    process = start(directory, **changes)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, (directory / "stderr").read_text()[-3000:]
    return [json.loads(line) for line in out.splitlines()]


def same_files(one: Path, other: Path) -> bool:
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert len(files) >= 8
    return all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


def largest_difference(lines: list[dict[str, Any]], expected_lines: list[dict[str, Any]]) -> float:
    """The largest relative difference between the losses of two runs."""
    assert [(line["model"], line["step"]) for line in lines] == [
        (line["model"], line["step"]) for line in expected_lines
    ]
    pairs = zip(lines, expected_lines, strict=True)
    return max(abs(line["loss"] - expected["loss"]) / expected["loss"] for line, expected in pairs)


@pytest.mark.parametrize("merge", [False, True], ids=["alone", "merged"])
def test_training_continues_after_the_engine_is_killed(tmp_path: Path, merge: bool) -> None:
    """SIGKILL after the third of six steps; the next engine uses snapshots, or the command log alone. Results are equal
    on a CPU, and equal up to BOUND elsewhere."""
    steady = run(tmp_path / "steady", merge=merge)
    assert steady[-1]["loss"] < 0.9 * steady[1]["loss"], "the loss must fall, or else a lost step would not show"
    for interval_s in (1e9,) if merge else (1e-9, 1e9):
        directory = tmp_path / str(interval_s)
        process = start(directory, merge=merge, snapshot_interval_s=interval_s)
        assert process.stdout is not None
        lines_before = []
        for line in process.stdout:
            lines_before.append(json.loads(line))
            if len(lines_before) == 6:
                process.kill()
                break
        process.wait(LIMIT_S)
        process.stdout.close()
        lines_after = run(directory, merge=merge, snapshot_interval_s=interval_s)
        assert lines_after[:6] == lines_before, "results that were given stay the same"
        case = f"after SIGKILL, {'snapshots' if interval_s < 1 else 'command log only'}"
        column: Column = "merged" if merge else "alone"
        same = same_files(tmp_path / "steady" / "out", directory / "out")
        FIGURES.record(f"{case}: the same bits", same, column)
        difference = largest_difference(lines_after, steady)
        FIGURES.record(f"{case}: greatest relative difference of a loss", difference, column)
        assert same or merge or DEVICE == "cuda"
        assert difference < BOUND


def test_a_device_fault_ends_the_engine_and_after_two_deaths_the_command_is_skipped(tmp_path: Path) -> None:
    directory = tmp_path / "faulty"
    for death in (1, 2):
        process = start(directory, poison_at=2)
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode != 0, f"death {death}: {out}"
        steps = [json.loads(line)["step"] for line in out.splitlines()]
        assert steps == [1, 1, 2, 2][: len(steps)], "after the first death the command that failed runs first"
        assert death == 2 or len(steps) == 4
        assert (directory / "stderr").read_text().count("DeviceFault: ") >= death
    lines = run(directory, poison_at=2)
    (poison,) = [line["poison"] for line in lines if "poison" in line]
    assert "the engine died 2 times while it ran this command" in poison
    lines_after = [line for line in lines if "poison" not in line]
    steady = run(tmp_path / "steady")
    difference = largest_difference(lines_after, steady)
    FIGURES.record("after a device fault: greatest relative difference of a loss", difference)
    assert difference < BOUND
    if DEVICE != "cuda":
        assert [line["loss"] for line in lines_after] == [line["loss"] for line in steady]
