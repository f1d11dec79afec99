"""An engine without work gives back the memory that its last turn has freed, once, and not between two turns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_harness import NEVER_S, WAIT_S, Trainer, harness_in

from skyrl.engine import loop


async def test_memory_is_given_back_once_after_a_while_without_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[float] = []
    given_back = asyncio.Event()
    running = asyncio.get_running_loop()

    def trim() -> None:
        trims.append(running.time())
        running.call_soon_threadsafe(given_back.set)

    monkeypatch.setattr(loop, "SAFETY_POLL_S", 0.02)
    monkeypatch.setattr(loop, "TRIM_AFTER_S", NEVER_S)
    monkeypatch.setattr(loop, "trim", trim)
    async with harness_in(tmp_path / "state") as harness:
        await harness.start()
        trainer = await Trainer.create(harness)
        await trainer.result(await trainer.forward_backward(1))
        await asyncio.sleep(0.1)
        assert not trims, "another pass may come at once"
        monkeypatch.setattr(loop, "TRIM_AFTER_S", 0.01)
        await asyncio.wait_for(given_back.wait(), WAIT_S)
        await asyncio.sleep(0.1)
        assert len(trims) == 1, "nothing was freed since"
        given_back.clear()
        await trainer.result(await trainer.optim_step())
        await asyncio.wait_for(given_back.wait(), WAIT_S)
        assert len(trims) == 2
