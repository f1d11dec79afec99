"""The programs of the page on pictures, in order, on a server whose model sees."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.cli.demo.server import DemoServer
from tests.pages import blocks_of
from tests.sdk_programs import TRACED, succeeded

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = "docs/howto/pictures.md"


def test_the_classifier_and_the_reinforcement_learning_of_the_page_learn(seeing: DemoServer, tmp_path: Path) -> None:
    program = "\n\n".join(block.text for block in blocks_of(PAGE) if block.language == "python")
    model = seeing.state_dir.parent / "model"
    program = program.replace("http://127.0.0.1:8000", seeing.url).replace("./tiny-vision", str(model))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | TRACED,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert succeeded(done.returncode, done.stderr), f"{done.returncode}: {done.stderr}"
    accuracy = re.findall(r"^accuracy ([\d.]+)$", done.stdout, re.M)
    assert float(accuracy[0]) > 0.8
    steps = [line.split() for line in done.stdout.splitlines() if line.count(" ") == 2]
    rewards = [float(reward) for _, reward, _ in steps]
    assert len(rewards) == 24
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2
    assert all(abs(float(gap)) < 1e-4 for _, _, gap in steps)
    assert float(done.stdout.splitlines()[-1]) < 1e-4
