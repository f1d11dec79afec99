"""The cookbook learns from preferences on the real server: DPO with a custom loss, and rewards from comparisons."""

from __future__ import annotations

import math

import pytest

from .conftest import Stored, assert_final_is_kept
from .workspace import Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3000)]

PREFERENCES = "`Anthropic/hh-rlhf`: rows with `chosen` and `rejected`"


@pytest.mark.slow
def test_dpo_starts_at_the_reference_and_moves_away(workspace: Workspace, stored: Stored) -> None:
    options = ("batch_size=4", "max_length=256", "learning_rate=1e-3", "max_steps=3")
    run = workspace.run("preference.dpo.train", "dpo", *options)
    loss = run.column("dpo_loss")
    # The policy is still the reference: -log sigmoid(0).
    assert loss[0] == pytest.approx(math.log(2), abs=0.001)
    assert max(loss[1:]) < 0.6
    assert min(run.column("margin")[1:]) > 0.2
    assert_final_is_kept(run, stored)
    run.shows("the loss is ln 2 at first, then falls", data=PREFERENCES, loss=loss)


@pytest.mark.slow
def test_sampler_and_trainer_agree_after_a_step_that_moved_the_policy(workspace: Workspace, stored: Stored) -> None:
    options = ("batch_size=2", "group_size=4", "max_tokens=16", "learning_rate=1e-3", "max_steps=3")
    run = workspace.run("preference.shorter.train", "shorter", *options)
    assert run.column("kl_pre_post_v2")[0] > 0.01
    # Half the mean squared difference between the logprobs of sampler and trainer; rounding alone gives 1e-12.
    assert all(apart < 1e-8 for apart in run.column("optim/kl_sample_train_v2"))
    assert all(map(math.isfinite, run.column("env/all/reward/total")))
    assert run.column("optimizer_step") == [1, 2, 3]
    assert_final_is_kept(run, stored)
    run.shows(
        "sampler and trainer agree after steps that move the policy", divergence=run.column("optim/kl_sample_train_v1")
    )
