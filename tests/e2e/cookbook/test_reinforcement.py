"""The cookbook's reinforcement learning on the real server: `math_rl` in each of its modes, and a game of many turns.

The tiny model cannot add. Within a few steps it can learn to end its answer in time: a cut-off answer costs 0.1, and
with `max_tokens=1` every answer but an empty one is cut off. So rewards differ within a group, gradients are not zero,
and the reward rises to 0.
"""

from __future__ import annotations

import math

import pytest

from .agreement import AGREE, divergence
from .conftest import Stored, assert_final_is_kept
from .workspace import Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3000)]

ARITHMETIC = ("env=arithmetic", "groups_per_batch=8", "group_size=8", "max_tokens=1")


def test_on_policy_training_learns_and_the_sampler_is_the_trained_policy(workspace: Workspace, stored: Stored) -> None:
    """Uses one loss. The next tests use the other losses, and unit tests compare every loss with its formula."""
    options = ("loss_fn=cispo", "learning_rate=1e-2", "max_steps=3")
    run = workspace.run("math_rl.train", "on-policy", *ARITHMETIC, *options)
    assert [abs(step) < AGREE for step in divergence(run)] == [True] * 3
    reward = run.column("env/all/reward/total")
    assert reward[0] < reward[-1] <= 0
    assert run.column("grad_norm")[0] > 0
    assert_final_is_kept(run, stored)
    run.shows("sampler and trainer agree; the reward rises", reward=reward, divergence=divergence(run))


@pytest.mark.slow
def test_off_policy_training_runs_to_its_end(workspace: Workspace, stored: Stored) -> None:
    options = ("loss_fn=ppo", "learning_rate=3e-3", "max_steps=3", "max_steps_off_policy=1")
    run = workspace.run("math_rl.train", "off-policy", *ARITHMETIC, *options)
    assert abs(divergence(run)[0]) < AGREE
    staleness = run.column("async/staleness_max")
    assert (staleness[0], max(staleness)) == (0, 1)
    reward = run.column("env/all/reward/total")
    assert reward[0] < reward[-1] <= 0
    assert [row["name"] for row in run.checkpoints] == ["000000", "final"]
    assert_final_is_kept(run, stored)
    run.shows("samples of the policy before train it; the reward rises", reward=reward, staleness=staleness)


@pytest.mark.slow
def test_training_on_streamed_minibatches_runs_to_its_end(workspace: Workspace, stored: Stored) -> None:
    stream = ("stream_minibatch_config.groups_per_batch=8", "stream_minibatch_config.num_minibatches=2")
    options = ("loss_fn=importance_sampling", "learning_rate=1e-2", "max_steps=2")
    run = workspace.run("math_rl.train", "stream", *ARITHMETIC, *options, *stream)
    assert [abs(step) < AGREE for step in divergence(run)] == [True] * 2
    assert run.column("sampling_client/step_min") == [0, 1]
    assert run.column("optimizer_step") == [1, 2]
    reward = run.column("env/all/reward/total")
    assert reward[0] < reward[-1] <= 0
    assert_final_is_kept(run, stored)
    run.shows("minibatches train while others are sampled; the reward rises", reward=reward, divergence=divergence(run))


@pytest.mark.slow
def test_several_optimizer_steps_per_batch_report_the_divergence_after_them(workspace: Workspace) -> None:
    options = ("loss_fn=importance_sampling", "learning_rate=1e-3", "num_substeps=2", "compute_post_kl=True")
    run = workspace.run("math_rl.train", "substeps", *ARITHMETIC, *options, "max_steps=2")
    assert run.column("optimizer_step") == [2, 4]
    during, after = run.column("optim/kl_sample_train_v2"), run.column("kl_pre_post_v2")
    # The second half of the batch was computed after one of the two updates, the new sampler's weights after both.
    assert 0 < during[0] < after[0]
    run.shows("two optimizer steps for each batch; the new sampler has both", divergence_after=after)
    assert all(map(math.isfinite, during + after))


@pytest.mark.slow
def test_the_default_loss_is_refused_with_a_hint(workspace: Workspace) -> None:
    run = workspace.run("math_rl.train", "default-loss", *ARITHMETIC, "max_steps=1", fails=True)
    assert "stable_reinforce is not available: send loss_fn=ppo" in run.log


@pytest.mark.slow
def test_a_game_of_many_turns_runs_to_its_end(workspace: Workspace, stored: Stored) -> None:
    options = ("batch_size=1", "group_size=2", "max_tokens=8", "eval_every=0", "max_steps=2")
    run = workspace.run("multiplayer_rl.guess_number.train", "guess-number", *options)
    assert [abs(step) < AGREE for step in divergence(run)] == [True] * 2
    # Ten turns unless the number was found; a guess in the wrong format costs 1.
    assert all(1 < turns <= 10 for turns in run.column("env/all/turns_per_episode"))
    assert all(-10 <= reward <= 1 for reward in run.column("env/all/reward/total"))
    assert_final_is_kept(run, stored)
    run.shows("sampler and trainer agree over ten turns", divergence=divergence(run))
