"""Unnamed saves for sampling: they are counted, bounded by time and by free disk, and deleted in a safe order.

The engine really saves; the clock runs ahead.
"""

from __future__ import annotations

import shutil
import time
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import Harness, Trainer, files_in, harness_in
from safetensors.torch import load
from sqlalchemy import select, update

from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion
from skyrl.engine import save_limits
from skyrl.engine.sweeping import GRACE_S
from skyrl.storage import shares
from skyrl.storage.db import adapter_versions, quotas
from skyrl.storage.db import futures as rows
from skyrl.storage.db.adapter_versions import NEWEST, NOTICE_S, SamplerDropped, samplers
from skyrl.storage.db.checkpoints import checkpoint_of, checkpoints
from skyrl.storage.db.samplers import Sampler, Samplers, find_sampler

HOUR_S = 3600.0
IDLE_S = 6 * HOUR_S
"""The default of unnamed_saves_idle_s."""


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


async def save(trainer: Trainer, number: int) -> str:
    saved = await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=number)
    return saved["sampling_session_id"]


def sampler_of(harness: Harness, sampler_id: str) -> Sampler:
    sampler = harness.database.read(lambda c: find_sampler(c, sampler_id))
    assert sampler is not None
    return sampler


def status_of(harness: Harness, *sampler_ids: str) -> list[str]:
    query = select(samplers.c.id, samplers.c.status).where(samplers.c.id.in_(sampler_ids))
    found = {row.id: row.status for row in harness.database.read(lambda c: list(c.execute(query)))}
    return [found[sampler_id] for sampler_id in sampler_ids]


async def use(harness: Harness, *sampler_ids: str) -> None:
    """Note a use of these sampling sessions, as a sample does, and write it, as an API process does each minute."""
    api = Samplers(harness.database, harness.writer)
    for sampler_id in sampler_ids:
        api.note_use(sampler_of(harness, sampler_id))
    await api.write_uses()


async def sweep(harness: Harness, clock: Clock) -> None:
    """Sweep until idle versions are marked, unloaded and deleted."""
    for wait_s in (0.0, NOTICE_S + 1, GRACE_S + 1):
        clock.now += wait_s
        await harness.sweep()


def versions(harness: Harness, model_id: str) -> list[int]:
    """The versions of a model with files on the disk."""
    return [int(path.name.removeprefix("v")) for path in harness.versions(model_id)]


def pending(harness: Harness, sampler_id: str) -> None:
    """A pending sample of this sampling session."""
    row = dict.fromkeys(rows.RECORD.parameters) | {"id": "r", "kind": "EXTERNAL", "tenant": "tenant"}
    row |= {"session_id": "elsewhere", "digest": b"", "created_at": 0, "body_format": "json", "status": "pending"}
    row |= {"sampling_session_id": sampler_id, "sample_seq_id": 0}
    harness.database.write(lambda c: rows.RECORD.execute(c, [row]))


async def test_only_idle_versions_that_are_not_the_newest_are_deleted(harness: Harness, clock: Clock) -> None:
    trainer = await Trainer.create(harness)
    saved = [await save(trainer, number) for number in range(4)]
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="named")
    saved += [await save(trainer, number) for number in range(4, 4 + NEWEST)]
    clock.now += IDLE_S - 300
    await use(harness, saved[1])
    pending(harness, saved[2])
    await sweep(harness, clock)
    assert status_of(harness, *saved) == ["active"] * len(saved), "their idle time is not over"
    clock.now += 300
    await sweep(harness, clock)
    assert status_of(harness, *saved) == ["dropped", "active", "active", "dropped", *["active"] * NEWEST]
    assert versions(harness, trainer.model_id) == [2, 3, 5, 6, 7, 8, 9]
    clock.now += 2 * IDLE_S
    await sweep(harness, clock)
    assert versions(harness, trainer.model_id) == [3, 5, 6, 7, 8, 9], "version 3 stays while its sample runs"
    api = Samplers(harness.database, harness.writer)
    with pytest.raises(SamplerDropped, match=r"^sampling_session_id: the weights of sampling session 's.*:sample:0' "):
        await api.find(saved[0], "tenant")
    assert await api.find(saved[0], "somebody else") is None


async def test_the_weights_of_a_deleted_checkpoint_are_treated_as_unnamed(harness: Harness, clock: Clock) -> None:
    trainer = await Trainer.create(harness)
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="named")
    (row,) = harness.checkpoint_rows(trainer.model_id)
    for number in range(NEWEST):
        await save(trainer, number)
    sampler = Sampler(f"{trainer.session.id}:sample:99", trainer.session.id, "tenant", "tiny", "p", row.weights)
    await Samplers(harness.database, harness.writer).create(sampler, 99, checkpoint_of(row))
    unnamed = harness.database.read(lambda c: quotas.stored_bytes(c, "tenant")) - row.size_bytes
    clock.now += 2 * IDLE_S
    await sweep(harness, clock)
    assert status_of(harness, sampler.id) == ["active"], "a checkpoint holds the weights"
    harness.database.write(lambda c: c.execute(checkpoints.delete()))
    assert harness.database.read(lambda c: quotas.stored_bytes(c, "tenant")) == unnamed + row.size_bytes
    await sweep(harness, clock)
    assert status_of(harness, sampler.id) == ["dropped"]
    assert versions(harness, trainer.model_id) == [2, 3, 4, 5]


async def test_a_use_is_written_later_if_its_write_failed(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = await Trainer.create(harness)
    sampler = sampler_of(harness, await save(trainer, 0))
    api = Samplers(harness.database, harness.writer)
    harness.database.write(lambda c: c.execute(update(samplers).values(last_used_at=1.0)))
    api.note_use(sampler)
    with monkeypatch.context() as patch:
        patch.setattr(adapter_versions, "note_uses", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await api.write_uses()
    await api.write_uses()
    query = select(samplers.c.last_used_at).where(samplers.c.id == sampler.id)
    assert harness.database.read(lambda c: c.execute(query).scalar_one()) > 1.0


async def test_a_sample_recorded_before_the_drop_keeps_its_weights(harness: Harness, clock: Clock) -> None:
    """The engine lists idle versions, then a sample arrives, then the engine tries to drop the version."""
    trainer = await Trainer.create(harness)
    saved = [await save(trainer, number) for number in range(NEWEST + 1)]
    clock.now += 2 * IDLE_S
    used_before = clock.now - IDLE_S
    assert harness.database.read(lambda c: adapter_versions.idle(c, used_before)) == saved[:1]
    pending(harness, saved[0])
    assert harness.database.write(lambda c: adapter_versions.drop(c, saved[:1], used_before)) == []
    assert status_of(harness, saved[0]) == ["active"]


class RecordingGroup:
    """Stands for the inference servers: records which files are still on the disk when an adapter is unloaded."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.unloaded: list[tuple[str, bool]] = []

    async def publish_adapter(self, adapter: AdapterVersion) -> None:
        pass

    async def retire(self, adapters: Sequence[AdapterVersion]) -> set[AdapterVersion]:
        self.unloaded += [(adapter.name, bool(files_in(self._directory))) for adapter in adapters]
        return set(adapters)


async def test_a_drop_marks_the_row_then_waits_then_unloads_then_deletes_the_files(
    harness: Harness, clock: Clock
) -> None:
    trainer = await Trainer.create(harness)
    saved = [await save(trainer, number) for number in range(NEWEST + 1)]
    directory = harness.adapter(AdapterVersion.of(trainer.model_id, 1))
    harness.parts.sweep._group = group = RecordingGroup(directory)  # type: ignore[assignment]
    api = Samplers(harness.database, harness.writer)
    assert await api.find(saved[0], "tenant") is not None
    clock.now += 2 * IDLE_S
    await harness.sweep()
    assert status_of(harness, saved[0]) == ["dropped"]
    assert group.unloaded == []
    assert api.cached(saved[0], "tenant") is not None
    await api.forget_dropped()
    assert api.cached(saved[0], "tenant") is None
    clock.now += NOTICE_S - 1
    await harness.sweep()
    assert group.unloaded == [], "an API process may not know of the drop yet"
    pending(harness, saved[0])
    clock.now += 2
    await harness.sweep()
    assert group.unloaded == [], "a sample from before the notice runs to its end"
    harness.database.write(lambda c: c.execute(rows.futures.delete().where(rows.futures.c.id == "r")))
    await harness.sweep()
    assert group.unloaded == [(f"{trainer.model_id}@1", True)]
    clock.now += GRACE_S - 1
    await harness.sweep()
    assert files_in(directory), "vLLM may read the files again for a running request"
    clock.now += 2
    await harness.sweep()
    assert not directory.exists()
    assert len(group.unloaded) == 1


async def test_unnamed_saves_count_as_stored_bytes_and_fail_beyond_the_quota(tmp_path: Path) -> None:
    async with harness_in(tmp_path / "state", quota_stored_bytes=1000) as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        first = await save(trainer, 0)
        (directory,) = harness.versions(trainer.model_id)
        size = sum(map(len, files_in(directory).values()))
        assert size > 1000
        assert harness.database.read(lambda c: quotas.stored_bytes(c, "tenant")) == size
        assert harness.database.read(quotas.held)["tenant"].stored_bytes == size
        for body in ({"sampling_session_seq_id": 1}, {"path": "named"}):
            refused = await trainer.fails(Kind.SAVE_WEIGHTS_FOR_SAMPLER, **body)
            assert refused.error_category == "user"
            assert f"has {size} bytes of checkpoints and of weights saved for sampling" in (refused.error or "")
        assert versions(harness, trainer.model_id) == [1]
        harness.database.write(lambda c: c.execute(update(samplers).values(status="closed")))
        assert harness.database.read(lambda c: quotas.stored_bytes(c, "tenant")) == 0
        await save(trainer, 1)
        assert status_of(harness, first) == ["closed"]


async def test_saves_are_refused_before_the_disk_is_full(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = await Trainer.create(harness)
    usage = namedtuple("usage", "total used free")
    bound = harness.config.min_free_disk_bytes
    checked_directories: list[Path] = []

    def almost_full(directory: Path) -> Any:
        checked_directories.append(Path(directory))
        return usage(2 * bound, bound + 1, bound - 1)

    with monkeypatch.context() as patch:
        patch.setattr(save_limits.shutil, "disk_usage", almost_full)
        for kind, body in (
            (Kind.SAVE_WEIGHTS_FOR_SAMPLER, {"sampling_session_seq_id": 0}),
            (Kind.SAVE_WEIGHTS_FOR_SAMPLER, {"path": "a"}),
            (Kind.SAVE_WEIGHTS, {"path": "a"}),
            (Kind.SAVE_WEIGHTS_EXTERNAL, {"path": "a"}),
        ):
            refused = await trainer.fails(kind, **body)
            assert refused.error_category == "server"
            assert (refused.error or "").startswith(f"the server's disk is nearly full: {bound - 1} bytes are free")
    assert set(checked_directories) == {harness.config.state_dir}
    assert not harness.config.adapters_dir.exists()
    assert shutil.disk_usage(harness.config.state_dir).free >= bound, "this test needs free disk space"
    await save(trainer, 0)


async def test_saves_leave_room_for_those_of_other_tenants(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = await Trainer.create(harness)
    await save(trainer, 0)
    size = harness.database.read(lambda c: quotas.stored_bytes(c, "tenant"))
    free = harness.config.min_free_disk_bytes + size // shares.SHARE
    monkeypatch.setattr(shares, "LEAST_BYTES", 1)
    with monkeypatch.context() as patch:
        usage = namedtuple("usage", "total used free")
        patch.setattr(shutil, "disk_usage", lambda _: usage(2**60, 2**60 - free, free))
        for kind, body in (
            (Kind.SAVE_WEIGHTS_FOR_SAMPLER, {"sampling_session_seq_id": 1}),
            (Kind.SAVE_WEIGHTS, {"path": "a"}),
        ):
            refused = await trainer.fails(kind, **body)
            assert refused.error_category == "user"
            sentence = f"has {size} bytes of checkpoints and of weights saved for sampling, which is its share of the"
            assert sentence in (refused.error or "")
    await save(trainer, 1)


async def test_only_saves_for_sampling_are_stored_in_bfloat16(tmp_path: Path) -> None:
    async with harness_in(tmp_path / "state", adapter_dtype="bfloat16") as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.step(1)
        unnamed = sampler_of(harness, await save(trainer, 0))
        for kind in (Kind.SAVE_WEIGHTS_FOR_SAMPLER, Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_EXTERNAL):
            await trainer.do(kind, path="named")
        stored = {row.kind: harness.stored(row) for row in harness.checkpoint_rows(trainer.model_id)}
        stored["unnamed"] = files_in(harness.adapter(unnamed.weights))
        kinds = {
            kind: {tensor.dtype for tensor in load(files["adapter_model.safetensors"]).values()}
            for kind, files in stored.items()
        }
        halves, exact = {torch.bfloat16}, {torch.float32}
        assert kinds == {
            "unnamed": halves,
            "sampler_weights": halves,
            "weights": exact,
            "external_weights": exact,
        }
        await trainer.do(Kind.LOAD_WEIGHTS, path=f"tinker://{trainer.model_id}/weights/named")


async def test_the_number_of_a_dropped_version_is_not_used_again(harness: Harness, clock: Clock) -> None:
    trainer = await Trainer.create(harness)
    saved = [await save(trainer, number) for number in range(NEWEST + 1)]
    clock.now += 2 * IDLE_S
    await sweep(harness, clock)
    assert status_of(harness, saved[0]) == ["dropped"]
    refused = await trainer.fails(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    assert "exists already" in (refused.error or "")


async def test_unnamed_saves_count_as_sampling_sessions_of_the_tenant(tmp_path: Path) -> None:
    async with harness_in(tmp_path / "state", max_sampling_sessions_per_tenant=2) as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        for number in range(2):
            await save(trainer, number)
        refused = await trainer.fails(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=2)
        assert refused.error_category == "user"
        assert refused.error == (
            "max_sampling_sessions_per_tenant: a tenant may have at most 2, and this API key's tenant has 2 sampling "
            "sessions in active sessions: finish a session that is done"
        )
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="named")
