"""Checkpoints: save, continue, describe, publish, expire, delete."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from ..catalogue import feature
from ..user import SECOND_NAME, User, both, refusal, wait

GROUP = "Checkpoints"
HOUR = 3600


def run_of(path: str) -> str:
    return path.removeprefix("tinker://").partition("/")[0]


def listed(user: User, path: str) -> Any:
    """The checkpoint in the list of its training run, or None."""
    found = [c for c in wait(user.rest.list_checkpoints(run_of(path))).checkpoints if c.tinker_path == path]
    return found[0] if found else None


@feature(GROUP, "`load_state_with_optimizer` continues exactly, `load_state` with a fresh optimizer.")
def save_and_load(user: User) -> None:
    trainer = user.train(seed=2)
    user.step(trainer)
    saved, again = (wait(given).path for given in (trainer.save_state("one"), wait(trainer.save_state_async("two"))))
    whole = [user.step(trainer) for _ in range(3)]
    for path, exact in ((saved, "load_state_with_optimizer"), (again, "load_state_with_optimizer_async")):
        other = user.train()
        wait(getattr(other, exact)(path))
        assert [user.step(other) for _ in range(3)] == whole
    for path, fresh in ((saved, "load_state"), (again, "load_state_async")):
        other = user.train()
        wait(getattr(other, fresh)(path))
        losses = [user.step(other) for _ in range(3)]
        assert losses[0] == whole[0]
        assert losses[1:] != whole[1:]


@feature(GROUP, "`create_training_client_from_state`, with and without the optimizer.")
def training_client_from_state(user: User) -> None:
    trainer = user.train(seed=2, rank=6, user_metadata={"from": "the first"})
    user.step(trainer)
    saved = wait(trainer.save_state("half")).path
    whole = [user.step(trainer) for _ in range(3)]
    for other in both(user.open(), "create_training_client_from_state_with_optimizer", saved):
        assert wait(other.get_info()).lora_rank == 6
        assert [user.step(other) for _ in range(3)] == whole
    for other in both(user.open(), "create_training_client_from_state", saved, user_metadata={"resumed": "yes"}):
        losses = [user.step(other) for _ in range(3)]
        assert losses[0] == whole[0]
        assert losses[1:] != whole[1:]
        run = wait(user.rest.get_training_run(user.model_id(other)))
        assert run.user_metadata == {"resumed": "yes"}


@feature(GROUP, "A name is taken, unless `overwrite` says so.", needs=("TrainingClient.save_state(overwrite)",))
def overwrite(user: User) -> None:
    trainer = user.train(seed=2)
    first = wait(trainer.save_state("latest")).path
    user.step(trainer)
    assert "latest" in refusal(lambda: trainer.save_state("latest"))
    assert wait(trainer.save_state("latest", overwrite=True)).path == first
    other = wait(user.service.create_training_client_from_state(first))
    assert np.array_equal(user.scores(other), user.scores(trainer))


@feature(GROUP, "A checkpoint saved with a time to live says when it expires.")
def time_to_live(user: User) -> None:
    trainer = user.train()
    paths = [wait(save("for-an-hour", HOUR)).path for save in (trainer.save_state, trainer.save_weights_for_sampler)]
    for path in paths:
        expires = listed(user, path).expires_at
        assert timedelta(minutes=55) < expires - datetime.now(UTC) < timedelta(minutes=65)
        both(user.rest, "set_checkpoint_ttl_from_tinker_path", path, 2 * HOUR)
        assert listed(user, path).expires_at > expires + timedelta(minutes=50)
        both(user.rest, "set_checkpoint_ttl_from_tinker_path", path, None)
        assert listed(user, path).expires_at is None


@feature(
    GROUP,
    "`user_metadata` of a checkpoint comes back.",
    needs=("TrainingClient.save_state(user_metadata)", "types.Checkpoint(user_metadata)"),
)
def checkpoint_metadata(user: User) -> None:
    trainer = user.train()
    for save in (trainer.save_state, trainer.save_weights_for_sampler):
        path = wait(save("noted", user_metadata={"step": "3"})).path
        assert listed(user, path).user_metadata == {"step": "3"}


@feature(GROUP, "Checkpoints of a run and of the user, with kind, size and path.")
def list_checkpoints(user: User) -> None:
    trainer = user.train()
    run = user.model_id(trainer)
    training, sampler = wait(trainer.save_state("a")).path, wait(trainer.save_weights_for_sampler("a")).path
    for answer in both(user.rest, "list_checkpoints", run):
        kinds = {c.tinker_path: (c.checkpoint_type, c.checkpoint_id) for c in answer.checkpoints}
        assert kinds == {training: ("training", "weights/a"), sampler: ("sampler", "sampler_weights/a")}
        assert all(c.size_bytes > 0 and not c.public for c in answer.checkpoints)
    for answer in both(user.rest, "list_user_checkpoints", limit=2):
        assert {c.tinker_path for c in answer.checkpoints} == {training, sampler}
        assert answer.cursor.total_count >= 2
    for answer in both(user.rest, "get_training_run_by_tinker_path", training):
        assert answer.training_run_id == run
        assert answer.last_checkpoint.tinker_path == training
        assert answer.last_sampler_checkpoint.tinker_path == sampler


@feature(GROUP, "Training runs, in pages, newest first.")
def list_training_runs(user: User) -> None:
    runs = [user.model_id(user.train()) for _ in range(2)]
    for scope in ("owned", "accessible"):
        for answer in both(user.rest, "list_training_runs", limit=1, access_scope=scope):
            assert [run.training_run_id for run in answer.training_runs] == runs[1:]
            assert answer.cursor.total_count >= 2
    assert wait(user.rest.list_training_runs(limit=1, offset=1)).training_runs[0].training_run_id == runs[0]


@feature(
    GROUP,
    "Loading under another name of the base model.",
    needs=("ServiceClient.create_training_client_from_state(base_model)",),
)
def base_model_of_a_loaded_state(user: User) -> None:
    trainer = user.train()
    user.step(trainer)
    other = wait(
        user.service.create_training_client_from_state(wait(trainer.save_state("named")).path, base_model=SECOND_NAME)
    )
    assert wait(other.get_info()).model_data.model_name == SECOND_NAME
    assert np.array_equal(user.scores(other), user.scores(trainer))


@feature(
    GROUP,
    "Another user's private weights, with that user's key for a token.",
    needs=("TrainingClient.load_state(weights_access_token)",),
)
def weights_access_token(user: User) -> None:
    trainer = user.train()
    user.step(trainer)
    path = wait(trainer.save_state("private")).path
    stranger = user.open(api_key=f"{user.key}-stranger")
    loaded = user.train(stranger)
    assert "private" in refusal(lambda: loaded.load_state(path))
    loaded = user.train(stranger)
    wait(loaded.load_state(path, weights_access_token=user.key))
    made = wait(stranger.create_training_client_from_state(path, weights_access_token=user.key))
    for other in (loaded, made):
        assert np.array_equal(user.scores(other), user.scores(trainer))


@feature(GROUP, "A published checkpoint is open to another user, until it is unpublished.", statuses=(404,))
def publish(user: User) -> None:
    trainer = user.train()
    user.step(trainer)
    path = wait(trainer.save_state("shared")).path
    stranger = user.open(api_key=f"{user.key}-stranger")
    both(user.rest, "publish_checkpoint_from_tinker_path", path)
    assert listed(user, path).public
    loaded = wait(stranger.create_training_client_from_state(path))
    assert np.array_equal(user.scores(loaded), user.scores(trainer))
    both(user.rest, "unpublish_checkpoint_from_tinker_path", path)
    assert not listed(user, path).public
    assert "shared" in refusal(lambda: stranger.create_training_client_from_state(path))


@feature(GROUP, "A deleted checkpoint is no longer listed; one of another kind with its name stays.")
def delete_checkpoints(user: User) -> None:
    trainer = user.train()
    run = user.model_id(trainer)
    kept = wait(trainer.save_weights_for_sampler("1")).path
    deletions = (
        lambda: user.rest.delete_checkpoint(run, "weights/1"),
        lambda: user.rest.delete_checkpoint_async(run, "weights/1"),
        lambda: user.rest.delete_checkpoint_from_tinker_path(f"tinker://{run}/weights/1"),
        lambda: user.rest.delete_checkpoint_from_tinker_path_async(f"tinker://{run}/weights/1"),
    )
    for delete in deletions:
        path = wait(trainer.save_state("1")).path
        wait(delete())
        assert listed(user, path) is None
        assert listed(user, kept) is not None


@feature(GROUP, "A copy in another project, with a time to live of its own.", needs=("ServiceClient.copy_weights",))
def copy_weights(user: User) -> None:
    trainer = user.train()
    user.step(trainer)
    path = wait(trainer.save_state("source")).path
    project = f"archive-of-{user.model_id(trainer)}"
    copies = [wait(user.open(project_id=project).copy_weights(path, ttl_seconds=HOUR))]
    if hasattr(user.rest, "copy_weights"):
        copies += both(user.rest, "copy_weights", path, project)
    wait(user.rest.delete_checkpoint_from_tinker_path(path))
    assert path not in copies
    assert len(set(copies)) == len(copies)
    assert listed(user, copies[0]).expires_at is not None
    runs = wait(user.rest.list_training_runs(project_id=project)).training_runs
    assert {run.training_run_id for run in runs} == {run_of(copy) for copy in copies}
    for copy in copies:
        other = wait(user.service.create_training_client_from_state(copy))
        assert np.array_equal(user.scores(other), user.scores(trainer))
