"""Unnamed saves are answered while their files are in memory; named ones once they are on the disk. The engine really
saves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from engine_harness import Harness, Trainer, files_in, until

from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion
from skyrl.storage.checkpoint_store import held as module
from skyrl.storage.checkpoint_store.held import SHARED_MEMORY, HeldVersions


def links(directory: Path) -> int:
    return sum(file.is_symlink() for file in directory.iterdir())


class HeldBack:
    """Copies to the disk wait for `let`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let = threading.Event()
        copy = HeldVersions.copy

        def waiting(held: HeldVersions, directory: Path) -> None:
            assert self.let.wait(30)
            copy(held, directory)

        monkeypatch.setattr(HeldVersions, "copy", waiting)


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> HeldBack:
    return HeldBack(monkeypatch)


async def test_an_unnamed_save_is_answered_before_its_files_are_on_the_disk(
    harness: Harness, held_back: HeldBack
) -> None:
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    directory = harness.adapter(AdapterVersion.of(trainer.model_id, 1))
    assert links(directory) == 2
    held = files_in(directory)
    await trainer.do(Kind.SAVE_WEIGHTS_EXTERNAL, path="same")
    held_back.let.set()
    await until(lambda: links(directory) == 0)
    assert files_in(directory) == held
    exported = harness.checkpoint_store.files(harness.checkpoint_rows(trainer.model_id)[0].store_key)
    assert exported == {name: len(content) for name, content in held.items()}


async def test_an_engine_that_died_before_the_copy_is_made_good_by_the_next_one(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise OSError("the process has died")

    trainer = await Trainer.create(harness)
    await trainer.step(1)
    with monkeypatch.context() as patched:
        patched.setattr(HeldVersions, "copy", dies)
        await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
        await harness.crash()
    directory = harness.adapter(AdapterVersion.of(trainer.model_id, 1))
    held = files_in(directory)
    assert links(directory) == 2
    await harness.start()
    await harness.sweep()
    assert links(directory) == 0
    assert files_in(directory) == held
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=1)
    second = harness.adapter(AdapterVersion.of(trainer.model_id, 2))
    assert files_in(second) == held, "the model was restored with the same weights"


def has_memory(state_dir: Path) -> bool:
    owners = [owner.read_text() for owner in SHARED_MEMORY.glob("skyrl-*/state-dir")]
    return any(str(state_dir.resolve()) in owner for owner in owners)


async def test_a_version_without_a_row_is_not_written_again_and_frees_its_memory(harness: Harness) -> None:
    """The engine died between the files and the commit: vLLM may have loaded the version."""
    trainer = await Trainer.create(harness)
    await trainer.step(1)
    harness.kill_before_commit_of(lambda _: True)
    request_id = await trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    await harness.wait_until_killed()
    first = harness.adapter(AdapterVersion.of(trainer.model_id, 1))
    assert links(first) == 2
    await harness.start()
    await trainer.result(request_id)
    second = harness.adapter(AdapterVersion.of(trainer.model_id, 2))
    await until(lambda: links(second) == 0)
    await harness.sweep()
    assert links(first) == 0
    await until(lambda: not has_memory(harness.config.state_dir))


async def test_a_named_save_is_answered_when_its_files_are_on_the_disk(harness: Harness, held_back: HeldBack) -> None:
    trainer = await Trainer.create(harness)
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="named")
    assert links(harness.adapter(AdapterVersion.of(trainer.model_id, 1))) == 0
    held_back.let.set()


async def test_without_room_in_memory_an_unnamed_save_goes_to_the_disk(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 0)
    trainer = await Trainer.create(harness)
    await trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
    assert links(harness.adapter(AdapterVersion.of(trainer.model_id, 1))) == 0
