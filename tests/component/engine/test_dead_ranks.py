"""A rank of the trainer is killed: the engine ends, starts all ranks again, and goes on to the same result.

`test_lost_backends` tests the same at every kind of command, with a backend that says that a rank has died.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, Trainer, harness_in, until

from skyrl.base.config.server import ServerConfig
from skyrl.trainer.protocol import RankDied
from skyrl.trainer.ranks.full_backend import FullBackend
from skyrl.trainer.ranks.full_rank import FullRank
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.ranks.rank import RankSettings
from tests.local_ranks import LocalRanks

LONG = (200,) * 30
"""Sequences of a pass that takes a second or more."""
SETTINGS = {"trainer.micro_batch_tokens": 256, "trainer.rank_timeout_s": 60}


FULL = {"trainer.full_finetuning": True}


def _two_ranks(config: ServerConfig) -> LoraBackend | FullBackend:
    if config.full_finetuning:
        return FullBackend(config, LocalRanks(2, RankSettings.of(config), FullRank))
    return LoraBackend(config, LocalRanks(2, RankSettings.of(config)))


async def _started(harness: Harness) -> None:
    harness.make_backend = _two_ranks
    await harness.start()


def _kill_a_rank(harness: Harness) -> None:
    ranks = harness.backend.group
    assert isinstance(ranks, LocalRanks)
    os.kill(ranks.pids[1], signal.SIGKILL)


@pytest.fixture(params=[{}, FULL], ids=["adapters", "whole model"])
async def harness(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    async with harness_in(tmp_path / "state", backend_config=SETTINGS | request.param) as harness:
        await _started(harness)
        yield harness
        await harness.stop()
        harness.backend.close()


async def _learn(harness: Harness, *, kills: bool) -> list[Any]:
    """Train two adapters or one whole model; with `kills`, a rank dies in the middle of a pass, and another one between
    two commands. Returns all results, metrics and states."""
    if harness.config.full_finetuning:
        trainers = [await Trainer.create(harness, rank=0)]
    else:
        trainers = [await Trainer.create(harness, seed=seed) for seed in (1, 2)]
    answers: list[Any] = [await each.step(1) for each in trainers]
    trainer, other = trainers[0], trainers[-1]
    snapshot = trainer.seq_id + 1
    await harness.threads.on_backend(lambda: harness.snapshots.take(trainer.model_id, snapshot))
    answers.append(await trainer.step(2))
    running = await trainer.forward_backward(3, None, *LONG)
    waiting = await trainer.optim_step()
    if kills:
        await until(lambda: running in harness.config.running_file.read_text())
        await asyncio.sleep(0.2)
        _kill_a_rank(harness)
        await harness.wait_until_killed(RankDied)
        harness.backend.close()
        await harness.start()
    answers += [await trainer.result(each) for each in (running, waiting)]
    answers.append(await other.step(4))
    if kills:
        _kill_a_rank(harness)
    sent = await trainer.send_step(5)
    if kills:
        await harness.wait_until_killed(RankDied)
        harness.backend.close()
        await harness.start()
    answers.append(await trainer.result(sent))
    answers += [await each.state() for each in trainers]
    return answers


@pytest.mark.slow
async def test_ranks_killed_in_a_pass_and_between_commands_change_no_bit(harness: Harness, tmp_path: Path) -> None:
    disturbed = await _learn(harness, kills=True)
    mode = FULL if harness.config.full_finetuning else {}
    async with harness_in(tmp_path / "steady", backend_config=SETTINGS | mode) as steady:
        await _started(steady)
        assert await _learn(steady, kills=False) == disturbed
        await steady.stop()
        steady.backend.close()
