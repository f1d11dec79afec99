"""The cookbook's supervised training on the real server: rolling checkpoints, and a run that was killed and resumed."""

from __future__ import annotations

import pytest

from .conftest import CHATS, Stored, assert_final_is_kept
from .workspace import Run, Workspace, kill_after_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]


def test_supervised_training_lowers_the_loss(rolling: Run) -> None:
    loss = rolling.column("train_mean_nll")
    assert loss[-1] < 0.6 * loss[0]
    rolling.shows("the loss falls; a killed run resumes at its last checkpoint", data="rows with `messages`", loss=loss)


def test_rolling_checkpoints_are_deleted_and_the_others_are_kept(rolling: Run, stored: Stored) -> None:
    assert [row["name"] for row in rolling.checkpoints] == ["000001", "000002", "000003", "final"]
    kept = {row[kind] for row in rolling.checkpoints if "rolling" not in row for kind in ("state_path", "sampler_path")}
    assert stored.paths(rolling) == kept
    assert_final_is_kept(rolling, stored)


def test_a_killed_run_resumes_at_its_last_checkpoint(workspace: Workspace, stored: Stored) -> None:
    run, process = workspace.start("chat_sl.train", "killed", *CHATS, "save_every=3")
    kill_after_checkpoint(run, process)
    saved = run.checkpoints[-1]
    (first,) = run.column("train_mean_nll")[:1]
    steps = saved["batch"] + 2
    options = ("save_every=3", f"max_steps={steps}", "behavior_if_log_dir_exists=resume")
    workspace.run("chat_sl.train", "killed", *CHATS, *options)
    assert run.column("step") == list(range(steps))
    # A run that started anew would show the first loss and the optimizer's first step.
    assert max(run.column("train_mean_nll")[saved["batch"] :]) < 0.8 * first
    assert run.column("optimizer_step")[saved["batch"]] > saved["batch"]
    assert run.training_run not in saved["state_path"]
    assert_final_is_kept(run, stored)
