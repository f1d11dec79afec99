"""What servers are asked for a version on their disk."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.weights import workers
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
