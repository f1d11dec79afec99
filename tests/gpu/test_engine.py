"""A real engine in a process of its own: killed in mid-training, and ended by a fault of its device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.support import DEVICE, FIGURES

ROOT = Path(__file__).parents[2]
STEPS = 6
BOUND = 0.02
"""How far the losses of two runs of the same commands may be apart, relative, where they agree up to rounding."""
LIMIT_S = 240


def start(directory: Path, **wanted: Any) -> subprocess.Popen[str]:
    given = {
        "state_dir": str(directory / "state"),
        "out": str(directory / "out"),
        "steps": STEPS,
        "merge": False,
        "snapshot_interval_s": 1e9,
    }
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.gpu.engine_process", json.dumps(given | wanted)]
    with (directory / "stderr").open("a") as stderr:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)


def run(directory: Path, **wanted: Any) -> list[dict[str, Any]]:
    """What it printed; it must end well."""
    process = start(directory, **wanted)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, (directory / "stderr").read_text()[-3000:]
    return [json.loads(line) for line in out.splitlines()]


def same_files(one: Path, other: Path) -> bool:
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert len(files) >= 8
    return all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


def apart(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """The greatest relative difference of two runs' losses."""
    assert [(a["model"], a["step"]) for a in some] == [(b["model"], b["step"]) for b in others]
    return max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("merge", [False, True], ids=["alone", "merged"])
def test_a_killed_engine_goes_on_where_it_was(tmp_path: Path, merge: bool) -> None:
    """SIGKILL after the third step of six, with snapshots or from the log alone. Exactly on a CPU, else up to BOUND."""
    steady = run(tmp_path / "steady", merge=merge)
    assert steady[-1]["loss"] < 0.9 * steady[1]["loss"], "nothing was learnt, so nothing would be seen"
    for interval_s in (1e9,) if merge else (1e-9, 1e9):
        directory = tmp_path / str(interval_s)
        process = start(directory, merge=merge, snapshot_interval_s=interval_s)
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(json.loads(line))
            if len(seen) == 6:
                process.kill()
                break
        process.wait(LIMIT_S)
        process.stdout.close()
        again = run(directory, merge=merge, snapshot_interval_s=interval_s)
        assert again[:6] == seen, "what was told stays as it was told"
        how = f"replay, {'merged' if merge else 'alone'}, {'snapshots' if interval_s < 1 else 'log only'}"
        same = same_files(tmp_path / "steady" / "out", directory / "out")
        FIGURES[f"{how}: the same bits"] = same
        FIGURES[f"{how}: greatest relative difference of a loss"] = apart(again, steady)
        assert same or merge or DEVICE == "cuda"
        assert apart(again, steady) < BOUND


def test_a_device_fault_ends_the_engine_and_the_second_death_skips_its_command(tmp_path: Path) -> None:
    directory = tmp_path / "faulty"
    for death in (1, 2):
        process = start(directory, poison_at=2)
        out, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode != 0, f"death {death}: {out}"
        told = [json.loads(line)["step"] for line in out.splitlines()]
        assert told == [1, 1, 2, 2][: len(told)], "after the first death the command is the first that runs"
        assert death == 2 or len(told) == 4
        assert (directory / "stderr").read_text().count("DeviceFault: ") >= death
    lines = run(directory, poison_at=2)
    (poison,) = [line["poison"] for line in lines if "poison" in line]
    assert "the engine died 2 times while it ran this command" in poison
    again = [line for line in lines if "poison" not in line]
    steady = run(tmp_path / "steady")
    FIGURES["device fault: greatest relative difference of a loss afterwards"] = apart(again, steady)
    assert apart(again, steady) < BOUND
    if DEVICE != "cuda":
        assert [line["loss"] for line in again] == [line["loss"] for line in steady]
