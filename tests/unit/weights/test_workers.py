"""What servers are asked for a version on their disk, and how long they may take."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyrl.weights import group, workers
from skyrl.weights.group import _both
from skyrl.weights.workers import VersionOnDisk, Workers


@pytest.mark.parametrize("given", [{}, {"keep": True}, {"base": "1"}, {"checksums": {"a": "00"}}], ids=str)
async def test_all_that_is_given_is_sent(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[dict[str, Any]] = []

    async def answer(client: Any, method: str, url: str, body: Any, timeout_s: float) -> Any:
        if url.endswith("disk"):
            posted.append(body)
        return {"stages_updates": True}

    monkeypatch.setattr(workers, "_ask", answer)
    version = VersionOnDisk(Workers(["http://server"]), **given)
    await version.begin("2")
    await version.send("reference")
    await version.finish()
    all_three = {"keep": False, "base": None, "checksums": None} | given if given else {}
    same = {"model_path": "reference", "weight_version": "2", "flush_cache": False} | all_three
    assert posted == [same | {"stage_only": True}, same]


async def test_a_server_that_hangs_does_not_keep_the_others_paused_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    async def answer(client: Any, method: str, url: str, body: Any, timeout_s: float) -> Any:
        asked.append((url.rpartition("/")[2], timeout_s))
        return {}

    monkeypatch.setattr(workers, "_ask", answer)
    async with Workers(["http://server"], update_s=600.0).paused("in_place"):
        pass
    async with Workers(["http://server"], update_s=5.0).paused("in_place"):
        pass
    pause, go_on = "pause_generation", "continue_generation"
    assert asked == [(pause, workers.PAUSE_S), (go_on, workers.PAUSE_S), (pause, 5.0), (go_on, 5.0)]


async def test_after_a_failed_sending_a_server_has_only_a_moment_to_say_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def fails() -> None:
        raise ConnectionError("the group broke")

    async def says(seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.append("it waits for no answer any more")
            raise
        raise ValueError("rank 1 has no such tensor")

    with pytest.raises(ValueError, match="rank 1 has no such tensor"):
        await _both(fails(), says(0.01))
    monkeypatch.setattr(group, "SHORT_S", 0.01)
    with pytest.raises(ConnectionError, match="the group broke"):
        await _both(fails(), says(1e6))
    await asyncio.sleep(0)
    assert ended
