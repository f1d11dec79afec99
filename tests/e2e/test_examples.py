"""The scripts in examples/ that the how-to pages use, run as processes against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.cli.demo.server import DemoServer
from tests.sdk_programs import TRACED, succeeded

pytestmark = pytest.mark.vllm

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(server: DemoServer, script: str, *options: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), "--base-url", server.url, *options]
    env = os.environ | TRACED
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert succeeded(done.returncode, done.stderr), f"{done.returncode}: {done.stderr}"
    return done.stdout


def numbers(output: str, name: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{name} ([-+\d.]+)", output)]


@pytest.mark.slow
def test_the_grpo_example_compares_its_first_and_last_version(server: DemoServer) -> None:
    output = run(server, "grpo.py", "--steps", "8")
    assert all(abs(kl) < 0.5 for kl in numbers(output, "kl"))
    start, end = re.findall(r"/sampler_weights/(?:start|end): reward ([\d.]+)", output)
    assert float(end) > float(start)


@pytest.mark.slow
def test_the_dpo_example_begins_at_the_reference_and_learns_the_preference(server: DemoServer) -> None:
    losses = numbers(run(server, "dpo.py", "--steps", "4"), "loss")
    assert losses[0] == pytest.approx(0.6931, abs=2e-3), (
        "the loss is ln 2, because policy and reference agree before the first step"
    )
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_resume_example_continues_without_a_difference(server: DemoServer) -> None:
    once = run(server, "resume.py", "--name", "whole", "--steps", "6", "--save-every", "3")
    first = run(server, "resume.py", "--name", "halves", "--steps", "5", "--save-every", "3")
    second = run(server, "resume.py", "--name", "halves", "--steps", "6", "--save-every", "3")
    assert second.startswith("resumed from tinker://")
    assert "step-000003" in second.splitlines()[0], "the second run resumes at the last save, not at the last step"
    assert numbers(once, "loss") == numbers(first, "loss")[:3] + numbers(second, "loss")
