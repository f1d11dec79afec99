"""The cookbook's recipe for environments of the package `verifiers`, with the small one in `examples/cookbook`."""

from __future__ import annotations

import pytest

from .agreement import AGREE, assert_rises, divergence
from .conftest import Stored, assert_final_is_kept
from .workspace import Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

ENVIRONMENT = ("vf_env_id=colours-env", "renderer_name=qwen3_instruct", "groups_per_batch=4", "group_size=8")
LEARNS = ("max_tokens=8", "learning_rate=3e-3", "max_steps=8", "behavior_if_log_dir_exists=resume")


def test_verifiers_rl_learns_what_its_environment_rewards(tools: Workspace, stored: Stored) -> None:
    lesson = tools.taught("colours", "verifiers", "batch_size=8")
    options = (*ENVIRONMENT, *LEARNS)
    run = tools.run("verifiers_rl.train", "verifiers", *options, program="verifiers_train")
    assert [abs(step) < AGREE for step in divergence(run)] == [True] * 8
    reward = run.column("env/all/reward/total")
    assert_rises(reward, 0.25)
    assert_final_is_kept(run, stored)
    run.shows(
        "sampler and trainer agree; the reward rises",
        data="an environment, `examples/cookbook/colours_env.py`",
        before=[lesson.command, "export PYTHONPATH=examples/cookbook"],
        reward=reward,
        divergence=divergence(run),
    )


def test_verifiers_rl_alone_does_not_start_in_this_release_of_the_cookbook(tools: Workspace) -> None:
    """When this fails, the recipe runs without `verifiers_train.py`."""
    run = tools.run("verifiers_rl.train", "verifiers-alone", *ENVIRONMENT, "max_tokens=8", "max_steps=1", fails=True)
    assert "unexpected keyword argument 'termination'" in run.log
