"""The engine with real parts: results, order, isolation between tenants, files."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Trainer, data, files_in, harness_in, until
from sqlalchemy import delete, update
from sqlalchemy.exc import OperationalError

from skyrl.base.types.requests import SAVES, Kind
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.engine import exclusive_commands, loop, sweeping
from skyrl.storage.checkpoint_store.directories import safe_name, scratch_in
from skyrl.storage.db import futures as rows
from skyrl.storage.db import retention
from skyrl.storage.db.checkpoints import checkpoints
from skyrl.storage.db.faults import DatabaseError
from skyrl.storage.db.models import models, set_status
from skyrl.storage.db.samplers import find_sampler, samplers
from skyrl.storage.db.sessions import sessions
from skyrl.storage.doorbell import SESSIONS
from skyrl.trainer.protocol import TrainingPass
from tests.families import make_family
from tests.local_ranks import rank_of


def note_batches(harness: Harness, batches: list[list[str]]) -> None:
    """From now on `batches` receives, for each call of the backend, the model of each pass."""
    run = harness.backend.run

    def noted(passes: list[TrainingPass]) -> Any:
        batches.append([training_pass.model_id for training_pass in passes])
        return run(passes)

    harness.backend.run = noted  # type: ignore[method-assign,assignment]


async def test_every_command_gives_its_result(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    forward = await trainer.do(Kind.FORWARD, forward_input={"data": data(1, 12), "loss_fn": "cross_entropy"})
    passed = await trainer.result(await trainer.forward_backward(1, None, 12))
    assert passed == forward, "a forward pass and a forward_backward compute the same"
    (output,) = passed["loss_fn_outputs"]
    assert output["logprobs"]["shape"] == [12]
    assert max(output["logprobs"]["data"]) < 0
    assert passed["metrics"]["loss:sum"] > 0
    stepped = await trainer.result(await trainer.optim_step())
    assert stepped["metrics"]["optimizer_step"] == 1
    assert stepped["metrics"]["grad_norm"] > 0
    assert harness.model_row(trainer.model_id).status == "ready"


async def test_a_new_adapter_on_a_tied_lm_head_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for tied in (False, True):
        base = make_family("qwen2", tmp_path / str(tied), vocab_size=512, tie_word_embeddings=tied)
        async with harness_in(tmp_path / f"state-{tied}", base_model=base) as harness:
            await harness.start()
            trainer = await Trainer.create(harness)
            assert trainer.creating is not None
            await trainer.result(trainer.creating)
        said = [record.getMessage() for record in caplog.records if "skyrl adapter merge" in record.getMessage()]
        assert [trainer.model_id in line for line in said] == [True] * tied


async def test_loaded_weights_equal_the_saved_ones_bit_for_bit(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    before = await trainer.state()
    saved = await trainer.do(Kind.SAVE_WEIGHTS, path="first", user_metadata={"a": "1"})
    path = f"tinker://{trainer.model_id}/weights/first"
    assert saved == {"type": "save_weights", "path": path}
    (row,) = harness.checkpoint_rows(trainer.model_id)
    assert (row.tenant, row.kind, row.name, row.user_metadata) == ("tenant", "weights", "first", {"a": "1"})
    assert harness.stored(row) == before
    assert row.size_bytes == sum(len(content) for content in before.values())
    await trainer.step(2)
    assert await trainer.state() != before
    loaded = await trainer.do(Kind.LOAD_WEIGHTS, path=path, optimizer=True)
    assert loaded == {"type": "load_weights", "path": path, "model_id": trainer.model_id}
    assert await trainer.state() == before

    other = await Trainer.create(harness, session=trainer.session, model_seq_id=1, create=False)
    await other.result(await other.send(Kind.LOAD_WEIGHTS, 0, path=path, optimizer=True))
    assert await other.state() == before
    assert await other.step(5) == await trainer.step(5)
    assert await other.state() == await trainer.state()


@pytest.mark.parametrize("kind", [Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS])
async def test_a_model_whose_session_ends_while_it_is_made_stays_closed(harness: Harness, kind: Kind) -> None:
    trainer = await Trainer.create(harness)
    path = (await trainer.do(Kind.SAVE_WEIGHTS, path="first"))["path"]
    other = await Trainer.create(harness, session=trainer.session, model_seq_id=1, create=False)
    make = harness.backend.create_model

    def made(model_id: str, lora: LoraSpec) -> None:
        make(model_id, lora)
        harness.database.write(set_status(model_id, "closed"))

    harness.backend.create_model = made  # type: ignore[method-assign]
    body = {"path": path, "optimizer": True} if kind is Kind.LOAD_WEIGHTS else {}
    await other.result(await other.send(kind, 0, **body))
    assert harness.model_row(other.model_id).status == "closed"


async def test_a_load_after_steps_is_accepted_and_drops_moments_and_the_gradient(harness: Harness) -> None:
    """Tinker refuses it (docs/reference/unknowns.md)."""
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    path = (await trainer.do(Kind.SAVE_WEIGHTS, path="first"))["path"]
    await trainer.step(2)
    await trainer.forward_backward(3)
    await trainer.do(Kind.LOAD_WEIGHTS, path=path, optimizer=False)
    other = await Trainer.create(harness, session=trainer.session, model_seq_id=1, create=False)
    await other.result(await other.send(Kind.LOAD_WEIGHTS, 0, path=path, optimizer=False))
    assert await other.state() == await trainer.state()
    steps = [await each.step(4) for each in (trainer, other)]
    assert steps[0] == steps[1]
    assert steps[0]["optimizer_step"] == 1
    assert await other.state() == await trainer.state()


async def test_a_bad_request_fails_alone_and_uses_up_its_number(tmp_path: Path) -> None:
    async with harness_in(tmp_path / "state") as harness:
        one = await Trainer.create(harness, tenant="one")
        two = await Trainer.create(harness, tenant="two")
        good = [await one.forward_backward(1, 1), await one.forward_backward(3, 3), await two.forward_backward(4, 1)]
        wrong = data(2, 12)
        wrong[0]["loss_fn_inputs"]["target_tokens"]["data"][3] = 512
        bad = await one.send(
            Kind.FORWARD_BACKWARD, 2, forward_backward_input={"data": wrong, "loss_fn": "cross_entropy"}
        )
        step = await one.optim_step(4)
        batches: list[list[str]] = []
        await harness.start(lambda harness: note_batches(harness, batches))
        refused = await one.outcome(bad)
        assert refused.error_category == "user"
        assert refused.error is not None
        assert refused.error.startswith("data[0]: loss_fn_inputs.target_tokens: token id 512 is outside")
        for trainer, request_id in zip((one, one, two), good, strict=True):
            await trainer.result(request_id)
        await one.result(step)
        assert any(batch.count(one.model_id) == 2 for batch in batches), (
            "the passes beside the bad one ran in one batch"
        )

        alone = await Trainer.create(harness)
        await alone.forward_backward(1)
        await alone.forward_backward(3)
        await alone.result(await alone.optim_step())
        assert await one.state() == await alone.state()


async def test_epsilon_given_as_a_clip_bound_fails_the_pass_and_says_what_to_write(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    given = {"data": data(1, 12), "loss_fn": "ppo"}
    bounds = {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}
    refused = await trainer.fails(Kind.FORWARD_BACKWARD, forward_backward_input=given | {"loss_fn_config": bounds})
    assert refused.error_category == "user"
    assert (refused.error or "").startswith("loss_fn_config.clip_high_threshold: 0.2 is below 1: ")
    assert (refused.error or "").endswith("write clip_low_threshold 0.8 and clip_high_threshold 1.2")


async def test_a_tenant_gets_the_same_results_beside_others_as_alone(harness: Harness) -> None:
    alone = []
    for seed in (1, 2):
        trainer = await Trainer.create(harness, seed=seed, rank=2 * seed)
        for number in range(3):
            await trainer.step(10 * seed + number)
        alone.append(await trainer.state())
    batches: list[list[str]] = []
    note_batches(harness, batches)
    harness.scheduler.budget = 1  # one pass fills a tenant's share
    both_are_queued = threading.Event()
    holding = asyncio.create_task(harness.threads.on_backend(both_are_queued.wait))
    pair = [await Trainer.create(harness, tenant=f"t{seed}", seed=seed, rank=2 * seed) for seed in (1, 2)]
    lasts: list[str] = []
    for trainer, seed in zip(pair, (1, 2), strict=True):
        sent = [await trainer.send_step(10 * seed + number) for number in range(3)]
        lasts.append(sent[-1])
    await harness.queued(2 * (1 + 3 * 3) - 1)  # all commands but the one that waits for the backend
    both_are_queued.set()
    await asyncio.gather(holding, *(trainer.result(last) for trainer, last in zip(pair, lasts, strict=True)))
    order = [model_id for batch in batches for model_id in batch]
    switches = sum(before != after for before, after in itertools.pairwise(order))
    assert switches >= 3, "the tenants took turns"
    assert [await trainer.state() for trainer in pair] == alone


async def test_a_name_is_used_once_unless_overwrite_is_set(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(0)
    for kind in sorted(SAVES):
        await trainer.do(kind, path="name")
        refused = await trainer.fails(kind, path="name")
        assert refused.error_category == "user"
        assert "exists already" in (refused.error or "")
    before = {row.kind: row for row in harness.checkpoint_rows(trainer.model_id)}
    await trainer.step(1)
    for kind in sorted(SAVES):
        await trainer.do(kind, path="name", overwrite=True)
    after = {row.kind: row for row in harness.checkpoint_rows(trainer.model_id)}
    assert before.keys() == after.keys() == {"weights", "sampler_weights", "external_weights"}
    for kind in before:
        assert harness.stored(before[kind]).keys() == harness.stored(after[kind]).keys() != set()
        assert harness.stored(before[kind]) != harness.stored(after[kind])


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "path: is missing"),
        ({"path": "a/b"}, "path: 'a/b' is not a checkpoint name"),
        ({"path": "../up"}, "path: '../up' is not a checkpoint name"),
        ({"path": "x", "ttl_seconds": 0}, "ttl_seconds: must be in"),
        ({"path": "x", "ttl_seconds": 10**300}, "ttl_seconds: "),
        ({"path": "x", "user_metadata": {"a": 1}}, "user_metadata[...]: Expected `str`"),
        ({"path": "x", "user_metadata": ["a"]}, "user_metadata: Expected `object"),
        ({"path": "x", "user_metadata": {"a": "x" * 20_000}}, "user_metadata: must have at most 16384 bytes"),
    ],
)
async def test_a_save_with_wrong_arguments_is_a_user_error(harness: Harness, body: dict[str, Any], error: str) -> None:
    trainer = await Trainer.create(harness)
    for kind in sorted(SAVES):
        refused = await trainer.fails(kind, **body)
        assert refused.error_category == "user"
        assert error.split(":")[0] in (refused.error or "")
        expected = error if body or kind is not Kind.SAVE_WEIGHTS_FOR_SAMPLER else "path: give a name"
        assert (refused.error or "").startswith(expected) or "Expected `int" in (refused.error or "")
    assert harness.checkpoint_rows(trainer.model_id) == []
    assert harness.checkpoint_store.stored() == []


async def test_the_longest_allowed_name_fits_the_file_system(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    for kind in sorted(SAVES):
        await trainer.do(kind, path="n" * 255)


async def test_the_name_of_an_expired_checkpoint_may_be_used_again(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    await trainer.do(Kind.SAVE_WEIGHTS, path="brief", ttl_seconds=3600)
    (row,) = harness.checkpoint_rows(trainer.model_id)
    assert row.expires_at - row.created_at == pytest.approx(3600)
    harness.database.write(lambda c: c.execute(update(checkpoints).values(expires_at=time.time() - 1)))
    path = f"tinker://{trainer.model_id}/weights/brief"
    assert "no training checkpoint" in ((await trainer.fails(Kind.LOAD_WEIGHTS, path=path)).error or "")
    await trainer.do(Kind.SAVE_WEIGHTS, path="brief")
    await trainer.do(Kind.LOAD_WEIGHTS, path=path)


async def test_every_sampler_save_makes_a_new_version(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    named = await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="named")
    await trainer.step(1)
    unnamed = await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=4)
    assert named["path"] == f"tinker://{trainer.model_id}/sampler_weights/named"
    assert unnamed["sampling_session_id"] == f"{trainer.session.id}:sample:4"
    (row,) = harness.checkpoint_rows(trainer.model_id)
    assert (row.kind, row.weights) == ("sampler_weights", AdapterVersion(f"{trainer.model_id}@1"))
    sampler = harness.database.read(lambda c: find_sampler(c, unnamed["sampling_session_id"]))
    assert sampler is not None
    assert (sampler.weights, sampler.tenant) == (AdapterVersion(f"{trainer.model_id}@2"), "tenant")
    assert harness.model_row(trainer.model_id).sampler_version == 2
    contents = []
    for weights in (row.weights, sampler.weights):
        files = files_in(harness.adapter(weights))
        assert files.keys() == {"adapter_config.json", "adapter_model.safetensors"}
        assert json.loads(files["adapter_config.json"])["r"] == 4
        contents.append(files["adapter_model.safetensors"])
    assert contents[0] != contents[1]


async def test_the_number_of_a_sampling_session_is_used_once(harness: Harness) -> None:
    """To answer with the older session would sample from older weights without notice."""
    trainer = await Trainer.create(harness)
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=4)
    refused = await trainer.fails(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=4)
    assert refused.error_category == "user"
    assert (refused.error or "").startswith("sampling_session_seq_id: ")
    assert harness.model_row(trainer.model_id).sampler_version == 1


async def test_a_number_that_no_row_of_a_sampling_session_can_hold_fails_its_command_alone(harness: Harness) -> None:
    trainer = await Trainer.create(harness)
    for number in (-1, 2**31, 2**63):
        refused = await trainer.fails(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=number)
        assert (refused.error_category, refused.error) == ("user", "sampling_session_seq_id: must be in [0, 2**31)")
    await trainer.step(1)


async def test_a_database_that_is_away_while_a_command_begins_is_not_the_commands_failure(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise OperationalError("a read", None, Exception("no route"))

    trainer = await Trainer.create(harness, create=False)
    monkeypatch.setattr(exclusive_commands, "find_model", away)
    harness.engine_database.stop_retrying()
    creating = await trainer.send(Kind.CREATE_MODEL, 0)
    await harness.wait_until_killed(DatabaseError)
    monkeypatch.undo()
    assert harness.model_row(trainer.model_id).status == "creating"
    await harness.start()
    await trainer.result(creating)


async def test_all_commands_of_a_model_that_cannot_be_created_fail(harness: Harness) -> None:
    trainer = await Trainer.create(harness, rank=1000)
    chunk, step = await trainer.forward_backward(1), await trainer.optim_step()
    for request_id in (chunk, step):
        outcome = await trainer.outcome(request_id)
        assert outcome.error_category == "user"
    assert harness.model_row(trainer.model_id).status == "failed"
    other = await Trainer.create(harness)
    assert (await other.step(1))["optimizer_step"] == 1


async def test_a_failed_creation_from_a_checkpoint_leaves_no_adapter(harness: Harness) -> None:
    saver = await Trainer.create(harness, rank=4)
    path = (await saver.do(Kind.SAVE_WEIGHTS, path="rank4"))["path"]
    loader = await Trainer.create(harness, rank=8, create=False)
    outcome = await loader.outcome(await loader.send(Kind.LOAD_WEIGHTS, 0, path=path))
    assert "lora_config.rank" in (outcome.error or "")
    assert set(rank_of(harness.backend).adapters) == {saver.model_id}
    assert harness.model_row(loader.model_id).status == "failed"


async def test_an_ended_session_frees_its_models_and_files(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, other = await Trainer.create(harness), await Trainer.create(harness)
    for each in (trainer, other):
        await each.step(1)
        await each.do(Kind.SAVE_WEIGHTS, path="kept")
        await each.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="kept")
        await each.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
        harness.snapshots.take(each.model_id, each.seq_id + 1)
    waiting = await trainer.forward_backward(1, trainer.seq_id + 2)  # a number before this command is missing
    await harness.queued(1)
    await harness.end(trainer.session)
    assert (await trainer.outcome(waiting)).error == "the session has ended"
    snapshots = harness.config.snapshots_dir
    await until(lambda: [path.name for path in snapshots.iterdir()] == [safe_name(other.model_id)])
    assert harness.model_row(trainer.model_id).status == "closed"
    assert harness.model_row(other.model_id).status == "ready"
    assert set(rank_of(harness.backend).adapters) == {other.model_id}
    assert harness.scheduler.waiting == 0
    await harness.sweep()
    assert len(harness.versions(trainer.model_id)) == 2, "both versions are too young to be deleted"
    monkeypatch.setattr(sweeping, "GRACE_S", 0.0)
    await harness.sweep()
    await harness.sweep()
    assert [path.name for path in harness.versions(trainer.model_id)] == ["v000001"], "only the named version stays"
    assert len(harness.versions(other.model_id)) == 2
    assert all(harness.stored(row) for row in harness.checkpoint_rows(trainer.model_id))
    assert (await other.step(2))["optimizer_step"] == 2


async def test_adapter_files_are_kept_while_samples_from_them_run(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "GRACE_S", 0.0)
    trainer = await Trainer.create(harness)
    saved = await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    sampler = harness.database.read(lambda c: find_sampler(c, saved["sampling_session_id"]))
    assert sampler is not None
    row = dict.fromkeys(rows.RECORD.parameters) | {"id": "r", "kind": "EXTERNAL", "tenant": "tenant"}
    row |= {"session_id": "elsewhere", "digest": b"", "created_at": 0}
    row |= {"sampling_session_id": sampler.id, "sample_seq_id": 0, "body_format": "json", "status": "pending"}
    harness.database.write(lambda c: rows.RECORD.execute(c, [row]))
    harness.database.write(lambda c: c.execute(update(samplers).values(status="closed")))
    await harness.sweep()
    await harness.sweep()
    assert files_in(harness.adapter(sampler.weights))
    harness.database.write(lambda c: c.execute(delete(rows.futures).where(rows.futures.c.id == "r")))
    await harness.sweep()
    await harness.sweep()
    assert not files_in(harness.adapter(sampler.weights))


async def test_the_files_of_replaced_and_expired_checkpoints_are_deleted(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await Trainer.create(harness)
    await trainer.do(Kind.SAVE_WEIGHTS, path="replaced")
    await trainer.do(Kind.SAVE_WEIGHTS, path="replaced", overwrite=True)
    await trainer.do(Kind.SAVE_WEIGHTS, path="expired", ttl_seconds=3600)
    expire = update(checkpoints).where(checkpoints.c.name == "expired").values(expires_at=time.time() - 1)
    harness.database.write(lambda c: c.execute(expire))
    directory = harness.config.checkpoints_dir / safe_name(trainer.model_id)
    assert len(list(directory.iterdir())) == 3
    await harness.sweep()
    assert len(list(directory.iterdir())) == 2, "a client may still be loading the replaced checkpoint"
    monkeypatch.setattr(sweeping, "GRACE_S", 0.0)
    await harness.sweep()
    (row,) = harness.checkpoint_rows(trainer.model_id)
    assert [f"{directory.name}/{path.name}" for path in directory.iterdir()] == [row.store_key]


@pytest.mark.parametrize("clock_set_back_s", [0.0, 7200.0])
async def test_the_sweep_keeps_files_being_written_and_deletes_those_of_dead_engines(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, clock_set_back_s: float
) -> None:
    monkeypatch.setattr(sweeping, "GRACE_S", 0.0)
    trainer = await Trainer.create(harness)
    roots = (harness.config.adapters_dir, harness.config.checkpoints_dir, harness.config.snapshots_dir)
    ours, dead = [], []
    for root in roots:
        for found in (ours, dead):
            found.append(scratch_in(root / safe_name(trainer.model_id)))
            found[-1].mkdir(parents=True)
        os.utime(dead[-1], (time.time() - 3600, time.time() - 3600))
    harness.parts.sweeper._started_at += clock_set_back_s
    closed = await Trainer.create(harness)
    await closed.step(1)
    harness.snapshots.take(closed.model_id, 4)
    dead.append(harness.snapshots.path(closed.model_id, 4))
    assert dead[-1].is_dir()
    close = update(models).where(models.c.id == closed.model_id).values(status="closed")
    harness.database.write(lambda c: c.execute(close))
    await harness.sweep()
    await harness.sweep()
    assert [path.exists() for path in ours] == [True] * 3
    assert [path.exists() for path in dead] == [False] * 4


async def test_the_engine_finds_a_command_whose_ring_was_lost(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SAFETY_POLL_S", 0.05)
    harness.engine.ring([SESSIONS])  # the next poll is due at once, and not after the time that was set before
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    monkeypatch.setattr(harness.engine, "ring", lambda *_: None)
    assert (await trainer.step(2))["optimizer_step"] == 2


async def test_sessions_end_on_a_server_that_is_never_idle(harness: Harness) -> None:
    running = asyncio.get_running_loop()
    busy, ending = await Trainer.create(harness), await Trainer.create(harness)
    await ending.step(1)
    seen: list[str] = []
    step = harness.backend.optim_step

    def watched(*args: Any) -> Any:
        if not seen:
            end = update(sessions).where(sessions.c.id == ending.session.id).values(status="finished")
            harness.database.write(lambda c: c.execute(end))
            running.call_soon_threadsafe(harness.engine.ring, [SESSIONS])
        seen.append(harness.model_row(ending.model_id).status)
        return step(*args)

    harness.backend.optim_step = watched  # type: ignore[method-assign]
    ids = [await busy.optim_step(seq) for seq in range(2, 102)]
    await busy.optim_step(1)
    for request_id in ids:
        await busy.result(request_id)
    assert seen[0] == "ready"
    assert seen[-1] == "closed"


async def test_new_commands_are_read_after_all_old_rows_were_deleted(harness: Harness) -> None:
    """SQLite numbers rows from 1 again after the table has become empty."""
    first = await Trainer.create(harness)
    await first.step(1)
    await harness.end(first.session)
    await first.fails(Kind.OPTIM_STEP)
    assert harness.database.write(lambda c: retention.forget(c, time.time() + 1)) == 5
    second = await Trainer.create(harness)
    assert (await second.step(1))["optimizer_step"] == 1
